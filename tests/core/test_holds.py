"""The rule by which a registration outlives its engine."""

from __future__ import annotations

import itertools

import pytest

from kvxfer.core.holds import TRANSITIONS, Event, Hold, IllegalTransition, State


@pytest.mark.parametrize("state, event", list(itertools.product(State, Event)))
def test_every_state_with_every_event(state: State, event: Event) -> None:
    hold = Hold(5.0)
    hold.state = state
    if (state, event) in TRANSITIONS:
        hold._step(event)
        assert hold.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition):
            hold._step(event)
        assert hold.state is state


def test_what_was_never_held_stays() -> None:
    hold = Hold(5.0)
    assert not hold.tick(1e9)
    assert (hold.state, hold.left(0.0)) == (State.FREE, None)


def test_it_lives_as_long_as_a_stream_is_open_and_the_grace_beyond() -> None:
    hold = Hold(5.0)
    hold.open()
    hold.open()
    assert not hold.tick(1e9)
    hold.end(100.0, keep_leases=True)
    assert (hold.state, hold.streams, hold.left(100.0)) == (State.HELD, 1, None)
    hold.end(200.0, keep_leases=False)
    assert (hold.state, hold.left(201.0)) == (State.WAITING, 4.0)
    assert not hold.keep_leases  # as the last one says
    assert not hold.tick(204.9)
    hold.open()
    assert not hold.tick(300.0)
    hold.end(300.0, keep_leases=True)
    assert hold.tick(305.0)
    assert (hold.over, hold.keep_leases, hold.left(305.0)) == (True, True, None)
    assert not hold.tick(306.0)  # told once


def test_who_is_to_hold_it_must_come_within_the_grace() -> None:
    hold = Hold(5.0)
    hold.expect(0.0)
    assert not hold.tick(4.0)
    hold.expect(4.0)
    assert hold.left(4.0) == 5.0
    assert not hold.tick(8.0)
    hold.open()
    hold.expect(8.0)
    assert hold.state is State.HELD
    hold.end(8.0, keep_leases=False)
    assert hold.tick(13.0)
