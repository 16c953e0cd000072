"""Which way the bytes of a link really take, as far as this side can see it.

NIXL does not tell what UCX has chosen.  Two things can be seen from outside: how much has come in over this process's
TCP connections while a read was under way, and whether the read was over when the posting call returned, as it is
where the kernel copies from one process to the other (CMA).  A link is looked at with a read of some size that had the
process to itself; until then its transport is not known.
"""

from __future__ import annotations

import ctypes
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
#: Open descriptors of this process that are looked through at most: it is done while the event loop waits.
MOST_DESCRIPTORS: Final = 2_048
_LIBC: Final = ctypes.CDLL(None)
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


def received_over_tcp() -> int | None:
    """Bytes that have come in over the TCP connections that this process has open.

    ``None`` where that cannot be told: the kernel does not list descriptors, or there are more than
    :data:`MOST_DESCRIPTORS`.
    """
    total = 0
    # The descriptors are others', who may close them at any moment, or open something else under the same number.  So
    # the kernel is asked about the number: what is no TCP connection has no answer.  A socket object, or a duplicate,
    # would be one more owner, and Python may set it to another mode of blocking, which all owners share.
    info, size = ctypes.create_string_buffer(_RECEIVED + 8), ctypes.c_uint32()
    try:
        with os.scandir("/proc/self/fd") as listed:
            for count, entry in enumerate(listed):
                if count >= MOST_DESCRIPTORS:
                    return None
                size.value = len(info)
                asked = _LIBC.getsockopt(int(entry.name), socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size))
                if asked == 0 and size.value == len(info):  # an older kernel tells less
                    total += int(struct.unpack_from("=Q", info, _RECEIVED)[0])
    except OSError:
        return None
    return total


@dataclass(frozen=True, slots=True)
class Look:
    """What was so when a read was posted.

    :param received: see :func:`received_over_tcp`.
    """

    posts: int
    received: int | None


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
        if self._posts != look.posts or not results or look.received is None:
            return Transport.UNKNOWN
        received = received_over_tcp()
        if received is None:
            return Transport.UNKNOWN
        return judge(received - look.received, size, results, one_host=one_host)


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
