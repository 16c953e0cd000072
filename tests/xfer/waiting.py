"""Waiting for conditions, and reading a state afresh."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvxfer.xfer.api import Read, ReadState


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Poll a condition, with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():  # what is waited for happens in memory or in another process
        if time.monotonic() > deadline:
            raise AssertionError("the condition did not come true in time")
        await asyncio.sleep(0.001)


def state_of(read: Read) -> ReadState:
    """The state as it is now (a type checker believes that the attribute cannot change across an await)."""
    return read.state
