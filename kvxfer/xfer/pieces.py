"""A read on its way to the library: cut into pieces as it is posted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvxfer.xfer.api import Indices


class Pieces:
    """What is left to be posted of a read, in order, so that what is contiguous stays so.

    :param make: makes a request for some of the descriptor pairs, or for all that there are; gives the driver's handle.
    :param ours: of the local side.
    :param theirs: of the remote side, as many.
    :param lengths: bytes of each descriptor, or one number where all have the same.
    """

    def __init__(
        self, make: Callable[[Indices, Indices, bool], Any], ours: Indices, theirs: Indices, lengths: npt.ArrayLike
    ) -> None:
        self._make = make
        self._ours, self._theirs = ours, theirs
        self._length: Final = int(np.asarray(lengths)) if np.ndim(lengths) == 0 else 0
        self._ends: Final = None if self._length else np.cumsum(lengths, dtype=np.uint64)
        self._at = 0
        self._made: deque[tuple[Any, int]] = deque()

    @property
    def left(self) -> bool:
        """Whether anything is."""
        return bool(self._made) or self._at < self._ours.size

    def make(self, most: int) -> None:
        """Make the requests of all that is left, in pieces of at most ``most`` bytes where the descriptors allow it."""
        while self._at < self._ours.size:
            self._made.append(self._cut(most))

    def take(self, most: int) -> tuple[Any, int]:
        """The request of the next piece, and its bytes."""
        return self._made.popleft() if self._made else self._cut(most)

    def drop(self) -> list[Any]:
        """Leave nothing; the requests that were made and not taken."""
        self._at = self._ours.size
        made = [handle for handle, _ in self._made]
        self._made.clear()
        return made

    def size(self, most: int) -> int:
        """Bytes of the next piece."""
        return self._made[0][1] if self._made else self._between(self._at, self._stop(most))

    def _between(self, start: int, stop: int) -> int:
        if self._ends is None:
            return (stop - start) * self._length
        return int(self._ends[stop - 1]) - (int(self._ends[start - 1]) if start else 0)

    def _stop(self, most: int) -> int:
        """Where the next piece ends: of as many as it takes, all of about the same size."""
        count = self._ours.size - self._at
        pieces = -(-self._between(self._at, self._ours.size) // most)
        if pieces <= 1:
            return self._ours.size
        if self._ends is None:
            return self._at + max(1, count // pieces)
        done = int(self._ends[self._at - 1]) if self._at else 0
        fair = done + (int(self._ends[-1]) - done) // pieces
        # Of the array's own type, or NumPy would convert all of it.
        return max(self._at + 1, int(np.searchsorted(self._ends, np.uint64(fair), "right")))

    def _cut(self, most: int) -> tuple[Any, int]:
        start, stop = self._at, self._stop(most)
        whole = stop - start == self._ours.size
        handle = self._make(self._ours[start:stop], self._theirs[start:stop], whole)
        self._at = stop
        return handle, self._between(start, stop)
