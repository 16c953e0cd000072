"""How a registration ends: by its engine's wish, or after its engine, which does not come back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import structlog

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.service.settings import ServiceSettings

if TYPE_CHECKING:
    from kvxfer.service.registrations import Registration

log = structlog.get_logger()


class Lifetimes:
    """The ends of all registrations of a sidecar.

    :param known: the registrations, by engine ID; what has ended is taken out of it.
    :param on_change: called whenever one takes no more work, or goes.
    """

    def __init__(
        self, settings: ServiceSettings, known: dict[str, Registration], on_change: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._known = known
        self._on_change = on_change
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()
        self._ending: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def alone(self, engine_id: str) -> AsyncIterator[None]:
        """One caller at a time for each engine; what that takes is gone with the last of them."""
        lock = self._locks.setdefault(engine_id, asyncio.Lock())
        self._users[engine_id] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[engine_id] -= 1
            if not self._users[engine_id]:
                del self._users[engine_id], self._locks[engine_id]

    async def drain(self, registration: Registration, seconds: float, granted: float = 0.0) -> bool:
        """Let it take no new work, and wait as :meth:`Registration.drain` does."""
        registration.closing = True
        self._on_change()
        return await registration.drain(seconds, granted)

    async def undo(self, registration: Registration, why: KvxferError) -> None:
        """Close it and forget it."""
        await registration.close(why)
        del self._known[registration.identity.engine_id]
        self._on_change()

    def expect(self, registration: Registration) -> None:
        """Its engine shall come to hold it."""
        registration.hold.expect(time.monotonic())
        self.watch(registration)

    def watch(self, registration: Registration) -> None:
        """See after the grace whether its engine has come back."""
        registration.watchdog.cancel()
        left = registration.hold.left(time.monotonic())
        if left is not None and self._known.get(registration.identity.engine_id) is registration:
            registration.watchdog = asyncio.get_running_loop().call_later(left, self._look_after, registration)

    def _look_after(self, registration: Registration) -> None:
        if not registration.hold.tick(time.monotonic()):
            self.watch(registration)  # it is held again, or the timer was early
            return
        task = asyncio.ensure_future(self._bury(registration))
        self._ending.add(task)
        task.add_done_callback(self._buried)

    def _buried(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the registration of a dead engine was not undone", exc_info=error)

    async def _bury(self, registration: Registration) -> None:
        """Its engine is gone: undo the registration, whether or not it drains in time."""
        engine_id, keep = registration.identity.engine_id, registration.hold.keep_leases
        registration.events.engine_lost(len(registration.leases))
        self._on_change()
        if keep and not registration.closing:
            await registration.transfers.drain(self._settings.drain_timeout)
            await registration.leases.over()
        async with self.alone(engine_id):
            if self._known.get(engine_id) is not registration:
                return
            # As where it is replaced: what is granted is waited for, and everything else ends with its agent.
            await self.drain(registration, self._settings.drain_timeout, self._settings.read_grant)
            await self.undo(registration, unregistered(engine_id))

    async def buried(self) -> None:
        """Wait for the registrations of dead engines that are being undone: for leases that have been withdrawn."""
        for task in tuple(self._ending):
            await asyncio.wait([task])


def unregistered(engine_id: str) -> KvxferError:
    """That a registration is no more."""
    return KvxferError(
        Reason.NOT_REGISTERED,
        f"the registration of engine {engine_id} has ended",
        field="engine_id",
        engine_id=engine_id,
    )
