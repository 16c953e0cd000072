"""D's side of a handshake: meet every rank of an engine, compile the plan, prepare both descriptor lists.

A :class:`~kvxfer.service.link.Link` is the result, good for any number of reads until a source is lost or restarts.
Concurrent callers share one attempt; attempts on different engines never wait for one another.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import structlog

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, MemoryKind
from kvxfer.core.pairing import Member, PairingOptions, compile_plan
from kvxfer.core.plan import SourcePlan
from kvxfer.files import AGENT, FILES
from kvxfer.service.events import Events
from kvxfer.service.link import Link, LinkSource, PeerClient, PeerConnector, RemoteRank
from kvxfer.service.settings import ServiceSettings
from kvxfer.service.transport import host_mark
from kvxfer.wire.peer import ExchangeAnswer, ExchangeQuery, PeerMemory, Reader
from kvxfer.wire.requests import Target
from kvxfer.wire.tickets import TicketRank
from kvxfer.xfer.api import Span, TransferEngine

if TYPE_CHECKING:
    from kvxfer.service.registrations import Registration

log = structlog.get_logger()

#: Versions of the peer protocol that this code speaks.
PROTOCOL_VERSIONS: Final = (1, 1)
#: Longest wait for a peer's answer to something that only saves it time (goodbye, heartbeat), seconds.
COURTESY_TIMEOUT: Final = 2.0
#: Ranks of one engine that are met at the same time.
EXCHANGES_AT_ONCE: Final = 64


class Links:
    """The links of one registration, by remote engine."""

    def __init__(self, registration: Registration, connect: PeerConnector, settings: ServiceSettings) -> None:
        self._registration = registration
        self._connect = connect
        self._settings = settings
        self._stopped = False
        #: Which host this is; see :func:`host_mark`.
        self.host: Final = host_mark()
        #: How often there was no room for another engine.
        self.limited = 0
        self._links: dict[str, Link] = {}
        self._open: set[Link] = set()
        self._attempts: dict[str, tuple[object, asyncio.Task[Link]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[Link]:
        return iter(tuple(self._links.values()))

    def __len__(self) -> int:
        return len(self._links)

    @property
    def events(self) -> Events:
        """Whom to tell of what happens."""
        return self._registration.events

    async def get(self, target: Target, options: PairingOptions | None, timeout: float) -> Link:
        """The link to an engine, made now if need be.

        :param options: ``None`` takes whatever was agreed before.
        :param timeout: seconds; the attempt itself goes on for others who wait for it.
        :raises KvxferError: PEER_UNREACHABLE, INCOMPATIBLE_PEER, LAYOUT_MISMATCH, STALE_INCARNATION,
            PEER_METADATA_INVALID, LIMIT_EXCEEDED, DEADLINE_EXCEEDED.
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
            if self._stopped:
                raise KvxferError(Reason.SHUTTING_DOWN, "the cache is being unregistered")
            if running is None:
                self._make_room(target.engine_id)
                agreed = options or (link.options if link is not None else PairingOptions())
                task = asyncio.ensure_future(
                    self._bounded_attempt(target, agreed, max(timeout, self._settings.handshake_timeout))
                )
                running = self._attempts[target.engine_id] = (key, task)
                task.add_done_callback(functools.partial(self._ended, target.engine_id, time.perf_counter()))
            # Not awaited itself: that would cancel it with this caller, and this caller with it.
            await asyncio.wait([running[1]])
            if running[1].cancelled():
                raise KvxferError(Reason.SHUTTING_DOWN, "the cache was unregistered during the handshake")
            return running[1].result()

    def _make_room(self, engine_id: str) -> None:
        """Let go of the idle link that was used least recently, where there are too many.

        :raises KvxferError: LIMIT_EXCEEDED where all are in use.
        """
        others = {*self._links, *self._attempts} - {engine_id}
        if len(others) < self._settings.max_peers:
            return
        idle = [link for name, link in self._links.items() if link.idle and name not in self._attempts]
        if not idle:
            self.limited += 1
            raise KvxferError(
                Reason.LIMIT_EXCEEDED,
                f"this engine reads from {len(others)} others; the limit is {self._settings.max_peers} (max_peers)",
                limit_name="max_peers",
                limit=self._settings.max_peers,
            )
        self.drop(min(idle, key=lambda link: link.used))

    def _ended(self, engine_id: str, began: float, task: asyncio.Task[Link]) -> None:
        del self._attempts[engine_id]
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, KvxferError):
            error = KvxferError(Reason.INTERNAL, f"the handshake failed in an unforeseen way: {error!r}")
        seconds = time.perf_counter() - began
        self.events.handshake_ended(engine_id, seconds, error, None if error else task.result())

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
        FILES.require(2 * AGENT)  # before anybody is asked to attend to a connection that cannot be made
        async with contextlib.AsyncExitStack() as undo:
            clients = []
            for rank in target.ranks:
                clients.append(self._connect(rank.address))
                undo.push_async_callback(clients[-1].close)
            answers = await self._exchange_all(target, clients, timeout)
            mine = Member(self._registration.identity.rank, self._registration.layout)
            members = [Member(facts.rank, memory.layout) for facts, memory in answers]
            plan = await asyncio.to_thread(compile_plan, mine, members, options)
            ranks = []
            for client, (facts, memory) in zip(clients, answers, strict=True):
                groups = tuple(group.name for group in memory.layout.groups)
                ranks.append(RemoteRank(client, replace(facts, memory=None), groups))
            by_number = {r.facts.rank.number: (r, memory) for r, (_, memory) in zip(ranks, answers, strict=True)}
            engine = self._registration.new_reader()
            undo.push_async_callback(engine.close, 0.0)
            await engine.start()
            await engine.register(self._registration.spans)
            sources = [await self._prepare(engine, *by_number[s.rank.number], s) for s in plan.sources]
            undo.pop_all()  # nothing can fail from here on: all of it is the link's
        link = Link(self, engine, target, options, plan, tuple(ranks), tuple(sources))
        former = self._links.get(target.engine_id)
        self._links[target.engine_id] = link
        self._open.add(link)
        if former is not None:
            former.let_go()
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
        if answer.tcp_segment > (room := self._registration.segments.received):
            raise KvxferError(
                Reason.INCOMPATIBLE_PEER,
                f"{client.address} sends {answer.tcp_segment} bytes at once over TCP (UCX_TCP_TX_SEG_SIZE there), and "
                f"there is room for {room} (UCX_TCP_RX_SEG_SIZE here): UCX could write past the end of its buffer",
                address=client.address,
                local=room,
                remote=answer.tcp_segment,
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
        self, engine: TransferEngine, rank: RemoteRank, memory: PeerMemory, plan: SourcePlan
    ) -> LinkSource:
        """Meet a source's agent and hand over both lists; what fails is undone by closing the engine."""
        mine = self._registration.spans
        theirs = tuple(Span(s.address, s.size, s.memory, s.device) for s in memory.spans)
        peer = await engine.add_peer(memory.agent_metadata, memory.agent_name, spans=theirs)
        here = plan.local.bind([s.address for s in mine], [s.device for s in mine])
        there = plan.remote.bind([s.address for s in theirs], [s.device for s in theirs])
        local = await engine.prepare_local(here, _kind(self._registration.layout, plan.local.region), peer)
        remote = await engine.prepare_remote(there, _kind(memory.layout, plan.remote.region), peer)
        return LinkSource(rank, plan, peer, local, remote)

    async def give_back(self, link: Link) -> None:
        """Destroy a link's transfer engine and drop its connections, with a goodbye where nobody else needs them."""
        try:
            if link.alive and link.target.engine_id not in self._links and link.target.engine_id not in self._attempts:
                await asyncio.gather(*(self._goodbye(rank) for rank in link.ranks))
            await link.engine.close(0.0)
        finally:
            self._open.discard(link)
            await asyncio.gather(*(rank.client.close() for rank in link.ranks))

    async def _goodbye(self, rank: RemoteRank) -> None:
        target, asked = self._as_target(rank)
        try:
            await rank.client.goodbye(replace(self._query(target, asked, known=""), goodbye=True), COURTESY_TIMEOUT)
        except KvxferError as error:  # it is gone, and needs us no more
            log.debug("goodbye not heard", peer=rank.facts.engine_id, address=rank.client.address, error=str(error))

    async def beat(self, rank: RemoteRank) -> None:
        """Tell a source that its reader is alive.

        :raises KvxferError: where it is not the same any more, or does not answer.
        """
        target, asked = self._as_target(rank)
        await rank.client.exchange(self._query(target, asked, known=asked.incarnation), rank.beat_interval)

    @staticmethod
    def _as_target(rank: RemoteRank) -> tuple[Target, TicketRank]:
        asked = TicketRank(rank.facts.rank, rank.facts.incarnation, rank.client.address)
        return Target(rank.facts.engine_id, (asked,)), asked

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

    async def stop(self) -> None:
        """Take nothing new, and stop every read that is posted."""
        self._stopped = True
        attempts = [task for _, task in self._attempts.values()]
        for task in attempts:
            task.cancel()
        # Cancelled once, and waited for: what an attempt has made it takes back before it ends.
        await asyncio.gather(*attempts, return_exceptions=True)
        await asyncio.gather(*(link.engine.close(0.0) for link in tuple(self._open)))

    async def close(self) -> None:
        """Give back every link.  :meth:`stop` comes first, and transfers must have ended."""
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
