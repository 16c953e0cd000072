"""Real sidecars for the kit: two processes, which it may stop, kill and start again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer_client.client import Client

#: Short times, so that nobody has to wait long for what they lead to, seconds.
SETTINGS: Final[Mapping[str, object]] = {
    "read_grant": 3.0,
    "publish_wait": 0.3,
    "engine_grace": 1.0,
    "drain_timeout": 2.0,
    "drain_limit": 5.0,
    "handshake_timeout": 3.0,
}
#: How long a sidecar may take to serve, seconds.
START: Final = 60.0


class Sidecar:
    """One of them.

    :param target: of one that runs already; it cannot be stopped then, and checks that need that are skipped.
    """

    def __init__(self, name: str, directory: Path, command: Sequence[str], target: str = "") -> None:
        self.name: Final = name
        self.directory: Final = directory
        self.target: Final = target or f"unix:{directory / name}.sock"
        self._ours: Final = not target
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False

    def start(self) -> None:
        """Start it where it does not run, and return when it serves.

        :raises KvxferError: UNSUPPORTED where there is no such command; DEADLINE_EXCEEDED where it does not serve.
        """
        self.resume()
        if self._ours and (self._process is None or self._process.poll() is not None):
            given = {"engine_socket": self.target.removeprefix("unix:"), "log_format": "text", **SETTINGS}
            flags = [part for name, value in given.items() for part in ("--set", f"{name}={value}")]
            # Over TCP a reader can be caught in mid-read, by pausing whom it reads from.
            environment = {**os.environ, "UCX_TLS": "tcp"}
            with open(self.log_path, "ab") as log:
                try:
                    self._process = subprocess.Popen(
                        [*self._command, "serve", "--memory-directory", str(self.directory), *flags],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment,
                    )
                except OSError as error:
                    raise KvxferError(
                        Reason.UNSUPPORTED,
                        f"{self._command[0]} cannot be run: {error}; install kvxfer[nixl], or give targets of "
                        "sidecars that run",
                        field="command",
                    ) from error
        with Client(self.target, timeout=START) as client:
            client.wait_ready()

    @property
    def log_path(self) -> Path:
        """Where its log goes."""
        return self.directory / f"{self.name}.log"

    def pause(self) -> None:
        """SIGSTOP: it says nothing more."""
        self._signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """SIGCONT, where it was paused."""
        if self._paused:
            self._signal(signal.SIGCONT)
            self._paused = False

    def kill(self) -> None:
        """SIGKILL."""
        self._paused = False
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """The end, where it is ours."""
        if self._process is None or self._process.poll() is not None:
            return
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        if not self._ours:
            raise unittest.SkipTest("this check stops or kills a sidecar; these are not the kit's")
        if self._process is not None:
            self._process.send_signal(number)


class Sidecars:
    """One for P and one for D, on loopback, with a directory in memory; a context manager.

    :param command: what runs a sidecar; by default ``kvxfer`` on the PATH, or this interpreter's.
    :param targets: engine listeners of two sidecars that run already, P's and D's, instead; with ``directory``, which
        both take memory from.  Checks that have to stop one are then skipped.
    """

    def __init__(
        self,
        command: Sequence[str] = (),
        *,
        targets: tuple[str, str] | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        self._made = directory is None
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.directory: Final = Path(directory or tempfile.mkdtemp(prefix="kvxfer-kit-", dir=base))
        found = shutil.which("kvxfer")
        chosen = command or ([found] if found else [sys.executable, "-m", "kvxfer"])
        p, d = targets or ("", "")
        self.p: Final = Sidecar("p", self.directory, chosen, p)
        self.d: Final = Sidecar("d", self.directory, chosen, d)

    def start(self) -> None:
        """Start those that do not run."""
        for one in (self.p, self.d):
            try:
                one.start()
            except KvxferError as error:
                log = one.log_path.read_text(errors="replace")[-2000:] if one.log_path.exists() else ""
                raise KvxferError(error.reason, f"sidecar {one.name}: {error.message}\n{log}") from error

    def stop(self) -> None:
        """Stop them, and remove the directory where it was made here."""
        for one in (self.p, self.d):
            one.stop()
        if self._made:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Sidecars:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
