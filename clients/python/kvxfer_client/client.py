"""The blocking client."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from kvxfer.core.errors import KvxferError
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.pb import transfer_pb2_grpc
from kvxfer_client import calls
from kvxfer_client.calls import DEFAULT_TARGET, DEFAULT_TIMEOUT, Call, Origin, Pages
from kvxfer_client.channel import OPTIONS, WATCH, closed_error, late_error, told_as_kvxfer_errors
from kvxfer_client.results import Status, TransferInfo, TransferState, status_from_pb, transfer_from_pb

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
        """See :class:`Origin` for the arguments."""
        super().__init__(target, engine_id=engine_id, timeout=timeout)
        self._channel = grpc.insecure_channel(target, options=OPTIONS)
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
    withdraw = _blocking(calls.withdraw)
    wait_ready = _blocking(calls.wait_ready)

    def list_transfers(self, states: Iterable[TransferState] = (), *, page_size: int = 0) -> Iterator[TransferInfo]:
        """See :func:`kvxfer_client.calls.list_transfers`; pages are asked for as the iterator gets to them."""
        return self._pages(calls.list_transfers(self, states, page_size=page_size))

    def status(self) -> Status:
        """What the sidecar is, holds and is connected to.  :raises KvxferError: what every call may raise."""
        return status_from_pb(self._pages(calls.status_pages(self)))

    def watch(self, *, include_current: bool = False, timeout: float | None = None) -> Watch:
        """Follow the state changes of all transfers of the engine.

        Returns once the watch is live: no change after that is missed.

        :param include_current: begin with every transfer that the sidecar remembers.
        :param timeout: end the watch after so many seconds (DEADLINE_EXCEEDED); ``None``: when it is closed.
        :raises KvxferError: NOT_REGISTERED; and what every call may raise.
        """
        return Watch(self, include_current, timeout)

    def close(self) -> None:
        """End every call and watch, and the connection.  Idempotent."""
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
        with self._open(call.method, call.facts):
            return getattr(self._stub, call.method)(request, timeout=call.deadline, wait_for_ready=call.wait_for_ready)

    @contextmanager
    def _open(self, method: str, facts: Mapping[str, str]) -> Iterator[None]:
        """Around a call: it needs a channel that is open, and fails with errors of ours."""
        if self._closed:
            raise closed_error(self.target)
        try:
            with told_as_kvxfer_errors(self.target, method, facts):
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


class Watch:
    """The changes of all transfers of an engine, as an iterator; made by :meth:`Client.watch`.

    Each change comes as the transfer was then.  The iteration ends when the watch or its client is closed, and raises
    :class:`KvxferError` otherwise: NOT_REGISTERED where the registration has ended, LIMIT_EXCEEDED where the caller was
    too slow and has missed changes (watch again with ``include_current``), PEER_UNREACHABLE where the sidecar is gone.
    A context manager: closes at the end.  :meth:`close` may be called from another thread.
    """

    def __init__(self, client: Client, include_current: bool, timeout: float | None) -> None:
        """Not for callers; see :meth:`Client.watch`."""
        self._client = client
        self._closed = False
        request = calls.watch_request(client, include_current)
        limit = None if timeout is None else calls.checked_seconds(timeout)
        with client._open(WATCH, {}):
            self._call = client._stub.WatchTransfers(request, timeout=limit)
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._call.cancel()

        timer = threading.Timer(client.timeout, give_up)
        timer.daemon = True
        timer.start()
        try:
            self._first = self._receive()
        except KvxferError:
            if late.is_set():
                raise late_error(client.target, WATCH, client.timeout) from None
            raise
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the watch.  Idempotent."""
        self._closed = True
        self._call.cancel()

    def __iter__(self) -> Iterator[TransferInfo]:
        return self

    def __next__(self) -> TransferInfo:
        while True:
            message, self._first = self._first, None
            if message is None:
                message = self._receive()
            if message is None:
                raise StopIteration
            if message.HasField("event"):
                return transfer_from_pb(message.event.transfer)

    def _receive(self) -> pb.WatchTransfersResponse | None:
        """The next message; ``None`` at the end."""
        try:
            with told_as_kvxfer_errors(self._client.target, WATCH, {}):
                return next(self._call, None)
        except KvxferError:
            if self._closed or self._client._closed:
                return None
            raise

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
