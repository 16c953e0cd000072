"""P's published requests: what holds their blocks, who reads them, and when they may be freed.

The rules are :mod:`kvxfer.core.leases`; this module finds the lease that a message means, waits for one that is about
to be published, remembers what comes too early or too late, and tells those who watch.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import heapq
import hmac
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import structlog

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout
from kvxfer.core.leases import Lease, ReadKey
from kvxfer.service.events import Events
from kvxfer.service.publications import check_promise, check_publication, content_digest
from kvxfer.service.settings import ServiceSettings
from kvxfer.service.watch import Watchers
from kvxfer.wire.blocks import block_digest
from kvxfer.wire.peer import CloseRead, OpenRead, Outcome, ReadNotice, ReadRef
from kvxfer.wire.requests import PublishBlocks

log = structlog.get_logger()

#: Ends of reads that came before their request was published: how many are remembered, in all and of one request, and
#: for how long (seconds).
MAX_EARLY: Final = 65_536
MAX_EARLY_EACH: Final = 1_024
EARLY_TTL: Final = 60.0
#: What is due of leases that have ended before may be so many entries, and as many as leases are held.
SPARE_DUE: Final = 1_024
#: Reads that may wait at once for their request to be published.
MAX_WAITING: Final = 4_096


@dataclass(frozen=True)
class _Early:
    """The end of a read of a request that is not published yet."""

    token: bytes
    key: ReadKey
    readers: int
    done: bool
    until: float


@dataclass
class _Entry:
    """A lease, when it is next looked at, and whether its end was told."""

    lease: Lease
    digest: bytes
    due: float = math.inf
    told: bool = False


@dataclass
class _Waiting:
    """Reads that wait for a request to be published."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    count: int = 0


@dataclass
class Totals:
    """Counts since the registration."""

    published: int = 0
    released: int = 0
    expired: int = 0
    withdrawn: int = 0
    opened: int = 0


class Leases:
    """The published requests of one registration.  Call :meth:`tick` now and then; it is cheap."""

    def __init__(self, layout: CacheLayout, settings: ServiceSettings, events: Events) -> None:
        self._layout = layout
        self._events = events
        self._settings = settings
        self._known: dict[str, _Entry] = {}
        self._live = 0
        self._ended: deque[_Entry] = deque()
        self._due: list[tuple[float, int, str]] = []
        self._early: dict[str, dict[tuple[bytes, ReadKey], _Early]] = {}
        self._early_order: deque[tuple[str, _Early]] = deque()
        self._waiting: dict[str, _Waiting] = {}
        self._waiters = 0
        self._changed = asyncio.Event()
        self._closing = False
        self._closed = False
        self._numbers = 0
        self.watchers: Final[Watchers[Lease]] = Watchers()
        self.totals: Final = Totals()

    def __len__(self) -> int:
        """Leases that have not ended."""
        return self._live

    def __iter__(self) -> Iterator[tuple[int, Lease]]:
        """All that are remembered, newest first, with a number that falls."""
        return ((entry.lease.number, entry.lease) for entry in reversed(tuple(self._known.values())))

    @property
    def open_reads(self) -> int:
        """Granted reads that are open."""
        return sum(entry.lease.open_reads for entry in self._known.values() if not entry.lease.ended)

    # -- what the engine asks --------------------------------------------------------------------------------------

    def publish(self, record: PublishBlocks) -> Lease:
        """Hold a request's blocks; the same content again extends the hold.

        :raises KvxferError: REQUEST_ID_REUSED (other content), LEASE_EXPIRED (the same content, but the hold has
            ended), FIELD_INVALID (ttl), LIMIT_EXCEEDED, SHUTTING_DOWN, and what
            :func:`kvxfer.core.resolve.check_blocks` raises.
        """
        if self._closing:
            raise KvxferError(Reason.SHUTTING_DOWN, "the cache is being unregistered")
        ttl = self._ttl(record.ttl)
        check_publication(self._layout, record)
        now = time.monotonic()
        self.tick(now)
        digests = {blocks.group: block_digest(blocks) for blocks in record.blocks}
        digest = content_digest(record, digests)
        entry = self._known.get(record.request_id)
        if entry is not None and hmac.compare_digest(entry.digest, digest):
            with self._changing(entry) as lease:
                lease.extend(now + ttl)
            return lease
        if entry is not None and (not entry.lease.ended or hmac.compare_digest(entry.lease.token, record.lease_token)):
            ended = entry.lease.ended
            advice = "use a fresh lease token" if ended else "withdraw it first, and wait until it has ended"
            raise KvxferError(
                Reason.REQUEST_ID_REUSED,
                f"request {record.request_id} {'was' if ended else 'is'} published with other content; {advice}",
                field="request_id",
                request_id=record.request_id,
            )
        if self._live >= self._settings.max_leases:
            raise KvxferError(
                Reason.LIMIT_EXCEEDED,
                f"{self._live} requests are published; the limit is {self._settings.max_leases} (max_leases)",
                limit_name="max_leases",
                limit=self._settings.max_leases,
            )
        self._numbers += 1
        lease = Lease(
            record.request_id,
            record.lease_token,
            digests,
            record.num_tokens,
            number=self._numbers,
            readers=record.readers,
            published=now,
            deadline=now + ttl,
        )
        self._known.pop(record.request_id, None)  # the place of an ended one, which is last in line now
        entry = self._known[record.request_id] = _Entry(lease, digest)
        self._live += 1
        self.totals.published += 1
        self._events.lease_published()
        self.watchers.tell(copy.copy(lease))
        with self._changing(entry):
            for early in self._early.pop(record.request_id, {}).values():
                if hmac.compare_digest(early.token, lease.token) and now < early.until:
                    with contextlib.suppress(KvxferError):  # one that contradicts the publication means nothing
                        lease.close(early.key, early.readers, now, done=early.done)
        if (waiting := self._waiting.pop(record.request_id, None)) is not None:
            waiting.event.set()
        return lease

    def renew(self, request_id: str, token: bytes, ttl: float | None) -> float:
        """Hold a request for ``ttl`` seconds from now at least.

        :returns: seconds that are left.
        :raises KvxferError: LEASE_UNKNOWN, LEASE_TOKEN_MISMATCH, LEASE_EXPIRED, FIELD_INVALID (ttl).
        """
        seconds = self._ttl(ttl)
        now = time.monotonic()
        with self._changing(self._find(request_id, token)) as lease:
            lease.tick(now)
            lease.extend(now + seconds)
        return lease.left(now)

    def withdraw(self, request_id: str, token: bytes) -> float | None:
        """Offer a request's blocks no more.

        :returns: how long granted reads may still go on, seconds; ``None``: the blocks may be freed now.
        :raises KvxferError: LEASE_UNKNOWN, LEASE_TOKEN_MISMATCH.
        """
        now = time.monotonic()
        with self._changing(self._find(request_id, token)) as lease:
            lease.tick(now)
            lease.withdraw()
        return None if lease.ended else lease.held_for(now)

    def _ttl(self, ttl: float | None) -> float:
        chosen = self._settings.lease_ttl if ttl is None else ttl
        if not 0 < chosen <= self._settings.max_lease_ttl:
            raise KvxferError(
                Reason.FIELD_INVALID,
                f"ttl is {chosen} s; allowed are more than 0 and at most {self._settings.max_lease_ttl} s",
                field="ttl",
                value=chosen,
                maximum=self._settings.max_lease_ttl,
            )
        return chosen

    # -- what readers ask ------------------------------------------------------------------------------------------

    async def open(self, record: OpenRead) -> float:
        """A read is wanted: see that the blocks are held for it, and keep them for a while.

        :returns: seconds granted from now.
        :raises KvxferError: LEASE_UNKNOWN (also where other blocks are held), LEASE_TOKEN_MISMATCH, LEASE_EXPIRED,
            FIELD_INVALID, LIMIT_EXCEEDED, SHUTTING_DOWN.
        """
        ref = record.ref
        if self._is_to_come(ref.request_id, ref.lease_token):
            await self._await_publication(ref.request_id)
        now = time.monotonic()
        with self._changing(self._find(ref.request_id, ref.lease_token)) as lease:
            check_promise(lease, record)
            seconds = min(record.wanted or self._settings.read_grant, self._settings.read_grant)
            lease.open(_key(ref), ref.readers, seconds, now)
        self.totals.opened += 1
        return seconds

    async def _await_publication(self, request_id: str) -> None:
        """Workers learn of a request later than the scheduler that answers for it: wait a little."""
        if self._closing:
            raise KvxferError(Reason.SHUTTING_DOWN, "the cache is being unregistered")
        if self._waiters >= MAX_WAITING:
            return
        waiting = self._waiting.setdefault(request_id, _Waiting())
        waiting.count += 1
        self._waiters += 1
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(waiting.event.wait(), self._settings.publish_wait)
        finally:
            self._waiters -= 1
            waiting.count -= 1
            if not waiting.count and self._waiting.get(request_id) is waiting:
                del self._waiting[request_id]
        if self._closing:
            raise KvxferError(Reason.SHUTTING_DOWN, "the cache is being unregistered")

    def renew_read(self, ref: ReadRef, wanted: float | None) -> float:
        """An open read goes on.

        :returns: seconds granted from now.
        :raises KvxferError: LEASE_UNKNOWN, LEASE_TOKEN_MISMATCH, LEASE_EXPIRED.
        """
        seconds = min(wanted or self._settings.read_grant, self._settings.read_grant)
        with self._changing(self._find(ref.request_id, ref.lease_token)) as lease:
            return lease.renew(_key(ref), seconds, self._settings.max_read, time.monotonic())

    def close_read(self, record: CloseRead) -> None:
        """A read has ended.

        :raises KvxferError: LEASE_TOKEN_MISMATCH, FIELD_INVALID, LIMIT_EXCEEDED.
        """
        ref, done = record.ref, not record.will_retry
        now = time.monotonic()
        if self._is_to_come(ref.request_id, ref.lease_token):
            self._keep_early(ref.request_id, _Early(ref.lease_token, _key(ref), ref.readers, done, now + EARLY_TTL))
            return
        if record.outcome is not Outcome.DONE:
            log.debug("read not done", request=ref.request_id, reader=ref.reader.engine_id, outcome=record.outcome.name)
        with self._changing(self._find(ref.request_id, ref.lease_token)) as lease:
            lease.close(_key(ref), ref.readers, now, done=done)

    def finished(self, notice: ReadNotice) -> bool:
        """The transport says that a READ has completed; anybody may say so, and what does not fit means nothing.

        :returns: whether an open read has ended by it.
        """
        entry = self._known.get(notice.request_id)
        if entry is None or not hmac.compare_digest(entry.lease.token, notice.lease_token):
            return False
        reader = notice.reader
        key = ReadKey(reader.engine_id, reader.rank, reader.incarnation, notice.transfer_id)
        with contextlib.suppress(KvxferError), self._changing(entry) as lease:
            return lease.finished(key, time.monotonic())
        return False

    def _keep_early(self, request_id: str, early: _Early) -> None:
        known = self._early.setdefault(request_id, {})
        name = (early.token, early.key)
        if name in known or len(known) >= MAX_EARLY_EACH:
            return
        while len(self._early_order) >= MAX_EARLY:
            self._drop_earliest()
        self._early.setdefault(request_id, known)[name] = early
        self._early_order.append((request_id, early))

    def _drop_earliest(self) -> None:
        request_id, early = self._early_order.popleft()
        known = self._early.get(request_id, {})
        if known.get((early.token, early.key)) is early:
            del known[early.token, early.key]
            if not known:
                del self._early[request_id]

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Let time pass; ``now`` in monotonic seconds."""
        while self._due and self._due[0][0] <= now:
            _, number, request_id = heapq.heappop(self._due)
            entry = self._known.get(request_id)
            if entry is not None and entry.lease.number == number:
                entry.due = math.inf
                with self._changing(entry) as lease:
                    lease.tick(now)
        while self._early_order and self._early_order[0][1].until <= now:
            self._drop_earliest()

    async def drain(self, timeout: float) -> bool:
        """Withdraw everything, and wait until no granted read is open.

        :returns: whether that was so within ``timeout`` seconds.
        """
        self._closing = True
        for waiting in self._waiting.values():
            waiting.event.set()
        self._waiting.clear()
        for entry in tuple(self._known.values()):
            if not entry.told:
                with self._changing(entry) as lease:
                    lease.withdraw()
        deadline = time.monotonic() + timeout
        while self._live and (left := deadline - time.monotonic()) > 0:
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, 0.5))
            self.tick(time.monotonic())
        return not self._live

    async def over(self) -> None:
        """Wait until every lease has ended, or nobody keeps them any more."""
        while self._live and not self._closed:
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        """End every stream."""
        self._closed = True
        self._changed.set()
        self.watchers.close()

    # -- small things ----------------------------------------------------------------------------------------------

    def _is_due(self, due: float, number: int, request_id: str) -> bool:
        """Whether a lease has to be looked at then: it has not ended, and nothing is due before."""
        entry = self._known.get(request_id)
        return entry is not None and entry.lease.number == number and not entry.told and entry.due == due

    def _is_to_come(self, request_id: str, token: bytes) -> bool:
        """Whether a request may still be published: it is unknown, or what is known of its ID has ended."""
        entry = self._known.get(request_id)
        return entry is None or (entry.lease.ended and not hmac.compare_digest(entry.lease.token, token))

    def _find(self, request_id: str, token: bytes) -> _Entry:
        entry = self._known.get(request_id)
        if entry is None:
            raise KvxferError(
                Reason.LEASE_UNKNOWN,
                f"request {request_id} is not published here (or not any more)",
                field="request_id",
                request_id=request_id,
            )
        entry.lease.check_token(token)
        return entry

    @contextlib.contextmanager
    def _changing(self, entry: _Entry) -> Iterator[Lease]:
        """Around anything that may change a lease, also where it fails half-way: its end must not go untold."""
        try:
            yield entry.lease
        finally:
            self._settle(entry)

    def _settle(self, entry: _Entry) -> None:
        lease = entry.lease
        if entry.told:
            return
        if not lease.ended:
            if (due := lease.due()) < entry.due:
                entry.due = due
                heapq.heappush(self._due, (due, lease.number, lease.request_id))
                if len(self._due) > 2 * self._live + SPARE_DUE:
                    self._due = [waiting for waiting in self._due if self._is_due(*waiting)]
                    heapq.heapify(self._due)
            return
        entry.told = True
        self._live -= 1
        name = lease.state.value.lower()
        setattr(self.totals, name, getattr(self.totals, name) + 1)
        self._events.lease_ended(lease, time.monotonic())
        self._changed.set()
        self.watchers.tell(lease)
        self._ended.append(entry)
        while len(self._ended) > self._settings.kept_leases:
            oldest = self._ended.popleft()
            if self._known.get(oldest.lease.request_id) is oldest:
                del self._known[oldest.lease.request_id]


def _key(ref: ReadRef) -> ReadKey:
    return ReadKey(ref.reader.engine_id, ref.reader.rank, ref.reader.incarnation, ref.transfer_id)
