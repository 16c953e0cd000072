"""Sessions for the asyncio client."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvxfer.core.errors import KvxferError, Reason
from kvxfer_client import calls, checks
from kvxfer_client.calls import DEFAULT_TIMEOUT, MakeRegister
from kvxfer_client.channel import closed_error, late_error, session_closed_error
from kvxfer_client.life import GONE, Follow, Found, Hold, Lost, Plan, Register, Sleep, Step, plan
from kvxfer_client.local import Memory
from kvxfer_client.results import Registered

if TYPE_CHECKING:
    from kvxfer_client.aio import AsyncClient, AsyncWatch

log = logging.getLogger(__name__)


class AsyncSession:
    """A registered cache that is held: made by :meth:`AsyncClient.session`.

    As :class:`kvxfer_client.Session`, with a task instead of a thread; callbacks may be coroutine functions, and are
    awaited.  An async context manager: closes at the end.
    """

    def __init__(
        self,
        client: AsyncClient,
        memory: tuple[Memory, ...],
        make: MakeRegister,
        *,
        keep_leases: bool,
        on_lost: Callable[[KvxferError, str], object] | None,
        on_registered: Callable[[Registered], object] | None,
        on_ended: Callable[[KvxferError], object] | None,
    ) -> None:
        """Not for callers; see :meth:`AsyncClient.session`."""
        self._client = client
        self._make = make
        self._keep_leases = keep_leases
        self._on_lost, self._on_registered, self._on_ended = on_lost, on_registered, on_ended
        self._plan: Plan = plan(memory)
        self._stream: AsyncWatch[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._settled = asyncio.Event()
        self._registered: Registered | None = None
        self._error: KvxferError | None = None

    async def _begin(self) -> AsyncSession:
        """Register and hold; then go on in the background."""
        try:
            step = next(self._plan)
            while not isinstance(step, Follow):
                step = self._plan.send(await self._do(step))
        except BaseException:
            self._let_go()
            raise
        self._task = asyncio.ensure_future(self._run(step))
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

    async def wait_registered(self, timeout: float = DEFAULT_TIMEOUT) -> Registered:
        """Wait until the cache is registered and held; returns at once where it is.

        :param timeout: seconds.
        :raises KvxferError: DEADLINE_EXCEEDED; what ended the session; FIELD_INVALID where it was closed.
        """
        try:
            return await asyncio.wait_for(self._await_registered(), checks.seconds(timeout))
        except asyncio.TimeoutError:
            raise late_error(self._client.target, "RegisterCache", timeout) from None

    async def _await_registered(self) -> Registered:
        while True:
            await self._settled.wait()
            if self._error is not None:
                raise self._error
            if self._closing:
                raise session_closed_error(self._client.target)
            if (found := self._registered) is not None:
                return found
            await asyncio.sleep(0)

    async def close(self, *, unregister: bool | None = None) -> None:
        """End the session; as :meth:`kvxfer_client.Session.close`.

        :param unregister: take the cache back now, after draining; ``None``: unless the session keeps its leases.
        :raises KvxferError: REGISTRATION_BUSY, DEADLINE_EXCEEDED.
        """
        first, self._closing = not self._closing, True
        self._settled.set()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.wait([self._task])
        found, self._registered = self._registered, None
        self._let_go()
        wanted = not self._keep_leases if unregister is None else unregister
        if first and found is not None and wanted and not self._client._closed:
            try:
                await self._client.unregister(found.incarnation)
            except KvxferError as error:
                if error.reason not in GONE:
                    raise

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closing else str(self._error or self._registered or "away")
        return f"<AsyncSession of engine {self._client.engine_id!r} {state}>"

    # -- the background --------------------------------------------------------------------------------------------

    async def _run(self, step: Step) -> None:
        try:
            while not self._closing:
                try:
                    done = await self._do(step)
                except KvxferError as error:
                    if isinstance(step, Found | Lost):  # of a callback
                        raise
                    step = self._plan.throw(error)
                else:
                    step = self._plan.send(done)
        except KvxferError as error:
            await self._end(error)
        except Exception as error:
            log.exception("a session of engine %s failed", self._client.engine_id)
            await self._end(KvxferError(Reason.INTERNAL, f"the session failed: {error!r}"))

    async def _end(self, error: KvxferError) -> None:
        if self._closing:
            return
        self._registered, self._error = None, error
        self._let_go()
        self._settled.set()
        try:
            await _tell(self._on_ended, error)
        except Exception:
            log.exception("on_ended of a session of engine %s failed", self._client.engine_id)

    async def _do(self, step: Step) -> Any:
        match step:
            case Register(memory, again):
                return await self._client._run(self._make(memory, again))
            case Hold(incarnation):
                await self._open(incarnation)
            case Follow():
                return await self._follow()
            case Sleep(seconds):
                await asyncio.sleep(seconds)
            case Found(registered, fresh):
                self._registered = registered
                if fresh:
                    await _tell(self._on_registered, registered)
                self._settled.set()
            case Lost(reason, incarnation):
                await _tell(self._on_lost, reason, incarnation)
        return None

    async def _open(self, incarnation: str) -> None:
        from kvxfer_client.aio import AsyncWatch

        self._let_go()
        self._stream = AsyncWatch(self._client, calls.hold(self._client, incarnation, self._keep_leases), None)
        await self._stream._begin()

    async def _follow(self) -> KvxferError:
        ended = KvxferError(Reason.PEER_UNREACHABLE, "the sidecar has ended the stream", target=self._client.target)
        try:
            if self._stream is not None:
                await anext(self._stream, None)
        except KvxferError as error:
            ended = error
        if self._client._closed:
            ended = closed_error(self._client.target)
        if not self._closing:
            self._settled.clear()
            self._registered = None
        return ended

    def _let_go(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


async def _tell(callback: Callable[..., object] | None, *facts: object) -> None:
    if callback is not None:
        answer = callback(*facts)
        if inspect.isawaitable(answer):
            await answer
