"""File descriptors, of which UCX must not run out.

Where it does while it makes an agent, it keeps an entry for a descriptor that it has closed; once that number is given
out again, which is soon, it cannot make another agent in this process at all.  So whoever is about to have it open some
asks here first, and is refused while there is room left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Final

from kvxfer.core.errors import KvxferError, Reason

#: How the limit is called in errors and where limits are listed.
NAME: Final = "RLIMIT_NOFILE"
#: Left over for what does not ask: calls, the files of a cache, connections of agents, and RDMA devices, each of which
#: an agent opens.
RESERVE: Final = 128
#: An agent opens so many; 13 were seen where there is no RDMA device.
AGENT: Final = 16
#: What a peer that connects makes this side open: its calls, and what its agents (two, by default) read through.
CONNECTION: Final = 4


def limit() -> int:
    """How many this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 2**31 - 1


def used() -> int:
    """How many it has open."""
    # Since Linux 6.2 the kernel tells; before, all are listed, which takes milliseconds where there are thousands.
    try:
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # looking takes one, too
            return limit()
        return 0  # it cannot be known here


def raise_limit() -> None:
    """Allow as many as this process may allow itself: what is usual, 1,024, is meant for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # what is inherited may be more than the kernel allows by now
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Files:
    """The descriptors of this process.

    :param used: how many are open; ``limit``: how many may be.
    """

    def __init__(self, used: Callable[[], int] = used, limit: Callable[[], int] = limit) -> None:
        self._used, self._limit = used, limit
        self._lock = threading.Lock()
        self._promised = 0

    def require(self, count: int) -> None:
        """Refuse what opens ``count``, unless that leaves enough.

        :raises KvxferError: LIMIT_EXCEEDED.
        """
        most, now = self._limit(), self._used()
        if now + self._promised + count + RESERVE > most:
            raise KvxferError(
                Reason.LIMIT_EXCEEDED,
                f"this process has {now} files open and may have {most} (ulimit -n); this would take about {count}, "
                f"and {RESERVE} must be left",
                limit_name=NAME,
                limit=most,
            )

    @contextlib.contextmanager
    def agent(self) -> Iterator[None]:
        """While an agent is made; others may be at the same time, on other threads.

        What it has opened so far counts twice meanwhile: where little is left, some of many that come at once are
        refused although they would fit one after another.

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
