"""The life of a lease: every state with every event, and what readers and time do to it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.core import leases
from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.core.leases import ENDED, TRANSITIONS, Event, Lease, ReadKey, State

#: What each state becomes, event by event; "-" is the same.
EXPECTED = """
            READERS_DONE  EXPIRE     WITHDRAW      QUIET
HELD        RELEASING     EXPIRING   WITHDRAWING   -
RELEASING   -             -          WITHDRAWING   RELEASED
EXPIRING    RELEASING     -          WITHDRAWING   EXPIRED
WITHDRAWING -             -          -             WITHDRAWN
RELEASED    -             -          -             -
EXPIRED     -             -          -             -
WITHDRAWN   -             -          -             -
"""


def expected() -> dict[tuple[State, Event], State]:
    head, *rows = (line.split() for line in EXPECTED.strip().splitlines())
    return {
        (State(row[0]), Event(event)): State(row[0] if cell == "-" else cell)
        for row in rows
        for event, cell in zip(head, row[1:], strict=True)
    }


def test_every_event_in_every_state() -> None:
    assert set(TRANSITIONS) == set(itertools.product(State, Event))
    assert dict(TRANSITIONS) == expected()


def test_blocks_are_free_only_in_states_that_nothing_leaves() -> None:
    for state in State:
        after = {TRANSITIONS[state, event] for event in Event}
        assert (state in ENDED) == (after == {state})
        # While a granted read may be open (no QUIET) no event frees the blocks.
        if state not in ENDED:
            assert not ENDED & {TRANSITIONS[state, event] for event in Event if event is not Event.QUIET}


def key(rank: int = 0, transfer: str = "t", engine: str = "d", size: int = 4) -> ReadKey:
    return ReadKey(engine, Rank(rank, size), "inc", transfer)


def lease(readers: int | None = None, published: float = 0.0, deadline: float = 30.0) -> Lease:
    return Lease("r", b"x" * 16, {}, 10, readers=readers, published=published, deadline=deadline)


def refused(reason: Reason) -> pytest.RaisesExc[KvxferError]:
    return pytest.RaisesExc(KvxferError, check=lambda error: error.reason is reason)


def test_it_expires_at_its_deadline_and_not_before() -> None:
    one = lease(deadline=10.0)
    one.tick(9.999)
    assert (one.state, one.left(9.0), one.due()) == (State.HELD, 1.0, 10.0)
    one.tick(10.0)
    assert (one.state, one.left(9.0)) == (State.EXPIRED, 0.0)
    with refused(Reason.LEASE_EXPIRED):
        one.extend(20.0)


def test_a_repeated_publication_only_ever_extends() -> None:
    one = lease(deadline=10.0)
    one.extend(5.0)
    assert one.deadline == 10.0
    one.extend(15.0)
    assert one.deadline == 15.0


def test_it_is_released_by_distinct_readers_and_by_no_number_of_messages() -> None:
    one = lease()
    for rank in range(3):
        for again in range(5):
            one.close(key(rank, f"t{again}"), 4, 1.0, done=True)
    assert one.state is State.HELD
    one.close(key(3), 4, 1.0, done=True)
    assert one.state is State.RELEASED


def test_readers_of_different_engines_do_not_add_up() -> None:
    one = lease()
    one.close(key(0, engine="d1", size=2), 2, 1.0, done=True)
    one.close(key(1, engine="d2", size=2), 2, 1.0, done=True)
    assert one.state is State.HELD
    one.close(key(1, engine="d1", size=2), 2, 1.0, done=True)
    assert one.state is State.RELEASED


def test_one_that_will_read_again_is_not_done() -> None:
    one = lease()
    one.close(key(), 1, 1.0, done=False)
    assert one.state is State.HELD
    one.close(key(transfer="again"), 1, 2.0, done=True)
    assert one.state is State.RELEASED


@pytest.mark.parametrize("event", ["expire", "withdraw", "done"])
def test_blocks_stay_while_a_granted_read_is_open(event: str) -> None:
    one = lease(deadline=10.0)
    one.open(key(0, size=2), 2, 15.0, 1.0)
    if event == "expire":
        one.tick(10.0)
    elif event == "withdraw":
        one.withdraw()
    else:
        one.close(key(0, "other", size=2), 2, 2.0, done=True)
        one.close(key(1, size=2), 2, 2.0, done=True)
    assert not one.ended
    assert one.held_for(10.0) == 6.0
    with refused(Reason.LEASE_EXPIRED):
        one.open(key(1, "new", size=2), 2, 15.0, 10.0)
    one.tick(15.999)
    assert not one.ended
    one.tick(16.0)
    assert one.state is {"expire": State.EXPIRED, "withdraw": State.WITHDRAWN, "done": State.RELEASED}[event]


def test_an_open_read_that_ends_lets_the_lease_end() -> None:
    one = lease(deadline=10.0)
    one.open(key(), 1, 15.0, 1.0)
    one.tick(10.0)
    assert one.state is State.EXPIRING
    one.close(key(), 1, 11.0, done=True)
    assert one.state is State.RELEASED


def test_the_number_of_readers_must_agree() -> None:
    one = lease()
    one.open(key(0), 4, 15.0, 1.0)
    with refused(Reason.FIELD_INVALID):
        one.open(key(1), 2, 15.0, 1.0)
    with refused(Reason.FIELD_INVALID):
        one.close(key(0), 1, 1.0, done=True)
    assert one.open_reads == 1
    told = lease(readers=2)
    with refused(Reason.FIELD_INVALID):
        told.open(key(0), 4, 15.0, 1.0)


def test_the_notification_of_a_read_is_its_end() -> None:
    one = lease()
    one.open(key(0, size=2), 2, 15.0, 1.0)
    assert one.finished(key(0, size=2), 2.0)
    assert (one.open_reads, one.state) == (0, State.HELD)
    assert not one.finished(key(0, size=2), 2.0)
    with refused(Reason.LEASE_EXPIRED):
        one.open(key(0, size=2), 2, 15.0, 2.0)


def test_the_notification_of_a_read_that_was_not_granted_means_nothing() -> None:
    """Nothing is posted before it is granted: whoever says otherwise is not heard."""
    one = lease()
    assert not one.finished(key(), 1.0)
    one.open(key(), 1, 15.0, 2.0)
    assert one.finished(key(), 3.0)
    assert one.state is State.RELEASED


def test_a_closed_read_is_not_opened_again() -> None:
    one = lease()
    one.open(key(0), 4, 15.0, 1.0)
    one.close(key(0), 4, 2.0, done=False)
    with refused(Reason.LEASE_EXPIRED):
        one.open(key(0), 4, 15.0, 3.0)
    one.close(key(1), 4, 2.0, done=True)
    with refused(Reason.LEASE_EXPIRED):
        one.open(key(1), 4, 15.0, 3.0)


def test_what_is_withdrawn_is_not_renewed_although_the_readers_of_one_engine_are_done() -> None:
    one = lease()
    one.open(key(0, engine="slow"), 4, 15.0, 1.0)
    one.close(key(0, engine="quick", size=1), 1, 1.0, done=True)
    assert one.state is State.RELEASING
    one.withdraw()
    with refused(Reason.LEASE_EXPIRED):
        one.renew(key(0, engine="slow"), 5.0, 60.0, 2.0)
    one.tick(16.0)
    assert one.state is State.WITHDRAWN


def test_a_read_that_ended_after_the_lease_does_not_count() -> None:
    one = lease(deadline=10.0)
    one.tick(10.0)
    one.finished(key(), 11.0)
    with refused(Reason.LEASE_EXPIRED):
        one.open(key(), 1, 15.0, 12.0)


def test_a_read_renews_up_to_a_limit() -> None:
    one = lease(deadline=8.0)
    one.open(key(), 1, 5.0, 1.0)
    assert one.renew(key(), 5.0, 12.0, 4.0) == 5.0
    one.tick(8.0)  # it is expiring, and the read goes on
    assert one.renew(key(), 5.0, 12.0, 8.5) == 4.5  # until 13, and not over 12 seconds in all
    one.tick(12.99)
    assert not one.ended
    one.tick(13.0)
    assert one.state is State.EXPIRED
    with refused(Reason.LEASE_EXPIRED):
        one.renew(key(), 5.0, 12.0, 13.0)


def test_a_withdrawn_read_cannot_renew() -> None:
    one = lease()
    one.open(key(), 1, 5.0, 1.0)
    one.withdraw()
    with refused(Reason.LEASE_EXPIRED):
        one.renew(key(), 5.0, 60.0, 2.0)
    assert one.held_for(2.0) == 4.0


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_GRANTS", "MAX_ENGINES", "MAX_CLOSED"):
        monkeypatch.setattr(leases, name, 3)
    one = lease()
    for i in range(3):
        one.open(key(i), 4, 15.0, 1.0)
    with refused(Reason.LIMIT_EXCEEDED):
        one.open(key(3), 4, 15.0, 1.0)
    one.open(key(2), 4, 15.0, 1.0)  # it is open already
    for i in range(2):
        one.close(key(0, engine=f"e{i}"), 4, 1.0, done=True)
    with refused(Reason.LIMIT_EXCEEDED):
        one.close(key(0, engine="e2"), 4, 1.0, done=True)
    for i in range(20):
        one.close(key(0, f"t{i}"), 4, 1.0, done=True)
    assert len(one._closed) == 3
    assert one.state is State.HELD


def test_tokens_are_compared() -> None:
    one = lease()
    one.check_token(b"x" * 16)
    for wrong in (b"y" * 16, b"x" * 15, b""):
        with refused(Reason.LEASE_TOKEN_MISMATCH):
            one.check_token(wrong)


class Life(RuleBasedStateMachine):
    """Any order of everything: blocks are never free inside the time of a grant that was not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lease = lease(deadline=5.0)
        self.granted: dict[ReadKey, float] = {}
        self.was_ended = False

    @rule(rank=st.integers(0, 1), transfer=st.sampled_from("ab"), seconds=st.sampled_from([0.5, 2.0, 9.0]))
    def open(self, rank: int, transfer: str, seconds: float) -> None:
        name = key(rank, transfer, size=2)
        try:
            self.lease.open(name, 2, seconds, self.now)
        except KvxferError:
            return
        if name in self.lease._grants:
            assert not self.was_ended
            self.granted[name] = max(self.granted.get(name, 0.0), self.now + seconds)

    @rule(rank=st.integers(0, 1), transfer=st.sampled_from("ab"), done=st.booleans())
    def close(self, rank: int, transfer: str, done: bool) -> None:
        name = key(rank, transfer, size=2)
        self.lease.close(name, 2, self.now, done=done)
        self.granted.pop(name, None)

    @rule(rank=st.integers(0, 1), transfer=st.sampled_from("ab"))
    def finish(self, rank: int, transfer: str) -> None:
        name = key(rank, transfer, size=2)
        assert self.lease.finished(name, self.now) == (self.granted.pop(name, 0.0) > self.now)

    @rule(rank=st.integers(0, 1), transfer=st.sampled_from("ab"), seconds=st.sampled_from([0.5, 9.0]))
    def renew(self, rank: int, transfer: str, seconds: float) -> None:
        name = key(rank, transfer, size=2)
        try:
            more = self.lease.renew(name, seconds, 20.0, self.now)
        except KvxferError:
            return
        self.granted[name] = self.now + more

    @rule()
    def withdraw(self) -> None:
        self.lease.withdraw()

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.lease.tick(self.now)

    @precondition(lambda self: not self.lease.ended)
    @rule(seconds=st.sampled_from([1.0, 8.0]))
    def extend(self, seconds: float) -> None:
        try:
            self.lease.extend(self.now + seconds)
        except KvxferError:
            assert self.lease.state is not State.HELD

    @invariant()
    def blocks_stay_while_granted(self) -> None:
        live = any(until > self.now for until in self.granted.values())
        assert not (self.lease.ended and live)
        assert not (self.was_ended and not self.lease.ended)
        self.was_ended = self.lease.ended
        if not self.lease.ended:
            assert self.lease.due() > self.now


TestLife = Life.TestCase
TestLife.settings = settings(deadline=None, max_examples=300, stateful_step_count=30)
