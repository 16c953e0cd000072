"""Registered caches: memory mapped, registered with NIXL, and everything that lives as long as it does.

A registration has an *incarnation*, fresh every time, and a transfer engine (NIXL agent) of its own whose name carries
it: whatever outlives a registration somewhere (a ticket, a cached handshake, agent metadata) can be told from its
successor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import structlog

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.holds import Hold
from kvxfer.core.layout import CacheLayout
from kvxfer.memory.api import MappedRegion, MemoryPolicy, open_region, take_region
from kvxfer.memory.handles import Mappable, Owned
from kvxfer.memory.mapping import MemoryIdentity
from kvxfer.service.events import Events
from kvxfer.service.handed import check_apart, check_handles
from kvxfer.service.leases import Leases
from kvxfer.service.lifetimes import Lifetimes, unregistered
from kvxfer.service.link import PeerConnector
from kvxfer.service.links import Links
from kvxfer.service.metrics import Metrics
from kvxfer.service.readers import Readers
from kvxfer.service.settings import ServiceSettings
from kvxfer.service.transfers import Transfers
from kvxfer.service.transport import Probe
from kvxfer.wire.fields import at
from kvxfer.wire.handles import handle_path
from kvxfer.wire.peer import notice_from_bytes
from kvxfer.wire.requests import RegisterCache
from kvxfer.xfer.api import NotificationHandler, Span, TransferEngine
from kvxfer.xfer.segments import Segments

log = structlog.get_logger()

#: Builds a transfer engine: (agent name, what to call with each notification).  One that is to be read from is told
#: what to call; one that is given None only reads.
EngineFactory = Callable[[str, NotificationHandler | None], TransferEngine]


class Registration:
    """One engine's cache, while it is registered."""

    def __init__(
        self,
        record: RegisterCache,
        incarnation: str,
        regions: Sequence[MappedRegion],
        engine: TransferEngine,
        metadata: bytes,
        segments: Segments,
        readers: Readers,
        leases: Leases,
        events: Events,
        probe: Probe,
        make_engine: EngineFactory,
        connect: PeerConnector,
        settings: ServiceSettings,
    ) -> None:
        self.identity: Final = record
        self.layout: Final = record.layout
        self.incarnation: Final = incarnation
        self.engine: Final = engine
        self.metadata: Final = metadata
        self.segments: Final = segments
        self.spans: Final = spans_of(record.layout, regions)
        self.exported: Final[tuple[Mappable | None, ...]] = tuple(r.export() for r in regions)
        self.readers: Final = readers
        self.leases: Final = leases
        self.events: Final = events
        self.probe: Final = probe
        self.links: Final = Links(self, connect, settings)
        self.transfers: Final = Transfers(self, settings)
        self.hold: Final = Hold(settings.engine_grace)
        #: Fires after the grace in which an engine that was lost may come back.
        self.watchdog: asyncio.TimerHandle = asyncio.get_running_loop().call_later(0, lambda: None)
        #: Why it has ended, once it has.
        self.ended: Final[asyncio.Future[KvxferError]] = asyncio.get_running_loop().create_future()
        self._regions = tuple(regions)
        self._make_engine = make_engine
        self._made = itertools.count(1)
        self.closing = False

    def new_reader(self) -> TransferEngine:
        """A transfer engine to read with, not started yet: one for each remote engine.

        Destroying an agent is the only thing that stops a posted read, and it stops all of the agent's.
        """
        return self._make_engine(f"{self.engine.name}/{next(self._made)}", None)

    @property
    def identities(self) -> tuple[MemoryIdentity, ...]:
        """Which memory it is, region by region."""
        return tuple(r.identity for r in self._regions)

    @property
    def owned(self) -> bool:
        """Whether all of its memory is the sidecar's, which no engine takes along."""
        return None not in self.exported

    @property
    def takes_work(self) -> bool:
        """Whether its engine is there and may ask for things."""
        return not self.closing and not self.hold.over

    @property
    def size(self) -> int:
        """Bytes of all regions."""
        return sum(r.size for r in self.layout.regions)

    async def drain(self, timeout: float, granted: float = 0.0) -> bool:
        """Refuse new work, cancel transfers, and wait until nothing reads or writes the memory any more.

        :param granted: wait so long at least for reads that were granted to others.
        :returns: whether that was so within ``timeout`` seconds.
        """
        self.closing = True
        over = await asyncio.gather(self.leases.drain(max(timeout, granted)), self.transfers.drain(timeout))
        return all(over)

    async def close(self, why: KvxferError, *, keep: Callable[[MappedRegion], bool] = lambda _: False) -> None:
        """Undo the registration: destroy the agent, unmap.  Idempotent; :meth:`drain` comes first.

        The agent goes before the mappings: a NIXL target crashes when memory that is still readable is unmapped, and
        destroying the agent is what ends its readability.

        :param why: what those are told who hold it.
        :param keep: which sidecar-owned files are left where they are.
        """
        self.closing = True
        self.watchdog.cancel()
        await self.links.stop()
        await self.transfers.close()
        await self.links.close()
        self.readers.close()
        await self.engine.close()
        self.leases.close()  # the last: whoever watches them takes the end of the stream for the end of all reading
        await asyncio.to_thread(_close_all, self._regions, keep)
        if not self.ended.done():
            self.ended.set_result(why)
        log.info("cache unregistered", engine=self.identity.engine_id, incarnation=self.incarnation)


def spans_of(layout: CacheLayout, regions: Sequence[MappedRegion]) -> tuple[Span, ...]:
    """What NIXL registers: exactly the layout's regions, not what their mappings may have beyond them."""
    return tuple(
        Span(r.address, spec.size, spec.memory, spec.device) for spec, r in zip(layout.regions, regions, strict=True)
    )


def _close_all(regions: Sequence[MappedRegion], keep: Callable[[MappedRegion], bool] = lambda _: False) -> None:
    for region in regions:
        try:
            region.close(keep=keep(region))
        except KvxferError as error:  # the others are closed all the same
            log.error("a region was not unmapped", error=str(error))


class Registrations:
    """All registrations of a sidecar, by engine ID."""

    def __init__(
        self,
        settings: ServiceSettings,
        make_engine: EngineFactory,
        connector: PeerConnector,
        metrics: Metrics | None = None,
    ) -> None:
        self._settings = settings
        self._policy: MemoryPolicy = settings.memory
        self._make_engine = make_engine
        self._connector = connector
        self.metrics: Final = metrics or Metrics()
        self._probe = Probe()
        self._by_engine: dict[str, Registration] = {}
        self._lifetimes = Lifetimes(settings, self._by_engine, lambda: self.on_change())
        self._opening = 0
        self._closed = False
        #: Called whenever a registration comes, takes no more work, or goes.
        self.on_change: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._by_engine)

    @property
    def unready(self) -> str:
        """Why no work should be sent here: no cache is registered that takes any, or a transfer engine has failed.

        Empty where it should.
        """
        takes = [r for r in self if r.takes_work]
        if not takes:
            return "no cache is registered" if not self._by_engine else "the cache is being unregistered"
        return next((f"engine {r.identity.engine_id}: {r.engine.fault}" for r in takes if r.engine.fault), "")

    def __iter__(self) -> Iterator[Registration]:
        return iter(tuple(self._by_engine.values()))

    def known(self, engine_id: str) -> Registration | None:
        """The registration of an engine, in whatever state; or none."""
        return self._by_engine.get(engine_id)

    def get(self, engine_id: str, *, closing: bool = False, orphaned: bool = False) -> Registration:
        """The registration of an engine.

        :param closing: also while it is being undone.
        :param orphaned: also where its engine is gone, while what it has published is still held.
        :raises KvxferError: NOT_REGISTERED, SHUTTING_DOWN.
        """
        found = self._by_engine.get(engine_id)
        if self._closed and not closing:
            raise KvxferError(Reason.SHUTTING_DOWN, "the sidecar is shutting down")
        if found is None or not (closing or found.takes_work or (orphaned and not found.closing)):
            known = ", ".join(sorted(self._by_engine)) or "none"
            raise KvxferError(
                Reason.NOT_REGISTERED,
                f"no cache of engine {engine_id} is registered here (registered: {known})",
                field="engine_id",
                engine_id=engine_id,
            )
        return found

    async def register(self, record: RegisterCache) -> Registration:
        """Map and register a cache; the same content again gives the same registration.

        :raises KvxferError: REGISTRATION_BUSY where the engine has other content and ``record.replace`` is false;
            MEMORY_*, REGION_TOO_SMALL; LIMIT_EXCEEDED; SHUTTING_DOWN.  Nothing is left behind by a failure, and a
            registration that was to be replaced is still there.
        """
        check_handles(record.layout, record.memory)
        engine_id, content = record.engine_id, replace(record, replace=False, held=False)
        async with self._lifetimes.alone(engine_id):
            self._check_open()
            existing = self._by_engine.get(engine_id)
            if existing is not None:
                same = existing.identity == content and existing.takes_work
                if same and await asyncio.to_thread(self._is_still, existing) and existing.takes_work:
                    if record.held:
                        self._lifetimes.expect(existing)
                    return existing
                if not record.replace:
                    state = "another cache registered"
                    if existing.closing:
                        state = "a cache that is being unregistered"
                    elif existing.hold.over:
                        state = "a cache whose engine was lost"
                    elif same:
                        state = "a cache registered whose memory was made anew since, under the same names"
                    raise KvxferError(
                        Reason.REGISTRATION_BUSY,
                        f"engine {engine_id} has {state}; unregister it or set replace",
                        field="engine_id",
                        engine_id=engine_id,
                        incarnation=existing.incarnation,
                    )
            elif (taken := len(self._by_engine) + self._opening) >= self._settings.max_registrations:
                raise KvxferError(
                    Reason.LIMIT_EXCEEDED,
                    f"{taken} engines are registered; the limit is {self._settings.max_registrations} "
                    "(max_registrations)",
                    field="engine_id",
                    limit_name="max_registrations",
                    limit=self._settings.max_registrations,
                )
            self._opening += existing is None
            try:
                fresh = await self._open(content, replaced=existing)
            finally:
                self._opening -= existing is None
            if existing is not None:
                # Nothing is read into the new registration while the old one may still be written: its blocks are the
                # same memory.  Posted reads that have not drained in time end with their agents; reads that were
                # granted to others are waited for as long as they were granted, or their bytes would count.
                await self._lifetimes.drain(existing, self._settings.drain_timeout, self._settings.read_grant)
                heirs = fresh.identities
                await existing.close(
                    stale(engine_id, fresh.incarnation, existing.incarnation),
                    # A file that both name is the memory of the fresh one.
                    keep=lambda region: any(region.identity.meets(heir) for heir in heirs),
                )
            try:
                self._check_open()
            except KvxferError as why:  # what has closed has not seen this one
                await fresh.close(why, keep=lambda _: True)
                raise
            self._by_engine[engine_id] = fresh
            self.on_change()
            if record.held:
                self._lifetimes.expect(fresh)
            return fresh

    def _check_open(self) -> None:
        if self._closed:
            raise KvxferError(Reason.SHUTTING_DOWN, "the sidecar is shutting down")

    def _is_still(self, registration: Registration) -> bool:
        """Whether the handles of a registration still name the memory that it has mapped."""
        for handle, known in zip(registration.identity.memory, registration.identities, strict=True):
            if isinstance(handle, Owned):
                continue
            try:
                region = open_region(handle, self._policy)
            except KvxferError:
                return False
            region.close()
            if region.identity != known:
                return False
        return True

    async def _open(self, record: RegisterCache, *, replaced: Registration | None) -> Registration:
        regions: list[MappedRegion] = []
        found: set[MappedRegion] = set()  # these were there before, and stay if this fails
        engine: TransferEngine | None = None
        incarnation = secrets.token_hex(8)
        try:
            for i, handle in enumerate(record.memory):
                try:
                    regions.append(await asyncio.to_thread(take_region, handle, self._policy))
                except KvxferError as error:
                    path = at(f"memory[{i}]", handle_path(handle, error.field)).rstrip(".")
                    raise KvxferError(error.reason, error.message, field=path, **dict(error.metadata)) from error
                if not isinstance(handle, Owned):
                    found.add(regions[-1])
            check_apart(regions, [r for r in self if r is not replaced])
            events = Events(self.metrics, record.engine_id, incarnation)
            readers, leases = Readers(events.reader_lost), Leases(record.layout, self._settings, events)

            def on_notification(agent: str, payload: bytes) -> None:
                try:
                    notice = notice_from_bytes(payload)
                except KvxferError as error:  # anybody may send one
                    log.debug("a notification that is none", agent=agent, error=str(error))
                    return
                ours = (notice.engine_id, notice.incarnation) == (record.engine_id, incarnation)
                if ours and leases.finished(notice):
                    # CloseReads comes a little later, and till then polling without pause would be for nothing.
                    readers.close_read(notice.reader, notice.transfer_id)

            name = f"{record.engine_id[:128]}/{record.rank}/{incarnation}"
            engine = self._make_engine(name, on_notification)
            await engine.start()
            await engine.register(spans_of(record.layout, regions))
            metadata = await engine.metadata()
            segments = Segments.of((await engine.info()).environment)
        except BaseException:
            if engine is not None:
                await engine.close()
            await asyncio.to_thread(_close_all, regions, found.__contains__)
            raise
        readers.engine = engine
        events.registered()
        log.info(
            "cache registered",
            engine=record.engine_id,
            rank=str(record.rank),
            incarnation=incarnation,
            regions=len(regions),
            bytes=sum(r.size for r in record.layout.regions),
        )
        return Registration(
            record,
            incarnation,
            regions,
            engine,
            metadata,
            segments,
            readers,
            leases,
            events,
            self._probe,
            self._make_engine,
            self._connector,
            self._settings,
        )

    async def unregister(self, engine_id: str, incarnation: str = "", drain: float | None = None) -> None:
        """Undo a registration, after draining.

        :param incarnation: only this one; another is left alone.
        :param drain: seconds to wait for transfers and readers; ``None``: the setting.
        :raises KvxferError: NOT_REGISTERED, STALE_INCARNATION; REGISTRATION_BUSY where it has not drained in time: it
            then takes no new work, and the call may be made again.
        """
        async with self._lifetimes.alone(engine_id):
            registration = self.get(engine_id, closing=True)
            if incarnation and registration.incarnation != incarnation:
                raise stale(engine_id, registration.incarnation, incarnation)
            seconds = self._settings.drain_timeout if drain is None else drain
            if not await self._lifetimes.drain(registration, seconds):
                raise KvxferError(
                    Reason.REGISTRATION_BUSY,
                    f"engine {engine_id} has not drained within {seconds:g} s; it takes no new work",
                    field="drain_timeout",
                    engine_id=engine_id,
                    reads_open=registration.leases.open_reads,
                )
            await self._lifetimes.undo(registration, unregistered(engine_id))

    # -- engines that die ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def hold(self, engine_id: str, incarnation: str, *, keep_leases: bool) -> Iterator[Registration]:
        """Inside, an engine holds its registration.

        :param keep_leases: when the engine is gone, what it has published stays readable until its leases end.
        :raises KvxferError: NOT_REGISTERED, STALE_INCARNATION, SHUTTING_DOWN, FIELD_INVALID (``keep_leases`` where not
            all memory is the sidecar's).
        """
        registration = self.get(engine_id)
        if registration.incarnation != incarnation:
            raise stale(engine_id, registration.incarnation, incarnation)
        if keep_leases and not registration.owned:
            raise KvxferError(
                Reason.FIELD_INVALID,
                "keep_leases needs a cache whose memory is all owned by the sidecar",
                field="keep_leases",
                engine_id=engine_id,
            )
        registration.hold.open()
        try:
            yield registration
        finally:
            registration.hold.end(time.monotonic(), keep_leases=keep_leases)
            self._lifetimes.watch(registration)

    async def ending(self, engine_id: str, incarnation: str) -> None:
        """Where this very registration is ending, wait until it has: only then is its memory nobody's any more.

        :raises KvxferError: why it has ended.
        """
        found = self._by_engine.get(engine_id)
        if found is not None and found.incarnation == incarnation and not found.takes_work:
            raise await asyncio.shield(found.ended)

    async def _close(self, engine_id: str) -> None:
        async with self._lifetimes.alone(engine_id):
            registration = self._by_engine.get(engine_id)
            if registration is None:
                return
            await registration.drain(self._settings.drain_timeout, self._settings.read_grant)
            # Sidecar-owned files stay: the cache is the engine's, which may register them again by path.  Not those of
            # an engine that is gone.
            keep = not registration.hold.over
            why = KvxferError(Reason.SHUTTING_DOWN, "the sidecar is shutting down")
            await registration.close(why, keep=lambda _: keep)
            del self._by_engine[engine_id]

    async def close(self) -> None:
        """Unregister everything and take nothing new."""
        self._closed = True
        ends = await asyncio.gather(*(self._close(e) for e in list(self._by_engine)), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                log.error("a registration did not end well", exc_info=end)
        await self._lifetimes.buried()
        self.on_change()


def stale(engine_id: str, registered: str, given: str) -> KvxferError:
    """That another incarnation is registered than the one that is meant."""
    return KvxferError(
        Reason.STALE_INCARNATION,
        f"engine {engine_id} is registered as {registered}, not as {given}",
        field="incarnation",
        registered=registered,
        given=given,
    )
