"""Streams of changes: each watcher gets all of them in order, and one that falls too far behind is told so."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from kvxfer.core.errors import KvxferError, Reason

#: Changes that a watcher may be behind before it is dropped.
BACKLOG: Final = 10_000

T = TypeVar("T")


@dataclass(eq=False)
class Watcher(Generic[T]):
    """One stream: what changed, in the order of the changes; ``None`` at the end."""

    queue: asyncio.Queue[T | None] = field(default_factory=lambda: asyncio.Queue(BACKLOG))
    overrun: bool = False

    async def next(self) -> T | None:
        """The next change; ``None`` once there will be none.

        :raises KvxferError: LIMIT_EXCEEDED once all that was kept has been given, and changes were missed.
        """
        if self.overrun and self.queue.empty():
            raise KvxferError(
                Reason.LIMIT_EXCEEDED,
                "this watch fell too far behind and has missed changes; watch again with include_current",
            )
        return await self.queue.get()


class Watchers(Generic[T]):
    """All streams of one kind."""

    def __init__(self) -> None:
        self._all: set[Watcher[T]] = set()

    def watch(self) -> Watcher[T]:
        """Follow every change from now on; give it back with :meth:`unwatch`."""
        watcher = Watcher[T]()
        self._all.add(watcher)
        return watcher

    def unwatch(self, watcher: Watcher[T]) -> None:
        """End a stream."""
        self._all.discard(watcher)

    def tell(self, changed: T) -> None:
        """Something has changed."""
        for watcher in tuple(self._all):
            self._put(watcher, changed)

    def close(self) -> None:
        """Nothing will change any more."""
        for watcher in tuple(self._all):
            self._put(watcher, None)
        self._all.clear()

    def _put(self, watcher: Watcher[T], item: T | None) -> None:
        try:
            watcher.queue.put_nowait(item)
        except asyncio.QueueFull:  # it is told once it has caught up with what it has
            watcher.overrun = True
            self._all.discard(watcher)
