"""The life of a transfer: every state with every event."""

from __future__ import annotations

import pytest

from kvxfer.core import transfers
from kvxfer.core.transfers import Event, IllegalTransition, State

ILLEGAL = {
    (State.PREPARED, Event.COMPLETE),
    (State.PREPARED, Event.QUIESCED),
    (State.POSTED, Event.POST),
    (State.POSTED, Event.QUIESCED),
    *((s, e) for s in State if s not in (State.PREPARED, State.POSTED) for e in (Event.POST, Event.COMPLETE)),
}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_every_event_in_every_state(state: State, event: Event) -> None:
    if (state, event) in ILLEGAL:
        with pytest.raises(IllegalTransition, match=f"{event.value} cannot happen to a transfer that is {state.value}"):
            transfers.step(state, event)
        return
    after = transfers.step(state, event)
    if state in transfers.FINAL_STATES:
        assert after is state
    if state is State.POSTED:
        # From posting on, nothing but completion or quiescence makes the blocks free.
        assert (after in transfers.QUIESCENT) == (event is Event.COMPLETE)
    if state in (State.DRAINING_FAILED, State.DRAINING_CANCELLED):
        assert (after in transfers.QUIESCENT) == (event is Event.QUIESCED)


def test_draining_ends_as_it_began() -> None:
    for event, end in ((Event.FAULT, State.FAILED), (Event.CANCEL, State.CANCELLED)):
        draining = transfers.step(State.POSTED, event)
        for late in (Event.FAULT, Event.CANCEL):
            assert transfers.step(draining, late) is draining
        assert transfers.step(draining, Event.QUIESCED) is end
