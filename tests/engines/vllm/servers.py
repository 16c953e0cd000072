"""vLLM's own server, started as a user starts it, and the router in front of two of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.engines.vllm.processes import free_port
from tests.engines.vllm.settings import environment
from tests.support.processes import until

#: Seconds until a server serves, on a machine that has other things to do.
START = 420.0
#: Ends with the test, also where that is killed; and a process group of its own, to end all that it has started.
_MAIN = (
    "import ctypes, os, runpy, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "if os.getppid() != {parent}: raise SystemExit\n"
    "sys.argv = sys.argv[1:]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


class Server:
    """A Python module that serves HTTP in processes of its own.  Starts at once; :meth:`ready` waits for it.

    A context manager: ends them, in whatever way.
    """

    def __init__(self, name: str, directory: Path, module: str, flags: Sequence[str], **variables: str) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = directory / f"{name}.log"
        root = Path(__file__).parents[3]
        paths = {"PYTHONPATH": f"{root}:{root / 'clients' / 'python'}"}
        command = [sys.executable, "-c", _MAIN.format(parent=os.getpid()), module, "--port", str(self.port), *flags]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment({**paths, **variables}),
                cwd=directory,
                start_new_session=True,
            )

    def ready(self) -> Server:
        """Wait until it says that it is well."""
        until(self._is_ready, START, f"that {self.name} serves")
        return self

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"{self.name} has ended ({self.process.returncode}):\n{self.log()}")
        try:
            self._get("/health")
        except OSError:
            return False
        return True

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=20) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self._get("/metrics"), re.MULTILINE)
        assert found, f"{self.name} has no metric {name}"
        return sum(map(float, found))

    def log(self) -> str:
        """The end of what it has written."""
        return self.log_path.read_text(errors="replace")[-6000:]

    def kill(self) -> None:
        """SIGKILL to all its processes, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None and error is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"{self.name} did not stop:\n{self.log()}") from None
        self.kill()  # whatever it has left behind
