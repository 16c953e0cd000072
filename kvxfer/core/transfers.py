"""The life of a transfer, as a table.

A transfer is one logical read: one read from each source rank, in as many NIXL requests
as it takes, with one outcome.  The rule behind the table: a
posted READ cannot be called back, so from the moment of posting until the library has let go of every request, the
local blocks belong to the network.  ``DRAINING`` is that time, once the outcome is settled; no transfer leaves it but
by ``QUIESCED``, and only states in :data:`QUIESCENT` may tell the engine that its blocks are free.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final


class State(str, Enum):
    """Where a transfer is.  Draining remembers what it will end as."""

    PREPARED = "PREPARED"
    POSTED = "POSTED"
    DRAINING_FAILED = "DRAINING_FAILED"
    DRAINING_CANCELLED = "DRAINING_CANCELLED"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class Event(str, Enum):
    """What can happen to a transfer."""

    POST = "POST"
    """Its sources are asked; what they grant is handed to the library."""
    COMPLETE = "COMPLETE"
    """Every source's read is done and counts."""
    FAULT = "FAULT"
    """A source failed, its peer is lost, or the deadline passed."""
    CANCEL = "CANCEL"
    """Its owner wants it no more, or it was never read in time."""
    QUIESCED = "QUIESCED"
    """The library has let go of every request."""


TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = MappingProxyType(
    {
        (State.PREPARED, Event.POST): State.POSTED,
        (State.PREPARED, Event.FAULT): State.FAILED,
        (State.PREPARED, Event.CANCEL): State.CANCELLED,
        (State.POSTED, Event.COMPLETE): State.DONE,
        (State.POSTED, Event.FAULT): State.DRAINING_FAILED,
        (State.POSTED, Event.CANCEL): State.DRAINING_CANCELLED,
        # What arrives after the outcome was settled changes nothing.
        (State.DRAINING_FAILED, Event.FAULT): State.DRAINING_FAILED,
        (State.DRAINING_FAILED, Event.CANCEL): State.DRAINING_FAILED,
        (State.DRAINING_FAILED, Event.QUIESCED): State.FAILED,
        (State.DRAINING_CANCELLED, Event.FAULT): State.DRAINING_CANCELLED,
        (State.DRAINING_CANCELLED, Event.CANCEL): State.DRAINING_CANCELLED,
        (State.DRAINING_CANCELLED, Event.QUIESCED): State.CANCELLED,
        **{
            (state, event): state
            for state in (State.DONE, State.FAILED, State.CANCELLED)
            for event in (Event.FAULT, Event.CANCEL, Event.QUIESCED)
        },
    }
)

#: Nothing will happen to these any more.
FINAL_STATES: Final = frozenset({State.DONE, State.FAILED, State.CANCELLED})
#: Nothing writes into the local blocks in these.
QUIESCENT: Final = FINAL_STATES | {State.PREPARED}


class IllegalTransition(Exception):
    """An event that cannot happen in a state: a bug of ours, never a caller's."""


def step(state: State, event: Event) -> State:
    """The state after ``event``.

    :raises IllegalTransition: where the table has no entry.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"{event.value} cannot happen to a transfer that is {state.value}") from None
