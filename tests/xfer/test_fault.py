"""Whether a transfer engine can be relied on, as it says itself."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvxfer.xfer import watch
from kvxfer.xfer.lanes import LanedEngine
from kvxfer.xfer.loopback import Fabric, LoopbackEngine
from tests.support.loopback import soon


@pytest.fixture
async def engine() -> AsyncIterator[LoopbackEngine]:
    made = LoopbackEngine("x", Fabric())
    await made.start()
    yield made
    await made.close()


async def test_one_that_runs_has_none(engine: LoopbackEngine) -> None:
    assert LoopbackEngine("y", Fabric()).fault == "the transfer engine is new"
    assert engine.fault == ""
    await engine.close()
    assert engine.fault == "the transfer engine is closed"


async def test_polling_that_fails_for_long(engine: LoopbackEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FAILING", 3600.0)
    running, really = engine._running, engine.driver.notifications
    assert running is not None
    fails = True

    def fail() -> Any:
        if fails:
            raise RuntimeError("no")
        return really()

    monkeypatch.setattr(engine.driver, "notifications", fail)
    with engine.serving():
        await soon(lambda: running.counters.poll_errors > 1)
        assert engine.fault == ""  # it has not failed for long
        monkeypatch.setattr(watch, "FAILING", 0.05)
        await soon(lambda: engine.fault.startswith("polling the transfer library has failed for"))
        fails = False
        await soon(lambda: engine.fault == "")


async def test_polling_that_works_again_when_nobody_asks_for_it(
    engine: LoopbackEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reasons to poll have ended meanwhile: it must not stay a fault for good."""
    monkeypatch.setattr(watch, "FAILING", 0.05)
    fails = True

    def fail() -> Any:
        if fails:
            raise RuntimeError("no")
        return ()

    monkeypatch.setattr(engine.driver, "notifications", fail)
    with engine.serving():
        await soon(lambda: engine.fault != "")
    assert engine.fault.startswith("polling the transfer library has failed for")
    fails = False
    await soon(lambda: engine.fault == "")


async def test_a_single_failure_is_no_fault_however_long_ago() -> None:
    clocks = watch.Watch()
    clocks.poll_failed()
    assert clocks._failed is not None
    first, last = clocks._failed
    clocks._failed = first - 1_000, last - 1_000
    assert clocks.failing
    assert clocks.fault(waiting=False) == ""
    clocks.poll_failed()
    assert clocks.fault(waiting=False).startswith("polling the transfer library has failed for")
    clocks.poll_worked()
    assert clocks.fault(waiting=False) == ""


async def test_a_library_that_does_not_come_back(engine: LoopbackEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "HANGING", 0.05)
    hangs, free = threading.Event(), threading.Event()

    def hang() -> Any:
        hangs.set()
        free.wait(10)
        return ()

    try:
        with engine.serving():
            await engine.metadata()  # all that was asked so far is taken
            monkeypatch.setattr(engine.driver, "notifications", hang)
            await soon(hangs.is_set)
            assert engine.fault == ""  # nobody waits for it
            waiting = engine.connected()
            await soon(lambda: engine.fault.startswith("the transfer library has not come back for"))
            free.set()
            await soon(lambda: engine.fault == "")
            waiting.close()
    finally:
        free.set()


async def test_one_that_sleeps_is_none(engine: LoopbackEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to do, and nothing asked of it: that no time is lost with turns is no fault."""
    monkeypatch.setattr(watch, "HANGING", 0.0)
    await engine.metadata()
    await soon(lambda: engine.fault == "")


async def test_what_was_asked_just_now_does_not_hang(engine: LoopbackEngine) -> None:
    """The thread has slept for long, and has not woken up yet."""
    running, busy, free = engine._running, threading.Event(), threading.Event()
    assert running is not None

    def work() -> None:
        busy.set()
        free.wait(10)

    running._ask(work)
    try:
        await soon(busy.is_set)
        running._watch._turned -= 1_000
        running._watch._asked -= 1_000
        assert engine.fault == ""
        waiting = engine.connected()
        assert engine.fault == ""
        running._watch._asked -= 1_000
        assert engine.fault.startswith("the transfer library has not come back for")
        waiting.close()
    finally:
        free.set()


async def test_a_fault_of_any_lane_is_one() -> None:
    fabric = Fabric()
    lanes = [LoopbackEngine(name, fabric) for name in ("a", "b")]
    laned = LanedEngine(lanes)
    await laned.start()
    assert laned.fault == ""
    await lanes[1].close()
    assert laned.fault == "the transfer engine is closed"
    await laned.close()
