"""D's side of a handshake: meet every rank of an engine, compile the plan, prepare both descriptor lists.

A :class:`Link` is the result, good for any number of reads until a source is lost or restarts.  Concurrent callers
share one attempt; attempts on different engines never wait for one another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, MemoryKind
from kvxfer.core.pairing import Member, PairingOptions, compile_plan
from kvxfer.core.plan import Plan, SourcePlan
from kvxfer.service.settings import ServiceSettings
from kvxfer.wire.peer import CloseRead, ExchangeAnswer, ExchangeQuery, OpenRead, PeerMemory, Reader
from kvxfer.wire.requests import Target
from kvxfer.wire.tickets import TicketRank
from kvxfer.xfer.api import Peer, Rows, Span

if TYPE_CHECKING:
    from kvxfer.service.registrations import Registration

log = structlog.get_logger()

#: Versions of the peer protocol that this code speaks.
PROTOCOL_VERSIONS: Final = (1, 1)
#: Longest wait for a peer's answer to something that only saves it time (goodbye, heartbeat), seconds.
COURTESY_TIMEOUT: Final = 2.0
#: Ranks of one engine that are met at the same time.
EXCHANGES_AT_ONCE: Final = 64
#: A peer's idle timeout is taken as at least and at most so many seconds.
IDLE_BOUNDS: Final = (3.0, 600.0)
#: A peer's attention is taken as at most so many seconds.
MAX_ATTENTION: Final = 60.0


class PeerClient(Protocol):
    """One rank's KvPeer service.  Every call raises PEER_UNREACHABLE, or what the peer answered."""

    @property
    def address(self) -> str:
        """Where it listens."""

    async def exchange(self, query: ExchangeQuery, timeout: float) -> ExchangeAnswer:
        """Introduce the reader, or say that it is alive; the answer is checked."""

    async def goodbye(self, query: ExchangeQuery, timeout: float) -> None:
        """The reader leaves."""

    async def open_read(self, record: OpenRead, timeout: float) -> float:
        """A read is under way; seconds granted."""

    async def close_read(self, record: CloseRead, timeout: float) -> None:
        """A read has ended."""

    async def wait_lost(self) -> None:
        """Returns once an established connection breaks."""

    async def close(self) -> None:
        """Drop the connection."""


#: Makes a client of the KvPeer service at an address; connects lazily.
PeerConnector = Callable[[str], PeerClient]


@dataclass(eq=False)
class LinkSource:
    """One P rank that is read from, with its prepared descriptor lists.

    :param attentive_until: it polls until then at least, monotonic seconds: later reads are announced first.
    """

    client: PeerClient
    facts: ExchangeAnswer
    plan: SourcePlan
    peer: Peer
    local: Rows
    remote: Rows
    attentive_until: float

    @property
    def attentive(self) -> bool:
        """Whether a read may be posted unannounced."""
        return time.monotonic() < self.attentive_until

    def heard(self, asked: float) -> None:
        """It has answered something that renews its attention, and that was sent at ``asked``; half of it is ours."""
        self.attentive_until = max(self.attentive_until, asked + min(self.facts.attention, MAX_ATTENTION) / 2)


@dataclass
class _Met:
    """A NIXL peer, shared by the links that use it."""

    peer: Peer
    users: int = 1
    broken: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Link:
    """A reader's prepared way to one engine.

    Held by the table of links and by every transfer that uses it; what it prepared is given back when the last one
    lets go, so never under a posted read.
    """

    def __init__(
        self,
        owner: Links,
        target: Target,
        options: PairingOptions,
        plan: Plan,
        sources: tuple[LinkSource, ...],
        incarnations: Mapping[int, str],
    ) -> None:
        self._owner = owner
        self.target: Final = target
        self.options: Final = options
        self.plan: Final = plan
        self.sources: Final = sources
        self.incarnations: Final = incarnations
        self.lost: Final[asyncio.Future[KvxferError]] = asyncio.get_running_loop().create_future()
        self._users = 1
        self._watchers = [asyncio.ensure_future(self._watch(s)) for s in sources]

    @property
    def alive(self) -> bool:
        """Whether reads may still be tried."""
        return not self.lost.done()

    def serves(self, target: Target, options: PairingOptions | None) -> bool:
        """Whether this link is what a handshake with ``target`` would give."""
        return (
            self.alive
            and (options is None or options == self.options)
            and {(r.rank, r.address) for r in target.ranks} == {(r.rank, r.address) for r in self.target.ranks}
            and all(r.incarnation in ("", self.incarnations[r.rank.number]) for r in target.ranks)
        )

    def lose(self, error: KvxferError) -> None:
        """A source is gone: nothing new is read over this link, and reads under way fail."""
        if not self.lost.done():
            log.warning("peer lost", engine=self.target.engine_id, reason=error.reason.value, detail=error.message)
            self.lost.set_result(error)
            self._owner.drop(self)

    def hold(self) -> None:
        """One more user."""
        self._users += 1

    def let_go(self) -> None:
        """One user less; the last one gives everything back."""
        self._users -= 1
        if self._users == 0:
            for watcher in self._watchers:
                watcher.cancel()
            self._owner.in_background(self._owner.give_back(self.sources, broken=not self.alive))

    async def _watch(self, source: LinkSource) -> None:
        """Tell the source now and then that its reader is alive; notice when it is not."""
        lost = asyncio.ensure_future(source.client.wait_lost())
        try:
            while True:
                await asyncio.wait([lost], timeout=_beat_interval(source))
                if lost.done():
                    self.lose(_lost(source, "its connection broke"))
                    return
                await self._owner.beat(source)
        except KvxferError as error:
            self.lose(_lost(source, str(error)))
        except Exception as error:  # a link that nobody watches would never be lost
            log.exception("watching a peer failed", peer=source.client.address)
            self.lose(_lost(source, repr(error)))
        finally:
            lost.cancel()


def _beat_interval(source: LinkSource) -> float:
    """Seconds between two signs of life: three in the time after which the peer forgets its reader."""
    low, high = IDLE_BOUNDS
    return min(max(source.facts.idle_timeout, low), high) / 3


def _lost(source: LinkSource, why: str) -> KvxferError:
    facts = source.facts
    return KvxferError(
        Reason.PEER_LOST,
        f"rank {facts.rank} of engine {facts.engine_id} at {source.client.address} is lost: {why}",
        engine_id=facts.engine_id,
        rank=facts.rank,
        address=source.client.address,
        incarnation=facts.incarnation,
    )


class Links:
    """The links of one registration, by remote engine."""

    def __init__(self, registration: Registration, connect: PeerConnector, settings: ServiceSettings) -> None:
        self._registration = registration
        self._connect = connect
        self._settings = settings
        self._links: dict[str, Link] = {}
        self._attempts: dict[str, tuple[object, asyncio.Task[Link]]] = {}
        self._met: dict[str, _Met] = {}
        self._meeting: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Any:
        return iter(tuple(self._links.values()))

    async def get(self, target: Target, options: PairingOptions | None, timeout: float) -> Link:
        """The link to an engine, made now if need be.

        :param options: ``None`` takes whatever was agreed before.
        :param timeout: seconds; the attempt itself goes on for others who wait for it.
        :raises KvxferError: PEER_UNREACHABLE, INCOMPATIBLE_PEER, LAYOUT_MISMATCH, STALE_INCARNATION,
            PEER_METADATA_INVALID, DEADLINE_EXCEEDED.
        """
        link = self._links.get(target.engine_id)
        if link is not None and link.serves(target, options):
            return link
        try:
            return await asyncio.wait_for(self._get(target, options, timeout), timeout)
        except asyncio.TimeoutError:
            raise KvxferError(
                Reason.DEADLINE_EXCEEDED,
                f"the handshake with engine {target.engine_id} took longer than {timeout:g} s",
                engine_id=target.engine_id,
                timeout_s=timeout,
            ) from None

    async def _get(self, target: Target, options: PairingOptions | None, timeout: float) -> Link:
        while True:
            link = self._links.get(target.engine_id)
            if link is not None and link.serves(target, options):
                return link
            key = (target, options)
            running = self._attempts.get(target.engine_id)
            if running is not None and running[0] != key:
                await asyncio.wait([running[1]])
                continue
            if running is None:
                agreed = options or (link.options if link is not None else PairingOptions())
                task = asyncio.ensure_future(
                    self._bounded_attempt(target, agreed, max(timeout, self._settings.handshake_timeout))
                )
                running = self._attempts[target.engine_id] = (key, task)
                task.add_done_callback(lambda t: self._ended(target.engine_id, t))
            # Not awaited itself: that would cancel it with this caller, and this caller with it.
            await asyncio.wait([running[1]])
            if running[1].cancelled():
                raise KvxferError(Reason.SHUTTING_DOWN, "the cache was unregistered during the handshake")
            return running[1].result()

    def _ended(self, engine_id: str, task: asyncio.Task[Link]) -> None:
        del self._attempts[engine_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("handshake failed", engine=engine_id, error=str(error))

    async def _bounded_attempt(self, target: Target, options: PairingOptions, timeout: float) -> Link:
        """An attempt that ends: one that is stuck would be shared by every later caller."""
        try:
            return await asyncio.wait_for(self._attempt(target, options, timeout), 2 * timeout)
        except asyncio.TimeoutError:
            raise KvxferError(
                Reason.PEER_UNREACHABLE,
                f"the connection to engine {target.engine_id} was not made within {2 * timeout:g} s",
                engine_id=target.engine_id,
            ) from None

    async def _attempt(self, target: Target, options: PairingOptions, timeout: float) -> Link:
        """One handshake: exchange with all ranks at once, compile, prepare."""
        clients: list[PeerClient] = []
        used: set[int] = set()
        try:
            clients.extend(self._connect(r.address) for r in target.ranks)
            asked = time.monotonic()
            answers = await self._exchange_all(target, clients, timeout)
            mine = Member(self._registration.identity.rank, self._registration.layout)
            members = [Member(facts.rank, memory.layout) for facts, memory in answers]
            plan = await asyncio.to_thread(compile_plan, mine, members, options)
            by_rank = {facts.rank.number: i for i, (facts, _) in enumerate(answers)}
            sources: list[LinkSource] = []
            try:
                for source in plan.sources:
                    i = by_rank[source.rank.number]
                    sources.append(await self._prepare(clients[i], *answers[i], source))
                    sources[-1].heard(asked)
                    used.add(i)
            except BaseException:
                used.clear()
                await self.give_back(sources, broken=False)
                raise
        finally:
            await asyncio.gather(*(c.close() for i, c in enumerate(clients) if i not in used))
        incarnations = {facts.rank.number: facts.incarnation for facts, _ in answers}
        link = Link(self, target, options, plan, tuple(sources), incarnations)
        former = self._links.get(target.engine_id)
        self._links[target.engine_id] = link
        if former is not None:
            former.let_go()
        log.info("handshake done", engine=target.engine_id, sources=[str(s.facts.rank) for s in sources])
        return link

    async def _exchange_all(
        self, target: Target, clients: Sequence[PeerClient], timeout: float
    ) -> list[tuple[ExchangeAnswer, PeerMemory]]:
        room = asyncio.Semaphore(EXCHANGES_AT_ONCE)  # a connection is made by its first call

        async def one(rank: TicketRank, client: PeerClient) -> tuple[ExchangeAnswer, PeerMemory]:
            async with room:
                return await self._exchange(target, rank, client, timeout)

        answers = await asyncio.gather(
            *(one(r, c) for r, c in zip(target.ranks, clients, strict=True)), return_exceptions=True
        )
        found = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        return found

    async def _exchange(
        self, target: Target, rank: TicketRank, client: PeerClient, timeout: float
    ) -> tuple[ExchangeAnswer, PeerMemory]:
        """Meet one rank, and see that it is who was asked for: another engine may listen at an address by now."""
        answer = await client.exchange(self._query(target, rank, known=""), timeout)
        if (answer.engine_id, answer.rank) != (target.engine_id, rank.rank) or answer.memory is None:
            raise KvxferError(
                Reason.PEER_METADATA_INVALID,
                f"{client.address} answers as rank {answer.rank} of engine {answer.engine_id}; rank {rank.rank} of "
                f"engine {target.engine_id} was asked for",
                address=client.address,
            )
        mine, (low, high) = self._registration.identity.compatibility_key, PROTOCOL_VERSIONS
        # The peer has compared them, too; it may be of a kind that does not.
        if answer.compatibility_key != mine or not low <= answer.protocol_version <= high:
            raise KvxferError(
                Reason.INCOMPATIBLE_PEER,
                f"{client.address} has compatibility key {answer.compatibility_key!r} and speaks version "
                f"{answer.protocol_version}; this side has {mine!r} and speaks {low} to {high}",
                address=client.address,
                local=f"{mine} {low}-{high}",
                remote=f"{answer.compatibility_key} {answer.protocol_version}",
            )
        if rank.incarnation not in ("", answer.incarnation):
            raise KvxferError(
                Reason.STALE_INCARNATION,
                f"rank {rank.rank} of engine {target.engine_id} is {answer.incarnation} now, not {rank.incarnation}",
                expected=rank.incarnation,
                found=answer.incarnation,
            )
        return answer, answer.memory

    def _query(self, target: Target, rank: TicketRank, *, known: str) -> ExchangeQuery:
        return ExchangeQuery(
            protocol_versions=PROTOCOL_VERSIONS,
            engine_id=target.engine_id,
            rank=rank.rank,
            reader=self.reader,
            compatibility_key=self._registration.identity.compatibility_key,
            expected_incarnation=rank.incarnation,
            known_incarnation=known,
        )

    @property
    def reader(self) -> Reader:
        """Who this side is to those it reads from."""
        identity = self._registration.identity
        return Reader(identity.engine_id, identity.rank, self._registration.incarnation)

    async def _prepare(
        self, client: PeerClient, facts: ExchangeAnswer, memory: PeerMemory, plan: SourcePlan
    ) -> LinkSource:
        engine, mine = self._registration.engine, self._registration.spans
        theirs = tuple(Span(s.address, s.size, s.memory, s.device) for s in memory.spans)
        met = await self._meet(memory, theirs)
        try:
            here = plan.local.bind([s.address for s in mine], [s.device for s in mine])
            there = plan.remote.bind([s.address for s in theirs], [s.device for s in theirs])
            local = await engine.prepare_local(here, _kind(self._registration.layout, plan.local.region), met.peer)
            try:
                remote = await engine.prepare_remote(there, _kind(memory.layout, plan.remote.region), met.peer)
            except BaseException:
                await engine.release_rows(local)
                raise
        except BaseException:
            await self._leave(met, broken=False)
            raise
        return LinkSource(client, facts, plan, met.peer, local, remote, attentive_until=0.0)

    async def _meet(self, memory: PeerMemory, spans: tuple[Span, ...]) -> _Met:
        """The NIXL peer behind an answer, one more time."""
        name = memory.agent_name
        while (met := self._met.get(name)) is not None and met.broken:
            await met.gone.wait()
        async with self._meeting.setdefault(name, asyncio.Lock()):
            met = self._met.get(name)
            if met is None:
                peer = await self._registration.engine.add_peer(memory.agent_metadata, name, spans=spans)
                met = self._met[name] = _Met(peer)
            else:
                met.users += 1
            return met

    async def _leave(self, met: _Met, *, broken: bool) -> None:
        met.users -= 1
        met.broken = met.broken or broken
        if met.users:
            return
        met.broken = True  # nobody may join while it is being removed
        try:
            await self._registration.engine.remove_peer(met.peer)
        except KvxferError as error:
            log.warning("peer not removed", peer=met.peer.name, error=str(error))
        finally:
            if self._met.get(met.peer.name) is met:
                del self._met[met.peer.name]
            self._meeting.pop(met.peer.name, None)
            met.gone.set()

    async def give_back(self, sources: Sequence[LinkSource], *, broken: bool) -> None:
        """Release descriptor lists, peers and connections; whatever fails, the rest is given back."""
        for source in sources:
            met = self._met[source.peer.name]
            try:
                for rows in (source.local, source.remote):
                    await self._registration.engine.release_rows(rows)
                if met.users == 1 and not broken:
                    target, rank = self._as_target(source)
                    query = replace(self._query(target, rank, known=""), goodbye=True)
                    await source.client.goodbye(query, COURTESY_TIMEOUT)
            except KvxferError as error:  # the engine is closing, or the peer is gone: neither needs us any more
                log.debug("not given back", peer=source.client.address, error=str(error))
            finally:
                await self._leave(met, broken=broken)
                await source.client.close()

    async def beat(self, source: LinkSource) -> None:
        """Tell a source that its reader is alive.

        :raises KvxferError: where it is not the same any more, or does not answer.
        """
        target, rank = self._as_target(source)
        query = self._query(target, rank, known=rank.incarnation)
        await source.client.exchange(query, _beat_interval(source))

    @staticmethod
    def _as_target(source: LinkSource) -> tuple[Target, TicketRank]:
        rank = TicketRank(source.facts.rank, source.facts.incarnation, source.client.address)
        return Target(source.facts.engine_id, (rank,)), rank

    def drop(self, link: Link) -> None:
        """Forget a link; its users keep it until they are done."""
        if self._links.get(link.target.engine_id) is link:
            del self._links[link.target.engine_id]
            link.let_go()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` to its end, whatever happens to the caller."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("giving back a link failed", exc_info=error)

    async def close(self) -> None:
        """Give up attempts and give back every link.  Transfers must have ended."""
        for _, task in list(self._attempts.values()):
            task.cancel()
        await asyncio.gather(*(t for _, t in self._attempts.values()), return_exceptions=True)
        for link in list(self._links.values()):
            self.drop(link)
        while self._tasks:
            await asyncio.wait(self._tasks)


def _kind(layout: CacheLayout, regions: Any) -> MemoryKind:
    """The one kind of memory that rows lie in.

    :raises KvxferError: UNSUPPORTED where host and device memory are mixed.
    """
    kinds = {layout.regions[int(r)].memory for r in set(regions.tolist())}
    if len(kinds) != 1:
        raise KvxferError(Reason.UNSUPPORTED, "a cache that lies partly in host and partly in device memory")
    return kinds.pop()
