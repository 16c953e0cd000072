"""Several engines that act as one, over the loopback driver with scripted faults."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.xfer import jobs, pump
from kvxfer.xfer.api import MemoryKind, Peer, Read, ReadResult, ReadState, Rows, Span, TransferEngine
from kvxfer.xfer.engine import EngineSettings
from kvxfer.xfer.lanes import LanedEngine
from kvxfer.xfer.loopback import QUICK, Fabric, LoopbackEngine
from tests.xfer.waiting import state_of, until

DRAM = MemoryKind.DRAM
BLOCK, COUNT = 64, 32
#: Reads of more than three blocks are split.
SPLIT = 4 * BLOCK
#: Pieces have ten blocks at most.
PIECE = 10 * BLOCK


@dataclass
class World:
    """A reader of two lanes and a source with 32 blocks of 64 bytes, joined and prepared."""

    fabric: Fabric
    lanes: list[LoopbackEngine]
    reader: LanedEngine
    source: LoopbackEngine
    into: npt.NDArray[np.uint8]
    data: npt.NDArray[np.uint8]
    notes: list[tuple[str, bytes]]
    peer: Peer
    local: Rows
    remote: Rows

    async def make(self, count: int, note: bytes = b"", *, now: bool = True) -> Read:
        """A read of the first ``count`` blocks, scattered on the source's side."""
        here = np.arange(count, dtype=np.int32)
        return await self.reader.make_read(self.local, here, self.remote, here[::-1].copy(), note, now=now)

    def expected(self, count: int) -> npt.NDArray[np.uint8]:
        """What the reader's memory must be after such a read."""
        memory = np.zeros_like(self.into)
        blocks = self.data.reshape(COUNT, BLOCK)[:count][::-1]
        memory[: count * BLOCK] = blocks.ravel()
        return memory

    async def posted(self) -> list[int]:
        """Requests posted in each lane."""
        return [(await lane.info()).counters.posted for lane in self.lanes]


@pytest_asyncio.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(jobs, "BULK_BYTES", SPLIT)
    monkeypatch.setattr(pump, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(pump, "PIECE_SECONDS", 0.0)
    fabric = Fabric()
    notes: list[tuple[str, bytes]] = []
    settings = replace(QUICK, drain=0.2)
    lanes = [LoopbackEngine(name, fabric, settings=settings) for name in ("reader", "reader/lane1")]
    reader = LanedEngine(lanes, split_bytes=SPLIT)
    source = LoopbackEngine("source", fabric, lambda peer, payload: notes.append((peer, payload)))
    into = np.zeros(BLOCK * COUNT, dtype=np.uint8)
    data = np.random.default_rng(1).integers(1, 256, BLOCK * COUNT, dtype=np.uint8)
    await reader.start()
    await source.start()
    await reader.register([Span(into.ctypes.data, into.nbytes)])
    span = Span(data.ctypes.data, data.nbytes)
    await source.register([span])
    peer = await reader.add_peer(await source.metadata(), "source", spans=[span])
    rows = np.array([[into.ctypes.data, BLOCK, 0, BLOCK, COUNT]], dtype=np.uint64)
    local = await reader.prepare_local(rows, DRAM, peer)
    rows[0, 0] = data.ctypes.data
    remote = await reader.prepare_remote(rows, DRAM, peer)
    yield World(fabric, lanes, reader, source, into, data, notes, peer, local, remote)
    fabric.let_go()
    await reader.close()
    await source.close()


def conforms(engine: LanedEngine) -> TransferEngine:
    return engine


async def test_a_large_read_is_split_and_told_once(world: World) -> None:
    with world.source.serving():
        read = await world.make(9, b"done")
        result = await world.reader.post(read)
        await until(lambda: world.notes, 5.0)
    assert np.array_equal(world.into, world.expected(9))
    assert (result.bytes, result.telemetry and result.telemetry.bytes) == (9 * BLOCK, 9 * BLOCK)
    assert (read.bytes, read.descriptors, read.state) == (9 * BLOCK, 9, ReadState.DONE)
    assert await world.posted() == [1, 1]
    assert world.notes == [("reader", b"done")]


async def test_parts_are_consecutive_and_about_equal(world: World) -> None:
    read = await world.make(9)
    sizes = [part.bytes for _, part in read.parts]  # type: ignore[attr-defined]
    assert sizes == [4 * BLOCK, 5 * BLOCK]
    await world.reader.release(read)


async def test_no_piece_is_very_large(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for lane in world.lanes:
        monkeypatch.setattr(lane.driver, "post", seen(lane.driver.post, sizes))
    with world.source.serving():
        read = await world.make(32, b"done")
        assert [lane for lane, _ in read.parts] == world.lanes  # type: ignore[attr-defined]
        result = await world.reader.post(read)
        await until(lambda: world.notes, 5.0)
    assert sizes == [8] * 4
    assert np.array_equal(world.into, world.expected(32))
    assert (result.bytes, result.telemetry and result.telemetry.bytes) == (32 * BLOCK, 32 * BLOCK)
    assert world.notes == [("reader", b"done")]


def seen(really: Callable[[Any], bool], sizes: list[int]) -> Callable[[Any], bool]:
    """A posting call that notes how many blocks it was for."""

    def post(handle: Any) -> bool:
        sizes.append(int(handle.lengths.sum()) // BLOCK)
        return really(handle)

    return post


async def test_pieces_are_what_moves_in_a_moment(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rate that was seen, where that is more than the least."""
    sizes: list[int] = []
    for lane in world.lanes:
        monkeypatch.setattr(lane.driver, "post", seen(lane.driver.post, sizes))
    await world.reader.post(await world.make(32))
    assert sizes == [8] * 4
    monkeypatch.setattr(pump, "PIECE_SECONDS", 3_600.0)
    await world.reader.post(await world.make(32))
    assert sizes[4:] == [16] * 2


async def test_a_small_read_does_not_wait_for_all_of_a_large_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Posting may take as long as copying: a lane posts a piece, then whatever small has come, then the next piece."""
    gate, order = threading.Semaphore(0), []

    def gated(really: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def post(handle: Any) -> bool:
            order.append((threading.get_ident(), int(handle.lengths.sum()) // BLOCK))
            assert gate.acquire(timeout=10)
            return really(handle)

        return post

    for lane in world.lanes:
        monkeypatch.setattr(lane.driver, "post", gated(lane.driver.post))
    with world.source.serving():
        waiting = [world.reader.submit(await world.make(32))]
        await until(lambda: len(order) == 2, 5.0)  # one piece in each lane
        waiting.append(world.reader.submit(await world.make(1, now=False)))
        gate.release(5)
        await asyncio.gather(*waiting)
    (small,) = (thread for thread, blocks in order if blocks == 1)
    assert [blocks for thread, blocks in order if thread == small] == [8, 1, 8]


async def test_bulk_does_not_pile_up_in_the_transport(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane has two pieces under way, and more only where they are gone in a moment; small reads always go."""
    monkeypatch.setattr(pump, "BULK_SECONDS", 0.0)
    monkeypatch.setattr(pump, "PIECE_BYTES", 4 * BLOCK)
    world.fabric.hold()
    large = world.reader.submit(await world.make(32))  # eight pieces
    await until(lambda: world.fabric.posts == 4, 5.0)
    small = world.reader.submit(await world.make(1))
    await until(lambda: world.fabric.posts == 5, 5.0)
    for lane in world.lanes:
        await lane.metadata()  # it has come by, and posted nothing more
    assert world.fabric.posts == 5
    world.fabric.let_go()
    await asyncio.gather(large, small)
    assert world.fabric.posts == 9
    assert np.array_equal(world.into[BLOCK:], world.expected(32)[BLOCK:])  # the small one went into the first block
    # It has seen how fast bulk moves, and with an hour ahead of it all of it may go at once.
    monkeypatch.setattr(pump, "BULK_SECONDS", 3600.0)
    world.fabric.hold()
    large = world.reader.submit(await world.make(32))
    await until(lambda: world.fabric.posts == 17, 5.0)
    world.fabric.let_go()
    await large


async def test_no_notice_before_the_last_part_is_done(world: World) -> None:
    """Both parts are under way: nobody may be told yet."""
    with world.source.serving():
        read = await world.make(8, b"done")
        world.fabric.hold()
        waiting = world.reader.submit(read)
        await until(lambda: all(lane_read.state is ReadState.POSTED for _, lane_read in read.parts), 5.0)  # type: ignore[attr-defined]
        assert (world.notes, waiting.done(), read.is_quiesced) == ([], False, False)
        world.fabric.let_go()
        await waiting
        await until(lambda: world.notes, 5.0)
    assert world.notes == [("reader", b"done")]


async def test_small_reads_go_beside_a_large_one(world: World) -> None:
    world.fabric.hold()
    first = world.reader.submit(await world.make(3))
    second = world.reader.submit(await world.make(2))
    third = world.reader.submit(await world.make(1))
    world.fabric.let_go()
    await asyncio.gather(first, second, third)
    assert await world.posted() == [1, 2]  # 3 blocks in one lane, 2 and 1 in the other


async def test_one_part_that_fails_fails_the_whole(world: World) -> None:
    read = await world.make(8)
    world.fabric.fail_post(2)
    with pytest.raises(KvxferError) as caught:
        await world.reader.post(read)
    assert caught.value.reason is Reason.TRANSFER_FAILED
    await until(lambda: read.state is ReadState.FAILED, 5.0)  # the other part may take a moment longer
    assert (read.kept, read.is_quiesced) == (True, False)
    await world.reader.release(read)
    await world.reader.close(0.0)
    assert read.is_quiesced


async def test_one_connection_that_breaks_is_told_of_the_whole(world: World) -> None:
    world.fabric.hold()
    read = await world.make(COUNT)
    waiting = asyncio.ensure_future(world.reader.post(read))
    await until(lambda: world.fabric.posts > 0, 5.0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert not read.lost
    world.fabric.vanish(world.source.name)
    await asyncio.wait_for(read.quiesced, 5)
    assert (read.lost, read.is_quiesced) == (True, True)


async def test_a_cancelled_wait_drains_in_every_lane(world: World) -> None:
    read = await world.make(8)
    world.fabric.hold()
    task = asyncio.ensure_future(world.reader.post(read))
    await until(lambda: world.fabric.posts == 2, 5.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (read.state, read.is_quiesced) == (ReadState.POSTED, False)
    with pytest.raises(KvxferError) as caught:
        await world.reader.release(read)
    assert caught.value.reason is Reason.TRANSFER_STATE
    with pytest.raises(KvxferError):
        await world.reader.remove_peer(world.peer)
    world.fabric.let_go()
    await read.quiesced
    assert read.is_quiesced


async def test_a_peer_that_one_lane_cannot_add_is_added_in_none(world: World) -> None:
    span = world.peer.spans[0]
    other = LoopbackEngine("other", world.fabric)
    await other.start()
    await other.register([span])
    metadata = await other.metadata()
    await world.lanes[1].add_peer(metadata, "other", spans=[span])
    with pytest.raises(KvxferError):
        await world.reader.add_peer(metadata, "other", spans=[span])
    assert [(await lane.info()).peers for lane in world.lanes] == [1, 2]
    await other.close()


async def test_lists_are_given_back_in_every_lane(world: World) -> None:
    await world.reader.release_rows(world.local)
    await world.reader.release_rows(world.remote)
    await world.reader.release_rows(world.remote)
    assert [(await lane.info()).rows for lane in world.lanes] == [0, 0]
    with pytest.raises(KvxferError) as caught:
        await world.make(8)
    assert caught.value.reason is Reason.NO_HANDSHAKE
    await world.reader.remove_peer(world.peer)
    assert [(await lane.info()).peers for lane in world.lanes] == [0, 0]


@pytest.mark.parametrize("count", [2, 8])
async def test_a_read_may_be_made_where_it_is_posted(world: World, count: int) -> None:
    with world.source.serving():
        read = await world.make(count, b"note", now=False)
        assert [(await lane.info()).counters.made for lane in world.lanes] == [0, 0]
        await world.reader.post(read)
        await until(lambda: world.notes, 5.0)
    assert np.array_equal(world.into, world.expected(count))
    assert sum([(await lane.info()).counters.made for lane in world.lanes]) == len(read.parts)  # type: ignore[attr-defined]


async def test_a_read_that_was_never_made_is_dropped_without_a_trace(world: World) -> None:
    read = await world.make(8, now=False)
    await world.reader.release(read)
    await read.quiesced
    assert [(await lane.info()).reads for lane in world.lanes] == [0, 0]
    await world.reader.release_rows(world.local)
    assert [(await lane.info()).rows for lane in world.lanes] == [1, 1]


async def test_a_peer_that_one_lane_still_reads_from_is_removed_from_none(world: World) -> None:
    world.fabric.hold()
    reading = world.reader.submit(await world.make(1))  # in the first lane only
    for _ in range(2):
        with pytest.raises(KvxferError) as caught:
            await world.reader.remove_peer(world.peer)
        assert caught.value.reason is Reason.TRANSFER_STATE
    assert [(await lane.info()).peers for lane in world.lanes] == [1, 1]
    world.fabric.let_go()
    await reading
    await until(lambda: not any(lane._reads for lane in world.lanes), 5.0)
    await world.reader.remove_peer(world.peer)
    assert [(await lane.info()).peers for lane in world.lanes] == [0, 0]
    await world.reader.add_peer(await world.source.metadata(), "source", spans=world.peer.spans)


async def test_a_read_that_one_lane_refuses_quiesces(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Read) -> asyncio.Future[ReadResult]:
        deadline = time.monotonic() + 10
        while not world.fabric.posts and time.monotonic() < deadline:  # what is given up before that is never posted
            time.sleep(0)  # the other lane's thread posts its part
        raise KvxferError(Reason.SHUTTING_DOWN, "this lane is closing")

    monkeypatch.setattr(world.lanes[1], "submit", refuse)
    world.fabric.hold()
    read = await world.make(8)
    waiting = world.reader.submit(read)
    with pytest.raises(KvxferError) as caught:
        await waiting
    assert caught.value.reason is Reason.SHUTTING_DOWN
    assert (state_of(read), read.is_quiesced) == (ReadState.POSTED, False)
    with pytest.raises(KvxferError, match="TRANSFER_STATE"):
        await world.reader.release(read)
    assert [part.state for _, part in read.parts] == [ReadState.POSTED, ReadState.READY]  # type: ignore[attr-defined]
    quiet = asyncio.ensure_future(_wait(read))
    world.fabric.let_go()
    await asyncio.wait_for(quiet, 5)
    await asyncio.wait_for(read.quiesced, 5)
    assert read.is_quiesced
    assert state_of(read) is ReadState.FAILED
    with pytest.raises(KvxferError, match="TRANSFER_STATE"):
        await world.reader.post(read)
    await world.reader.release(read)
    assert [(await lane.info()).reads for lane in world.lanes] == [0, 0]
    assert world.reader._load == [0, 0]


async def _wait(read: Read) -> None:
    await read.quiesced


async def test_a_meeting_that_was_called_off_is_undone_in_every_lane(world: World) -> None:
    """One lane had met the peer already when its caller gave up, the other had not."""
    settings = [EngineSettings(warm_up=seconds, drain=0.2) for seconds in (0.0, 60.0)]
    lanes = [LoopbackEngine(f"late{i}", world.fabric, settings=settings[i]) for i in range(2)]
    reader = LanedEngine(lanes)
    await reader.start()
    world.fabric.hold()
    metadata = await world.source.metadata()
    meeting = asyncio.ensure_future(reader.add_peer(metadata, "source", spans=world.peer.spans))
    await until(lambda: world.fabric.posts == 1 and not lanes[0]._adding, 5.0)
    meeting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(meeting, 5)
    world.fabric.let_go()
    await asyncio.wait_for(reader.add_peer(metadata, "source", spans=world.peer.spans), 5)
    await reader.close()
