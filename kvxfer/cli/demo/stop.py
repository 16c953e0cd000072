"""Ending early: signals, and the Enter key."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interruptible(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine; the first signal cancels it, and no signal disturbs its cleaning up.

    :raises KeyboardInterrupt: after the cleaning up, where a signal came.
    """

    async def main() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work())
        came = False

        def stop() -> None:
            nonlocal came
            if not came:
                came = True
                task.cancel()

        for number in _SIGNALS:
            loop.add_signal_handler(number, stop)
        try:
            return await task
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    return asyncio.run(main())


async def enter() -> None:
    """Wait for the Enter key or a signal; both are an ordinary end."""
    loop = asyncio.get_running_loop()
    pressed = asyncio.Event()

    def read() -> None:
        if sys.stdin.readline():
            pressed.set()
        else:  # nobody will ever press it: only a signal ends us now
            loop.remove_reader(sys.stdin)

    # What cannot be watched, such as /dev/null, is never pressed either.
    with contextlib.suppress(OSError, ValueError):
        loop.add_reader(sys.stdin, read)
    with contextlib.suppress(asyncio.CancelledError):
        await pressed.wait()
    with contextlib.suppress(ValueError):
        loop.remove_reader(sys.stdin)
