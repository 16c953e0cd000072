"""The transfer loop: prepare, post, wait, settle; one logical read with one outcome.

A transfer belongs to the sidecar, not to the call that started it: a caller that goes away changes nothing.  Its states
and what may follow what are the table of :mod:`kvxfer.core.transfers`; this module does the work between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
import traceback
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import structlog

from kvxfer.core import transfers as life
from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.transfers import Event, State
from kvxfer.service import closing
from kvxfer.service.link import Link
from kvxfer.service.making import make_reads
from kvxfer.service.metrics import LINK_BREAKERS
from kvxfer.service.reading import leave, read_source
from kvxfer.service.room import Room
from kvxfer.service.settings import ServiceSettings
from kvxfer.service.telling import Telling
from kvxfer.service.transfer import Live, Part, Totals, Transfer
from kvxfer.service.watch import Watchers
from kvxfer.wire.requests import TransferSpec
from kvxfer.xfer.api import Read as XferRead
from kvxfer.xfer.api import ReadState

if TYPE_CHECKING:
    from kvxfer.service.registrations import Registration

log = structlog.get_logger()

#: What was announced is posted at once.  Where it is not after so many seconds, whoever wanted it is gone.
ANNOUNCED_TTL: Final = 5.0
#: What a source says that is about to stop; it serves on what it has granted.
STOPPING: Final = Reason.SHUTTING_DOWN.value
#: So many IDs that were cancelled stay known as such, of each registration; 16,384 take 2 to 6 MiB.
KEPT_CANCELLED: Final = 16_384


@dataclass
class _Preparing:
    """A transfer that is being made.

    :param cancelled: set once it was cancelled; what is made is then not read.
    """

    spec: TransferSpec
    made: asyncio.Future[Transfer]
    cancelled: KvxferError | None = None


class Transfers:
    """The transfers of one registration."""

    def __init__(self, registration: Registration, settings: ServiceSettings) -> None:
        self._registration = registration
        self._settings = settings
        self._known: dict[str, Transfer] = {}
        self._preparing: dict[str, _Preparing] = {}
        #: IDs that were cancelled, the last ones last: no call with one of them reads, whatever else is forgotten.
        self._refused: dict[str, None] = {}
        self._claims: dict[int, str] = {}
        self._ended: deque[Transfer] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._closing = False
        self._telling: Final = Telling(registration)
        self.room: Final = Room(
            "transfers",
            ("max_transfers", "max_transfers_per_peer"),
            settings.max_transfers,
            settings.max_transfers_per_peer,
        )
        self.bytes_room: Final = Room(
            "bytes",
            ("max_bytes_in_flight", "max_bytes_in_flight_per_peer"),
            settings.max_bytes_in_flight,
            settings.max_bytes_in_flight_per_peer,
        )
        self.watchers: Final[Watchers[Transfer]] = Watchers()
        self.totals: Final = Totals()

    @property
    def bytes_in_flight(self) -> int:
        """Bytes posted and not quiesced."""
        return self.bytes_room.taken

    @property
    def limited(self) -> int:
        """How often there was no room for a transfer."""
        return self.room.refused + self.bytes_room.refused

    # -- looking ---------------------------------------------------------------------------------------------------

    def get(self, transfer_id: str) -> Transfer:
        """A transfer that is remembered.

        :raises KvxferError: TRANSFER_UNKNOWN.
        """
        found = self._known.get(transfer_id)
        if found is None:
            raise KvxferError(
                Reason.TRANSFER_UNKNOWN,
                f"there is no transfer {transfer_id}; ended ones are remembered for a while only",
                field="transfer_id",
                transfer_id=transfer_id,
            )
        return found

    def __iter__(self) -> Iterator[Transfer]:
        """Newest first."""
        return reversed(tuple(self._known.values()))

    def current(self) -> list[Transfer]:
        """Everything that is remembered, oldest first."""
        return list(self._known.values())

    # -- preparing -------------------------------------------------------------------------------------------------

    async def prepare(self, spec: TransferSpec, *, read: float | None = None) -> Transfer:
        """Validate, resolve and make the request; nothing moves.

        :param spec: with a transfer ID; the same ID with the same content is the same transfer.
        :param read: it is posted at once (:meth:`post`, or else :meth:`take_back`), to be read within so many seconds.
            A handshake may take no longer either; the sources are told, and answer while the rest is worked out; and
            making the NIXL request is left to :meth:`post`.

        :raises KvxferError: TRANSFER_ID_REUSED, TRANSFER_CANCELLED, INCOMPATIBLE_PEER, LIMIT_EXCEEDED, and what the
            handshake and :func:`kvxfer.core.resolve.resolve` raise.
        """
        while True:
            known = self._known.get(spec.transfer_id)
            if known is not None and not known.taken_back:
                _check_same(spec, known.digest)
                return known
            if spec.transfer_id in self._refused:
                raise _cancelled(spec.transfer_id)
            other = self._preparing.get(spec.transfer_id)
            if other is None:
                break
            _check_same(spec, other.spec.digest)
            try:
                return await asyncio.shield(other.made)
            except KvxferError as error:
                if error.reason is not Reason.DEADLINE_EXCEEDED:  # which was that of whoever began
                    raise
                if other.cancelled is not None:
                    raise other.cancelled from None
        preparing = _Preparing(spec, asyncio.get_running_loop().create_future())
        self._preparing[spec.transfer_id] = preparing
        try:
            transfer = await self._prepare(spec, read)
        except BaseException as error:
            preparing.made.set_exception(
                error
                if isinstance(error, KvxferError)
                else KvxferError(Reason.TRANSFER_CANCELLED, "the call that prepared this transfer was cancelled")
            )
            preparing.made.exception()  # nobody else may be waiting for it
            raise
        finally:
            del self._preparing[spec.transfer_id]
        if preparing.cancelled is not None:
            self._give_up(transfer, Event.CANCEL, preparing.cancelled)
        preparing.made.set_result(transfer)
        return transfer

    async def _prepare(self, spec: TransferSpec, read: float | None) -> Transfer:
        if self._closing:
            raise KvxferError(Reason.SHUTTING_DOWN, "the cache is being unregistered")
        mine = self._registration.identity.compatibility_key
        theirs = spec.ticket.compatibility_key
        if theirs != mine:
            raise KvxferError(
                Reason.INCOMPATIBLE_PEER,
                f"the ticket's compatibility key is {theirs!r}, this engine's {mine!r}",
                field="ticket.compatibility_key",
                local=mine,
                remote=theirs,
            )
        peer = spec.ticket.engine_id
        self.room.take(peer, 1)
        try:
            return await self._prepare_within(spec, read)
        except BaseException:
            self.room.give(peer, 1)
            raise

    async def _prepare_within(self, spec: TransferSpec, read: float | None) -> Transfer:
        try:
            transfer, link = await self._prepare_once(spec, read)
        except KvxferError as error:
            # The link was lost while it was being used: the next one may be as good.
            if error.reason not in (Reason.NO_HANDSHAKE, Reason.SHUTTING_DOWN) or self._closing:
                raise
            transfer, link = await self._prepare_once(spec, read)
        self._known.pop(spec.transfer_id, None)  # one that was taken back; the last is the newest
        self._known[spec.transfer_id] = transfer
        self._arm(transfer, link)
        self.watchers.tell(transfer)
        return transfer

    async def _prepare_once(self, spec: TransferSpec, read: float | None) -> tuple[Transfer, Link]:
        limit = self._settings.handshake_timeout
        link = await self._registration.links.get(spec.target, None, limit if read is None else min(limit, read))
        link.hold()
        try:
            return await self._make(spec, link, read), link
        except BaseException:
            link.let_go()
            raise

    async def _make(self, spec: TransferSpec, link: Link, read: float | None) -> Transfer:
        transfer = Transfer(spec, link, next(self._numbers))
        try:
            if read is not None:
                transfer.announced = True
                for source in link.sources:
                    self._telling.announce(transfer, source, read)
                await asyncio.sleep(0)  # the calls go out with the loop's next turn
            await make_reads(transfer, spec, link, self._telling, self._settings.max_descriptors, now=read is None)
        except BaseException:
            if transfer.openings:
                link.hold()
                self._start(self._take_back(transfer, link))
            raise
        return transfer

    async def _take_back(self, transfer: Transfer, link: Link) -> None:
        """Undo what was announced of a transfer that has not come about."""
        with link.leaving():
            await self._telling.close(transfer, link, tuple(transfer.openings.values()), None)

    def _arm(self, transfer: Transfer, link: Link) -> None:
        """A prepared transfer that nobody reads, or whose peer is lost, does not stay for ever."""
        ttl = min(self._settings.prepared_ttl, ANNOUNCED_TTL) if transfer.announced else self._settings.prepared_ttl
        why = f"transfer {transfer.id} was prepared and not read within {ttl:g} s"
        late = KvxferError(Reason.TRANSFER_CANCELLED, why, ttl_s=ttl)
        timer = asyncio.get_running_loop().call_later(ttl, self._give_up, transfer, Event.CANCEL, late)

        def on_lost(lost: asyncio.Future[KvxferError]) -> None:
            self._give_up(transfer, Event.FAULT, lost.result())

        link.lost.add_done_callback(on_lost)

        def disarm() -> None:
            timer.cancel()
            link.lost.remove_done_callback(on_lost)

        transfer.disarm = disarm

    def _give_up(self, transfer: Transfer, event: Event, error: KvxferError) -> None:
        """End a transfer that was never posted."""
        link = transfer.link
        if transfer.state is State.PREPARED and link is not None:
            transfer.disarm()
            self._decide(transfer, event, error)
            self._start(self._let_go(transfer, link, posted=False))

    async def take_back(self, transfer: Transfer, why: KvxferError, timeout: float) -> None:
        """What was announced and cannot be posted is as if it had never been: no source is to wait for it."""
        if transfer.announced and transfer.state is State.PREPARED:
            transfer.taken_back = True
            self._give_up(transfer, Event.CANCEL, why)
            await _within(transfer.finished.wait(), timeout)

    # -- reading ---------------------------------------------------------------------------------------------------

    def post(self, transfer: Transfer, timeout: float) -> None:
        """Start a prepared transfer; one that was started already is left as it is.

        :param timeout: seconds from now until it fails.
        :raises KvxferError: LOCAL_BLOCK_BUSY, LIMIT_EXCEEDED; the transfer then stays prepared.
        """
        link = transfer.link
        if transfer.state is not State.PREPARED or link is None:
            return
        if self._closing:
            raise KvxferError(Reason.SHUTTING_DOWN, "the cache is being unregistered")
        busy = next((c for c in transfer.claims if c in self._claims), None)
        if busy is not None:  # the first block's number is 0
            raise KvxferError(
                Reason.LOCAL_BLOCK_BUSY,
                f"local block {busy & 0xFFFFFFFF} is still being written by transfer {self._claims[busy]}",
                field="local_blocks",
                block=busy & 0xFFFFFFFF,
                transfer_id=self._claims[busy],
            )
        self.bytes_room.take(transfer.remote_engine_id, transfer.bytes)
        self._claims.update(dict.fromkeys(transfer.claims, transfer.id))
        self._move(transfer, Event.POST)
        transfer.disarm()
        transfer.look = self._registration.probe.posted(transfer.bytes, wanted=link.to_be_seen)
        if transfer.look is not None:
            link.looks()
        for live in transfer.live:
            if id(live.source.rank) not in transfer.openings:
                self._telling.announce(transfer, live.source, timeout)
        self._start(self._run(transfer, link, timeout))

    async def _run(self, transfer: Transfer, link: Link, timeout: float) -> None:
        """From posting to the outcome."""
        posted = time.perf_counter()
        work = [
            asyncio.ensure_future(self._read(transfer, link, part, part.live, timeout))
            for part in transfer.parts
            if part.live is not None
        ]
        try:
            event, fault = await self._outcome(transfer, link, work, timeout)
        except Exception as error:
            log.exception("a transfer failed in an unforeseen way", transfer=transfer.id)
            event, fault = Event.FAULT, _as_error(error)
        leave(*work)
        if fault is not None and fault.reason in LINK_BREAKERS and fault.metadata.get("said") != STOPPING:
            link.lose(fault)
        transfer.timings.total = time.perf_counter() - posted
        self._decide(transfer, event, fault)
        if transfer.state is State.DONE:  # where it failed, its caller is told whether the blocks are quiet
            await asyncio.sleep(0)  # whoever waits for it is answered first
        await self._let_go(transfer, link, posted=True)

    async def _read(self, transfer: Transfer, link: Link, part: Part, live: Live, timeout: float) -> None:
        rank = live.source.rank
        ref, opening = self._telling.ref(transfer, rank), transfer.openings[id(rank)]
        part.result = await read_source(link.engine, live, ref, opening, timeout)

    async def _outcome(
        self, transfer: Transfer, link: Link, parts: Sequence[asyncio.Future[None]], timeout: float
    ) -> tuple[Event, KvxferError | None]:
        """Wait until everything is done, or the first thing that settles it otherwise."""
        work: set[asyncio.Future[Any]] = set(parts)
        deadline = time.monotonic() + timeout
        while work:
            done, _ = await asyncio.wait(
                {*work, transfer.stop, link.lost},
                timeout=max(0.0, deadline - time.monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            # All are looked at, or asyncio would complain about those that were not.
            failed = [error for d in done & work if (error := d.exception()) is not None]
            work -= done
            for error in failed:
                # Its frames lead to the futures that it came from, and those back to it: until the collector came by,
                # such a ring would keep calls, and with them connections, that were given up.
                traceback.clear_frames(error.__traceback__)
            if failed:
                return Event.FAULT, _worst([_as_error(error) for error in failed])
            if transfer.stop in done:
                return Event.CANCEL, transfer.stop.result()
            if link.lost in done:
                return Event.FAULT, link.lost.result()
            if not done:
                why = f"the read did not finish within {timeout:g} s"
                return Event.FAULT, KvxferError(Reason.DEADLINE_EXCEEDED, why, timeout_s=timeout)
        return Event.COMPLETE, None

    def _decide(self, transfer: Transfer, event: Event, error: KvxferError | None) -> None:
        """Give a transfer its outcome.  From here on nothing but :meth:`_let_go` touches it, which is to follow."""
        transfer.error = None if error is None else error.bare()
        results = transfer.results
        for name, attribute in (("queue", "queue_seconds"), ("post", "post_seconds"), ("move", "move_seconds")):
            if results:
                setattr(transfer.timings, name, max(getattr(r, attribute) for r in results))
        if transfer.timings.make is None:
            transfer.timings.make = max((live.read.make_seconds for live in transfer.live), default=None)
        self._move(transfer, event)
        transfer.settled.set()

    def _look_at(self, transfer: Transfer, link: Link) -> None:
        """See how the bytes have come, where it was looked at."""
        if transfer.look is not None:
            found = self._registration.probe.see(
                transfer.look, transfer.bytes, transfer.results, one_host=link.on_one_host
            )
            link.found(found)

    def _free(self, transfer: Transfer) -> None:
        """The local blocks of a posted transfer are nobody's any more."""
        self._registration.probe.ended()
        self.bytes_room.give(transfer.remote_engine_id, transfer.bytes)
        for claim in transfer.claims:
            del self._claims[claim]

    async def _let_go(self, transfer: Transfer, link: Link, *, posted: bool) -> None:
        """Wait until the library has let go of a decided transfer, and give everything back."""
        draining = transfer.state not in life.QUIESCENT
        if transfer.state is State.DONE:
            self._look_at(transfer, link)
            self._free(transfer)  # its caller may reuse the blocks at once
        if not draining:
            self._registration.events.transfer_ended(transfer)
        for read in [live.read for live in transfer.live]:
            if read.kept:
                await link.cut(KvxferError(Reason.PEER_LOST, "a read failed of which some may still be under way"))
            # A read whose posting was called off in time was never posted; nothing will ever write for it.
            if read.state is ReadState.POSTED or not read.is_quiesced:
                await self._quiesce(transfer, link, read)
            if read.lost:  # also where the transfer had its outcome before: the next one needs another connection
                link.lose(KvxferError(Reason.PEER_LOST, f"the connection to engine {link.target.engine_id} broke"))
            try:
                await link.engine.release(read)
            except KvxferError as error:  # the engine is closing, and takes its requests with it
                log.debug("request not released", transfer=transfer.id, error=str(error))
        sources = {id(live.source.rank) for live in transfer.live}
        openings = tuple(transfer.openings.values())
        self._move(transfer, Event.QUIESCED)
        if draining:
            self._free(transfer)
            self._registration.events.transfer_ended(transfer)
        transfer.forget_details()
        transfer.finished.set()
        self.room.give(transfer.remote_engine_id, 1)
        self.watchers.tell(transfer)
        self._ended.append(transfer)
        while len(self._ended) > self._settings.kept_transfers:
            oldest = self._ended.popleft()
            if self._known.get(oldest.id) is oldest:  # its ID may have been given to another
                del self._known[oldest.id]
        try:
            with link.leaving():
                await self._telling.close(transfer, link, openings, sources if posted else None)
        finally:  # also where the registration ends before its sources could be told
            transfer.forget_secret()

    async def _quiesce(self, transfer: Transfer, link: Link, read: XferRead) -> None:
        """Wait until the library has let go of a read; past the limit destroy what it is posted through."""
        try:
            await asyncio.wait_for(read.quiesced, self._settings.drain_limit)
        except asyncio.TimeoutError:
            limit = self._settings.drain_limit
            why = f"a read from engine {transfer.remote_engine_id} was in flight {limit:g} s after it had failed"
            log.warning(
                "agent destroyed",
                engine=self._registration.identity.engine_id,
                peer=transfer.remote_engine_id,
                request=transfer.request_id,
                transfer=transfer.id,
                limit_s=limit,
            )
            await link.cut(KvxferError(Reason.PEER_LOST, f"{why}: its agent was destroyed", limit_s=limit))
            await read.quiesced

    # -- ending ----------------------------------------------------------------------------------------------------

    async def cancel(self, transfer_id: str, timeout: float) -> Transfer:
        """Cancel, and wait at most ``timeout`` seconds until the local blocks are safe to reuse.

        That is final, also for what is not there yet: who gives up a call cannot know how far that has come, and is
        about to use the local blocks for something else.  No call with this ID, under way or to come, reads anything;
        of those that come later, as long as :data:`KEPT_CANCELLED` others have not been cancelled since.

        :raises KvxferError: TRANSFER_UNKNOWN, also then.
        """
        known, preparing = self._known.get(transfer_id), self._preparing.get(transfer_id)
        self._refused.pop(transfer_id, None)
        self._refused[transfer_id] = None
        while len(self._refused) > KEPT_CANCELLED:
            del self._refused[next(iter(self._refused))]
        if known is not None and known.taken_back:  # its ID is free no more
            known.taken_back, known.error = False, _cancelled(transfer_id)
        if known is not None and preparing is None:
            await self._cancel(known, timeout)
            return known
        if preparing is None:
            return self.get(transfer_id)
        # Nothing of it has been posted, so nobody has to wait: this is how it will have ended once it is made.
        preparing.cancelled = _cancelled(transfer_id)
        ended = Transfer(preparing.spec, None, 0)
        ended.state, ended.error, ended.ended = State.CANCELLED, preparing.cancelled, time.time()
        return ended

    async def _cancel(self, transfer: Transfer, timeout: float) -> None:
        error = _cancelled(transfer.id)
        if transfer.state is State.PREPARED:
            self._give_up(transfer, Event.CANCEL, error)
        elif not transfer.stop.done():
            transfer.stop.set_result(error)
        await _within(transfer.finished.wait(), timeout)

    async def drain(self, timeout: float) -> bool:
        """Take nothing new, cancel everything, and wait at most ``timeout`` seconds until all has ended."""
        self._closing = True
        deadline = time.monotonic() + timeout
        if making := [preparing.made for preparing in self._preparing.values()]:
            await asyncio.wait(making, timeout=timeout)
        active = [t for t in self._known.values() if not t.finished.is_set()]
        await asyncio.gather(*(self._cancel(t, max(0.0, deadline - time.monotonic())) for t in active))
        return not self._preparing and all(t.finished.is_set() for t in active)

    async def close(self) -> None:
        """End what :meth:`drain` has left; the transfer engine's end makes sure of the rest."""
        self._closing = True
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=sum(closing.BACKOFF))
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self.watchers.close()

    # -- small things ----------------------------------------------------------------------------------------------

    def _move(self, transfer: Transfer, event: Event) -> None:
        before, transfer.state = transfer.state, life.step(transfer.state, event)
        if transfer.state is before:
            return
        if transfer.state in life.FINAL_STATES:
            transfer.ended = time.time()
        if transfer.state is State.DONE:
            self.totals.done += 1
            self.totals.bytes_read += transfer.bytes
        self.totals.failed += transfer.state is State.FAILED
        self.totals.cancelled += transfer.state is State.CANCELLED
        if transfer.state not in life.FINAL_STATES:  # a final state is told once everything is given back
            self.watchers.tell(transfer)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a transfer task failed", exc_info=error)


async def _within(waiting: Coroutine[Any, Any, Any], seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(waiting, seconds)


def new_transfer_id() -> str:
    """An ID that nobody else has."""
    return secrets.token_hex(8)


def _check_same(spec: TransferSpec, digest: bytes) -> None:
    if digest != spec.digest:
        raise KvxferError(
            Reason.TRANSFER_ID_REUSED,
            f"transfer {spec.transfer_id} exists with other content",
            field="transfer_id",
            transfer_id=spec.transfer_id,
        )


def _cancelled(transfer_id: str) -> KvxferError:
    why = f"transfer {transfer_id} was cancelled"
    return KvxferError(Reason.TRANSFER_CANCELLED, why, transfer_id=transfer_id)


def _worst(errors: list[KvxferError]) -> KvxferError:
    """Of several sources' errors the one that says most: that P is another one now explains why it was lost."""
    return min(errors, key=lambda e: e.reason is not Reason.STALE_INCARNATION)


def _as_error(error: BaseException | None) -> KvxferError:
    if isinstance(error, KvxferError):
        return error
    return KvxferError(Reason.INTERNAL, f"the read failed in an unforeseen way: {error!r}")
