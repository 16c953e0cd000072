"""Transfer and lease life cycles: every state with every event."""

from __future__ import annotations

import pytest

from kvxfer.core import leases, transfers
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


@pytest.mark.parametrize("state", leases.State)
@pytest.mark.parametrize("event", leases.Event)
def test_every_lease_event_in_every_state(state: leases.State, event: leases.Event) -> None:
    lease = leases.Lease("r", 10.0, state)
    ended = {
        leases.Event.READERS_DONE: leases.State.RELEASED,
        leases.Event.EXPIRE: leases.State.EXPIRED,
        leases.Event.WITHDRAW: leases.State.WITHDRAWN,
    }
    assert lease.apply(event) is (ended[event] if state is leases.State.HELD else state)


def test_a_lease_expires_at_its_deadline_and_not_before() -> None:
    lease = leases.Lease("r", 10.0)
    assert (lease.tick(9.999), lease.left(9.0)) == (leases.State.HELD, 1.0)
    assert lease.tick(10.0) is leases.State.EXPIRED
    assert lease.left(9.0) == 0.0
