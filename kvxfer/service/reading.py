"""One source's share of a read: have it granted, post it, keep it granted, and see whether what arrived counts.

A READ cannot be refused by the side that it reads from.  So it is posted only once that side has answered (OpenRead)
that it holds exactly these blocks for this request; and its bytes count only if it ended inside the time that was
granted.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kvxfer.core.errors import KvxferError
from kvxfer.service.link import PeerClient
from kvxfer.service.opening import SURE, Grant, Opening, clock, looked_at
from kvxfer.service.transfer import Live
from kvxfer.wire.peer import ReadRef
from kvxfer.xfer.api import ReadResult, TransferEngine


async def read_source(engine: TransferEngine, live: Live, ref: ReadRef, opening: Opening, timeout: float) -> ReadResult:
    """From asking for a read until its bytes count.

    :param opening: from :func:`kvxfer.service.opening.announce`.
    :param timeout: seconds; the caller gives up by then.
    :raises KvxferError: what the source or the transfer engine answered; LEASE_EXPIRED where the read took longer than
        was granted (PEER_UNREACHABLE, where the source could not be asked for more).
    """
    moving = None
    try:
        grant = await opening
        grant.check(clock())
        moving = engine.submit(live.read)
        return await _finish(moving, grant, live.source.client, ref, timeout)
    finally:
        leave(opening, moving)


async def _finish(
    moving: asyncio.Future[ReadResult], grant: Grant, client: PeerClient, ref: ReadRef, timeout: float
) -> ReadResult:
    """Wait for a granted read, renewing as it goes on."""
    ended = 0.0

    def stamp(_: asyncio.Future[Any]) -> None:
        nonlocal ended
        ended = clock()

    moving.add_done_callback(stamp)
    while not moving.done():
        # Where the answer came late, and little is left, more is asked for in time, too.
        await asyncio.wait([moving], timeout=max(0.0, min(grant.seconds / 3, (grant.until - clock()) / 2)))
        if not moving.done():
            grant.check(clock())
            await _renew(moving, grant, client, ref, timeout)
    result = moving.result()
    grant.check(ended or clock())
    return result


async def _renew(
    moving: asyncio.Future[ReadResult], grant: Grant, client: PeerClient, ref: ReadRef, timeout: float
) -> None:
    """Ask for more time, while the read goes on; one that ends meanwhile needs none."""
    asked = clock()
    renewing = asyncio.ensure_future(client.renew_read(ref, timeout, max(0.001, grant.until - asked)))
    both: list[asyncio.Future[Any]] = [moving, renewing]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if renewing.done():
            grant.until, grant.unheard = max(grant.until, asked + renewing.result() * SURE), None
    except KvxferError as error:
        if moving.done():
            return  # the source has heard of its end, and has nothing to extend
        if not error.spec.retry:
            raise
        grant.unheard = error  # it is tried again until the time that was granted is over
    finally:
        leave(renewing)  # also where the transfer was given up meanwhile: nobody would look at it


def leave(*waiting: asyncio.Future[Any] | None) -> None:
    """Wait no longer, whatever comes of it; of a posted read this ends the waiting only."""
    for future in waiting:
        if future is not None:
            future.cancel()
            future.add_done_callback(looked_at)
