"""How a read is cut into pieces, and what becomes of the others when one of them fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.xfer import jobs, pump
from kvxfer.xfer.api import MemoryKind, Read, ReadState, Rows, Span
from kvxfer.xfer.loopback import QUICK, Fabric, LoopbackEngine
from kvxfer.xfer.pieces import Pieces
from tests.xfer.waiting import state_of, until

BLOCK, COUNT = 64, 32


def cut(lengths: int | list[int], count: int, most: int, *, ahead: bool = False) -> list[tuple[list[int], bool, int]]:
    """The descriptors of each piece, whether it was the only one, and its bytes."""
    numbers = np.arange(count, dtype=np.int32)
    pieces = Pieces(lambda ours, theirs, whole: (ours.tolist(), whole), numbers, numbers, lengths)
    if ahead:
        pieces.make(most)
    found = []
    while pieces.left:
        size = pieces.size(most)
        (chosen, whole), taken = pieces.take(most)
        assert taken == size
        found.append((chosen, whole, size))
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_pieces_are_in_order_and_about_equal(ahead: bool) -> None:
    assert cut(10, 7, 70, ahead=ahead) == [(list(range(7)), True, 70)]
    assert [len(chosen) for chosen, _, _ in cut(10, 7, 69, ahead=ahead)] == [3, 4]
    assert cut([30, 10, 10, 10], 4, 35, ahead=ahead) == [([0], False, 30), ([1, 2, 3], False, 30)]
    assert cut([500, 1, 1], 3, 10, ahead=ahead) == [([0], False, 500), ([1, 2], False, 2)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 400), st.booleans())
def test_every_descriptor_is_in_one_piece(lengths: list[int], most: int, ahead: bool) -> None:
    found = cut(lengths, len(lengths), most, ahead=ahead)
    assert [n for chosen, _, _ in found for n in chosen] == list(range(len(lengths)))
    assert all(size == sum(lengths[n] for n in chosen) for chosen, _, size in found)
    assert all(size <= most or len(chosen) == 1 for chosen, _, size in found)
    assert [whole for _, whole, _ in found] == [len(found) == 1] * len(found)
    if len(set(lengths)) == 1:
        same = cut(lengths[0], len(lengths), most, ahead=ahead)
        assert [size for _, _, size in same] == [size for _, _, size in found]


class Scene:
    """A reader whose reads are cut into pieces of eight blocks, of which two are under way."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.notes: list[tuple[str, bytes]] = []
        self.reader = LoopbackEngine("reader", fabric, settings=replace(QUICK, drain=0.2))
        self.source = LoopbackEngine("source", fabric, lambda peer, note: self.notes.append((peer, note)))
        self.into = np.zeros(BLOCK * COUNT, dtype=np.uint8)
        self.data = np.random.default_rng(1).integers(1, 256, BLOCK * COUNT, dtype=np.uint8)
        self.lists: tuple[Rows, Rows]

    async def start(self) -> None:
        await self.reader.start()
        await self.source.start()
        await self.reader.register([Span(self.into.ctypes.data, self.into.nbytes)])
        span = Span(self.data.ctypes.data, self.data.nbytes)
        await self.source.register([span])
        peer = await self.reader.add_peer(await self.source.metadata(), "source", spans=[span])
        here, there = (
            np.array([[a.ctypes.data, BLOCK, 0, BLOCK, COUNT]], dtype=np.uint64) for a in (self.into, self.data)
        )
        local = await self.reader.prepare_local(here, MemoryKind.DRAM, peer)
        self.lists = local, await self.reader.prepare_remote(there, MemoryKind.DRAM, peer)

    async def make(self, *, now: bool) -> Read:
        """All blocks."""
        local, remote = self.lists
        every = np.arange(COUNT, dtype=np.int32)
        return await self.reader.make_read(local, every, remote, every, b"done", now=now)

    @property
    def arrived(self) -> list[bool]:
        """Of each piece, whether its bytes are there."""
        same = (self.into == self.data).reshape(4, -1)
        return [bool(piece.all()) for piece in same]

    @property
    def alive(self) -> int:
        """Requests that the library has."""
        return sum(type(handle).__name__ == "_Request" for handle in self.reader.driver.alive)


@pytest_asyncio.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(jobs, "BULK_BYTES", BLOCK)
    monkeypatch.setattr(pump, "BULK_SECONDS", 0.0)
    monkeypatch.setattr(pump, "PIECE_BYTES", 8 * BLOCK)
    monkeypatch.setattr(pump, "PIECE_SECONDS", 0.0)
    made = Scene(Fabric())
    await made.start()
    yield made
    made.fabric.let_go()
    await made.reader.close()
    await made.source.close()
    assert not made.alive


@pytest.mark.parametrize("now", [True, False])
async def test_all_pieces_and_one_notification(scene: Scene, now: bool) -> None:
    with scene.source.serving():
        read = await scene.make(now=now)
        assert scene.alive == (4 if now else 0)
        result = await scene.reader.post(read)
        await until(lambda: scene.notes, 5.0)
    assert scene.arrived == [True] * 4
    assert (result.bytes, result.telemetry and result.telemetry.descriptors) == (BLOCK * COUNT, COUNT)
    assert read.make_seconds > 0
    await read.quiesced
    counters = (await scene.reader.info()).counters
    assert (counters.made, counters.posted, counters.released, counters.done) == (4, 4, 4, 1)
    assert (counters.bytes, scene.fabric.posts, scene.notes) == (BLOCK * COUNT, 4, [("reader", b"done")])


@pytest.mark.parametrize("now", [True, False])
@pytest.mark.parametrize("reason", [Reason.PEER_LOST, Reason.TRANSFER_FAILED])
async def test_after_a_piece_that_fails_none_is_posted(scene: Scene, now: bool, reason: Reason) -> None:
    read = await scene.make(now=now)
    scene.fabric.fail_post(2, reason)
    with pytest.raises(KvxferError) as caught:
        await scene.reader.post(read)
    assert caught.value.reason is reason
    assert (scene.arrived, scene.fabric.posts) == ([True, False, False, False], 2)
    assert (read.state, read.kept) == (ReadState.FAILED, reason is not Reason.PEER_LOST)
    if read.kept:  # what the library does not let go of goes with the agent
        await until(lambda: scene.alive == 1, 5.0)
        assert not read.is_quiesced
        await scene.reader.close(0.0)
    await asyncio.wait_for(_wait(read), 5)
    assert scene.alive == 0


async def test_a_piece_that_fails_beside_another(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one still writes: the read fails at once, and is not quiet before the agent is gone."""
    scene.fabric.hold()
    really, bad = scene.reader.driver.check, list[Any]()

    def first_fails(handle: Any) -> bool:
        if scene.fabric.posts == 2 and handle in (bad or [handle]):
            bad.append(handle)
            raise KvxferError(Reason.TRANSFER_FAILED, "the read failed")
        return really(handle)

    monkeypatch.setattr(scene.reader.driver, "check", first_fails)
    read = await scene.make(now=False)
    with pytest.raises(KvxferError) as caught:
        await scene.reader.post(read)
    assert (caught.value.reason, read.kept, read.is_quiesced) == (Reason.TRANSFER_FAILED, True, False)
    assert (scene.alive, scene.fabric.posts) == (2, 2)
    scene.fabric.let_go()
    await until(lambda: scene.alive == 1, 5.0)  # the other one is done, and freed
    assert (len(bad), read.is_quiesced, scene.fabric.posts) == (1, False, 2)
    await scene.reader.close(0.0)
    await asyncio.wait_for(_wait(read), 5)


@pytest.mark.parametrize("now", [True, False])
async def test_what_is_given_up_ends_with_the_pieces_that_are_under_way(scene: Scene, now: bool) -> None:
    read = await scene.make(now=now)
    scene.fabric.hold()
    waiting = asyncio.ensure_future(scene.reader.post(read))
    await until(lambda: scene.fabric.posts == 2, 5.0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (read.state, read.is_quiesced) == (ReadState.POSTED, False)
    scene.fabric.let_go()
    await asyncio.wait_for(_wait(read), 5)
    assert (scene.arrived, scene.fabric.posts) == ([True, True, False, False], 2)
    assert (state_of(read), scene.alive, scene.notes) == (ReadState.FAILED, 0, [])


@pytest.mark.parametrize("now", [True, False])
async def test_closing_ends_a_read_that_is_half_posted(scene: Scene, now: bool) -> None:
    read = await scene.make(now=now)
    scene.fabric.hold()
    waiting = scene.reader.submit(read)
    await until(lambda: scene.fabric.posts == 2, 5.0)
    await scene.reader.close(0.0)
    with pytest.raises(KvxferError) as caught:
        await waiting
    assert caught.value.reason is Reason.SHUTTING_DOWN
    await asyncio.wait_for(_wait(read), 5)
    assert scene.fabric.posts == 2


@pytest.mark.parametrize("posted", [False, True])
async def test_a_piece_that_cannot_be_made(scene: Scene, posted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were made are given back; what was posted is over by then."""
    really, calls = scene.reader.driver.make, iter(range(4))

    def third_fails(*args: Any) -> Any:
        if next(calls) == 2:
            raise KvxferError(Reason.INTERNAL, "the request was refused")
        return really(*args)

    monkeypatch.setattr(scene.reader.driver, "make", third_fails)
    with pytest.raises(KvxferError) as caught:
        await made_and_posted(scene, now=not posted)
    assert caught.value.reason is Reason.INTERNAL
    assert scene.arrived == [posted, posted, False, False]
    await until(lambda: scene.alive == 0, 5.0)
    await scene.reader.release_rows(scene.lists[0])
    assert (await scene.reader.info()).rows == 1  # nothing uses it any more


async def made_and_posted(scene: Scene, *, now: bool) -> None:
    await scene.reader.post(await scene.make(now=now))


async def test_a_prepared_read_is_released_whole(scene: Scene) -> None:
    read = await scene.make(now=True)
    assert scene.alive == 4
    await scene.reader.release(read)
    assert (scene.alive, read.is_quiesced, state_of(read)) == (0, True, ReadState.RELEASED)


async def test_what_is_abandoned_in_the_queue_does_not_wait_for_its_turn(scene: Scene) -> None:
    scene.fabric.hold()
    first, second = [await scene.make(now=now) for now in (False, True)]
    ahead = scene.reader.submit(first)
    behind = scene.reader.submit(second)
    await until(lambda: scene.fabric.posts == 2, 5.0)
    behind.cancel()
    await asyncio.wait_for(_wait(second), 5)
    assert (state_of(second), scene.alive, scene.fabric.posts) == (ReadState.FAILED, 2, 2)
    scene.fabric.let_go()
    await ahead
    assert scene.arrived == [True] * 4


class Stopping:
    """A driver that is told to stop while its second piece is under way, and a third may be posted.

    Only what a pump needs of a :class:`kvxfer.xfer.driver.Driver`.
    """

    def __init__(self) -> None:
        self.pump: pump.Pump
        self.told = threading.Event()
        self.told_too_early = False
        self.checked = 0

    def post(self, handle: int) -> bool:
        return handle == 0

    def check(self, handle: int) -> bool:
        self.checked += 1
        if self.checked == 1:
            self.pump._ask(self.pump._stop)
        return False

    def telemetry(self, handle: int) -> None:
        return None

    def release(self, handle: int) -> None:
        assert handle == 0, "a request in flight was released"

    def notifications(self) -> list[tuple[str, bytes]]:
        return []

    def close(self) -> None:
        self.told_too_early = self.told.wait(0.3)


async def test_nothing_is_let_go_before_the_agent_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces may still be writing."""
    monkeypatch.setattr(jobs, "BULK_BYTES", 1)
    monkeypatch.setattr(pump, "BULK_SECONDS", 3_600.0)
    driver, numbers, told = Stopping(), iter(range(4)), list[str]()

    def tell(what: str) -> None:
        told.append(what)
        driver.told.set()

    running = driver.pump = pump.Pump("x", driver, pump.PumpSettings(), None)  # type: ignore[arg-type]
    four = np.arange(4, dtype=np.int32)
    pieces = Pieces(lambda ours, theirs, whole: next(numbers), four, four, BLOCK)
    pieces.make(BLOCK)
    job = jobs.Job(
        pieces,
        "peer",
        4 * BLOCK,
        b"",
        wanted=lambda: True,
        settle=lambda result: tell("settled"),
        let_go=lambda: tell("let go"),
    )
    running.start()
    running.post(job)
    await until(lambda: driver.checked, 5.0)
    await running.stop()
    assert told == ["settled", "let go"]
    assert not driver.told_too_early


async def _wait(read: Read) -> None:
    await read.quiesced
