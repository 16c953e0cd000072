"""Where the demo's caches go: memory-backed if there is room, else the temporary directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.sizes import mib

SHARED: Final = "/dev/shm"
#: What is left free, bytes.
MARGIN: Final = 32 * 2**20
_PREFIX: Final = "kvxfer-demo-"
#: A directory younger than this may be one that another demo is just making, seconds.
_YOUNG: Final = 60.0
#: A Unix socket's path may have 107 characters; the file names of the demo take some of them.
_LONGEST: Final = 90


@contextmanager
def memory_directory(size: int, shared: str = SHARED) -> Iterator[tuple[Path, str]]:
    """A fresh directory with room for ``size`` bytes, removed at the end, and a note where it is not in memory.

    :raises KvxferError: MEMORY_LIMIT where no place has room.
    """
    temporary = tempfile.gettempdir()
    tried: list[str] = []
    for place in dict.fromkeys((shared, temporary)):
        room = _room(place)
        if room >= size + MARGIN:
            note = f"{'; '.join(tried)}: the caches are files in {place}" if tried else ""
            with _made(place) as path:
                yield path, note
            return
        tried.append(f"{place} has {mib(room)} free of the {mib(size + MARGIN)} needed")
    raise KvxferError(
        Reason.MEMORY_LIMIT,
        f"{'; '.join(tried)}.  Set TMPDIR to a larger place, or ask for less (--tokens, --memory-mib)",
        field="memory",
        needed=size + MARGIN,
    )


@contextmanager
def run_directory() -> Iterator[Path]:
    """A fresh directory for sockets and logs, with a path short enough for sockets; removed at the end."""
    place = tempfile.gettempdir()
    with _made(place if len(place) < _LONGEST - 24 else "/tmp") as path:
        yield path


def _room(place: str) -> int:
    """Free bytes for us; 0 where we may not write."""
    if not os.access(place, os.W_OK | os.X_OK):
        return 0
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


@contextmanager
def _made(place: str) -> Iterator[Path]:
    _sweep(place)
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    with _locked(path):
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a directory's lock, which the kernel lets go of when this process ends in whatever way.

    :raises OSError: where somebody else holds it, or it is not ours to open.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _sweep(place: str) -> None:
    """Remove what demos that were killed have left."""
    for path in Path(place).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid() and time.time() - path.stat().st_mtime > _YOUNG:
                with _locked(path):
                    shutil.rmtree(path, ignore_errors=True)
