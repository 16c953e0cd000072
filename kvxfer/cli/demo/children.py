"""Child processes: started at once, watched while anything is waited for, and ended in every case.

Each has a log file and a session (process group) of its own, so that Ctrl-C reaches the demo only, which then ends
them in order; and each asks the kernel to be killed should the demo be killed itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from kvxfer.core.errors import KvxferError, Reason

T = TypeVar("T")

#: How long a child may take to end by itself, seconds.
GRACE: Final = 8.0
#: When a call fails, how long to wait for a child's end that may have caused it, seconds.
_NOTICE: Final = 0.5
#: Longest line that an engine may answer, bytes.
_LINE: Final = 64 * 2**20
_TAIL_LINES: Final = 15


def failed(message: str, **values: str) -> KvxferError:
    """The demo itself did not work."""
    return KvxferError(Reason.INTERNAL, message, **values)


class Child:
    """A running child process, with the log that its standard error goes to."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name: Final = name
        self.process: Final = process
        self.log: Final = log
        self.ended: Final = asyncio.ensure_future(process.wait())

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ask(self, what: str, **values: object) -> dict[str, Any]:
        """Give an engine a command and return its answer.

        :raises KvxferError: what the engine says, or INTERNAL where it has ended.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        if stdin is None or stdout is None:
            raise failed(f"{self.name} has no pipes")
        with contextlib.suppress(ConnectionError):  # the empty answer below says more
            stdin.write(json.dumps({"do": what, **values}).encode() + b"\n")
            await stdin.drain()
        line = await stdout.readline()
        if not line.endswith(b"\n"):
            await self.ended
            raise self.lost()
        answer: dict[str, Any] = json.loads(line)
        if error := answer.get("error"):
            raise KvxferError(Reason(error["reason"]), f"{self.name}, {what}: {error['message']}", **error["metadata"])
        return answer

    def lost(self) -> KvxferError:
        """The error of a child that has ended."""
        status = self.process.returncode
        how = f"by signal {-status}" if status is not None and status < 0 else f"with status {status}"
        return failed(f"{self.name} ended {how}; the end of its log:\n{self.tail()}", child=self.name)

    def tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(f"  | {line}" for line in lines) or "  | (empty)"

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it started."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


class Children:
    """All children of a demo; ends them when the context is left."""

    def __init__(self, directory: Path, deadline: float) -> None:
        """:param directory: for logs.  :param deadline: how long anything may be waited for, seconds."""
        self._directory: Final = directory
        self._deadline: Final = deadline
        self.all: Final[list[Child]] = []

    async def __aenter__(self) -> Children:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def start(self, name: str, module: str, *arguments: str, pipes: bool = False) -> Child:
        """Start ``python -m module PID arguments...``, tied to this process."""
        log = self._directory / f"{name.replace(' ', '-')}.log"
        pipe = asyncio.subprocess.PIPE if pipes else asyncio.subprocess.DEVNULL
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, str(os.getpid()), *arguments),
                stdin=pipe,
                stdout=pipe if pipes else errors,
                stderr=errors,
                start_new_session=True,
                env=_environment(os.environ),
                limit=_LINE,
            )
        child = Child(name, process, log)
        self.all.append(child)
        return child

    async def all_of(self, what: str, work: Mapping[Child, Awaitable[T]], done: Callable[[], None]) -> list[T]:
        """The results of work that is done by several children at once.

        :param what: for errors.
        :param done: called as each is done.
        :raises KvxferError: the first failure; INTERNAL where any child ends meanwhile, or the deadline passes.
        """
        tasks = {child: asyncio.ensure_future(each) for child, each in work.items()}
        waiting: set[asyncio.Future[Any]] = set(tasks.values())
        ends = {child.ended for child in self.all}
        until = asyncio.get_running_loop().time() + self._deadline
        try:
            while waiting:
                left = until - asyncio.get_running_loop().time()
                ready, _ = await asyncio.wait(waiting | ends, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED)
                for task in ready & waiting:
                    if error := task.exception():
                        await self._check(_NOTICE)
                        raise error
                    done()
                waiting -= ready
                await self._check()
                if not ready:
                    late = [child for child, task in tasks.items() if task in waiting]
                    tails = "\n".join(f"{child.name}:\n{child.tail()}" for child in late[:2])
                    names = ", ".join(child.name for child in late)
                    raise failed(f"{what}: {names} took more than {self._deadline:g} s\n{tails}")
            return [task.result() for task in tasks.values()]
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _check(self, patience: float = 0.0) -> None:
        """:raises KvxferError: where a child has ended, or ends within ``patience`` seconds."""
        await asyncio.wait({c.ended for c in self.all}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        for child in self.all:
            if child.ended.done():
                raise child.lost()

    async def end(self) -> None:
        """Ask every child to end, kill those that do not, and reap all."""
        ends = [child.ended for child in self.all]
        try:
            for child in self.all:
                child.signal(signal.SIGTERM)
            if ends:
                await asyncio.wait(ends, timeout=GRACE)
        finally:
            for child in self.all:
                child.signal(signal.SIGKILL)
            await asyncio.gather(*ends)


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The children's environment: settings of the user's own sidecar are not for six of ours."""
    return {name: value for name, value in environment.items() if not name.startswith("KVXFER_")}
