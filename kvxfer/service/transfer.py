"""What the sidecar knows about one transfer: while it runs everything, afterwards what can still be asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvxfer.core import transfers as life
from kvxfer.core.errors import KvxferError
from kvxfer.core.layout import Rank
from kvxfer.core.resolve import BlockList
from kvxfer.core.transfers import State
from kvxfer.service.link import Link, LinkSource
from kvxfer.service.opening import Opening
from kvxfer.service.transport import Look
from kvxfer.wire.blocks import block_digest
from kvxfer.wire.peer import ReadRef
from kvxfer.wire.requests import TransferSpec
from kvxfer.xfer.api import Read as XferRead
from kvxfer.xfer.api import ReadResult


@dataclass
class Timings:
    """Seconds spent in each phase; of several sources the longest.  ``None``: not reached."""

    resolve: float | None = None
    make: float | None = None
    queue: float | None = None
    post: float | None = None
    move: float | None = None
    open: float | None = None
    total: float | None = None


@dataclass
class Live:
    """What a part reads with, until the transfer has ended."""

    source: LinkSource
    read: XferRead


@dataclass
class Part:
    """What one source contributes.

    :param live: ``None`` where nothing is read from it, and once the transfer has ended.
    """

    rank: Rank
    incarnation: str
    descriptors: int
    bytes_by_group: Mapping[str, int]
    live: Live | None
    result: ReadResult | None = None

    @property
    def bytes(self) -> int:
        """Bytes that the plan says."""
        return sum(self.bytes_by_group.values())


class Transfer:
    """One logical read; what it consists of is known from :meth:`consist` on."""

    def __init__(self, spec: TransferSpec, link: Link | None, number: int) -> None:
        self.id: Final = spec.transfer_id
        self.digest: Final = spec.digest
        self.request_id: Final = spec.ticket.request_id
        self.remote_engine_id: Final = spec.ticket.engine_id
        self.skip_tokens: Final = spec.skip_tokens
        self.num_tokens: Final = spec.num_tokens
        self.number: Final = number
        self.parts: Sequence[Part] = ()
        #: Numbers of the local blocks that it writes.
        self.claims: Sequence[int] = ()
        self.bytes = 0
        self.descriptors = 0
        self.link = link
        #: What sources were told of it, by the identity of their ranks.
        self.openings: dict[int, Opening] = {}
        #: They were told while it was prepared: it is posted at once, or given up.
        self.announced = False
        #: It was announced and could not be posted; its ID may stand for another one.
        self.taken_back = False
        #: Of the ticket; a secret.  Needed until every source has been told of the end.
        self.lease_token = spec.ticket.lease_token
        #: What sources know it by, by the identity of their ranks; they hold the secret as well.
        self.refs: dict[int, ReadRef] = {}
        self.promised_tokens: Final = spec.ticket.num_tokens
        #: What the ticket says of the other side's blocks.
        self.promised: Sequence[BlockList] = spec.ticket.blocks
        self._digests: dict[str, bytes] = {}
        self.state = State.PREPARED
        self.error: KvxferError | None = None
        self.timings = Timings()
        self.created: Final = time.time()
        self.ended: float | None = None
        #: What was so when it was posted, where the transport of its link is to be found out.
        self.look: Look | None = None
        #: Ends the watch over a prepared transfer.
        self.disarm: Callable[[], None] = lambda: None
        self.settled: Final = asyncio.Event()
        self.finished: Final = asyncio.Event()
        self.stop: Final[asyncio.Future[KvxferError]] = asyncio.get_running_loop().create_future()

    def consist(self, parts: Sequence[Part], claims: Sequence[int]) -> None:
        """Say what is read from whom, into which blocks."""
        self.parts, self.claims = parts, claims
        self.bytes = sum(p.bytes for p in parts)
        self.descriptors = sum(p.descriptors for p in parts)

    @property
    def live(self) -> list[Live]:
        """What is being read with."""
        return [p.live for p in self.parts if p.live is not None]

    @property
    def results(self) -> list[ReadResult]:
        """Of the reads that are done."""
        return [p.result for p in self.parts if p.result is not None]

    def digest_of(self, blocks: BlockList) -> bytes:
        """Over the blocks of one group of the other side; computed once for all its ranks."""
        if blocks.group not in self._digests:
            self._digests[blocks.group] = block_digest(blocks)
        return self._digests[blocks.group]

    @property
    def quiesced(self) -> bool:
        """Nothing writes the local blocks."""
        return self.state in life.QUIESCENT

    def forget_secret(self) -> None:
        """Nobody is told anything of it any more."""
        self.lease_token = b""
        self.refs = {}

    def forget_details(self) -> None:
        """Keep only what can still be asked for: thousands of ended transfers are remembered."""
        self.link = None
        self.claims = ()
        self.openings = {}
        self.promised = ()
        self.disarm = lambda: None
        for part in self.parts:
            part.live = None


@dataclass
class Totals:
    """Counts since the registration."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    bytes_read: int = 0
