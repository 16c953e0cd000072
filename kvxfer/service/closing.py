"""Telling one rank that reads have ended: as many in one call as have ended within a moment.

The NIXL notification of a READ has said so already, of those that are done; this makes sure of it.  So it can wait a
little, and does not cost a call for every read.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.wire.peer import MAX_ENDS, CloseRead

if TYPE_CHECKING:
    from kvxfer.service.link import PeerClient

log = structlog.get_logger()

#: What ends within so many seconds is told in one call.
GATHER: Final = 0.02
#: A call is tried so often, with these pauses between, seconds.
BACKOFF: Final = (0.1, 0.5, 2.0)
TIMEOUT: Final = 5.0


class Ends:
    """The ends of reads from one rank, all by the same reader."""

    def __init__(self, client: PeerClient) -> None:
        self._client = client
        self._gathered: list[CloseRead] = []
        self._telling: asyncio.Future[None] | None = None
        self._running: set[asyncio.Future[None]] = set()

    def tell(self, record: CloseRead) -> asyncio.Future[None]:
        """Tell of an end, together with others.

        :returns: done once it was told, or could not be, which costs the lease's time.  Others wait for it, too: not to
            be cancelled.
        """
        if self._telling is None or len(self._gathered) >= MAX_ENDS:
            self._gathered = []
            self._telling = asyncio.ensure_future(self._tell(self._gathered))
            self._running.add(self._telling)
            self._telling.add_done_callback(self._running.discard)
        self._gathered.append(record)
        return self._telling

    def close(self) -> None:
        """Tell nothing any more."""
        for telling in self._running:
            telling.cancel()

    async def _tell(self, records: list[CloseRead]) -> None:
        await asyncio.sleep(GATHER)
        if self._gathered is records:  # what ends from now on is told by the next
            self._gathered, self._telling = [], None
        ref = records[0].ref
        about = {
            "engine": ref.reader.engine_id,
            "peer": ref.engine_id,
            "peer_rank": str(ref.rank),
            "address": self._client.address,
            "reads": len(records),
        }
        for pause in (*BACKOFF, None):
            try:
                await self._client.close_reads(records, TIMEOUT)
                return
            except KvxferError as error:
                if error.reason is not Reason.PEER_UNREACHABLE:  # it was heard: once more changes nothing
                    log.info("the end of a read was refused", error=str(error), **about)
                    return
                if pause is None:
                    log.info("close not delivered", error=str(error), **about)
                    return
                await asyncio.sleep(pause)
            except Exception:  # nobody looks at how this task ends
                log.exception("telling of ends failed in an unforeseen way", **about)
                return
