"""Which way the bytes of a link really take, as far as this side can see it.

NIXL does not tell what UCX has chosen.  Two things can be seen from outside: how much has come in over this process's
TCP connections while a read was under way, and whether the read was over when the posting call returned, as it is
where the kernel copies from one process to the other (CMA).  A link is looked at with a read of some size that had the
process to itself; until then its transport is not known.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from kvxfer.xfer.api import ReadResult

#: Smaller reads tell nothing: other traffic of the process may be as much.
LEAST_BYTES: Final = 64 * 1024

#: Where ``tcpi_bytes_received`` (64 bit) lies in Linux's ``struct tcp_info``.
_RECEIVED: Final = 128
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class Transport(str, Enum):
    """How bytes come."""

    UNKNOWN = "unknown"
    TCP = "tcp"
    CMA = "cma"
    """The kernel copies from the other process."""
    OTHER = "other"
    """In another way, as RDMA."""

    @property
    def told(self) -> str:
        """For people."""
        return "UCX" if self is Transport.UNKNOWN else f"UCX: {self.value}"


def host_mark() -> str:
    """The same for all processes of this host, in whatever container, and for no others; empty where it is unknown."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        return ""
    return hashlib.sha256(b"kvxfer host " + boot.encode()).hexdigest()[:32]


def received_over_tcp() -> int:
    """Bytes that have come in over the TCP connections that this process has open."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        with socket.socket(fileno=copy) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                total += _received(connection)
    return total


def _received(connection: socket.socket) -> int:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED + 8)
    except OSError:
        return 0
    return int(struct.unpack_from("=Q", info, _RECEIVED)[0]) if len(info) >= _RECEIVED + 8 else 0


@dataclass(frozen=True, slots=True)
class Look:
    """What was so when a read was posted."""

    posts: int
    received: int


class Probe:
    """Looks at reads that have the process to themselves.  One for all registrations of a sidecar."""

    def __init__(self) -> None:
        self._under_way = 0
        self._posts = 0

    def posted(self, size: int, *, wanted: bool) -> Look | None:
        """A read of so many bytes is about to be posted; :meth:`ended` must follow.

        :param wanted: its transport is not known.
        """
        self._under_way += 1
        self._posts += 1
        if wanted and size >= LEAST_BYTES and self._under_way == 1:
            return Look(self._posts, received_over_tcp())
        return None

    def ended(self) -> None:
        """Nothing of it is under way any more."""
        self._under_way -= 1

    def see(self, look: Look, size: int, results: list[ReadResult], *, one_host: bool) -> Transport:
        """What the read that was posted at ``look`` has shown; :meth:`ended` has not been called yet."""
        if self._posts != look.posts or not results:
            return Transport.UNKNOWN
        return judge(received_over_tcp() - look.received, size, results, one_host=one_host)


def judge(received: int, size: int, results: list[ReadResult], *, one_host: bool) -> Transport:
    """Which way a read of ``size`` bytes took.

    :param received: bytes that came over TCP meanwhile.
    """
    if received >= size * 0.9:
        return Transport.TCP
    if received > size * 0.1:  # some of its sources this way, some that
        return Transport.UNKNOWN
    at_once = all(r.move_seconds <= r.post_seconds for r in results)
    return Transport.CMA if one_host and at_once else Transport.OTHER
