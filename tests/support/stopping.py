"""Processes that stand still for a while."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT in the end to those that still live."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            wake(pid)


def wake(pid: int) -> None:
    """SIGCONT."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
