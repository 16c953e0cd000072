"""Whether an engine still holds its registration: a rule over streams that begin and end.  Times are in seconds.

A registration that was never held is nobody's to lose: it stays until it is unregistered.  Once held, it lives as long
as a stream is open; after the last one it waits for a grace, in which another stream takes it up again.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final


class State(str, Enum):
    """Where a registration is, as far as its engine goes."""

    FREE = "FREE"
    """Never held, nor meant to be."""
    HELD = "HELD"
    """A stream is open."""
    WAITING = "WAITING"
    """None is open, but one may still come."""
    OVER = "OVER"
    """The grace has passed: its engine is gone."""


class Event(str, Enum):
    """What can happen to it."""

    EXPECT = "EXPECT"
    """It was registered by somebody who will hold it."""
    OPEN = "OPEN"
    """A stream begins."""
    LAST_ENDS = "LAST_ENDS"
    """The last stream ends."""
    LATE = "LATE"
    """The grace has passed."""


TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = MappingProxyType(
    {
        (State.FREE, Event.EXPECT): State.WAITING,
        (State.FREE, Event.OPEN): State.HELD,
        (State.HELD, Event.EXPECT): State.HELD,
        (State.HELD, Event.OPEN): State.HELD,
        (State.HELD, Event.LAST_ENDS): State.WAITING,
        # A sign of life: the grace begins anew.
        (State.WAITING, Event.EXPECT): State.WAITING,
        (State.WAITING, Event.OPEN): State.HELD,
        (State.WAITING, Event.LATE): State.OVER,
    }
)


class IllegalTransition(Exception):
    """An event that cannot happen in a state: a bug of ours, never a caller's."""


class Hold:
    """The hold on one registration.

    :param grace: how long it waits for a stream, seconds.
    """

    def __init__(self, grace: float) -> None:
        self.grace: Final = grace
        self.state = State.FREE
        #: Open streams.
        self.streams = 0
        #: What the stream that ended last has asked for.
        self.keep_leases = False
        self._deadline = 0.0

    @property
    def over(self) -> bool:
        """Whether its engine is gone."""
        return self.state is State.OVER

    def left(self, now: float) -> float | None:
        """Seconds that it still waits; ``None`` where it does not wait."""
        return max(0.0, self._deadline - now) if self.state is State.WAITING else None

    def expect(self, now: float) -> None:
        """Somebody has registered it who will open a stream."""
        self._step(Event.EXPECT)
        self._deadline = now + self.grace

    def open(self) -> None:
        """A stream begins."""
        self._step(Event.OPEN)
        self.streams += 1

    def end(self, now: float, *, keep_leases: bool) -> None:
        """A stream ends."""
        self.streams -= 1
        if self.streams == 0:
            self.keep_leases = keep_leases
            self._deadline = now + self.grace
            self._step(Event.LAST_ENDS)

    def tick(self, now: float) -> bool:
        """Let time pass.

        :returns: whether that was the end.
        """
        late = self.state is State.WAITING and now >= self._deadline
        if late:
            self._step(Event.LATE)
        return late

    def _step(self, event: Event) -> None:
        try:
            self.state = TRANSITIONS[self.state, event]
        except KeyError:
            raise IllegalTransition(
                f"{event.value} cannot happen to a registration that is {self.state.value}"
            ) from None
