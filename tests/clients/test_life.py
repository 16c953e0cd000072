"""The plan of a session, without a sidecar."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvxfer.memory.handles import FileHandle, Handle, Memfd, Owned, OwnedBacking
from kvxfer_client import KvxferError, Rank, Reason, Registered
from kvxfer_client.life import (
    LONGEST_PAUSE,
    Follow,
    Found,
    Hold,
    Lost,
    Register,
    Sleep,
    Step,
    memory_again,
    pauses,
    plan,
)

FILE = FileHandle("/cache/one", 0, 64)
MEMORY: tuple[Handle, ...] = (FILE, Owned(64))
EXPORTED = FileHandle("/cache/owned", 0, 64)


def registered(incarnation: str, exported: dict[int, Handle] | None = None) -> Registered:
    return Registered("e", Rank(), incarnation, "f", {1: EXPORTED} if exported is None else exported, "h:1")


def error(reason: Reason, **metadata: Any) -> KvxferError:
    return KvxferError(reason, "as the test says", **metadata)


class Driver:
    """Walks through a plan; sleeps are only noted."""

    def __init__(self) -> None:
        self.plan = plan(MEMORY)
        self.slept: list[float] = []
        self.step = self._awake(next(self.plan))

    def answer(self, what: object) -> Step:
        """To send back; errors to throw, but those that streams end with."""
        failed = isinstance(what, KvxferError) and not isinstance(self.step, Follow)
        got = self.plan.throw(what) if failed else self.plan.send(what)  # type: ignore[arg-type]
        self.step = self._awake(got)
        return self.step

    def _awake(self, step: Step) -> Step:
        while isinstance(step, Sleep):
            self.slept.append(step.seconds)
            step = self.plan.send(None)
        return step

    def held(self) -> Driver:
        """Until it is registered as "one" and followed."""
        assert self.step == Register(MEMORY, again=False)
        assert self.answer(registered("one")) == Hold("one")
        assert self.answer(None) == Found(registered("one"), fresh=True)
        assert self.answer(None) == Follow()
        return self


GONE = error(Reason.PEER_UNREACHABLE)


def test_the_sidecar_restarts() -> None:
    d = Driver().held()
    assert d.answer(GONE) == Hold("one")
    for _ in range(8):
        assert d.answer(GONE) == Hold("one")
    unknown = error(Reason.NOT_REGISTERED)
    assert d.answer(unknown) == Lost(unknown, "one")
    # By path: the file is what the engine has mapped.
    assert d.answer(None) == Register((FILE, EXPORTED), again=True)
    assert d.answer(registered("two")) == Hold("two")
    assert d.answer(None) == Found(registered("two"), fresh=True)
    assert d.answer(None) == Follow()
    # And once more.
    assert d.answer(GONE) == Hold("two")


def test_only_the_connection_was_lost() -> None:
    d = Driver().held()
    assert d.answer(GONE) == Hold("one")
    assert d.answer(None) == Found(registered("one"), fresh=False)
    assert d.answer(None) == Follow()


def test_a_sidecar_that_stops_has_lost_it_for_sure() -> None:
    d = Driver().held()
    stops = error(Reason.SHUTTING_DOWN)
    assert d.answer(stops) == Lost(stops, "one")
    assert d.answer(None) == Register((FILE, EXPORTED), again=True)
    for again in (stops, GONE, error(Reason.DEADLINE_EXCEEDED), error(Reason.LIMIT_EXCEEDED, retry_delay_s="7.5")):
        assert d.answer(again) == Register((FILE, EXPORTED), again=True)
    assert d.slept[-1] == 7.5
    assert max(d.slept[:-1]) <= LONGEST_PAUSE


def test_it_restarts_once_more_between_registering_and_holding() -> None:
    d = Driver().held()
    d.answer(error(Reason.SHUTTING_DOWN))
    d.answer(None)
    assert d.answer(registered("two")) == Hold("two")
    assert d.answer(error(Reason.NOT_REGISTERED)) == Register((FILE, EXPORTED), again=True)
    assert d.answer(registered("three")) == Hold("three")
    assert d.answer(GONE) == Register((FILE, EXPORTED), again=True)


@pytest.mark.parametrize("reason", [Reason.NOT_REGISTERED, Reason.STALE_INCARNATION])
def test_ended_on_purpose(reason: Reason) -> None:
    """By whoever unregistered it or took its place: no fight over it."""
    d = Driver().held()
    why = error(reason)
    assert d.answer(why) == Lost(why, "one")
    with pytest.raises(KvxferError) as caught:
        d.answer(None)
    assert caught.value is why


def test_another_has_taken_its_place_meanwhile() -> None:
    d = Driver().held()
    d.answer(GONE)
    why = error(Reason.STALE_INCARNATION)
    assert d.answer(why) == Lost(why, "one")
    with pytest.raises(KvxferError) as caught:
        d.answer(None)
    assert caught.value is why


def test_its_own_former_registration_is_waited_for_and_no_other() -> None:
    d = Driver().held()
    d.answer(GONE)
    d.answer(error(Reason.NOT_REGISTERED))
    d.answer(None)
    busy = error(Reason.REGISTRATION_BUSY, incarnation="one", retry_delay_s="0.5")
    assert d.answer(busy) == Register((FILE, EXPORTED), again=True)
    with pytest.raises(KvxferError) as caught:
        d.answer(error(Reason.REGISTRATION_BUSY, incarnation="another", retry_delay_s="0.5"))
    assert caught.value.reason is Reason.REGISTRATION_BUSY


@pytest.mark.parametrize("reason", [Reason.MEMORY_NOT_ALLOWED, Reason.LAYOUT_INVALID, Reason.INTERNAL])
def test_what_no_retry_helps_ends_it(reason: Reason) -> None:
    d = Driver().held()
    d.answer(GONE)
    d.answer(error(Reason.NOT_REGISTERED))
    d.answer(None)
    with pytest.raises(KvxferError) as caught:
        d.answer(error(reason))
    assert caught.value.reason is reason


@pytest.mark.parametrize("reason", [Reason.PEER_UNREACHABLE, Reason.MEMORY_LIMIT])
def test_the_first_attempt_is_not_repeated(reason: Reason) -> None:
    d = Driver()
    with pytest.raises(KvxferError):
        d.answer(error(reason))


def test_a_memfd_of_the_sidecar_cannot_be_had_again() -> None:
    known = registered("one", {1: Memfd(7, 3, 0, 64)})
    memory = (FILE, Owned(64, OwnedBacking.MEMFD))
    with pytest.raises(KvxferError) as caught:
        memory_again(known, memory)
    assert (caught.value.reason, caught.value.field) == (Reason.MEMORY_HANDLE_INVALID, "memory[1]")


def test_pauses_grow_and_differ() -> None:
    first, second = (list(itertools.islice(pauses(), 20)) for _ in range(2))
    assert first != second
    for listed in (first, second):
        assert 0.05 <= listed[0] <= 0.1
        assert all(LONGEST_PAUSE / 2 <= pause <= LONGEST_PAUSE for pause in listed[6:])
