"""The thread that owns a transfer agent, and the rhythm at which it polls.

The library's agent is not thread-safe and its posting call may block for a whole copy, so one thread makes every call.
The event loop hands it commands through a queue; results come back in batches, one wakeup of the loop for each.

How often the thread polls depends on what is at stake:

* requests posted here, or a peer reading from here (``spinning``): without pause, yielding the processor between polls,
  then with naps of some tens of microseconds, so that other processes on a small machine keep running;
* peers of which something may still be under way (``connected``): every few milliseconds.  A target that does not poll
  while a reader posts and dies can be aborted by the transport when it polls again, so this interval must stay below
  10 ms;
* peers known (this side reads from them), and something was under way a moment ago: as often, for a second, since what
  was sent last (the notification of a read) may have to be pushed out;
* polling has failed: every few milliseconds until it works, since nothing else can tell that it does;
* none of these: not at all.  The thread sleeps until a command arrives.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.xfer.api import Counters, NotificationHandler, ReadResult
from kvxfer.xfer.driver import Driver
from kvxfer.xfer.jobs import Job, Piece, is_bulk
from kvxfer.xfer.watch import Watch

_log = logging.getLogger(__name__)

#: How long to poll after the last event where this side only reads, seconds.
_LINGER: Final = 1.0
#: Commands taken between two polls, so that a burst of them does not starve the requests in flight.
_BURST: Final = 32
#: A piece is what has been seen to move in so many seconds, but at least so many bytes.
PIECE_SECONDS: Final = 0.0015
PIECE_BYTES: Final = 8 * 2**20
#: So many pieces may always be under way: one moves, and with the next behind it the transport does not run dry.
#: More of them only while they move within so many seconds: inside the transport nothing small can pass them.
PIECES_UNDER_WAY: Final = 2
BULK_SECONDS: Final = 0.001


@dataclass(frozen=True, slots=True)
class PumpSettings:
    """The rhythm of the pump; seconds.

    :param yielding: how long after the last event to poll without pause, giving the interpreter and the processor away
        in between; naps follow.
    :param nap: length of a nap; must be short against a read (the kernel adds about 50 us).
    :param interval: between two polls while nothing is known to be under way; at most 10 ms.
    """

    yielding: float = 0.02
    nap: float = 0.00002
    interval: float = 0.005

    def __post_init__(self) -> None:
        for name, low, high in (
            ("yielding", 0.0, 10.0),
            ("nap", 0.0, 0.01),
            ("interval", 1e-4, 0.01),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise KvxferError(
                    Reason.FIELD_INVALID, f"{name} must be within [{low}, {high}] s", field=name, value=value
                )


class Pump:
    """Runs a :class:`Driver` on a thread of its own.

    The public methods are called on the event loop; ``counters`` is written by the thread and may be read at any time.
    """

    def __init__(
        self, name: str, driver: Driver, settings: PumpSettings, on_notification: NotificationHandler | None
    ) -> None:
        self.counters: Final = Counters()
        self._name = name
        self._driver = driver
        self._settings = settings
        self._on_notification = on_notification
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._bulk: deque[Job] = deque()  # with pieces to post
        self._bulk_rate = 0.0  # bytes a second
        self._outbox: deque[Callable[[], None]] = deque()
        self._wakeup_pending = False
        self._spinning = 0
        self._connected = 0
        self._peers = 0
        self._posted: list[Piece] = []
        self._lingering: list[Piece] = []  # complete, but not freed yet
        self._kept: list[Piece] = []  # failed, and freed only with the agent
        self._last_event = 0.0
        self._complained = 0.0
        self._watch = Watch()
        self._stopping = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=f"kvxfer-pump-{name}", daemon=True)

    # --- on the event loop -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._watch.turn()
        self._thread.start()

    @property
    def fault(self) -> str:
        """Why it cannot be relied on; empty while it works."""
        if not self._thread.is_alive():
            return "the thread of the transfer library has ended"
        return self._watch.fault(waiting=not self._commands.empty())

    def _ask(self, command: Callable[[], None]) -> None:
        """Have the thread run a command, as soon as it can."""
        if self._commands.empty():
            self._watch.asked()
        self._commands.put(command)

    def call(
        self, function: Callable[[Driver], Any], *, unwanted: Callable[[Any], None] | None = None
    ) -> asyncio.Future[Any]:
        """Have the thread run ``function(driver)``; a future of what it returns or raises.

        :param unwanted: called on the loop with the result when the future was cancelled before it came: whatever was
            made must then be given back.
        """
        future: asyncio.Future[Any] = self._loop.create_future()

        def settle(result: Any, error: KvxferError | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)
            elif error is None and unwanted is not None:
                unwanted(result)

        def command() -> None:
            result, error = None, None
            try:
                if self._stopping:
                    raise KvxferError(Reason.SHUTTING_DOWN, "the transfer engine is closing")
                result = function(self._driver)
            except Exception as caught:  # noqa: BLE001  the thread must live on
                error = self._as_ours(caught)
            self._outbox.append(lambda: settle(result, error))

        self._ask(command)
        return future

    def post(self, job: Job) -> None:
        """Have the thread post a read and see it through."""
        if job.is_bulk:
            self._bulk.append(job)
            self._ask(_nothing)  # the thread may be asleep
        else:
            self._ask(lambda: self._post(job))

    def abandon(self, job: Job) -> None:
        """Nobody waits for a read any more: what has not been posted of it never is."""

        def give_up() -> None:
            if job.pieces.left and not job.settled:
                self._give_up(job, _abandoned())

        self._ask(give_up)

    def adjust(self, *, spinning: int = 0, connected: int = 0, peers: int = 0) -> None:
        """Change how many reasons there are to spin, to poll every few milliseconds, and to poll now and then."""
        self._spinning += spinning
        self._connected += connected
        self._peers += peers
        self._ask(_nothing)  # the thread may be asleep

    async def stop(self) -> None:
        """Destroy the agent and end the thread; everything in flight fails with SHUTTING_DOWN and is let go of."""
        self._ask(self._stop)
        await asyncio.shield(self._ended)

    def _deliver(self) -> None:
        self._wakeup_pending = False
        while self._outbox:
            action = self._outbox.popleft()
            try:
                action()
            except Exception:  # noqa: BLE001  the thread must live on
                _log.exception("a receiver of transfer results failed")

    # --- on the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            self._watch.turn()
            self._take(self._patience())
            if not self._stopping and self._may_post_bulk():
                self._post(self._bulk[0])
                self._flush()
            asked = self._spinning > 0 or self._connected > 0 or self._peers > 0
            if asked or self._posted or self._lingering or self._watch.failing:
                self._poll()
            if self._outbox:
                self._flush()
        try:
            self._driver.close()
        except Exception as caught:  # noqa: BLE001  the thread must live on
            _log.error("destroying the transfer agent failed: %s", self._as_ours(caught))
        gone = KvxferError(Reason.SHUTTING_DOWN, "the transfer engine was closed while the read was posted")
        for piece in (*self._posted, *self._lingering, *self._kept):
            self.counters.failed += not piece.job.settled
            self._destroyed(piece.job, gone)
        self._posted, self._lingering, self._kept = [], [], []
        while not self._commands.empty():  # what came too late is answered with SHUTTING_DOWN
            self._take(0.0)
        while self._bulk:
            self._post(self._bulk.popleft())
        self._outbox.append(lambda: None if self._ended.done() else self._ended.set_result(None))
        self._flush()

    def _bulk_under_way(self) -> int:
        return sum(piece.size for piece in self._posted if piece.bulk)

    def _may_post_bulk(self) -> bool:
        while self._bulk and not self._bulk[0].pieces.left:
            self._bulk.popleft()
        if not self._bulk:
            return False
        if sum(piece.bulk > 0 for piece in self._posted) < PIECES_UNDER_WAY:
            return True
        job = self._bulk[0]
        return self._bulk_under_way() + job.pieces.size(self.piece(job.size)) <= self._bulk_rate * BULK_SECONDS

    def piece(self, size: int) -> int:
        """Most bytes of a piece of a read of so many; called on the thread."""
        return size if not is_bulk(size) else max(PIECE_BYTES, int(self._bulk_rate * PIECE_SECONDS))

    def _stop(self) -> None:
        self._stopping = True

    def _patience(self) -> float | None:
        """How long to wait for a command before the next poll; None: until one comes."""
        if self._may_post_bulk():
            _give_way()  # whatever small is to come needs a processor, here and at the other side
            return 0.0
        quiet = time.perf_counter() - self._last_event
        if not (self._posted or self._lingering or self._spinning > 0):
            lingering = self._peers > 0 and quiet < _LINGER
            often = self._connected > 0 or lingering or self._watch.failing
            return self._settings.interval if often else None
        if quiet < self._settings.yielding:
            _give_way()
            return 0.0
        return self._settings.nap

    def _take(self, patience: float | None) -> None:
        """Wait for a command up to ``patience``, then run those that are there."""
        for _ in range(_BURST):
            try:
                if patience is None:
                    command = self._commands.get()
                elif patience > 0.0:
                    command = self._commands.get(timeout=patience)
                else:
                    command = self._commands.get_nowait()
            except queue.Empty:
                return
            patience = 0.0
            self._last_event = time.perf_counter()
            self._watch.turn()
            command()
            self._flush()  # before the next poll: somebody waits for this

    def _poll(self) -> None:
        self.counters.polls += 1
        if self._posted:
            self._posted = [job for job in self._posted if not self._advance(job, self._driver.check)]
        if self._lingering:
            self._lingering = [job for job in self._lingering if not self._free(job)]
        try:
            arrived = self._driver.notifications()
        except Exception as caught:  # noqa: BLE001  the thread must live on
            self.counters.poll_errors += 1
            self._watch.poll_failed()
            self._complain("polling for notifications failed", caught)
            return
        self._watch.poll_worked()
        for peer, payload in arrived:
            self._last_event = time.perf_counter()
            self.counters.notifications += 1
            if self._on_notification is not None:
                self._outbox.append(lambda p=peer, m=payload: self._notify(p, m))  # type: ignore[misc]

    def _notify(self, peer: str, payload: bytes) -> None:
        if self._on_notification is not None:
            self._on_notification(peer, payload)

    def _post(self, job: Job) -> None:
        """Post the next piece of a read."""
        if self._stopping:
            self._destroyed(job, KvxferError(Reason.SHUTTING_DOWN, "the transfer engine is closing"))
            return
        if not job.wanted():
            self._give_up(job, _abandoned())
            return
        job.taken = job.taken or time.perf_counter()
        try:
            handle, size = job.pieces.take(self.piece(job.size))
        except Exception as caught:  # noqa: BLE001  the thread must live on
            self.counters.failed += 1
            self._give_up(job, self._as_ours(caught))
            return
        piece = Piece(job, handle, size, time.perf_counter())
        if job.is_bulk:
            piece.bulk = size + self._bulk_under_way()
        job.started = job.started or piece.started
        job.moving, job.held, job.posted = job.moving + 1, job.held + 1, job.posted + 1
        self.counters.posted += 1
        if not self._advance(piece, self._driver.post):
            self._posted.append(piece)

    def _destroyed(self, job: Job, why: KvxferError) -> None:
        """The agent is, and with it all of the read's requests."""
        job.pieces.drop()
        job.held = 0
        self._settle(job, why)
        self._let_go(job)

    def _let_go(self, job: Job) -> None:
        if job.settled and not job.held and not job.gone:
            job.gone = True
            self._outbox.append(job.let_go)

    def _give_up(self, job: Job, error: KvxferError) -> None:
        """Settle a read that is not to go on, and free what was made of it and not posted."""
        self._settle(job, error)
        made = job.pieces.drop()
        job.held += len(made)
        for handle in made:
            self._retire(Piece(job, handle, 0, 0.0))
        self._let_go(job)

    def _advance(self, piece: Piece, step: Callable[[Any], bool]) -> bool:
        """Post or check a request; true when nothing more has to be done for it here."""
        job = piece.job
        try:
            complete = step(piece.handle)
        except Exception as caught:  # noqa: BLE001  the thread must live on
            error = self._as_ours(caught)
            self.counters.failed += not job.settled
            job.moving -= 1
            # A request is many operations, and the library reports the first that failed while others may go on writing
            # into local memory; it does not say how those fare, and freeing does not stop them.  With the connection
            # gone there are none.
            if error.reason is Reason.PEER_LOST:
                job.lost = True
                self._lingering.append(piece)
            else:
                job.kept = True
                self._kept.append(piece)
            self._give_up(job, KvxferError(error.reason, error.message, **{**error.metadata, "peer": job.peer}))
            return True
        now = time.perf_counter()
        if piece.returned == 0.0:
            piece.returned = now
            job.posting += now - piece.started
        if not complete:
            return False
        job.moving -= 1
        if piece.bulk:  # all that was ahead of it has moved as well
            self._bulk_rate = max(piece.bulk / (now - piece.started), 0.75 * self._bulk_rate)
        try:
            if (told := self._driver.telemetry(piece.handle)) is not None:
                job.telemetry.append(told)
        except Exception as caught:  # noqa: BLE001  the thread must live on
            self._complain("reading the telemetry of a request failed", caught)
        if job.settled or job.pieces.left or job.moving:
            self._lingering.append(piece)  # what is left is posted before it is freed
            return True
        self._done(job, now)
        if len(self._posted) <= 1 and not self._bulk and self._commands.empty():
            time.sleep(self._settings.nap)  # freeing can wait, the reader should not: it needs the interpreter now
        self._retire(piece)
        return True

    def _done(self, job: Job, now: float) -> None:
        if job.posted > 1 and job.notification:
            try:
                self._driver.notify(job.peer, job.notification)
            except Exception as caught:  # noqa: BLE001  the thread must live on; those who need it do without
                self._complain("a notification was not sent", caught)
        result = job.result(now)
        self.counters.done += 1
        self.counters.bytes += job.size
        self.counters.post_seconds += result.post_seconds
        self.counters.move_seconds += result.move_seconds
        self._settle(job, result)
        self._flush()

    def _settle(self, job: Job, result: ReadResult | KvxferError) -> None:
        self._last_event = time.perf_counter()
        if not job.settled:
            job.settled = True
            self._outbox.append(lambda: job.settle(result))

    def _retire(self, piece: Piece) -> None:
        if not self._free(piece):
            self._lingering.append(piece)

    def _free(self, piece: Piece) -> bool:
        """Free a complete request; false while some of it is still moving."""
        job = piece.job
        try:
            self._driver.release(piece.handle)
        except Exception as caught:  # noqa: BLE001  the thread must live on
            self._complain("a finished request cannot be freed yet", caught)
            return False
        self.counters.released += 1
        job.held -= 1
        self._let_go(job)
        return True

    def _flush(self) -> None:
        if not self._outbox or self._wakeup_pending:
            return
        self._wakeup_pending = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop was closed under us: nobody can be told anything any more
            _log.error("the event loop of transfer engine %s ended before the engine was closed", self._name)
            self._outbox.clear()
            self._stopping = True

    def _as_ours(self, caught: Exception) -> KvxferError:
        if isinstance(caught, KvxferError):
            return caught
        _log.error("unexpected failure on the transfer thread", exc_info=caught)
        return KvxferError(Reason.INTERNAL, "unexpected failure in the transfer engine; see the log")

    def _complain(self, what: str, caught: Exception) -> None:
        """Log at most one such failure a second: polling repeats them thousands of times."""
        now = time.perf_counter()
        if now - self._complained >= 1.0:
            self._complained = now
            _log.warning("%s: %s: %s", self._name, what, caught if isinstance(caught, KvxferError) else repr(caught))


def _abandoned() -> KvxferError:
    return KvxferError(Reason.TRANSFER_CANCELLED, "the read was abandoned before all of it was posted")


def _give_way() -> None:
    time.sleep(0)  # the interpreter to the event loop ...
    os.sched_yield()  # ... and the processor to other threads


def _nothing() -> None:
    """A command that only wakes the thread."""
