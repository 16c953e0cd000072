"""A reader's prepared way to one engine: whom it reads from, with what, and whether they still live."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.pairing import PairingOptions
from kvxfer.core.plan import Plan, SourcePlan
from kvxfer.service.closing import Ends
from kvxfer.service.transport import Transport
from kvxfer.wire.peer import CloseRead, ExchangeAnswer, ExchangeQuery, OpenRead, ReadRef
from kvxfer.wire.requests import Target
from kvxfer.xfer.api import Peer, Rows, TransferEngine

if TYPE_CHECKING:
    from kvxfer.service.links import Links

log = structlog.get_logger()

#: A peer's idle timeout is taken as at least and at most so many seconds.
IDLE_BOUNDS: Final = (3.0, 600.0)
#: Reads that are looked at to find out how a link's bytes come: where its sources differ, no read tells.
MAX_LOOKS: Final = 8
#: After so long they are looked at again, seconds: a way may change, and other traffic may have looked like it.
LOOK_AGAIN: Final = 300.0


class PeerClient(Protocol):
    """One rank's KvPeer service.  Every call raises PEER_UNREACHABLE, or what the peer answered."""

    @property
    def address(self) -> str:
        """Where it listens."""

    async def exchange(self, query: ExchangeQuery, timeout: float) -> ExchangeAnswer:
        """Introduce the reader, or say that it is alive; the answer is checked."""

    async def goodbye(self, query: ExchangeQuery, timeout: float) -> None:
        """The reader leaves."""

    def open_read(self, record: OpenRead, timeout: float) -> Awaitable[float]:
        """A read is wanted; seconds granted from before the call, which is on its way when this returns."""

    async def renew_read(self, ref: ReadRef, wanted: float, timeout: float) -> float:
        """A read goes on; seconds granted from before the call."""

    async def close_reads(self, records: Sequence[CloseRead], timeout: float) -> None:
        """Reads of one reader have ended; at most :data:`kvxfer.wire.peer.MAX_ENDS`."""

    async def wait_lost(self) -> None:
        """Returns once an established connection breaks."""

    async def close(self) -> None:
        """Drop the connection."""


#: Makes a client of the KvPeer service at an address; connects lazily.
PeerConnector = Callable[[str], PeerClient]


@dataclass(eq=False)
class RemoteRank:
    """One rank of the engine at the other end.

    :param facts: without its memory.
    :param groups: names of its groups.
    :param heard_at: when it has answered last, monotonic seconds.
    :param silent: a read was given up for want of its answer: no new one is to go the same way.
    :param ends: tells it of reads that have ended.
    """

    client: PeerClient
    facts: ExchangeAnswer
    groups: tuple[str, ...]
    heard_at: float = field(default_factory=time.monotonic)
    silent: bool = False
    ends: Ends = field(init=False)

    def __post_init__(self) -> None:
        self.ends = Ends(self.client)

    def heard(self) -> None:
        """It has answered."""
        self.heard_at = time.monotonic()

    @property
    def beat_interval(self) -> float:
        """Seconds between two signs of life: three in the time after which the peer forgets its reader."""
        low, high = IDLE_BOUNDS
        return min(max(self.facts.idle_timeout, low), high) / 3

    def lost(self, why: str) -> KvxferError:
        """That it is lost."""
        facts = self.facts
        return KvxferError(
            Reason.PEER_LOST,
            f"rank {facts.rank} of engine {facts.engine_id} at {self.client.address} is lost: {why}",
            engine_id=facts.engine_id,
            rank=facts.rank,
            address=self.client.address,
            incarnation=facts.incarnation,
        )


@dataclass(frozen=True, eq=False)
class LinkSource:
    """One rank that is read from, with the prepared descriptor lists of both sides."""

    rank: RemoteRank
    plan: SourcePlan
    peer: Peer
    local: Rows
    remote: Rows

    @property
    def client(self) -> PeerClient:
        """Its service."""
        return self.rank.client

    @property
    def facts(self) -> ExchangeAnswer:
        """Who it is."""
        return self.rank.facts


class Link:
    """A reader's prepared way to one engine, with a transfer engine of its own.

    Held by the table of links and by every transfer that uses it.  Its transfer engine is destroyed when the last one
    lets go; or before, by :meth:`cut`, which is the only thing that stops a posted read, and so must not be shared with
    reads from anybody else.

    :param ranks: every rank of the engine.
    :param sources: those that are read from.
    """

    def __init__(
        self,
        owner: Links,
        engine: TransferEngine,
        target: Target,
        options: PairingOptions,
        plan: Plan,
        ranks: tuple[RemoteRank, ...],
        sources: tuple[LinkSource, ...],
    ) -> None:
        self._owner = owner
        self.engine: Final = engine
        self.target: Final = target
        self.options: Final = options
        self.plan: Final = plan
        self.ranks: Final = ranks
        self.sources: Final = sources
        self._incarnations = {r.facts.rank.number: r.facts.incarnation for r in ranks}
        self.lost: Final[asyncio.Future[KvxferError]] = asyncio.get_running_loop().create_future()
        #: How its bytes come, once that was seen.
        self.transport = Transport.UNKNOWN
        self._looks_left = MAX_LOOKS
        self._look_at = 0.0
        self._seen = Transport.UNKNOWN
        #: Whether that is slower than it would have to be.
        self.slow = False
        self._users = 1
        self._leaving = 0
        self.used = time.monotonic()
        self._watchers = [asyncio.ensure_future(self._watch(s.rank)) for s in sources]

    @property
    def alive(self) -> bool:
        """Whether reads may still be tried."""
        return not self.lost.done()

    def serves(self, target: Target, options: PairingOptions | None) -> bool:
        """Whether this link is what a handshake with ``target`` would give."""
        return (
            self.alive
            and not any(rank.silent for rank in self.ranks)
            and (options is None or options == self.options)
            and {(r.rank, r.address) for r in target.ranks} == {(r.rank, r.address) for r in self.target.ranks}
            and all(r.incarnation in ("", self._incarnations[r.rank.number]) for r in target.ranks)
        )

    def lose(self, error: KvxferError) -> None:
        """A source is gone: nothing new is read over this link, and reads under way fail."""
        if not self.lost.done():
            self._owner.events.peer_lost(self, error)
            self.lost.set_result(error.bare())
            self._owner.drop(self)

    @property
    def to_be_seen(self) -> bool:
        """Whether it is worth while to look how its bytes come."""
        return time.monotonic() >= self._look_at

    def looks(self) -> None:
        """A read is looked at."""
        self._looks_left -= 1
        if self._looks_left <= 0:
            self._rest()

    def found(self, transport: Transport) -> None:
        """How its bytes came was seen, once.

        Two looks that agree are believed; one that has seen the kernel copy is, too: nothing else is over so soon.
        That a read was not, on a busy machine, says nothing against it.
        """
        before, self._seen = self._seen, transport
        if transport is Transport.OTHER and self.transport is Transport.CMA:
            transport = Transport.CMA
        elif transport is Transport.UNKNOWN or (transport is not before and transport is not Transport.CMA):
            return
        self._rest()
        if transport is not self.transport:
            self.transport = transport
            self.slow = self.on_one_host and transport is Transport.TCP
            if self.slow:
                self._owner.events.slow_link(self)

    def _rest(self) -> None:
        """Look again, but not soon: a look costs time."""
        self._looks_left, self._look_at = MAX_LOOKS, time.monotonic() + LOOK_AGAIN

    @property
    def on_one_host(self) -> bool:
        """Whether all that is read from is on this host."""
        here = self._owner.host
        return bool(here) and all(s.facts.host == here for s in self.sources)

    def hold(self) -> None:
        """One more user."""
        self._users += 1
        self.used = time.monotonic()

    @property
    def idle(self) -> bool:
        """Whether nobody uses it but the table of links, and transfers that have only their end to tell."""
        return self._users - self._leaving == 1

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """One user less after this; meanwhile it has only its end to tell, and nobody waits for its place."""
        self._leaving += 1
        try:
            yield
        finally:
            self._leaving -= 1
            self.let_go()

    def let_go(self) -> None:
        """One user less; the last one gives everything back."""
        self._users -= 1
        if self._users == 0:
            for watcher in self._watchers:
                watcher.cancel()
            for rank in self.ranks:
                rank.ends.close()
            self._owner.in_background(self._owner.give_back(self))

    async def cut(self, why: KvxferError) -> None:
        """Destroy the transfer engine, and with it every read that is posted over this link."""
        self.lose(why)
        await self.engine.close(0.0)

    async def _watch(self, rank: RemoteRank) -> None:
        """Tell a source now and then that its reader is alive; notice when it is not."""
        lost = asyncio.ensure_future(rank.client.wait_lost())
        try:
            while True:
                await asyncio.wait([lost], timeout=rank.beat_interval)
                if lost.done():
                    self.lose(rank.lost("its connection broke"))
                    return
                await self._owner.beat(rank)
                rank.heard()
        except KvxferError as error:
            self.lose(rank.lost(str(error)))
        except Exception as error:  # a link that nobody watches would never be lost
            log.exception(
                "watching a peer failed",
                peer=rank.facts.engine_id,
                peer_rank=str(rank.facts.rank),
                address=rank.client.address,
            )
            self.lose(rank.lost(repr(error)))
        finally:
            lost.cancel()
