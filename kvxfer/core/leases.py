"""The life of a lease: P's promise to keep a request's blocks, as a table.

Time comes in as an argument (seconds on any monotonic clock).  P may reuse blocks only once their lease has left
``HELD``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final


class State(str, Enum):
    """Where a lease is."""

    HELD = "HELD"
    RELEASED = "RELEASED"
    EXPIRED = "EXPIRED"
    WITHDRAWN = "WITHDRAWN"


class Event(str, Enum):
    """What can happen to a lease."""

    READERS_DONE = "READERS_DONE"
    EXPIRE = "EXPIRE"
    WITHDRAW = "WITHDRAW"


TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = MappingProxyType(
    {
        (State.HELD, Event.READERS_DONE): State.RELEASED,
        (State.HELD, Event.EXPIRE): State.EXPIRED,
        (State.HELD, Event.WITHDRAW): State.WITHDRAWN,
        # An ended lease stays ended as it ended.
        **{
            (state, event): state
            for state in (State.RELEASED, State.EXPIRED, State.WITHDRAWN)
            for event in (Event.READERS_DONE, Event.EXPIRE, Event.WITHDRAW)
        },
    }
)


@dataclass
class Lease:
    """A request's blocks, held until ``deadline``.

    :param deadline: monotonic seconds.
    """

    request_id: str
    deadline: float
    state: State = State.HELD

    def apply(self, event: Event) -> State:
        """The state after ``event``; total over states and events."""
        self.state = TRANSITIONS[self.state, event]
        return self.state

    def tick(self, now: float) -> State:
        """Let time pass: a held lease past its deadline expires."""
        return self.apply(Event.EXPIRE) if self.state is State.HELD and now >= self.deadline else self.state

    def left(self, now: float) -> float:
        """Seconds that the lease still runs; 0 once it has ended."""
        return max(0.0, self.deadline - now) if self.state is State.HELD else 0.0
