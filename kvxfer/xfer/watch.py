"""Whether the thread that owns a transfer agent gets on: how long polling has failed, and how long somebody waits.

The thread writes most of it, the event loop reads it.  Times are those of :func:`time.perf_counter`.
"""

from __future__ import annotations

import time
from typing import Final

#: Polling that fails for so long is a fault, and so is a call of the library that others wait for, seconds.  One that
#: copies a large read takes a second or so.
FAILING: Final = 3.0
HANGING: Final = 60.0


class Watch:
    """The clocks of one thread."""

    def __init__(self) -> None:
        self._turned = 0.0
        self._asked = 0.0
        # The first failure since polling has worked, and the last: one value, so that a reader sees both or none.
        self._failed: tuple[float, float] | None = None

    def turn(self) -> None:
        """The thread has come back from whatever it did."""
        self._turned = time.perf_counter()

    def asked(self) -> None:
        """Something is asked of the thread, and nothing else waits for it.  Called on the event loop."""
        self._asked = time.perf_counter()

    def poll_failed(self) -> None:
        """A poll has failed."""
        now = time.perf_counter()
        self._failed = (now if self._failed is None else self._failed[0], now)

    def poll_worked(self) -> None:
        """A poll has not failed."""
        self._failed = None

    @property
    def failing(self) -> bool:
        """Whether the last poll has failed: only another one can tell that the library works again."""
        return self._failed is not None

    def fault(self, *, waiting: bool) -> str:
        """Why the thread cannot be relied on; empty while it works.

        :param waiting: something was asked of the thread that it has not taken yet.
        """
        failed = self._failed
        if failed is not None and (seconds := failed[1] - failed[0]) >= FAILING:
            return f"polling the transfer library has failed for {seconds:.0f} s"
        # A thread that had nothing to do has slept since its last turn: that is no hanging.
        seconds = time.perf_counter() - max(self._turned, self._asked)
        if waiting and seconds >= HANGING:
            return f"the transfer library has not come back for {seconds:.0f} s"
        return ""
