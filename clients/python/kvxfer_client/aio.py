"""The asyncio client."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import grpc.aio

from kvxfer.core.errors import KvxferError
from kvxfer.core.layout import CacheLayout, Rank
from kvxfer.pb import transfer_pb2_grpc
from kvxfer_client import calls, checks
from kvxfer_client.aio_session import AsyncSession
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

P = ParamSpec("P")
T = TypeVar("T")


def _awaitable(
    build: Callable[Concatenate[Origin, P], Call[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """The method that makes the call and returns its answer."""

    @functools.wraps(build)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(build(self, *args, **kwargs))

    vars(method)["__signature__"] = calls.signature_of(build)
    return method


class AsyncClient(Origin):
    """An engine's connection to its sidecar, for asyncio.

    The methods of :class:`kvxfer_client.Client`, to be awaited; errors are the same.  A call whose task is cancelled is
    cancelled too, but what the sidecar has begun goes on: a read that was posted ends with :meth:`cancel` only.

    Belongs to the event loop of its first call.  An async context manager: closes at the end.
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
        self._channel: grpc.aio.Channel | None = None
        self._stub: transfer_pb2_grpc.KvTransferAsyncStub | None = None
        self._closed = False

    register = _awaitable(calls.register)
    unregister = _awaitable(calls.unregister)
    handshake = _awaitable(calls.handshake)
    prepare = _awaitable(calls.prepare)
    read = _awaitable(calls.read)
    read_prepared = _awaitable(calls.read_prepared)
    get_transfer = _awaitable(calls.get_transfer)
    cancel = _awaitable(calls.cancel)
    publish = _awaitable(calls.publish)
    renew = _awaitable(calls.renew)
    withdraw = _awaitable(calls.withdraw)
    wait_ready = _awaitable(calls.wait_ready)

    def list_transfers(
        self, states: Iterable[TransferState] = (), *, page_size: int = 0
    ) -> AsyncIterator[TransferInfo]:
        """All transfers of the engine that the sidecar remembers, newest first.

        Pages are asked for as the iterator gets to them.

        :param states: only these; none: all.
        :param page_size: transfers asked for at a time; 0: the sidecar's choice.
        :raises KvxferError: FIELD_INVALID; while iterating: NOT_REGISTERED; and what every call may raise.
        """
        return self._pages(calls.list_transfers(self, states, page_size=page_size))

    def list_leases(self, states: Iterable[LeaseState] = (), *, page_size: int = 0) -> AsyncIterator[LeaseInfo]:
        """All published requests of the engine that the sidecar remembers, newest first.

        Pages are asked for as the iterator gets to them.

        :param states: only these; none: all.
        :param page_size: published requests asked for at a time; 0: the sidecar's choice.
        :raises KvxferError: FIELD_INVALID; while iterating: NOT_REGISTERED; and what every call may raise.
        """
        return self._pages(calls.list_leases(self, states, page_size=page_size))

    async def status(self) -> Status:
        """What the sidecar is, holds and is connected to.

        :raises KvxferError: what every call may raise.
        """
        return status_from_pb([page async for page in self._pages(calls.status_pages(self))])

    async def watch(self, *, include_current: bool = False, timeout: float | None = None) -> AsyncWatch[TransferInfo]:
        """Follow the state changes of all transfers of the engine: ``async for transfer in await client.watch()``.

        Returns once the watch is live: no change after that is missed.

        :param include_current: begin with every transfer that the sidecar remembers.
        :param timeout: end the watch after so many seconds (DEADLINE_EXCEEDED); ``None``: when it is closed.
        :raises KvxferError: NOT_REGISTERED; and what every call may raise.
        """
        return await AsyncWatch(self, calls.watch(self, include_current), timeout)._begin()

    async def watch_leases(
        self, *, include_current: bool = False, timeout: float | None = None
    ) -> AsyncWatch[LeaseInfo]:
        """Follow what becomes of published requests: ``async for lease in await client.watch_leases()``.

        As :meth:`kvxfer_client.Client.watch_leases`.

        :param include_current: begin with every request that the sidecar remembers.
        :param timeout: as for :meth:`watch`.
        :raises KvxferError: NOT_REGISTERED; and what every call may raise.
        """
        return await AsyncWatch(self, calls.watch_leases(self, include_current), timeout)._begin()

    async def session(
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
    ) -> AsyncSession:
        """Register a cache and hold it: ``async with await client.session(...) as session``.

        As :meth:`kvxfer_client.Client.session`; callbacks may be coroutine functions.

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
        return await AsyncSession(
            self,
            handles,
            make,
            keep_leases=keep_leases,
            on_lost=on_lost,
            on_registered=on_registered,
            on_ended=on_ended,
        )._begin()

    async def close(self) -> None:
        """End every call, watch and session, and the connection.  Idempotent."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, call: Call[T]) -> T:
        return call.parse(await self._send(call, call.request))

    async def _send(self, call: Call[Any], request: Any) -> Any:
        with self._open(call.method, call.facts, call.deadline if call.wait_for_ready else None) as stub:
            return await getattr(stub, call.method)(request, timeout=call.deadline, wait_for_ready=call.wait_for_ready)

    async def _pages(self, pages: Pages[T]) -> AsyncIterator[T]:
        request: Any = pages.call.request
        while request is not None:
            answer = await self._send(pages.call, request)
            for item in pages.call.parse(answer):
                yield item
            request = pages.following(request, answer)

    @contextmanager
    def _open(
        self, method: str, facts: Mapping[str, str], waited: float | None = None
    ) -> Iterator[transfer_pb2_grpc.KvTransferAsyncStub]:
        """Around a call: it needs a channel that is open, and fails with errors of ours."""
        if self._closed:
            raise closed_error(self.target)
        if self._stub is None:
            # Not before: a channel belongs to the loop that is running when it is made.
            self._channel = grpc.aio.insecure_channel(self.target, options=OPTIONS)
            self._stub = transfer_pb2_grpc.KvTransferStub(self._channel)
        try:
            with told_as_kvxfer_errors(self.target, method, facts, waited):
                yield self._stub
        except asyncio.CancelledError:
            # grpc.aio says so too where close() has cut the call off; a task that is cancelled itself stays cancelled.
            if self._cut_off():
                raise closed_error(self.target) from None
            raise

    def _cut_off(self) -> bool:
        """Whether a cancelled call was cut off by :meth:`close`, and not by somebody who cancels the current task."""
        return self._closed and not _being_cancelled()


class AsyncWatch(Generic[T]):
    """What changes, as an async iterator; made by :meth:`AsyncClient.watch` and :meth:`AsyncClient.watch_leases`.

    As :class:`kvxfer_client.Watch`.  Cancelling a task that waits for the next change ends the watch.
    """

    def __init__(self, client: AsyncClient, stream: Stream[T], timeout: float | None) -> None:
        """Not for callers; see :meth:`AsyncClient.watch`."""
        self._client = client
        self._stream = stream
        self._closed = False
        self._first: Any = None
        limit = None if timeout is None else checks.seconds(timeout)
        with client._open(stream.method, {}) as stub:
            self._call = getattr(stub, stream.method)(stream.request, timeout=limit)

    async def _begin(self) -> AsyncWatch[T]:
        """Wait until it is live."""
        try:
            self._first = await asyncio.wait_for(self._receive(), self._client.timeout)
        except asyncio.TimeoutError:
            raise late_error(self._client.target, self._stream.method, self._client.timeout) from None
        return self

    def close(self) -> None:
        """End the watch.  Idempotent."""
        self._closed = True
        self._call.cancel()

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while True:
            message, self._first = self._first, None
            if message is None:
                message = await self._receive()
            if message is None:
                raise StopAsyncIteration
            if (item := self._stream.parse(message)) is not None:
                return item

    async def _receive(self) -> Any:
        """The next message; ``None`` at the end."""
        try:
            with told_as_kvxfer_errors(self._client.target, self._stream.method, {}):
                message = await self._call.read()
        except KvxferError:
            if self._closed or self._client._closed:
                return None
            raise
        except asyncio.CancelledError:
            if (self._closed or self._client._closed) and not _being_cancelled():
                return None
            raise
        return None if message is grpc.aio.EOF else message

    async def __aenter__(self) -> AsyncWatch[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _being_cancelled() -> bool:
    """Whether somebody cancels the current task; before Python 3.11 there is no asking."""
    task = asyncio.current_task()
    cancelling = getattr(task, "cancelling", None)
    return cancelling is not None and cancelling() > 0
