"""What a sidecar holds: descriptors, threads, mappings, memory, and what GetStatus counts.

A fault that leaks shows as a count that does not come back to what it was.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import psutil

from tests.support.processes import SidecarProcess

#: Threads that Python's and asyncio's executors may start at any time, and keep.
POOL_THREADS = 6
#: Anonymous memory may grow so much in a sidecar's life, bytes: allocators keep what they had at the worst moment.
GROWTH = 96 << 20


@dataclass(frozen=True)
class Census:
    """Everything here must come back to what it was, but for the two that :meth:`leaks` bounds."""

    fds: int
    ucx_threads: int
    """UCX has one for each process with agents."""
    maps: int
    """Mappings of caches."""
    registrations: int
    peers: int
    prepared: int
    posted: int
    draining: int
    bytes_in_flight: int
    published: int
    reads_open: int
    threads: int
    anonymous: int
    """Bytes of memory that is not shared."""

    def leaks(self, now: Census) -> list[str]:
        """What ``now`` has more of.  Less is none: a connection of the case before may have been late to go."""
        found = [
            f"{f.name}: {getattr(self, f.name)} before, {getattr(now, f.name)} after"
            for f in fields(self)
            if f.name not in ("threads", "anonymous") and getattr(now, f.name) > getattr(self, f.name)
        ]
        if now.threads > self.threads + POOL_THREADS:
            found.append(f"threads: {self.threads} before, {now.threads} after")
        if now.anonymous > self.anonymous + GROWTH:
            found.append(f"anonymous memory: {self.anonymous >> 20} MiB before, {now.anonymous >> 20} MiB after")
        return found


def _thread_names(pid: int) -> Iterator[str]:
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/comm", encoding="utf-8", errors="replace") as name:
                yield name.read().strip()
        except FileNotFoundError:  # it has ended meanwhile
            continue


def anonymous_bytes(pid: int) -> int:
    """Memory that belongs to the process alone."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


def fd_count(pid: int) -> int:
    """Open descriptors."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def thread_count(pid: int) -> int:
    """Threads."""
    return len(os.listdir(f"/proc/{pid}/task"))


def map_count(side: SidecarProcess) -> int:
    """Mappings of memory that engines have handed over."""
    marks = (str(side.directory), "/memfd:kvxfer")
    with open(f"/proc/{side.pid}/maps", encoding="utf-8", errors="replace") as maps:
        return sum(any(mark in line for mark in marks) for line in maps)


def census(side: SidecarProcess) -> Census:
    """Count."""
    status = side.status()
    counts, names = status.counts, list(_thread_names(side.pid))
    return Census(
        # Connections to its engine socket are the callers': gRPC makes new ones when it likes.
        fds=fd_count(side.pid) - sum(c.laddr == str(side.socket) for c in _connections(side.pid)),
        ucx_threads=names.count("async"),
        maps=map_count(side),
        registrations=len(status.registrations),
        peers=len(status.peers),
        prepared=counts.prepared,
        posted=counts.posted,
        draining=counts.draining,
        bytes_in_flight=counts.bytes_in_flight,
        published=counts.published,
        reads_open=counts.reads_open,
        threads=len(names),
        anonymous=anonymous_bytes(side.pid),
    )


def _connections(pid: int) -> list[Any]:
    found: list[Any] = psutil.Process(pid).net_connections("all")
    return found


def _open_files(pid: int) -> Iterator[str]:
    """What the descriptors are, for the one who has to find the leak."""
    for fd in sorted(map(int, os.listdir(f"/proc/{pid}/fd"))):
        with contextlib.suppress(FileNotFoundError):
            yield f"{fd}: {os.readlink(f'/proc/{pid}/fd/{fd}')}"
    # Through the process, for it may be in a network namespace of its own.
    for table in ("tcp", "tcp6", "unix"):
        with open(f"/proc/{pid}/net/{table}", encoding="ascii", errors="replace") as lines:
            yield from (f"{table}: {' '.join(line.split())}" for line in lines)


def assert_no_leaks(side: SidecarProcess, before: Census, seconds: float = 15.0) -> None:
    """Everything comes back to what it was: at once or soon, for connections take a while to go."""
    deadline = time.monotonic() + seconds
    while leaks := before.leaks(census(side)):
        if time.monotonic() > deadline:
            raise AssertionError(f"sidecar {side.name} leaks: " + "\n  ".join([*leaks, *_open_files(side.pid)]))
        time.sleep(0.05)
