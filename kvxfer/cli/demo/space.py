"""Where the demo's caches go: memory-backed if there is room, else the temporary directory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvxfer.core.errors import KvxferError, Reason

SHARED: Final = "/dev/shm"
#: What is left free, bytes.
MARGIN: Final = 32 * 2**20
#: A Unix socket's path may have 107 characters; the file names of the demo take some of them.
_LONGEST: Final = 90


def mib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**20:,.0f} MiB"


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
    path = Path(tempfile.mkdtemp(prefix="kvxfer-demo-", dir=place))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
