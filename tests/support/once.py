"""What is costly to make, and made once for all of the processes that run the tests."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def once(factory: pytest.TempPathFactory, name: str) -> Iterator[tuple[Path, bool]]:
    """A directory that the processes share, and whether it is to be filled: by one of them, while others wait.

    Where the body raises, whoever comes next tries again, in another directory.
    """
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (shared / f"{name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        made = lock.read()
        if made:
            yield Path(made), False
        else:
            place = factory.mktemp(name)
            yield place, True
            lock.write(str(place))
            lock.flush()
