"""The bookkeeping, over the loopback driver with scripted faults."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.xfer import pump
from kvxfer.xfer.api import MemoryKind, Peer, Read, ReadState, Rows, Span, TransferEngine
from kvxfer.xfer.engine import EngineSettings
from kvxfer.xfer.loopback import QUICK, Fabric, LoopbackEngine
from tests.xfer.waiting import state_of, until

DRAM = MemoryKind.DRAM
BLOCK, COUNT = 64, 32


def numbers(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


@dataclass
class World:
    """A reader and a source with 32 blocks of 64 bytes each, joined and prepared."""

    fabric: Fabric
    reader: LoopbackEngine
    source: LoopbackEngine
    into: npt.NDArray[np.uint8]
    data: npt.NDArray[np.uint8]
    notes: list[tuple[str, bytes]] = field(default_factory=list)
    peer: Peer = field(init=False)
    local: Rows = field(init=False)
    remote: Rows = field(init=False)

    async def make(self, note: bytes = b"", *blocks: int) -> Read:
        chosen = numbers(*(blocks or (3, 1)))
        return await self.reader.make_read(self.local, chosen, self.remote, chosen, note)


async def eventually(condition: Callable[[], object]) -> None:
    await until(condition, 5.0)


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    fabric = Fabric()
    notes: list[tuple[str, bytes]] = []
    made = World(
        fabric,
        LoopbackEngine("reader", fabric, settings=replace(QUICK, drain=0.2)),
        LoopbackEngine("source", fabric, lambda peer, payload: notes.append((peer, payload))),
        np.zeros(BLOCK * COUNT, dtype=np.uint8),
        np.random.default_rng(1).integers(1, 256, BLOCK * COUNT, dtype=np.uint8),
        notes,
    )
    await made.reader.start()
    await made.source.start()
    await made.reader.register([Span(made.into.ctypes.data, made.into.nbytes)])
    span = Span(made.data.ctypes.data, made.data.nbytes)
    await made.source.register([span])
    made.peer = await made.reader.add_peer(await made.source.metadata(), "source", spans=[span])
    row = [[made.into.ctypes.data, BLOCK, 0, BLOCK, COUNT]]
    made.local = await made.reader.prepare_local(np.array(row, dtype=np.uint64), DRAM, made.peer)
    row[0][0] = made.data.ctypes.data
    made.remote = await made.reader.prepare_remote(np.array(row, dtype=np.uint64), DRAM, made.peer)
    yield made
    fabric.let_go()
    await made.reader.close()
    await made.source.close()


def conforms(engine: LoopbackEngine) -> TransferEngine:
    return engine


async def test_bytes_and_notification(world: World) -> None:
    with world.source.serving():
        result = await world.reader.post(await world.make(b"hello", 5, 0, 31))
        await eventually(lambda: world.notes)
    assert result.bytes == 3 * BLOCK
    expected = np.zeros_like(world.into)
    for block in (5, 0, 31):
        expected[block * BLOCK : (block + 1) * BLOCK] = world.data[block * BLOCK : (block + 1) * BLOCK]
    assert np.array_equal(world.into, expected)
    assert world.notes == [("reader", b"hello")]


async def test_nothing_is_seen_without_demand(world: World) -> None:
    await world.reader.post(await world.make(b"hello"))
    await asyncio.sleep(0.05)
    assert world.notes == []
    assert (await world.source.info()).counters.polls == 0
    demand = world.source.connected()
    await eventually(lambda: world.notes)
    world.fabric.notify("reader", "source", b"later")  # while the thread has nothing to wake it but its own interval
    await eventually(lambda: len(world.notes) == 2)
    demand.close()
    demand.close()
    await world.source.metadata()
    polls = (await world.source.info()).counters.polls
    await asyncio.sleep(0.05)
    assert (await world.source.info()).counters.polls <= polls + 1


async def test_lost_and_duplicate_notifications(world: World) -> None:
    world.fabric.lose_notifications()
    world.fabric.duplicate_notifications()
    with world.source.serving():
        for note in (b"1", b"2", b"3"):
            await world.reader.post(await world.make(note))
        await eventually(lambda: len(world.notes) == 3)
    assert [note for _, note in world.notes] == [b"2", b"2", b"3"]


@pytest.mark.parametrize("reason", [Reason.TRANSFER_FAILED, Reason.PEER_LOST])
async def test_the_kth_post_fails(world: World, reason: Reason) -> None:
    world.fabric.fail_post(2, reason)
    await world.reader.post(await world.make())
    read = await world.make()
    with pytest.raises(KvxferError) as caught:
        await world.reader.post(read)
    assert caught.value.reason is reason
    assert caught.value.metadata["peer"] == "source"
    if reason is Reason.PEER_LOST:
        await asyncio.wait_for(read.quiesced, 5)
    assert (state_of(read), read.kept) == (ReadState.FAILED, reason is not Reason.PEER_LOST)
    with pytest.raises(KvxferError, match="TRANSFER_STATE"):
        await world.reader.post(read)
    await world.reader.release(read)
    await world.reader.post(await world.make())


async def test_a_cancelled_read_drains(world: World) -> None:
    world.fabric.hold()
    read = await world.make()
    posting = asyncio.ensure_future(world.reader.post(read))
    await eventually(lambda: world.fabric.posts == 1)
    posting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await posting
    assert state_of(read) is ReadState.POSTED
    assert not read.is_quiesced
    assert not world.into.any()
    with pytest.raises(KvxferError, match="TRANSFER_STATE"):
        await world.reader.release(read)
    with pytest.raises(KvxferError, match="TRANSFER_STATE"):
        await world.reader.remove_peer(world.peer)
    first = asyncio.ensure_future(_wait(read))
    await asyncio.sleep(0.01)
    first.cancel()
    assert not read.is_quiesced
    world.fabric.let_go()
    await asyncio.wait_for(read.quiesced, 5)
    assert state_of(read) is ReadState.DONE
    assert world.into.any()
    assert (await world.reader.info()).in_flight == 0


async def _wait(read: Read) -> None:
    await read.quiesced


async def test_a_read_cancelled_before_it_was_handed_over_is_never_posted(world: World) -> None:
    read, free = await world.make(), threading.Event()
    busy = world.reader._pump().call(lambda _: free.wait(10))
    posting = asyncio.ensure_future(world.reader.post(read))
    await asyncio.sleep(0)
    posting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await posting
    free.set()
    await asyncio.wait_for(read.quiesced, 5)
    await busy
    assert world.fabric.posts == 0
    assert state_of(read) is ReadState.FAILED
    assert not world.into.any()
    assert (await world.reader.info()).reads == 0


async def test_lists_stay_until_the_last_read_is_gone(world: World) -> None:
    world.fabric.hold()
    read = await world.make()
    posting = asyncio.ensure_future(world.reader.post(read))
    await eventually(lambda: world.fabric.posts == 1)
    alive = len(world.reader.driver.alive)
    await world.reader.release_rows(world.local)
    await world.reader.release_rows(world.remote)
    assert len(world.reader.driver.alive) == alive == 4  # registration, two lists, request
    with pytest.raises(KvxferError, match="NO_HANDSHAKE"):
        await world.make()
    world.fabric.let_go()
    await posting
    await eventually(lambda: len(world.reader.driver.alive) == 1)
    assert (await world.reader.info()).rows == 0


async def test_a_peer_vanishes_in_flight(world: World) -> None:
    world.fabric.hold()
    read = await world.make()
    posting = asyncio.ensure_future(world.reader.post(read))
    await eventually(lambda: world.fabric.posts == 1)
    world.fabric.vanish("source")
    with pytest.raises(KvxferError, match="PEER_LOST"):
        await posting
    await read.quiesced
    await world.reader.remove_peer(world.peer)
    info = await world.reader.info()
    assert (info.peers, info.rows, info.reads) == (0, 0, 0)


async def test_removing_a_peer_frees_what_was_made_for_it(world: World) -> None:
    unposted = await world.make()
    await world.reader.remove_peer(world.peer)
    assert state_of(unposted) is ReadState.RELEASED
    await eventually(lambda: len(world.reader.driver.alive) == 1)
    with pytest.raises(KvxferError, match="TRANSFER_STATE"):
        await world.reader.post(unposted)


async def test_calls_that_are_cancelled_leave_nothing_behind(world: World) -> None:
    before = len(world.reader.driver.alive)
    row = np.array([[world.into.ctypes.data, 1, 0, 1, 1]], dtype=np.uint64)
    calls = [
        world.make(),
        world.reader.prepare_local(row, DRAM, world.peer),
        world.make(),
    ]
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await eventually(lambda: len(world.reader.driver.alive) == before)
    await world.reader.release_rows(world.local)
    await world.reader.release_rows(world.remote)
    await eventually(lambda: len(world.reader.driver.alive) == 1)


async def test_closing_gives_up_after_the_drain(world: World) -> None:
    world.fabric.hold()
    read = await world.make()
    posting = asyncio.ensure_future(world.reader.post(read))
    await eventually(lambda: world.fabric.posts == 1)
    await world.reader.close()
    assert read.is_quiesced
    with pytest.raises(KvxferError, match="SHUTTING_DOWN"):
        await posting
    world.fabric.let_go()
    await asyncio.sleep(0.02)
    assert not world.into.any()
    with pytest.raises(KvxferError, match="SHUTTING_DOWN"):
        await world.make()


async def test_a_failing_receiver_of_notifications_does_not_stop_the_others(world: World) -> None:
    seen: list[bytes] = []

    def handler(_: str, payload: bytes) -> None:
        seen.append(payload)
        raise ValueError("a bug of the receiver")

    other = LoopbackEngine("other", world.fabric, handler)
    await other.start()
    world.fabric.notify("x", "other", b"1")
    world.fabric.notify("x", "other", b"2")
    with other.serving():
        await eventually(lambda: len(seen) == 2)
    await other.close()


async def test_starting_fails_cleanly(world: World) -> None:
    twin = LoopbackEngine("reader", world.fabric)
    with pytest.raises(KvxferError, match="INTERNAL"):
        await twin.start()
    await twin.close()
    with pytest.raises(KvxferError, match="SHUTTING_DOWN"):
        await twin.metadata()


async def test_an_unforeseen_failure_is_internal_and_the_thread_lives_on(world: World) -> None:
    with pytest.raises(KvxferError, match="INTERNAL"):
        await world.reader._pump().call(lambda _: 1 // 0)
    await world.reader.post(await world.make())


async def _silent(world: World) -> tuple[LoopbackEngine, Span, bytes]:
    """An engine that warms connections up, and a source that will not answer until ``let_go``."""
    reader = LoopbackEngine("warm", world.fabric, settings=EngineSettings(warm_up=2.0, drain=0.2))
    await reader.start()
    world.fabric.hold()
    return reader, Span(world.data.ctypes.data, world.data.nbytes), await world.source.metadata()


async def test_a_peer_that_was_silent_at_first_can_be_removed_and_met_again(world: World) -> None:
    reader, span, metadata = await _silent(world)
    peer = await reader.add_peer(metadata, "source", spans=[span])
    assert peer.warm_seconds is None
    await asyncio.wait_for(reader.remove_peer(peer), 5)
    with pytest.raises(KvxferError, match="NO_HANDSHAKE"):
        await reader.remove_peer(peer)
    again = asyncio.ensure_future(reader.add_peer(metadata, "source", spans=[span]))
    await reader.metadata()
    await reader.metadata()  # whatever the removal asked of the library was done by now
    assert not again.done()
    assert len(reader.driver.alive) == 4  # nothing is freed under the read: scratch, two lists, request
    world.fabric.let_go()
    peer = await asyncio.wait_for(again, 5)
    assert peer.warm_seconds is not None
    info = await reader.info()
    assert (info.peers, info.counters.done, info.counters.failed) == (1, 2, 0)
    await reader.remove_peer(peer)
    await eventually(lambda: len(reader.driver.alive) == 1)
    await reader.close()


async def test_a_meeting_that_was_called_off_can_be_repeated(world: World) -> None:
    reader, span, metadata = await _silent(world)
    first = asyncio.ensure_future(reader.add_peer(metadata, "source", spans=[span]))
    await eventually(lambda: world.fabric.posts == 1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    again = asyncio.ensure_future(reader.add_peer(metadata, "source", spans=[span]))
    await eventually(lambda: "source" not in reader._peers and "source" not in reader._adding)
    world.fabric.let_go()
    await asyncio.wait_for(again, 5)
    await reader.close()


async def test_an_engine_with_a_peer_that_is_leaving_can_be_closed(world: World) -> None:
    reader, span, metadata = await _silent(world)
    await reader.remove_peer(await reader.add_peer(metadata, "source", spans=[span]))
    again = asyncio.ensure_future(reader.add_peer(metadata, "source", spans=[span]))
    await asyncio.wait_for(reader.close(), 5)
    with pytest.raises(KvxferError, match="SHUTTING_DOWN"):
        await asyncio.wait_for(again, 5)
    assert not reader._leaving


async def test_known_peers_are_polled_for_a_moment_after_the_last_event(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent last may have to be pushed out; then nothing is done until a command comes."""
    monkeypatch.setattr(pump, "_LINGER", 3600.0 * pump._LINGER)
    running = world.reader._pump()
    polls = running.counters.polls
    await world.reader.metadata()
    await eventually(lambda: running.counters.polls >= polls + 3)
    assert running._patience() == running._settings.interval
    monkeypatch.setattr(pump, "_LINGER", 0.0)
    assert running._patience() is None
    await world.reader.remove_peer(world.peer)
    assert running._peers == 0


@pytest.mark.parametrize("reason", [Reason.TRANSFER_FAILED, Reason.INTERNAL, Reason.PEER_LOST])
async def test_a_failed_read_keeps_its_memory_unless_the_peer_was_lost(world: World, reason: Reason) -> None:
    """A library reports the first of many operations that fails; others may write until the agent is destroyed."""
    lost = reason is Reason.PEER_LOST
    reader = LoopbackEngine("kept", world.fabric)
    await reader.start()
    await reader.register([Span(world.into.ctypes.data, world.into.nbytes)])
    span = Span(world.data.ctypes.data, world.data.nbytes)
    peer = await reader.add_peer(await world.source.metadata(), "source", spans=[span])
    local = await reader.prepare_local(world.local.rows, DRAM, peer)
    remote = await reader.prepare_remote(world.remote.rows, DRAM, peer)
    read = await reader.make_read(local, numbers(3), remote, numbers(3), b"")
    world.fabric.fail_post(1, reason)
    with pytest.raises(KvxferError) as caught:
        await reader.post(read)
    assert caught.value.reason is reason
    assert (state_of(read), read.kept) == (ReadState.FAILED, not lost)
    if lost:
        await asyncio.wait_for(read.quiesced, 5)
        await reader.remove_peer(peer)
        await eventually(lambda: len(reader.driver.alive) == 1)
    else:
        assert not read.is_quiesced
        with pytest.raises(KvxferError, match="TRANSFER_STATE"):
            await reader.remove_peer(peer)
    await reader.close(0.0)
    assert read.is_quiesced
