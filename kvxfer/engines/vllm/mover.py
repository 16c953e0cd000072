"""A worker's side: publishes and reads what the scheduler side asks for, and tells when blocks are free.

Nothing here waits in the engine's thread.  Calls run in a few threads; what becomes of transfers and leases is learnt
from the sidecar's streams.  Blocks are told as free only when nothing can read or write them any more: a transfer has
quiesced, a lease has ended, or the registration is gone with all that hung on it.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from queue import SimpleQueue
from typing import Any, Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.core.resolve import BlockList
from kvxfer.engines.vllm.steps import Publication, Reading, Step
from kvxfer_client import Client, LeaseInfo, Registered, Session, TransferInfo, TransferState, ticket_from_string

# vLLM shows what is logged below its own name.
log = logging.getLogger("vllm.kvxfer")

#: Calls that run at once; one to an engine that is silent takes as long as a handshake may.
THREADS: Final = 32
#: Pause before asking again what has become of a call whose answer was lost, seconds.
PAUSE: Final = 0.2

#: After these it is not known whether the sidecar has done what it was asked for.
UNCERTAIN: Final = frozenset(
    {Reason.PEER_UNREACHABLE, Reason.DEADLINE_EXCEEDED, Reason.INTERNAL, Reason.SHUTTING_DOWN, Reason.LIMIT_EXCEEDED}
)
#: After these there is nothing that could read or write.
NOTHING_THERE: Final = frozenset(
    {Reason.TRANSFER_UNKNOWN, Reason.LEASE_UNKNOWN, Reason.NOT_REGISTERED, Reason.STALE_INCARNATION}
)


@dataclass
class Results:
    """What has ended since the last time, by vLLM's request IDs.

    :param failed: of ``received``, those whose blocks hold nothing of use.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class _At(Enum):
    """How far a read is."""

    WAITING = 0
    #: ReadBlocks is under way: what comes of it is not known before it returns.
    CALLING = 1
    POSTED = 2


@dataclass
class _Read:
    request_id: str
    transfer_id: str
    incarnation: str
    at: _At = _At.WAITING
    cancelled: bool = False


class Mover:
    """Everything that one registered cache has under way.

    :meth:`lost`, :meth:`registered` and :meth:`ended` are for the session's callbacks.
    """

    def __init__(self, client: Client, rank: Rank, read_timeout: float) -> None:
        self._client = client
        self._rank = rank
        self._read_timeout = read_timeout
        self._lock = threading.Lock()
        self._results = Results()
        self._reads: dict[str, _Read] = {}  # by transfer ID
        self._published: dict[str, Publication] = {}  # by name
        self._closing = threading.Event()
        self._work: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        # Of a kind that the interpreter does not wait for: no sidecar keeps an engine from ending.
        self._threads = [threading.Thread(target=self._run, name=f"kvxfer {i}", daemon=True) for i in range(THREADS)]
        for thread in self._threads:
            thread.start()
        self._incarnation = ""
        self._fresh: Registered | None = None
        self._session: Session | None = None
        self._followers: list[threading.Thread] = []

    # -- the session -----------------------------------------------------------------------------------------------

    def registered(self, found: Registered) -> None:
        """The cache is registered, for the first time or again."""
        with self._lock:
            self._incarnation, self._fresh = found.incarnation, found

    def lost(self, reason: KvxferError, incarnation: str) -> None:
        """A registration is gone: nobody reads or writes for it any more."""
        log.warning("the sidecar has lost registration %s: %s", incarnation, reason)
        with self._lock:
            if self._incarnation == incarnation:
                self._incarnation = ""
        self._end_all(incarnation)

    def ended(self, reason: KvxferError) -> None:
        """The session is over for good."""
        log.error("this engine's cache is not registered any more, nothing is sent or read: %s", reason)
        with self._lock:
            self._incarnation = ""
        self._end_all(None)

    def _end_all(self, incarnation: str | None) -> None:
        with self._lock:
            for read in [r for r in self._reads.values() if incarnation in (None, r.incarnation)]:
                if read.at is _At.CALLING:
                    # It may be the next registration that is asked; the call's own thread looks after it.
                    read.cancelled = True
                else:
                    self._received(read, failed=True)
            for name, publication in list(self._published.items()):
                if incarnation in (None, publication.incarnations.get(self._rank.number)):
                    self._sent(name)

    def follow(self, session: Session) -> None:
        """Begin to learn what becomes of transfers and leases."""
        self._session = session
        for name, watch, saw in (
            ("transfers", self._client.watch, self._saw_transfer),
            ("leases", self._client.watch_leases, self._saw_lease),
        ):
            thread = threading.Thread(
                target=self._follow, args=(session, watch, saw), name=f"kvxfer {name}", daemon=True
            )
            self._followers.append(thread)
            thread.start()

    def _follow(self, session: Session, watch: Callable[..., Any], saw: Callable[[Any], None]) -> None:
        while not self._closing.is_set() and session.error is None:
            try:
                session.wait_registered()
                # All that is remembered comes first, so that nothing is missed between two streams.
                with watch(include_current=True) as stream:
                    for item in stream:
                        saw(item)
            except KvxferError as error:
                log.info("watching again: %s", error)
            self._closing.wait(PAUSE)

    # -- the engine ------------------------------------------------------------------------------------------------

    def begin(self, step: Step, written: Callable[[], None]) -> None:
        """Take over what is new; returns at once.

        :param written: waits until the device has done all that it was given before this call.
        """
        for request_id in step.cancel:
            self._cancel(request_id)
        for ticket in step.give_back:
            self._later(self._return, ticket)
        for publication in step.publish:
            with self._lock:
                self._published[publication.id] = publication
            self._later(self._publish, publication, written)
        for reading in step.read:
            with self._lock:
                read = _Read(reading.request_id, uuid.uuid4().hex, self._incarnation)
                self._reads[read.transfer_id] = read
            self._later(self._begin_read, reading, read, written)

    def take(self) -> Results:
        """What has ended since the last call."""
        with self._lock:
            results, self._results = self._results, Results()
        return results

    @property
    def holds(self) -> bool:
        """Whether there are blocks that peers may read."""
        return bool(self._published)

    @property
    def away(self) -> bool:
        """Whether the sidecar is known to be gone, and not known to be back."""
        return self._session is not None and self._session.registered is None

    def take_registered(self) -> Registered | None:
        """The registration, where it is another one than at the last call."""
        with self._lock:
            found, self._fresh = self._fresh, None
        return found

    def close(self) -> None:
        """Stop; what is under way is the session's to end."""
        self._closing.set()
        for _ in self._threads:
            self._work.put(None)

    def _later(self, work: Callable[..., None], *args: Any) -> None:
        self._work.put((work, args))

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, args = item
            try:
                work(*args)
            except Exception:
                # Never freed: whatever it was, it is not known who still reads or writes there.
                log.exception("a fault in the connector; the blocks of %s stay taken", args[0])

    # -- reading ---------------------------------------------------------------------------------------------------

    def _begin_read(self, reading: Reading, read: _Read, written: Callable[[], None]) -> None:
        # Nobody may write these blocks beside the sidecar: an earlier step, or one that clears them.
        written()
        with self._lock:
            if read.cancelled:
                self._later(self._return, reading.ticket)
            if read.cancelled or not read.incarnation or read.incarnation != self._incarnation:
                self._received(read, failed=True)
                return
            if self.away:
                # What it has not been asked for it does not do, also once it is back.  A read that it may have heard of
                # waits for its word, or its successor's.
                absent = KvxferError(Reason.PEER_UNREACHABLE, "the sidecar is away", target=self._client.target)
                log.warning("request %s is not read: %s", reading.request_id, absent)
                self._received(read, failed=True)
                return
            read.at = _At.CALLING
        posted = False
        try:
            self._client.read(
                reading.ticket,
                self._local_blocks(reading),
                skip_tokens=reading.skip_tokens,
                transfer_id=read.transfer_id,
                wait=False,
                timeout=self._read_timeout,
            )
            posted = True
        except KvxferError as error:
            log.warning("request %s is not read: %s", reading.request_id, error)
        with self._lock:
            read.at = _At.POSTED
            given_up = read.cancelled
        if given_up or not posted:
            self._settle(read)

    def _return(self, ticket: str) -> None:
        """Have P release a request's blocks; it does so by itself when their lease ends."""
        try:
            num_tokens = ticket_from_string(ticket).num_tokens
            self._client.read(ticket, (), skip_tokens=num_tokens, wait=False, timeout=self._read_timeout)
        except KvxferError as error:
            log.info("a ticket is not given back: %s", error)

    def _local_blocks(self, reading: Reading) -> tuple[BlockList, ...]:
        if not reading.needed_from:
            return reading.blocks
        granule = self._client.handshake(reading.ticket).granule_tokens
        return clipped(reading.blocks, reading.needed_from, granule, reading.skip_tokens)

    def _cancel(self, request_id: str) -> None:
        with self._lock:
            read = next((r for r in self._reads.values() if r.request_id == request_id), None)
            if read is None:
                return
            read.cancelled = True
            posted = read.at is _At.POSTED
        if posted:  # otherwise the thread that begins it sees that it is cancelled
            self._later(self._settle, read)

    def _settle(self, read: _Read) -> None:
        """Have a read ended, whatever its state, and see it quiesce."""
        while not self._closing.is_set() and read.transfer_id in self._reads:
            try:
                self._saw_transfer(self._client.cancel(read.transfer_id))
            except KvxferError as error:
                if error.reason in NOTHING_THERE:
                    self._finish_read(read, failed=True)
                    return
            self._closing.wait(PAUSE)

    def _saw_transfer(self, info: TransferInfo) -> None:
        if not (info.state.ended and info.quiesced):
            return
        with self._lock:
            read = self._reads.get(info.id)
            if read is not None:
                if info.error is not None:
                    log.warning("request %s could not be read: %s", read.request_id, info.error)
                self._received(read, failed=info.state is not TransferState.DONE)

    def _finish_read(self, read: _Read, failed: bool) -> None:
        with self._lock:
            self._received(read, failed)

    def _received(self, read: _Read, failed: bool) -> None:
        if self._reads.pop(read.transfer_id, None) is None:
            return
        self._results.received.add(read.request_id)
        if failed:
            self._results.failed.add(read.request_id)

    # -- publishing ------------------------------------------------------------------------------------------------

    def _publish(self, publication: Publication, written: Callable[[], None]) -> None:
        incarnation = publication.incarnations.get(self._rank.number, "")
        if not incarnation or incarnation != self._incarnation or self.away:
            # Its ticket names a registration that is gone, or the sidecar is away and not asked: nobody can read it.
            self._finish_publication(publication)
            return
        written()
        try:
            self._client.publish(
                publication.id,
                publication.blocks,
                publication.num_tokens,
                publication.lease_token,
                ttl=publication.ttl,
                incarnation=incarnation,
            )
        except KvxferError as error:
            log.warning("request %s is not published: %s", publication.request_id, error)
            if error.reason in UNCERTAIN:
                self._withdraw(publication)
            else:
                self._finish_publication(publication)

    def _withdraw(self, publication: Publication) -> None:
        """Take back what may have been published."""
        while not self._closing.is_set() and publication.id in self._published:
            try:
                held_for = self._client.withdraw(publication.id, publication.lease_token)
                if held_for == 0:
                    self._finish_publication(publication)
                return  # otherwise its lease tells
            except KvxferError as error:
                if error.reason in NOTHING_THERE:
                    self._finish_publication(publication)
                    return
            self._closing.wait(PAUSE)

    def _saw_lease(self, info: LeaseInfo) -> None:
        if info.state.ended:
            with self._lock:
                self._sent(info.request_id)

    def _finish_publication(self, publication: Publication) -> None:
        with self._lock:
            self._sent(publication.id)

    def _sent(self, name: str) -> None:
        publication = self._published.pop(name, None)
        if publication is not None:
            self._results.sent.add(publication.request_id)


def clipped(
    blocks: Iterable[BlockList], needed_from: Mapping[str, int], granule: int, skip_tokens: int
) -> tuple[BlockList, ...]:
    """Block lists whose reads begin where their groups first need something.

    :param needed_from: first token of use, by group.
    :param granule: reads begin at multiples of it; one that is needed only in part is read as a whole.
    """
    found = []
    for each in blocks:
        first = needed_from.get(each.group, 0) // granule * granule
        found.append(replace(each, skip_tokens=first) if first > skip_tokens and each.positions is None else each)
    return tuple(found)
