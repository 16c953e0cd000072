"""Sessions: a cache that stays registered, whatever becomes of the sidecar; for the blocking client."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc

from kvxfer.core.errors import KvxferError, Reason
from kvxfer_client import calls, checks
from kvxfer_client.calls import DEFAULT_TIMEOUT, Call, MakeRegister
from kvxfer_client.channel import closed_error, late_error, session_closed_error
from kvxfer_client.life import GONE, Follow, Found, Hold, Lost, Plan, Register, Sleep, Step, plan
from kvxfer_client.local import Memory
from kvxfer_client.results import Registered

if TYPE_CHECKING:
    from kvxfer_client.client import Client, Watch

log = logging.getLogger(__name__)


class Session:
    """A registered cache that is held: made by :meth:`Client.session`.

    While the session is open, its registration lives; when this process dies, the sidecar undoes it after a grace of
    some seconds.  When the sidecar dies, the session waits for it, registers the same content again and tells the
    owner, by ``on_lost`` and ``on_registered``.  It ends by itself when trying again does not help: when the cache was
    unregistered, another has taken its place, or it is refused; then :attr:`error` says why, and ``on_ended`` is
    called.

    Callbacks run in the session's thread, one at a time; the first ``on_registered`` in the thread that made the
    session.  One that raises ends the session (INTERNAL).  They may close the session.

    A context manager: closes at the end.
    """

    def __init__(
        self,
        client: Client,
        memory: tuple[Memory, ...],
        make: MakeRegister,
        *,
        keep_leases: bool,
        on_lost: Callable[[KvxferError, str], object] | None,
        on_registered: Callable[[Registered], object] | None,
        on_ended: Callable[[KvxferError], object] | None,
    ) -> None:
        """Not for callers; see :meth:`Client.session`."""
        self._client = client
        self._make = make
        self._keep_leases = keep_leases
        self._on_lost, self._on_registered, self._on_ended = on_lost, on_registered, on_ended
        self._plan: Plan = plan(memory)
        self._stream: Watch[None] | None = None
        self._closing = threading.Event()
        self._settled = threading.Event()
        self._cut: Callable[[], object] = lambda: None
        self._registered: Registered | None = None
        self._error: KvxferError | None = None
        self._thread = threading.Thread(target=self._run, name=f"kvxfer session of {client.engine_id}", daemon=True)

    def _begin(self) -> Session:
        """Register and hold; then go on in the background."""
        try:
            step = next(self._plan)
            while not isinstance(step, Follow):
                step = self._plan.send(self._do(step))
        except BaseException:
            self._let_go()
            raise
        self._next = step
        self._thread.start()
        return self

    # -- what the owner asks ---------------------------------------------------------------------------------------

    @property
    def registered(self) -> Registered | None:
        """The registration that is held now; ``None`` while the sidecar is away, and once the session has ended."""
        return self._registered

    @property
    def error(self) -> KvxferError | None:
        """What ended the session, where it was not its owner."""
        return self._error

    def wait_registered(self, timeout: float = DEFAULT_TIMEOUT) -> Registered:
        """Wait until the cache is registered and held; returns at once where it is.

        :param timeout: seconds.
        :raises KvxferError: DEADLINE_EXCEEDED; what ended the session; FIELD_INVALID where it was closed.
        """
        deadline = time.monotonic() + checks.seconds(timeout)
        while True:
            settled = self._settled.wait(max(0.0, deadline - time.monotonic()))
            if self._error is not None:
                raise self._error
            if self._closing.is_set():
                raise session_closed_error(self._client.target)
            if (found := self._registered) is not None:
                return found
            if not settled:
                raise late_error(self._client.target, "RegisterCache", timeout)

    def close(self, *, unregister: bool | None = None) -> None:
        """End the session.  Prompt also where the sidecar is away or hangs, but for the draining.  Idempotent.

        :param unregister: take the cache back now, after draining, where it is registered: nothing reads or writes the
            memory any more when this returns.  Otherwise only the hold ends, and the sidecar undoes the registration
            after its grace.  ``None``: take it back, unless the session keeps its leases.
        :raises KvxferError: REGISTRATION_BUSY where it does not drain in time: the memory must stay as it is, until the
            sidecar has undone the registration; DEADLINE_EXCEEDED likewise.
        """
        first = not self._closing.is_set()
        self._closing.set()
        self._settled.set()
        self._cut()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        found, self._registered = self._registered, None
        self._let_go()
        wanted = not self._keep_leases if unregister is None else unregister
        if first and found is not None and wanted and not self._client._closed:
            try:
                self._client.unregister(found.incarnation)
            except KvxferError as error:
                if error.reason not in GONE:
                    raise

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closing.is_set() else str(self._error or self._registered or "away")
        return f"<Session of engine {self._client.engine_id!r} {state}>"

    # -- the background --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            step: Step = self._next
            while not self._closing.is_set():
                try:
                    done = self._do(step)
                except KvxferError as error:
                    if isinstance(step, Found | Lost):  # of a callback
                        raise
                    step = self._plan.throw(error)
                else:
                    step = self._plan.send(done)
        except KvxferError as error:
            self._end(error)
        except Exception as error:
            log.exception("a session of engine %s failed", self._client.engine_id)
            self._end(KvxferError(Reason.INTERNAL, f"the session failed: {error!r}"))

    def _end(self, error: KvxferError) -> None:
        if self._closing.is_set():
            return
        self._registered, self._error = None, error
        self._let_go()
        self._settled.set()
        if self._on_ended is not None:
            try:
                self._on_ended(error)
            except Exception:
                log.exception("on_ended of a session of engine %s failed", self._client.engine_id)

    def _do(self, step: Step) -> Any:
        match step:
            case Register(memory, again):
                return self._call(self._make(memory, again))
            case Hold(incarnation):
                self._open(incarnation)
            case Follow():
                return self._follow()
            case Sleep(seconds):
                self._closing.wait(seconds)
            case Found(registered, fresh):
                self._registered = registered
                if fresh and self._on_registered is not None:
                    self._on_registered(registered)
                self._settled.set()
            case Lost(reason, incarnation):
                if self._on_lost is not None:
                    self._on_lost(reason, incarnation)
        return None

    def _call(self, call: Call[Registered]) -> Registered:
        with self._client._open(call.method, call.facts):
            future = getattr(self._client._stub, call.method).future(call.request, timeout=call.deadline)
            self._interruptible(future.cancel)
            try:
                answer = future.result()
            except grpc.FutureCancelledError:  # by close()
                raise closed_error(self._client.target) from None
        return call.parse(answer)

    def _open(self, incarnation: str) -> None:
        from kvxfer_client.client import Watch

        self._let_go()
        self._stream = Watch(self._client, calls.hold(self._client, incarnation, self._keep_leases), None)
        self._interruptible(self._stream.close)
        self._stream._begin()

    def _follow(self) -> KvxferError:
        try:
            if self._stream is not None:
                next(self._stream, None)
            ended = KvxferError(Reason.PEER_UNREACHABLE, "the sidecar has ended the stream", target=self._client.target)
        except KvxferError as error:
            ended = error
        if self._client._closed:
            ended = closed_error(self._client.target)
        if not self._closing.is_set():
            self._settled.clear()
            self._registered = None
        return ended

    def _interruptible(self, cut: Callable[[], object]) -> None:
        """What is waited for now, and how :meth:`close` ends that."""
        self._cut = cut
        if self._closing.is_set():
            cut()

    def _let_go(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
