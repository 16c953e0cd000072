"""Sidecars in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import structlog.testing

from tests.support.loopback import Cluster, Reading, new_cluster


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[Any]]:
    """What the sidecars log; an error there is a failure of the test, whatever the callers saw."""
    with structlog.testing.capture_logs() as entries:
        yield entries
    assert not [e for e in entries if e["log_level"] in ("error", "critical")]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """A fabric, and as many sidecars on it as the test starts.  No task may fail unseen."""
    unseen: list[dict[str, Any]] = []

    def see(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # gRPC has one poller for all event loops of a process, and wakes those of earlier tests, too.
        if "PollerCompletionQueue" not in str(context.get("message")):
            unseen.append(context)

    asyncio.get_running_loop().set_exception_handler(see)
    async with new_cluster() as made:
        yield made
    assert not unseen


@pytest.fixture
async def reading(cluster: Cluster) -> Reading:
    """Two sidecars with an engine of one rank each, ready for a read."""
    p = await cluster.engine("engine-p", [await cluster.node()])
    d = await cluster.engine("engine-d", [await cluster.node()])
    return Reading(cluster, p, d)
