"""Two real agents in two processes, and a third that is asked what UCX can use here.

Bounded in time; every process is ended in any case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from threading import Timer
from typing import IO, Any, Final

from kvxfer.doctor import ucxlog

#: How long everything may take, seconds: NIXL loads in one, on a machine that does nothing else.
DEADLINE: Final = 30.0
#: No device and no transport has this name, so UCX tells which there are.
_NOBODY: Final = "kvxfer-none"
_GRACE: Final = 3.0
_OF_THE_LOG: Final = frozenset({"UCX_LOG_LEVEL", "UCX_LOG_FILE", "UCX_LOG_LEVEL_TRIGGER", "UCX_WARN_UNUSED_ENV_VARS"})


@dataclass(frozen=True, slots=True)
class Survey:
    """What NIXL and UCX are here, whatever the environment asks of them.

    :param modules: UCX's transport modules that were loaded.
    :param shipped: those that lie beside them.
    :param devices: network device -> its transports; None where UCX did not say.
    :param transports: every transport and alias that UCX can use; None where UCX did not say.
    :param failure: why there is no answer; empty where there is one.
    """

    nixl: str = ""
    ucx: str = ""
    modules: tuple[str, ...] = ()
    shipped: tuple[str, ...] = ()
    devices: Mapping[str, str] | None = None
    transports: tuple[str, ...] | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """What two agents of this environment got.

    :param paths: how UCX reads; empty where it did not say.
    :param seconds: of the best read of ``bytes`` bytes; ``right`` says whether all were.
    :param unused: variables that UCX does not know -> what may have been meant.
    :param unavailable: devices and transports that were asked for and are not there.
    :param problems: what UCX logged as errors.
    :param failure: why nothing was read; empty where something was.
    """

    paths: tuple[ucxlog.ReadPath, ...] = ()
    bytes: int = 0
    seconds: float = 0.0
    right: bool = False
    unused: Mapping[str, str] = field(default_factory=dict)
    unavailable: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()
    failure: str = ""


class _Child:
    """A child of a role, with its log."""

    def __init__(self, stack: ExitStack, role: str, environment: Mapping[str, str], deadline: float) -> None:
        self._role: Final = role
        self._deadline: Final = deadline
        log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - the stack closes it
        self._log: Final = stack.enter_context(log)
        self._process: Final = subprocess.Popen(
            [sys.executable, "-m", "kvxfer.doctor.agent", str(os.getpid()), role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(environment),
            text=True,
        )
        stack.callback(self._end)

    def _end(self) -> None:
        """Whatever it is doing."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # it has ended before it took everything
                    continue
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def say(self, text: str) -> None:
        """Give it a line, without waiting for what becomes of it."""
        pipe = _there(self._process.stdin)
        try:
            pipe.write(text + "\n")
            pipe.flush()
        except BrokenPipeError:  # the answer that does not come tells why
            return

    def answer(self) -> dict[str, Any]:
        """Its answer; ``error`` says why there is none."""
        killer = _Killer(self._process, self._deadline - time.monotonic())
        try:
            line = _there(self._process.stdout).readline()
        finally:
            killer.cancel()
        if not line.endswith("\n"):
            if killer.struck:
                return {"error": f"the {self._role} process did not answer within {DEADLINE:g} s"}
            status = self._process.wait()
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            return {"error": f"the {self._role} process ended {how}: {self._last_words()}"}
        found: dict[str, Any] = json.loads(line)
        return found

    def log(self) -> str:
        """What it, NIXL and UCX have printed."""
        self._log.seek(0)
        return self._log.read()

    def _last_words(self) -> str:
        return next((line.strip() for line in reversed(self.log().splitlines()) if line.strip()), "it said nothing")


class _Killer:
    """Kills a process after so many seconds, unless cancelled."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        self.struck = False
        self._process = process
        self._timer = Timer(max(seconds, 0.0), self._strike)
        self._timer.daemon = True
        self._timer.start()

    def _strike(self) -> None:
        self.struck = True
        self._process.kill()

    def cancel(self) -> None:
        """Let it live."""
        self._timer.cancel()


def look(environment: Mapping[str, str], deadline: float = DEADLINE) -> tuple[Survey, Pair]:
    """Start all three at once, and end them.

    :param environment: that of the sidecar that is to be.
    :param deadline: seconds for everything.
    """
    until = time.monotonic() + deadline
    # What UCX logs must be all, and be ours to read; how the peer is read is told once asked for.
    plain = {k: v for k, v in environment.items() if k not in _OF_THE_LOG}
    asking = {k: v for k, v in plain.items() if not k.startswith("UCX_")}
    with ExitStack() as stack:
        surveyor = _Child(stack, "survey", {**asking, "UCX_NET_DEVICES": _NOBODY, "UCX_TLS": f"tcp,{_NOBODY}"}, until)
        sides = [_Child(stack, role, {**plain, "UCX_PROTO_INFO": "y"}, until) for role in ("source", "reader")]
        pair = _pair(*sides)
        return _survey(surveyor), pair


def _survey(child: _Child) -> Survey:
    told, log = child.answer(), child.log()
    if "nixl" not in told:
        return Survey(failure=_reason(told))
    return Survey(
        told["nixl"],
        told["ucx"],
        ucxlog.modules(told["maps"]),
        ucxlog.modules(told["shipped"]),
        ucxlog.devices(log),
        ucxlog.transports(log),
    )


def _pair(source: _Child, reader: _Child) -> Pair:
    offered = source.answer()
    if "metadata" not in offered:
        return _logged(Pair(failure=_reason(offered)), source.log())
    reader.say(json.dumps({key: offered[key] for key in ("name", "metadata", "address")}))
    told, said = reader.answer(), reader.log()
    if "seconds" not in told:
        return _logged(Pair(failure=_reason(told)), said)
    return _logged(Pair(bytes=told["bytes"], seconds=told["seconds"], right=told["right"]), said)


def _logged(pair: Pair, log: str) -> Pair:
    return replace(
        pair,
        paths=ucxlog.read_paths(log),
        unused=ucxlog.unused(log),
        unavailable=ucxlog.unavailable(log),
        problems=ucxlog.problems(log),
    )


def _reason(told: Mapping[str, Any]) -> str:
    return ": ".join(part for part in (str(told.get("error", "")), str(told.get("detail", ""))) if part)


def _there(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise RuntimeError("a child was started without pipes")
    return pipe
