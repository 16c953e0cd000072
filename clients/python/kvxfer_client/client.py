"""The blocking client."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import grpc

from kvxfer.core.errors import KvxferError
from kvxfer.core.layout import CacheLayout, Rank
from kvxfer.pb import transfer_pb2_grpc
from kvxfer_client import calls, checks
from kvxfer_client.calls import (
    DEFAULT_REGISTER_TIMEOUT,
    DEFAULT_TARGET,
    DEFAULT_TIMEOUT,
    Call,
    Origin,
    Pages,
    Stream,
)
from kvxfer_client.channel import OPTIONS, closed_error, late_error, told_as_kvxfer_errors
from kvxfer_client.local import Memory
from kvxfer_client.results import (
    LeaseInfo,
    LeaseState,
    Registered,
    Status,
    TransferInfo,
    TransferState,
    status_from_pb,
)
from kvxfer_client.session import Session

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(build: Callable[Concatenate[Origin, P], Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """The method that makes the call and returns its answer."""

    @functools.wraps(build)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(build(self, *args, **kwargs))

    vars(method)["__signature__"] = calls.signature_of(build)
    return method


class Client(Origin):
    """An engine's connection to its sidecar.

    Methods block until the answer is there or a deadline has passed, and may be called from several threads.  Whatever
    goes wrong is a :class:`KvxferError`; besides the reasons that each method names, every call may raise
    PEER_UNREACHABLE (nobody answers), DEADLINE_EXCEEDED, FIELD_INVALID, SHUTTING_DOWN and INTERNAL.

    Nothing is sent before the first call.  A context manager: closes at the end.
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, engine_id: str = "", timeout: float = DEFAULT_TIMEOUT) -> None:
        """Connect when the first call is made.

        :param target: the sidecar's engine listener, a gRPC target (``unix:/run/kvxfer/kvxfer.sock``) or the socket's
            path (``/run/kvxfer/kvxfer.sock``).
        :param engine_id: the local engine; may stay empty where only :meth:`status` and :meth:`wait_ready` are called.
        :param timeout: deadline of calls that only ask, and what calls get on top that give the sidecar a time of its
            own, seconds.
        """
        super().__init__(target, engine_id=engine_id, timeout=timeout)
        self._channel = grpc.insecure_channel(self.target, options=OPTIONS)
        self._stub = transfer_pb2_grpc.KvTransferStub(self._channel)
        self._closed = False

    register = _blocking(calls.register)
    unregister = _blocking(calls.unregister)
    handshake = _blocking(calls.handshake)
    prepare = _blocking(calls.prepare)
    read = _blocking(calls.read)
    read_prepared = _blocking(calls.read_prepared)
    get_transfer = _blocking(calls.get_transfer)
    cancel = _blocking(calls.cancel)
    publish = _blocking(calls.publish)
    renew = _blocking(calls.renew)
    withdraw = _blocking(calls.withdraw)
    wait_ready = _blocking(calls.wait_ready)

    def list_transfers(self, states: Iterable[TransferState] = (), *, page_size: int = 0) -> Iterator[TransferInfo]:
        """All transfers of the engine that the sidecar remembers, newest first.

        Pages are asked for as the iterator gets to them.

        :param states: only these; none: all.
        :param page_size: transfers asked for at a time; 0: the sidecar's choice.
        :raises KvxferError: FIELD_INVALID; while iterating: NOT_REGISTERED; and what every call may raise.
        """
        return self._pages(calls.list_transfers(self, states, page_size=page_size))

    def list_leases(self, states: Iterable[LeaseState] = (), *, page_size: int = 0) -> Iterator[LeaseInfo]:
        """All published requests of the engine that the sidecar remembers, newest first.

        Pages are asked for as the iterator gets to them.

        :param states: only these; none: all.
        :param page_size: published requests asked for at a time; 0: the sidecar's choice.
        :raises KvxferError: FIELD_INVALID; while iterating: NOT_REGISTERED; and what every call may raise.
        """
        return self._pages(calls.list_leases(self, states, page_size=page_size))

    def status(self) -> Status:
        """What the sidecar is, holds and is connected to.

        :raises KvxferError: what every call may raise.
        """
        return status_from_pb(self._pages(calls.status_pages(self)))

    def watch(self, *, include_current: bool = False, timeout: float | None = None) -> Watch[TransferInfo]:
        """Follow the state changes of all transfers of the engine.

        Returns once the watch is live: no change after that is missed.

        :param include_current: begin with every transfer that the sidecar remembers.
        :param timeout: end the watch after so many seconds (DEADLINE_EXCEEDED); ``None``: when it is closed.
        :raises KvxferError: NOT_REGISTERED; and what every call may raise.
        """
        return Watch(self, calls.watch(self, include_current), timeout)._begin()

    def watch_leases(self, *, include_current: bool = False, timeout: float | None = None) -> Watch[LeaseInfo]:
        """Follow what becomes of published requests: each comes as it is published, and when it has ended.

        Blocks may be freed when their lease is told here as ended, and at no other time.  Returns once the watch is
        live: no change after that is missed.

        :param include_current: begin with every request that the sidecar remembers.
        :param timeout: as for :meth:`watch`.
        :raises KvxferError: NOT_REGISTERED; and what every call may raise.
        """
        return Watch(self, calls.watch_leases(self, include_current), timeout)._begin()

    def session(
        self,
        layout: CacheLayout,
        memory: Sequence[Memory],
        *,
        compatibility_key: str,
        rank: Rank = Rank(),  # noqa: B008 - frozen
        ranks: Iterable[tuple[Rank, str]] = (),
        dp_rank: int = 0,
        dp_size: int = 1,
        replace: bool = False,
        timeout: float = DEFAULT_REGISTER_TIMEOUT,
        keep_leases: bool = False,
        on_lost: Callable[[KvxferError, str], object] | None = None,
        on_registered: Callable[[Registered], object] | None = None,
        on_ended: Callable[[KvxferError], object] | None = None,
    ) -> Session:
        """Register a cache and hold it: undone when this process dies, and registered again when the sidecar does.

        Returns once it is registered and held; the first attempt is not repeated (:meth:`wait_ready` waits for a
        sidecar that is not there yet).  Arguments as for :meth:`register`, and:

        Memory that the sidecar makes as a file (:class:`Owned`) outlives the sidecar: keep it mapped, it is registered
        again by its path, with all that is in it.  A memfd of the sidecar is gone with it, which ends the session
        (MEMORY_HANDLE_INVALID).

        :param replace: an earlier registration of this engine, as one of a process before this, gives way.  Never one
            that somebody else has made since.
        :param keep_leases: when this process dies, what it has published stays readable until its leases end; only
            where all memory is owned by the sidecar.
        :param on_lost: called with the reason and the old incarnation when a registration is gone: with it all its
            leases, transfers and tickets.  Its blocks are read by nobody any more.
        :param on_registered: called with each registration: the first, and every one that follows a loss.
        :param on_ended: called with the error when the session ends by itself.
        :raises KvxferError: as :meth:`register`; FIELD_INVALID (``keep_leases``); UNSUPPORTED where the sidecar is too
            old.
        """
        handles, make = calls.held(
            self,
            layout,
            memory,
            compatibility_key=compatibility_key,
            rank=rank,
            ranks=checks.addresses(ranks),
            dp_rank=dp_rank,
            dp_size=dp_size,
            replace=replace,
            timeout=timeout,
        )
        return Session(
            self,
            handles,
            make,
            keep_leases=keep_leases,
            on_lost=on_lost,
            on_registered=on_registered,
            on_ended=on_ended,
        )._begin()

    def close(self) -> None:
        """End every call, watch and session, and the connection.  Idempotent."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, call: Call[T]) -> T:
        return call.parse(self._send(call, call.request))

    def _send(self, call: Call[Any], request: Any) -> Any:
        with self._open(call.method, call.facts, call.deadline if call.wait_for_ready else None):
            return getattr(self._stub, call.method)(request, timeout=call.deadline, wait_for_ready=call.wait_for_ready)

    @contextmanager
    def _open(self, method: str, facts: Mapping[str, str], waited: float | None = None) -> Iterator[None]:
        """Around a call: it needs a channel that is open, and fails with errors of ours."""
        if self._closed:
            raise closed_error(self.target)
        try:
            with told_as_kvxfer_errors(self.target, method, facts, waited):
                yield
        except ValueError:
            # Closed by another thread before the call began.
            if self._closed:
                raise closed_error(self.target) from None
            raise

    def _pages(self, pages: Pages[T]) -> Iterator[T]:
        request: Any = pages.call.request
        while request is not None:
            answer = self._send(pages.call, request)
            yield from pages.call.parse(answer)
            request = pages.following(request, answer)


class Watch(Generic[T]):
    """What changes, as an iterator; made by :meth:`Client.watch` and :meth:`Client.watch_leases`.

    Each change comes as the transfer or lease was then.  The iteration ends when the watch or its client is closed, and
    raises :class:`KvxferError` otherwise: NOT_REGISTERED where the registration has ended, LIMIT_EXCEEDED where the
    caller was too slow and has missed changes (watch again with ``include_current``), PEER_UNREACHABLE where the
    sidecar is gone.  A context manager: closes at the end.  :meth:`close` may be called from another thread.
    """

    def __init__(self, client: Client, stream: Stream[T], timeout: float | None) -> None:
        """Not for callers; see :meth:`Client.watch`."""
        self._client = client
        self._stream = stream
        self._closed = False
        self._first: Any = None
        limit = None if timeout is None else checks.seconds(timeout)
        with client._open(stream.method, {}):
            self._call = getattr(client._stub, stream.method)(stream.request, timeout=limit)

    def _begin(self) -> Watch[T]:
        """Wait until it is live."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._call.cancel()

        timer = threading.Timer(self._client.timeout, give_up)
        timer.daemon = True
        timer.start()
        try:
            self._first = self._receive()
        except KvxferError:
            if late.is_set():
                raise late_error(self._client.target, self._stream.method, self._client.timeout) from None
            raise
        finally:
            timer.cancel()
        return self

    def close(self) -> None:
        """End the watch.  Idempotent."""
        self._closed = True
        self._call.cancel()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while True:
            message, self._first = self._first, None
            if message is None:
                message = self._receive()
            if message is None:
                raise StopIteration
            if (item := self._stream.parse(message)) is not None:
                return item

    def _receive(self) -> Any:
        """The next message; ``None`` at the end."""
        try:
            with told_as_kvxfer_errors(self._client.target, self._stream.method, {}):
                return next(self._call, None)
        except KvxferError:
            if self._closed or self._client._closed:
                return None
            raise

    def __enter__(self) -> Watch[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
