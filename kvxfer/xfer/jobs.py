"""A read on its way through the pump, and its requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvxfer.core.errors import KvxferError
from kvxfer.xfer.api import ReadResult, Telemetry
from kvxfer.xfer.pieces import Pieces

#: Reads of at least so many bytes are bulk.  They wait until nothing else is to be done, and are then posted piece by
#: piece: posting may take as long as copying, and whatever small has come meanwhile goes between two pieces.
BULK_BYTES: Final = 2**20


def is_bulk(size: int) -> bool:
    """Whether a read of so many bytes waits for others, and is cut into pieces."""
    return size >= BULK_BYTES


@dataclass(slots=True, eq=False)
class Job:
    """A read on its way through the pump.

    :param size: bytes.
    :param notification: to be sent when more than one piece was read; a single one carries it itself.
    :param wanted: asked before each piece is posted: false means that nobody waits for it any more.
    :param settle: called on the loop with the result, once, when it is done, has failed or was not posted.
    :param let_go: called on the loop, once, when the library has freed all requests (or was destroyed).
    :param taken: when its first piece was taken up; ``started``: when that was posted.
    :param posting: seconds inside the posting call, of all pieces.
    :param moving: pieces that are posted and not complete; ``held``: those that the library has not freed.
    :param kept: it has failed, but some of it may still be moving; freed only with the agent.
    :param lost: the connection to its peer broke while it was under way.
    """

    pieces: Pieces
    peer: str
    size: int
    notification: bytes
    wanted: Callable[[], bool]
    settle: Callable[[ReadResult | KvxferError], None]
    let_go: Callable[[], None]
    submitted: float = field(default_factory=time.perf_counter)
    taken: float = 0.0
    started: float = 0.0
    posting: float = 0.0
    moving: int = 0
    held: int = 0
    posted: int = 0
    kept: bool = False
    lost: bool = False
    settled: bool = False
    gone: bool = False
    telemetry: list[Telemetry] = field(default_factory=list)

    @property
    def is_bulk(self) -> bool:
        """Whether it waits for others, and is cut into pieces."""
        return is_bulk(self.size)

    def result(self, now: float) -> ReadResult:
        """All of it is done."""
        told = self.telemetry
        return ReadResult(
            bytes=self.size,
            queue_seconds=self.taken - self.submitted,
            post_seconds=self.posting,
            move_seconds=now - self.started - self.posting,
            telemetry=in_turn(told) if len(told) == self.posted else None,
        )


def in_turn(told: Sequence[Telemetry]) -> Telemetry:
    """Of several requests, one after another."""
    return Telemetry(
        post_seconds=sum(t.post_seconds for t in told),
        transfer_seconds=sum(t.transfer_seconds for t in told),
        bytes=sum(t.bytes for t in told),
        descriptors=sum(t.descriptors for t in told),
    )


@dataclass(slots=True, eq=False)
class Piece:
    """A request of a read.

    :param bulk: bytes of bulk that were under way once it was posted; 0 where it is none.
    """

    job: Job
    handle: Any
    size: int
    started: float
    returned: float = 0.0
    bulk: int = 0
