"""File descriptors, of which UCX must not run out.

Where it does while it makes an agent, it keeps an entry for a descriptor that it has closed; once that number is given
out again, which is soon, it cannot make another agent in this process at all.  So whoever is about to have it open some
asks here first, and is refused while there is room left.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from typing import Final

from kvxfer.core.errors import KvxferError, Reason

#: Left over for what does not ask: calls, the files of a cache, connections of agents, and RDMA devices, each of which
#: an agent opens.
RESERVE: Final = 128
#: An agent opens so many, 13 were seen where there is no RDMA device.
AGENT: Final = 16
#: What a peer that connects makes this side open.
CONNECTION: Final = 4


def limit() -> int:
    """How many this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 2**31


def raise_limit() -> None:
    """Allow as many as this process may allow itself: what is usual, 1,024, is meant for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Files:
    """The descriptors of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promised = 0

    def require(self, count: int) -> None:
        """Refuse what opens ``count``, unless that leaves enough.

        :raises KvxferError: LIMIT_EXCEEDED.
        """
        most = limit()
        try:
            used = len(os.listdir("/proc/self/fd"))
        except OSError:  # looking takes one, too
            used = most
        if used + self._promised + count + RESERVE > most:
            raise KvxferError(
                Reason.LIMIT_EXCEEDED,
                f"this process has {used} files open and may have {most} (ulimit -n); this would take about {count}, "
                f"and {RESERVE} must be left",
                limit_name="RLIMIT_NOFILE",
                limit=most,
            )

    @contextlib.contextmanager
    def agent(self) -> Iterator[None]:
        """While an agent is made; others may be at the same time, on other threads.

        :raises KvxferError: LIMIT_EXCEEDED.
        """
        with self._lock:
            self.require(AGENT)
            self._promised += AGENT
        try:
            yield
        finally:
            with self._lock:
                self._promised -= AGENT


#: Of the whole process, however many agents and sidecars there are in it.
FILES: Final = Files()
