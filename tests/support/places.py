"""What demos and benchmarks leave behind in shared memory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def shared_places() -> set[Path]:
    """The directories of all demos and benchmarks."""
    return set(Path("/dev/shm").glob("kvxfer-demo-*"))


def abandoned(before: set[Path]) -> list[Path]:
    """Those that came after ``before`` and whose lock nobody holds: not those of others that run beside the test."""
    return sorted(place for place in shared_places() - before if _is_abandoned(place))


def _is_abandoned(directory: Path) -> bool:
    try:
        fd = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
