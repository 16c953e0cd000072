"""The port between the service and whatever moves bytes: what a transfer engine takes, gives and promises.

Everything here is plain data and one :class:`typing.Protocol`.  ``nixl.py`` implements it over NIXL, ``loopback.py``
with ``memcpy`` inside one process; importing this module needs neither.

An engine polls as often as its reads and every :class:`Demand` ask for, and not at all without any of these.

All methods are called from one asyncio event loop and never block it.  Failures are
:class:`kvxfer.core.errors.KvxferError`.  Addresses, lengths and strides are bytes, durations are seconds.

The life of a read::

    READY --post--> POSTED --> DONE | FAILED      (``release`` drops a read that was never posted)

A posted read cannot be stopped: letting go of the request does not stop the hardware from writing.  Cancelling the task
that awaits :meth:`TransferEngine.post` therefore only stops the waiting; the engine goes on polling, and
:attr:`Read.quiesced` tells when the local memory is safe to reuse.  A large read is posted piece by piece, and one that
nobody waits for any more ends, FAILED, with the pieces that are under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from types import TracebackType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvxfer.core.layout import MemoryKind

__all__ = [
    "MAX_ADDRESS",
    "MAX_DESCRIPTORS",
    "Counters",
    "Demand",
    "EngineInfo",
    "Indices",
    "MemoryKind",
    "NotificationHandler",
    "Peer",
    "Read",
    "ReadResult",
    "ReadState",
    "Registration",
    "RowArray",
    "Rows",
    "Span",
    "Telemetry",
    "TransferEngine",
]

#: One past the last byte of anything must not exceed this.
MAX_ADDRESS: Final = 2**63
#: Descriptor numbers are int32: a prepared list must have fewer descriptors than this.
MAX_DESCRIPTORS: Final = 2**31

#: N x 5, uint64: address, length, device, stride, count.
RowArray = npt.NDArray[np.uint64]
#: One-dimensional, int32: descriptor numbers within one prepared list.
Indices = npt.NDArray[np.int32]
#: Called on the event loop with the peer's agent name and the payload, once for each notification that arrives.
NotificationHandler = Callable[[str, bytes], None]


@dataclass(frozen=True, slots=True)
class Span:
    """A contiguous range of memory: ``[address, address + length)`` on ``device``."""

    address: int
    length: int
    kind: MemoryKind = MemoryKind.DRAM
    device: int = 0


@dataclass(frozen=True, slots=True)
class Registration:
    """Memory that was registered together; a token for :meth:`TransferEngine.deregister`."""

    id: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another agent that this one can read from.

    :param spans: what the peer said it registered; remote rows must lie inside them.
    :param warm_seconds: how long the first byte took to arrive, or ``None`` where the connection was not warmed up.
    """

    name: str
    id: int
    spans: tuple[Span, ...]
    warm_seconds: float | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """A prepared descriptor list.  Descriptor ``i`` of row ``r`` has the number ``starts[r] + i``.

    :param remote: whether it describes the peer's memory or this process's.
    :param rows: N x 5 uint64, read-only, as checked.
    :param starts: N + 1 int64: the number of the first descriptor of each row; the last entry is the total.
    """

    id: int
    peer: Peer
    kind: MemoryKind
    remote: bool
    rows: RowArray
    starts: npt.NDArray[np.int64]

    @cached_property
    def total(self) -> int:
        """Number of descriptors."""
        return int(self.starts[-1])

    @cached_property
    def length(self) -> int | None:
        """Bytes of a descriptor where all have the same, else ``None``."""
        lengths = self.rows[:, 1]
        return int(lengths[0]) if bool((lengths == lengths[0]).all()) else None


class ReadState(str, Enum):
    """Where a read is in its life."""

    READY = "ready"
    POSTED = "posted"
    DONE = "done"
    FAILED = "failed"
    RELEASED = "released"


class Read(Protocol):
    """A read that was made; see the module's docstring for its life."""

    @property
    def peer(self) -> Peer:
        """Whose memory it reads."""

    @property
    def state(self) -> ReadState:
        """Where it is in its life."""

    @property
    def bytes(self) -> int:
        """Bytes that it moves."""

    @property
    def descriptors(self) -> int:
        """Descriptor pairs, before the library merges neighbours."""

    @property
    def make_seconds(self) -> float:
        """What making the requests took inside the library."""

    @property
    def is_quiesced(self) -> bool:
        """Whether nothing writes into the local blocks of this read any more (true before it is posted)."""

    @property
    def kept(self) -> bool:
        """Whether it has failed, though its peer was not lost, so that parts of it may still be moving.

        The library reports the first failure and does not tell about the others: it quiesces only when the engine is
        closed.
        """

    @property
    def lost(self) -> bool:
        """Once it has quiesced: whether the connection to its peer broke, also where nobody waited for it any more."""

    @property
    def quiesced(self) -> Awaitable[None]:
        """Resolves when the library has let go of all its requests; a fresh awaitable each time, safe to cancel.

        Never raises, whatever became of the read.  For a read that was not posted it resolves when it is released.
        """


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What the transfer library itself measured for one request.

    :param post_seconds: duration of the posting call.
    :param transfer_seconds: from the start of posting until completion was seen (so it contains ``post_seconds``).
    :param bytes: bytes moved.
    :param descriptors: descriptors after merging neighbours.
    """

    post_seconds: float
    transfer_seconds: float
    bytes: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class ReadResult:
    """A read that completed.

    :param bytes: bytes moved.
    :param queue_seconds: from the call of ``post`` until its first piece was taken up.
    :param post_seconds: inside the library's posting calls (the whole copy, where the transport copies there).
    :param move_seconds: the rest, from the first posting until completion was seen.
    :param telemetry: the library's own figures, where it gives them; of several requests the sums.
    """

    bytes: int
    queue_seconds: float
    post_seconds: float
    move_seconds: float
    telemetry: Telemetry | None


@dataclass(slots=True)
class Counters:
    """Totals since the engine started; times are sums in seconds.

    ``made``, ``posted`` and ``released`` count requests, of which a large read has several; the others count reads.
    """

    made: int = 0
    posted: int = 0
    done: int = 0
    failed: int = 0
    released: int = 0
    bytes: int = 0
    notifications: int = 0
    polls: int = 0
    poll_errors: int = 0
    make_seconds: float = 0.0
    post_seconds: float = 0.0
    move_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is and how it fares.

    :param backends: backend name -> its parameters as the library reports them.
    :param environment: the variables that steer the library (``UCX_*``, ``NIXL_*``), as they were at the start.
    :param defaults: those of them that kvxfer set because nobody else had.
    :param rows: prepared lists alive.
    :param reads: alive (made, or posted and not let go of yet).
    :param in_flight: posted and not let go of yet.
    """

    name: str
    library: str
    library_version: str
    transport_version: str
    backends: Mapping[str, Mapping[str, str]]
    environment: Mapping[str, str]
    defaults: tuple[str, ...]
    registrations: int
    peers: int
    rows: int
    reads: int
    in_flight: int
    counters: Counters = field(default_factory=Counters)


class Demand:
    """A reason to poll, held until it is closed; a context manager.  Closing twice is fine."""

    __slots__ = ("_end",)

    def __init__(self, end: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end

    def close(self) -> None:
        """Withdraw the demand."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def __enter__(self) -> Demand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TransferEngine(Protocol):
    """Moves bytes from peers' memory into this process's.

    Handles (:class:`Registration`, :class:`Peer`, :class:`Rows`, :class:`Read`) belong to the engine that made them.
    Every method but :meth:`start` raises SHUTTING_DOWN unless the engine is started and not yet closing.
    """

    @property
    def name(self) -> str:
        """The agent name: unique among everything that may ever meet, so it carries the incarnation."""

    @property
    def fault(self) -> str:
        """Why it cannot be relied on: it does not run, or the library fails or hangs; empty while it works."""

    async def start(self) -> None:
        """Create the agent.  Raises UNSUPPORTED (no library or backend), INTERNAL."""

    async def close(self, drain: float | None = None) -> None:
        """Refuse new work, wait a bounded time for posted reads, then destroy the agent and with it what is left.

        Reads that are still posted then fail with SHUTTING_DOWN and quiesce.  Idempotent.

        :param drain: how long to wait, seconds; None: as the engine was set up.
        """

    async def register(self, spans: Sequence[Span]) -> Registration:
        """Register memory with the library.

        Raises FIELD_INVALID (malformed, overlapping, not mapped), MEMORY_LIMIT, UNSUPPORTED.
        """

    async def deregister(self, registration: Registration) -> None:
        """Undo :meth:`register`.  Raises REGISTRATION_BUSY while prepared lists or reads use it, NOT_REGISTERED.

        Peers' reads of this memory cannot be seen here: whoever calls must know that there are none.
        """

    async def metadata(self) -> bytes:
        """What a peer needs to read from here; it covers the memory that is registered now."""

    async def add_peer(self, metadata: bytes, expected_name: str, *, spans: Sequence[Span]) -> Peer:
        """Learn to read from a peer, and warm the connection up.

        The peer must be polling.  Raises PEER_METADATA_INVALID (damaged, or of another agent), PEER_LOST,
        FIELD_INVALID (spans, or the peer is known already).  Where a peer of this name is still being removed (see
        :meth:`remove_peer`), waits for that without a bound of its own.
        """

    async def remove_peer(self, peer: Peer) -> None:
        """Forget a peer, with its prepared lists.

        Raises TRANSFER_STATE, and changes nothing, while reads that were posted by the caller have not quiesced.  The
        engine's own warm-up read of a peer that never answered is no obstacle: the peer is forgotten at once, and the
        library drops it as soon as that read has quiesced.
        """

    async def prepare_local(self, rows: RowArray, kind: MemoryKind, peer: Peer) -> Rows:
        """Prepare this process's side of reads from ``peer``.

        Raises FIELD_INVALID (malformed), NOT_REGISTERED (outside registered spans), TOO_MANY_DESCRIPTORS.
        """

    async def prepare_remote(self, rows: RowArray, kind: MemoryKind, peer: Peer) -> Rows:
        """Prepare the peer's side; raises as :meth:`prepare_local`, checked against the spans of ``add_peer``."""

    async def release_rows(self, rows: Rows) -> None:
        """Give a prepared list back, as soon as the last read that uses it is gone.  Idempotent."""

    async def make_read(
        self,
        local: Rows,
        local_indices: Indices,
        remote: Rows,
        remote_indices: Indices,
        notification: bytes,
        *,
        now: bool = True,
    ) -> Read:
        """Make a request that reads each remote descriptor into the local one at the same place of the other array.

        ``notification`` reaches the peer after the last byte was read; empty for none.  Not ``now`` leaves the making
        to :meth:`post`, which saves a trip to the library's thread; what only the library can find wrong comes from
        there then, and the index arrays must not change until it has returned.  Raises FIELD_INVALID (empty, unequal,
        wrong dtype, lengths that differ), BLOCK_OUT_OF_RANGE, NO_HANDSHAKE (lists of another peer, released).
        """

    async def post(self, read: Read) -> ReadResult:
        """Post a READY read and wait until it completes.  Raises TRANSFER_STATE, PEER_LOST, TRANSFER_FAILED."""

    def submit(self, read: Read) -> asyncio.Future[ReadResult]:
        """As :meth:`post`, but handed over before it returns.  Cancelling the future is cancelling the wait."""

    async def release(self, read: Read) -> None:
        """Drop a read that is READY, DONE or FAILED.  Idempotent.  Raises TRANSFER_STATE for a posted one."""

    def serving(self) -> Demand:
        """Poll without pause while held: a peer is reading from here, or a connection is being made."""

    def connected(self) -> Demand:
        """Poll every few milliseconds while held: a peer may die, and what is left of its read may still be under way.

        Peers that this engine reads from need none.
        """

    async def info(self) -> EngineInfo:
        """What the engine is, and its counters; also answers while closing."""
