"""vLLM's own server, and the router in front of two: run as a user runs them, with all imports done already."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.engines.vllm import child
from tests.engines.vllm.processes import Forks, free_port
from tests.support.processes import until

#: Seconds until a server serves, on a machine that has other things to do.
START = 300.0


class Server:
    """A Python module that serves HTTP in processes of its own.  Starts at once; :meth:`ready` waits for it.

    A context manager: ends them, in whatever way.
    """

    def __init__(
        self, forks: Forks, name: str, directory: Path, module: str, flags: Sequence[str], **variables: str
    ) -> None:
        self.name = name
        self._forks = forks
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = directory / f"{name}.log"
        self.log_path.touch()
        arguments = ["--port", str(self.port), *flags]
        self.process = forks.start(
            child.serve, str(self.log_path), str(directory), variables, module, arguments, daemon=False
        )

    def ready(self) -> Server:
        """Wait until it says that it is well."""
        until(self._is_ready, START, f"that {self.name} serves")
        return self

    def _is_ready(self) -> bool:
        if (code := self._forks.ended(self.process)) is not None:
            raise AssertionError(f"{self.name} has ended ({code}):\n{self.log()}")
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
        if self._forks.ended(self.process) is None:
            self.process.kill()  # it may not have had its group yet
            self._forks.ended(self.process, 20)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._forks.ended(self.process) is None and error is None:
            self.process.terminate()
            if self._forks.ended(self.process, 60) is None:
                self.kill()
                raise AssertionError(f"{self.name} did not stop:\n{self.log()}")
        self.kill()  # whatever it has left behind
