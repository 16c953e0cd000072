"""What the memory tests share: a policy over a temporary directory, raw access to regions, other processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory.policy import MemoryPolicy

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    """The one directory that the test's policy allows."""
    directory = tmp_path / "allowed"
    directory.mkdir()
    return directory


@pytest.fixture
def policy(allowed: Path) -> MemoryPolicy:
    return MemoryPolicy(directories=(str(allowed),), max_region_bytes=1 << 30)


class Bytes:
    """Reads and writes a mapped region by its address."""

    @staticmethod
    def read(region: object, offset: int, size: int) -> bytes:
        return ctypes.string_at(region.address + offset, size)  # type: ignore[attr-defined]

    @staticmethod
    def write(region: object, offset: int, data: bytes) -> None:
        ctypes.memmove(region.address + offset, data, len(data))  # type: ignore[attr-defined]


@pytest.fixture
def raw() -> type[Bytes]:
    return Bytes


class Child:
    """A Python process that runs ``code``; talks in lines, so that nobody has to sleep."""

    def __init__(self, code: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'clients/python'}"},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        return self.hear()

    def hear(self) -> str:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        assert answer, f"the child ended with {self.process.wait()}"
        return answer.strip()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(code: str, *arguments: object) -> Child:
        children.append(Child(code, *arguments))
        return children[-1]

    yield start
    for each in children:
        each.end()


@contextmanager
def _refused(reason: Reason, field: str | None = None) -> Iterator[list[KvxferError]]:
    caught: list[KvxferError] = []
    with pytest.raises(KvxferError) as info:
        yield caught
    caught.append(info.value)
    assert info.value.reason is reason, str(info.value)
    if field is not None:
        assert info.value.field == field, str(info.value)


@pytest.fixture
def refused() -> Callable[..., object]:
    """``with refused(reason, field):`` the body raises just that."""
    return _refused


@contextmanager
def _in_time(seconds: int = 10) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("it hung")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def in_time() -> Callable[..., object]:
    """``with in_time():`` the body is interrupted when it blocks."""
    return _in_time


class Usage:
    """Descriptors and shared mappings of this process; anonymous ones come and go with the allocator.

    Sockets and the like are left out: gRPC's threads, of tests that ran before in this process, open and close them.
    """

    def __init__(self) -> None:
        self.descriptors: set[str] = set()
        for fd in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # the one that lists them
                if os.readlink(f"/proc/self/fd/{fd}").startswith("/"):
                    self.descriptors.add(fd)
        with open("/proc/self/maps", encoding="utf-8") as maps:
            shared = [line.split(None, 5)[-1].strip() for line in maps if line.split()[1][3] == "s"]
        # What libraries share with nobody by name (a pool of theirs) comes and goes as well.
        self.mappings = Counter(name for name in shared if name != "/dev/zero (deleted)")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Usage) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"Usage({vars(self)})"


@pytest.fixture
def usage() -> type[Usage]:
    return Usage
