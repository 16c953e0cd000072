"""A worker's side, against a sidecar that follows a script.

What is looked for everywhere: blocks are told as free only when nothing can read or write them any more, and a read
that failed is never told as good.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.engines.vllm import mover as module
from kvxfer.engines.vllm.mover import Mover, Results, clipped
from kvxfer.engines.vllm.steps import Publication, Reading, Step
from kvxfer_client import (
    LeaseInfo,
    LeaseState,
    Registered,
    Timings,
    TransferInfo,
    TransferState,
    attention_blocks,
    make_ticket,
    snapshot,
    ticket_to_string,
)

BLOCKS = (attention_blocks("0.attention", [1, 2, 3]), snapshot("1.mamba2", 4, 40))
READING = Reading("r", "ticket", BLOCKS, 16, 40, {}, {})
PUBLICATION = Publication("r.1", "r", BLOCKS, 40, b"t" * 16, 60.0, {0: "one"})
FREE = Results()


def error(reason: Reason) -> KvxferError:
    return KvxferError(reason, "as the test wants it")


def registered(incarnation: str = "one") -> Registered:
    return Registered("e", Rank(), incarnation, "f", {}, "127.0.0.1:7000")


def transfer(name: str, state: TransferState, quiesced: bool = True) -> TransferInfo:
    failed = None if state is TransferState.DONE else error(Reason.TRANSFER_FAILED)
    return TransferInfo(name, "e", "p", "r.1", state, quiesced, 16, 40, (), 1, 1, Timings(), failed, None, None)


def lease(state: LeaseState, name: str = "r.1") -> LeaseInfo:
    return LeaseInfo("e", name, state, False, None, 0, (), 40, 1.0)


def a_ticket() -> str:
    made = make_ticket(
        engine_id="p",
        compatibility_key="key",
        ranks=[registered().ticket_rank],
        request_id="r.1",
        blocks=BLOCKS,
        num_tokens=40,
        lease_token=b"t" * 16,
        ttl=60.0,
    )
    return ticket_to_string(made)


class Script:
    """Answers calls as it is told, one after the other, and remembers them."""

    def __init__(self) -> None:
        self.calls: queue.Queue[tuple[str, tuple[Any, ...], dict[str, Any]]] = queue.Queue()
        self.answers: dict[str, list[Any]] = {}
        self.entered = threading.Event()
        self.gates: dict[str, threading.Event] = {}

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.put((method, args, kwargs))
            self.entered.set()
            if (gate := self.gates.get(method)) is not None:
                assert gate.wait(10)
            told = self.answers.get(method, [])
            answer = told.pop(0) if len(told) > 1 else told[0] if told else None
            if isinstance(answer, KvxferError):
                raise answer
            return answer(*args) if callable(answer) else answer

        return call

    def called(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        return self.calls.get(timeout=10)

    @property
    def quiet(self) -> bool:
        return self.calls.empty()


class World:
    """A mover, its script, and the threads' word."""

    def __init__(self) -> None:
        self.client = Script()
        self.mover = Mover(self.client, Rank(), 60.0)  # type: ignore[arg-type]
        self.mover.registered(registered())
        self.written = threading.Event()

    def begin(self, step: Step, written: Callable[[], object] = lambda: None) -> None:
        self.mover.begin(step, lambda: (written(), self.written.set())[1])

    def settled(self) -> Results:
        """Once all calls that are due have been made."""
        for _ in self.mover._threads:
            self.mover._work.put(None)
        for thread in self.mover._threads:
            thread.join(10)
            assert not thread.is_alive()
        return self.mover.take()

    def posted(self) -> str:
        """A read that is under way; its transfer ID."""
        self.begin(Step(read=(READING,)))
        _, _, options = self.client.called()
        eventually(lambda: all(r.at is module._At.POSTED for r in self.mover._reads.values()))
        return str(options["transfer_id"])


def eventually(condition: Callable[[], object]) -> None:
    step = threading.Event()
    for _ in range(2000):
        if condition():
            return
        step.wait(0.005)
    pytest.fail("the condition did not come true in time")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(module, "PAUSE", 0.001)
    found = World()
    yield found
    for gate in found.client.gates.values():
        gate.set()
    found.mover.close()


# -- reading -----------------------------------------------------------------------------------------------------------


def test_a_read_is_good_when_the_stream_says_so(world: World) -> None:
    world.begin(Step(read=(READING,)))
    method, args, options = world.client.called()
    assert (method, args) == ("read", ("ticket", BLOCKS))
    assert (options["skip_tokens"], options["wait"], options["timeout"]) == (16, False, 60.0)
    for state in (TransferState.PREPARED, TransferState.POSTED):
        world.mover._saw_transfer(transfer(options["transfer_id"], state, False))
    assert world.mover.take() == FREE
    world.mover._saw_transfer(transfer(options["transfer_id"], TransferState.DONE))
    assert world.mover.take() == Results(received={"r"})
    assert world.mover.take() == FREE


def test_a_failed_read_is_told_when_nothing_writes_any_more(world: World) -> None:
    name = world.posted()
    world.mover._saw_transfer(transfer(name, TransferState.DRAINING, False))
    world.mover._saw_transfer(transfer(name, TransferState.FAILED, False))
    assert world.mover.take() == FREE
    world.mover._saw_transfer(transfer(name, TransferState.FAILED, True))
    assert world.mover.take() == Results(received={"r"}, failed={"r"})


def test_other_transfers_are_not_ours(world: World) -> None:
    world.posted()
    world.mover._saw_transfer(transfer("another", TransferState.DONE))
    assert world.mover.take() == FREE


@pytest.mark.parametrize("reason", [Reason.LEASE_UNKNOWN, Reason.LAYOUT_MISMATCH, Reason.PEER_UNREACHABLE])
def test_a_read_that_is_refused_is_ended_first(world: World, reason: Reason) -> None:
    world.client.answers["read"] = [error(reason)]
    world.client.answers["cancel"] = [
        error(Reason.PEER_UNREACHABLE),
        lambda name: transfer(name, TransferState.DRAINING, False),
        lambda name: transfer(name, TransferState.FAILED),
    ]
    world.begin(Step(read=(READING,)))
    assert world.settled() == Results(received={"r"}, failed={"r"})
    assert [world.client.called()[0] for _ in range(4)] == ["read", "cancel", "cancel", "cancel"]


@pytest.mark.parametrize("reason", [Reason.TRANSFER_UNKNOWN, Reason.NOT_REGISTERED])
def test_a_read_that_never_was_is_over(world: World, reason: Reason) -> None:
    world.client.answers["read"] = [error(Reason.DEADLINE_EXCEEDED)]
    world.client.answers["cancel"] = [error(reason)]
    world.begin(Step(read=(READING,)))
    assert world.settled() == Results(received={"r"}, failed={"r"})


def test_an_answer_that_was_lost_does_not_spoil_a_good_read(world: World) -> None:
    world.client.answers["read"] = [error(Reason.DEADLINE_EXCEEDED)]
    world.client.answers["cancel"] = [lambda name: transfer(name, TransferState.DONE)]
    world.begin(Step(read=(READING,)))
    assert world.settled() == Results(received={"r"})


def test_nothing_is_read_before_the_device_is_done(world: World) -> None:
    gate = threading.Event()
    world.begin(Step(read=(READING,)), lambda: gate.wait(10))
    assert world.client.quiet
    gate.set()
    assert world.client.called()[0] == "read"
    assert world.written.is_set()


def test_a_window_begins_at_a_granule(world: World) -> None:
    class Plan:
        granule_tokens = 8

    world.client.answers["handshake"] = [Plan()]
    needed = Reading("r", "ticket", BLOCKS, 16, 40, {"0.attention": 30, "1.mamba2": 30}, {})
    world.begin(Step(read=(needed,)))
    assert world.client.called()[:2] == ("handshake", ("ticket",))
    method, (_, blocks), _ = world.client.called()
    assert method == "read"
    assert [b.skip_tokens for b in blocks] == [24, None]


@pytest.mark.parametrize("first, skip, begins", [(30, 0, 24), (24, 0, 24), (23, 16, None), (7, 0, None), (0, 0, None)])
def test_clipping(first: int, skip: int, begins: int | None) -> None:
    (found,) = clipped(BLOCKS[:1], {"0.attention": first}, 8, skip)
    assert found.skip_tokens == begins


# -- giving up ---------------------------------------------------------------------------------------------------------


def test_cancelled_before_it_is_read(world: World) -> None:
    gate = threading.Event()
    world.begin(Step(read=(READING,)), lambda: gate.wait(10))
    world.begin(Step(cancel=("r",)))
    assert world.mover.take() == FREE
    gate.set()
    assert world.settled() == Results(received={"r"}, failed={"r"})
    assert world.client.quiet  # what would be given back is no ticket here


def test_a_ticket_is_given_back(world: World) -> None:
    ticket = a_ticket()
    world.begin(Step(give_back=(ticket,)))
    assert world.settled() == FREE
    method, args, options = world.client.called()
    assert (method, args) == ("read", (ticket, ()))
    assert (options["skip_tokens"], options["wait"]) == (40, False)


def test_cancelled_before_it_is_read_its_ticket_is_given_back(world: World) -> None:
    gate, ticket = threading.Event(), a_ticket()
    world.begin(Step(read=(replace(READING, ticket=ticket),)), lambda: gate.wait(10))
    world.begin(Step(cancel=("r",)))
    gate.set()
    eventually(lambda: world.mover._results.received)
    method, args, _ = world.client.called()
    assert (method, args) == ("read", (ticket, ()))
    assert world.mover.take() == Results(received={"r"}, failed={"r"})


def test_cancelled_while_it_is_being_posted(world: World) -> None:
    """What comes of the call is not known yet: a transfer that is unknown now may be there in a moment."""
    world.client.gates["read"] = threading.Event()
    world.client.answers["cancel"] = [lambda name: transfer(name, TransferState.CANCELLED)]
    world.begin(Step(read=(READING,)))
    world.client.called()
    world.begin(Step(cancel=("r",)))
    # Whatever the crew was given before these has begun when they have.
    marks = [threading.Event() for _ in range(2)]
    for mark in marks:
        world.mover._later(mark.set)
        assert mark.wait(10)
    assert world.client.quiet
    assert world.mover.take() == FREE
    world.client.gates["read"].set()
    assert world.settled() == Results(received={"r"}, failed={"r"})
    assert world.client.called()[0] == "cancel"


def test_cancelled_while_it_is_read(world: World) -> None:
    name = world.posted()
    world.client.answers["cancel"] = [
        lambda name: transfer(name, TransferState.DRAINING, False),
        lambda name: transfer(name, TransferState.CANCELLED),
    ]
    world.begin(Step(cancel=("r",)))
    assert world.client.called()[:2] == ("cancel", (name,))
    assert world.settled() == Results(received={"r"}, failed={"r"})


def test_cancelling_what_is_over_does_nothing(world: World) -> None:
    world.begin(Step(cancel=("r",)))
    assert world.settled() == FREE
    assert world.client.quiet


# -- losing the sidecar ------------------------------------------------------------------------------------------------


def test_with_the_registration_its_reads_are_gone(world: World) -> None:
    world.posted()
    world.mover.lost(error(Reason.PEER_UNREACHABLE), "another")
    assert world.mover.take() == FREE
    world.mover.lost(error(Reason.PEER_UNREACHABLE), "one")
    assert world.mover.take() == Results(received={"r"}, failed={"r"})


def test_a_call_under_way_outlives_the_registration(world: World) -> None:
    """It may be the next registration that gets it, and writes."""
    world.client.gates["read"] = threading.Event()
    world.client.answers["cancel"] = [error(Reason.TRANSFER_UNKNOWN)]
    world.begin(Step(read=(READING,)))
    world.client.called()
    world.mover.lost(error(Reason.PEER_UNREACHABLE), "one")
    assert world.mover.take() == FREE
    world.client.gates["read"].set()
    assert world.settled() == Results(received={"r"}, failed={"r"})


def test_nothing_is_read_while_the_sidecar_is_away(world: World) -> None:
    world.mover.lost(error(Reason.PEER_UNREACHABLE), "one")
    world.begin(Step(read=(READING,)))
    assert world.settled() == Results(received={"r"}, failed={"r"})
    assert world.client.quiet


@pytest.mark.parametrize("back", [False, True])
def test_a_sidecar_that_is_away_is_not_asked(world: World, back: bool) -> None:
    """Nor does the read wait for it: it need not come back."""
    world.mover._session = session = Held()  # type: ignore[assignment]
    session.registered = registered() if back else None
    world.begin(Step(read=(READING,)))
    assert world.settled() == (FREE if back else Results(received={"r"}, failed={"r"}))
    assert world.client.quiet == (not back)


def test_what_a_sidecar_may_have_heard_of_waits_for_it(world: World) -> None:
    name = world.posted()
    world.mover._session = Held()  # type: ignore[assignment]
    world.mover._session.registered = None
    world.begin(Step(read=(replace(READING, request_id="another"),)))
    assert world.settled() == Results(received={"another"}, failed={"another"})
    world.mover._saw_transfer(transfer(name, TransferState.DONE))
    assert world.mover.take() == Results(received={"r"})


def test_a_read_of_the_former_registration_is_not_begun(world: World) -> None:
    gate = threading.Event()
    world.begin(Step(read=(READING,)), lambda: gate.wait(10))
    world.mover.lost(error(Reason.PEER_UNREACHABLE), "one")
    world.mover.registered(registered("two"))
    gate.set()
    assert world.settled() == Results(received={"r"}, failed={"r"})
    assert world.client.quiet


def test_at_the_session_s_end_all_is_over(world: World) -> None:
    world.posted()
    world.mover.ended(error(Reason.STALE_INCARNATION))
    assert world.mover.take() == Results(received={"r"}, failed={"r"})


def test_each_registration_is_told_once(world: World) -> None:
    assert world.mover.take_registered() == registered()
    assert world.mover.take_registered() is None
    world.mover.registered(registered("two"))
    assert world.mover.take_registered() == registered("two")


# -- publishing --------------------------------------------------------------------------------------------------------


def published(world: World) -> None:
    world.begin(Step(publish=(PUBLICATION,)))
    method, args, options = world.client.called()
    assert (method, args) == ("publish", ("r.1", BLOCKS, 40, b"t" * 16))
    assert options == {"ttl": 60.0, "incarnation": "one"}


@pytest.mark.parametrize("state", [LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.WITHDRAWN])
def test_blocks_are_free_when_their_lease_has_ended(world: World, state: LeaseState) -> None:
    published(world)
    world.mover._saw_lease(lease(LeaseState.HELD))
    world.mover._saw_lease(lease(state, "another"))
    assert world.mover.take() == FREE
    world.mover._saw_lease(lease(state))
    assert world.mover.take() == Results(sent={"r"})


def test_nothing_is_published_before_the_device_is_done(world: World) -> None:
    gate = threading.Event()
    world.begin(Step(publish=(PUBLICATION,)), lambda: gate.wait(10))
    assert world.client.quiet
    gate.set()
    assert world.client.called()[0] == "publish"


@pytest.mark.parametrize("reason", [Reason.STALE_INCARNATION, Reason.NOT_REGISTERED, Reason.FIELD_INVALID])
def test_what_is_refused_is_free_at_once(world: World, reason: Reason) -> None:
    world.client.answers["publish"] = [error(reason)]
    world.begin(Step(publish=(PUBLICATION,)))
    assert world.settled() == Results(sent={"r"})
    assert world.client.called()[0] == "publish" and world.client.quiet


def test_what_may_have_been_published_is_taken_back(world: World) -> None:
    world.client.answers["publish"] = [error(Reason.DEADLINE_EXCEEDED)]
    world.client.answers["withdraw"] = [error(Reason.PEER_UNREACHABLE), error(Reason.LEASE_UNKNOWN)]
    world.begin(Step(publish=(PUBLICATION,)))
    assert world.settled() == Results(sent={"r"})
    assert [world.client.called()[0] for _ in range(3)] == ["publish", "withdraw", "withdraw"]


def test_what_is_being_read_waits_for_its_lease(world: World) -> None:
    world.client.answers["publish"] = [error(Reason.DEADLINE_EXCEEDED)]
    world.client.answers["withdraw"] = [15.0]
    world.begin(Step(publish=(PUBLICATION,)))
    assert world.settled() == FREE
    world.mover._saw_lease(lease(LeaseState.WITHDRAWN))
    assert world.mover.take() == Results(sent={"r"})


@pytest.mark.parametrize("now", ["", "two"])
def test_a_ticket_of_a_former_registration_is_not_published(world: World, now: str) -> None:
    world.mover.lost(error(Reason.PEER_UNREACHABLE), "one")
    if now:
        world.mover.registered(registered(now))
    world.begin(Step(publish=(PUBLICATION,)))
    assert world.settled() == Results(sent={"r"})
    assert world.client.quiet


def test_a_sidecar_that_is_away_is_not_told(world: World) -> None:
    """Blocks that nobody can have heard of are free: it need not come back."""
    world.mover._session = session = Held()  # type: ignore[assignment]
    session.registered = None
    world.begin(Step(publish=(PUBLICATION,)))
    assert world.settled() == Results(sent={"r"})
    assert world.client.quiet


def test_with_the_registration_its_publications_are_gone(world: World) -> None:
    published(world)
    world.mover.lost(error(Reason.PEER_UNREACHABLE), "one")
    assert world.mover.take() == Results(sent={"r"})


# -- following ---------------------------------------------------------------------------------------------------------


class Stream:
    def __init__(self, *items: Any) -> None:
        self.items = list(items)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            if isinstance(item, KvxferError):
                raise item
            yield item


class Held:
    """A session that is there, or over."""

    def __init__(self) -> None:
        self.error: KvxferError | None = None
        self.registered: Registered | None = registered()

    def wait_registered(self) -> Registered:
        return registered()


def test_streams_are_opened_again_from_the_beginning(world: World) -> None:
    name, session = world.posted(), Held()
    world.client.answers["watch"] = [
        Stream(transfer(name, TransferState.POSTED, False), error(Reason.PEER_UNREACHABLE)),
        error(Reason.NOT_REGISTERED),
        Stream(transfer(name, TransferState.DONE)),
    ]
    world.client.answers["watch_leases"] = [Stream()]
    world.mover.follow(session)  # type: ignore[arg-type]
    eventually(lambda: world.mover._results.received)
    session.error = error(Reason.STALE_INCARNATION)
    for thread in world.mover._followers:
        thread.join(10)
        assert not thread.is_alive()
    assert world.mover.take() == Results(received={"r"})
    watches = [options for method, _, options in world.client.calls.queue if method == "watch"]
    assert watches[:3] == [{"include_current": True}] * 3


def test_a_stream_that_ends_is_not_opened_again_without_a_pause(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends it at once, again and again, would keep a core busy."""
    monkeypatch.setattr(module, "PAUSE", 600.0)
    pauses: queue.SimpleQueue[float] = queue.SimpleQueue()
    really = world.mover._closing.wait

    def wait(seconds: float) -> bool:
        pauses.put(seconds)
        return really(seconds)

    monkeypatch.setattr(world.mover._closing, "wait", wait)
    for method in ("watch", "watch_leases"):
        world.client.answers[method] = [Stream()]
    world.mover.follow(Held())  # type: ignore[arg-type]
    assert [pauses.get(timeout=10) for _ in range(2)] == [600.0, 600.0]
    assert sorted(world.client.called()[0] for _ in range(2)) == ["watch", "watch_leases"]
    assert world.client.quiet
    world.mover.close()
    for thread in world.mover._followers:
        thread.join(10)
        assert not thread.is_alive()


def test_a_fault_keeps_blocks_taken(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def spoilt() -> None:
        raise RuntimeError("as the test wants it")

    world.begin(Step(read=(READING,)), spoilt)
    assert world.settled() == FREE
    assert "stay taken" in caplog.text
