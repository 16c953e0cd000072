"""What the engine keeps for each read and each prepared list."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Final

from kvxfer.xfer.api import Peer, ReadState, Rows
from kvxfer.xfer.pieces import Pieces


class PumpedRead:
    """The engine's side of :class:`kvxfer.xfer.api.Read`."""

    __slots__ = (
        "_quiesced",
        "abandoned",
        "bytes",
        "descriptors",
        "kept",
        "local",
        "lost",
        "make_seconds",
        "notification",
        "pieces",
        "remote",
        "state",
    )

    def __init__(
        self, pieces: Pieces, local: Rows, remote: Rows, nbytes: int, descriptors: int, notification: bytes
    ) -> None:
        self.pieces: Final = pieces
        self.notification: Final = notification
        self.local: Final = local
        self.remote: Final = remote
        self.bytes: Final = nbytes
        self.descriptors: Final = descriptors
        self.make_seconds = 0.0
        self.state = ReadState.READY
        self.abandoned = False
        #: See :attr:`kvxfer.xfer.api.Read.kept`.
        self.kept = False
        #: See :attr:`kvxfer.xfer.api.Read.lost`.
        self.lost = False
        self._quiesced: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def peer(self) -> Peer:
        """Whose memory it reads."""
        return self.remote.peer

    @property
    def is_quiesced(self) -> bool:
        """Whether nothing writes into its local blocks any more."""
        return self.state is ReadState.READY or self._quiesced.done()

    @property
    def quiesced(self) -> Awaitable[None]:
        """A fresh awaitable; cancelling it does not disturb other waiters."""
        return asyncio.shield(self._quiesced)

    def let_go(self) -> None:
        """Note that the library has freed the request."""
        if not self._quiesced.done():
            self._quiesced.set_result(None)


@dataclass(slots=True)
class RowsEntry:
    """A prepared list, and who uses it.

    :param handle: the driver's; None until it is prepared.
    :param registrations: the numbers of the registrations that it touches (local lists only).
    :param users: reads that were made from it and whose request is not freed yet.
    :param closing: it was released, and is freed with its last user.
    """

    rows: Rows
    handle: Any
    registrations: frozenset[int]
    users: int = 0
    closing: bool = False
