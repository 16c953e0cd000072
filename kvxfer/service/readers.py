"""P's side of the readers: who is connected, whose reads are under way, and when to poll for them.

With NIXL's progress thread off the target of a READ must poll while a connection is made and while a read is under way.
A reader asks before it posts (OpenRead), so that connected readers cost nothing while nothing is read.  For a while
after a reader was met, and after each of its reads, this side stays *attentive*: what is left of a read that was given
up needs it to drain.  This module turns what readers say into that demand.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.files import CONNECTION, FILES
from kvxfer.wire.peer import Reader
from kvxfer.xfer.api import Demand, TransferEngine

#: Called with a reader that fell silent, where it called from, and the seconds since it was last heard of.
OnLost = Callable[[Reader, str, float], None]

#: How long a new reader may take to make its connection, seconds; polled without pause for so long.
CONNECT_WINDOW: Final = 1.0
#: For so long after a reader was met, or has read, it is polled for now and then, seconds.
ATTENTION: Final = 10.0
#: A reader that says nothing for so long is forgotten, seconds.  Readers say something three times as often.
IDLE_TIMEOUT: Final = 60.0
#: A read whose reader never closes it stops costing CPU after so long, seconds.
OPEN_LIMIT: Final = 120.0
#: Most readers of one registration, and most reads that one reader may have under way: whoever reaches the peer port
#: may say that it is one, and each costs CPU.  A reader's own limit of reads is 1,024 of one engine
#: (``max_transfers_per_peer``), and those that have just ended still count here.
MAX_READERS: Final = 1_024
MAX_READS: Final = 2_048


@dataclass
class _Reader:
    address: str
    heard: float
    stays: bool = False
    attentive: Demand | None = None
    attentive_until: float = 0.0
    connecting: Demand | None = None
    connecting_until: float = 0.0
    reads: dict[str, tuple[Demand | None, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class ReaderStatus:
    """A reader as GetStatus tells it; ``idle`` in seconds."""

    reader: Reader
    address: str
    reads: int
    idle: float


class Readers:
    """The readers of one registration.  Call :meth:`tick` now and then; it is cheap."""

    def __init__(self, on_lost: OnLost = lambda reader, address, idle: None) -> None:
        self.engine: TransferEngine | None = None
        self._on_lost = on_lost
        self._known: dict[Reader, _Reader] = {}

    def __len__(self) -> int:
        """Everyone who is connected."""
        return len(self._known)

    @property
    def engines(self) -> set[str]:
        """Their engines."""
        return {reader.engine_id for reader in self._known}

    @property
    def most_reads(self) -> int:
        """Reads under way of the reader that has most."""
        return max((len(r.reads) for r in self._known.values()), default=0)

    def _engine(self) -> TransferEngine:
        if self.engine is None:
            raise RuntimeError("no transfer engine was given to Readers")
        return self.engine

    def meet(self, key: Reader, address: str, *, connecting: bool) -> None:
        """A reader introduced itself, or said that it is alive; ``connecting``: it is about to make a connection.

        :raises KvxferError: LIMIT_EXCEEDED for a new reader where there are :data:`MAX_READERS` already, and where its
            connection could take the last file descriptor.
        """
        now = time.monotonic()
        if connecting:  # others may be about to as well
            FILES.require(CONNECTION * (1 + sum(r.connecting is not None for r in self._known.values())))
        reader = self._known.get(key)
        if reader is None:
            if len(self._known) >= MAX_READERS:
                raise KvxferError(
                    Reason.LIMIT_EXCEEDED,
                    f"this engine has {len(self._known)} readers; the limit is {MAX_READERS} (max_readers)",
                    limit_name="max_readers",
                    limit=MAX_READERS,
                )
            reader = self._known[key] = _Reader(address, now)
        reader.heard, reader.address = now, address
        reader.stays |= not connecting
        if connecting:
            self._attend(reader, now)
            if reader.connecting is None:
                reader.connecting = self._engine().serving()
            reader.connecting_until = now + CONNECT_WINDOW

    def _attend(self, reader: _Reader, now: float) -> None:
        reader.attentive_until = now + ATTENTION
        if reader.attentive is None:
            reader.attentive = self._engine().connected()

    def ask(self, key: Reader, transfer_id: str, address: str) -> None:
        """A read is wanted, and counts as one until it is closed.

        :raises KvxferError: LIMIT_EXCEEDED where the reader has :data:`MAX_READS` under way already; as :meth:`meet`.
        """
        self.meet(key, address, connecting=False)
        reader = self._known[key]
        self._attend(reader, reader.heard)
        if transfer_id not in reader.reads and len(reader.reads) >= MAX_READS:
            raise KvxferError(
                Reason.LIMIT_EXCEEDED,
                f"this reader has {len(reader.reads)} reads under way; the limit is {MAX_READS} (max_reads)",
                limit_name="max_reads",
                limit=MAX_READS,
            )
        demand, _ = reader.reads.get(transfer_id, (None, 0.0))
        reader.reads[transfer_id] = demand, time.monotonic() + OPEN_LIMIT

    def open(self, key: Reader, transfer_id: str, address: str) -> None:
        """A read is granted, or goes on: poll without pause until it is closed.

        :raises KvxferError: as :meth:`ask`.
        """
        self.ask(key, transfer_id, address)
        reads = self._known[key].reads
        demand, until = reads[transfer_id]
        reads[transfer_id] = demand or self._engine().serving(), until

    def close_read(self, key: Reader, transfer_id: str) -> None:
        """A read is over; one that is not known is none of our business."""
        reader = self._known.get(key)
        if reader is not None and (read := reader.reads.pop(transfer_id, None)):
            reader.heard = time.monotonic()
            self._attend(reader, reader.heard)
            _end(read[0])

    def leave(self, key: Reader) -> None:
        """A reader said goodbye, or is not heard of any more."""
        reader = self._known.pop(key, None)
        if reader is None:
            return
        for demand, _ in reader.reads.values():
            _end(demand)
        for end in (reader.connecting, reader.attentive):
            if end is not None:
                end.close()

    def tick(self, now: float) -> None:
        """Forget readers that fell silent and end demands that ran out; ``now`` in monotonic seconds.

        Who has only been met is not lost: a reader meets every rank of an engine, and then reads from some of them.
        """
        for key, reader in list(self._known.items()):
            if reader.connecting is not None and now >= reader.connecting_until:
                reader.connecting.close()
                reader.connecting = None
            if reader.attentive is not None and not reader.reads and now >= reader.attentive_until:
                reader.attentive.close()
                reader.attentive = None
            for transfer_id, (demand, until) in list(reader.reads.items()):
                if now >= until:
                    _end(demand)
                    del reader.reads[transfer_id]
            if now - reader.heard >= IDLE_TIMEOUT:
                self.leave(key)
                if reader.stays:
                    self._on_lost(key, reader.address, now - reader.heard)

    def status(self) -> list[ReaderStatus]:
        """Everyone who is connected."""
        now = time.monotonic()
        return [ReaderStatus(k, r.address, len(r.reads), now - r.heard) for k, r in self._known.items()]

    @property
    def open_reads(self) -> int:
        """Reads under way."""
        return sum(len(r.reads) for r in self._known.values())

    def close(self) -> None:
        """Forget everyone."""
        for key in list(self._known):
            self.leave(key)


def _end(demand: Demand | None) -> None:
    if demand is not None:
        demand.close()
