"""Real NIXL between processes over host memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import time
import weakref
from collections.abc import Awaitable

import numpy as np
import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.xfer.api import MemoryKind, Peer, Read, ReadResult, ReadState, RowArray, Rows, TransferEngine
from kvxfer.xfer.engine import EngineSettings
from kvxfer.xfer.environment import DEFAULTS
from kvxfer.xfer.nixl import NixlEngine, _translated
from kvxfer.xfer.segments import Segments
from tests.xfer.nixl_processes import Bytes, Target, cpu_seconds, pattern, reader, run, span_of, target
from tests.xfer.waiting import state_of, until

pytestmark = pytest.mark.nixl

DRAM = MemoryKind.DRAM
TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}


def rows(*lines: tuple[int, int, int, int, int]) -> RowArray:
    return np.array(lines, dtype=np.uint64)


def numbers(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


async def meet(engine: TransferEngine, it: Target) -> Peer:
    return await engine.add_peer(it.metadata, it.name, spans=[it.span])


async def whole(engine: TransferEngine, it: Target, memory: Bytes, peer: Peer, block: int) -> tuple[Rows, Rows]:
    """Both sides as one row of equal blocks over all of the memory."""
    count = it.size // block
    local = await engine.prepare_local(rows((memory.ctypes.data, block, 0, block, count)), DRAM, peer)
    remote = await engine.prepare_remote(rows((it.span.address, block, 0, block, count)), DRAM, peer)
    return local, remote


# --- bytes -----------------------------------------------------------------------------------------------------------


async def strided_and_shuffled() -> None:
    async with target(size=4 << 20) as it, reader() as engine:
        memory = pattern(2 << 20, 99)
        before = memory.copy()
        await engine.register([span_of(memory)])
        peer = await meet(engine, it)
        assert peer.warm_seconds is not None
        assert peer.warm_seconds < 5
        here, there = memory.ctypes.data, it.span.address
        # Two rows a side with other strides and counts: 40 blocks of 1,000 bytes and 20 of 4,096.
        local = await engine.prepare_local(
            rows((here + 3, 1000, 0, 1777, 40), (here + 80_000, 4096, 0, 9000, 20)), DRAM, peer
        )
        remote = await engine.prepare_remote(
            rows((there + 50, 4096, 0, 5000, 30), (there + 200_001, 1000, 0, 1001, 70)), DRAM, peer
        )
        assert (local.total, remote.total) == (60, 100)
        assert local.starts.tolist() == [0, 40, 60]
        rng = random.Random(5)
        pairs = [(a, 30 + b) for a, b in zip(rng.sample(range(40), 25), rng.sample(range(70), 25), strict=True)]
        pairs += [(40 + a, b) for a, b in zip(rng.sample(range(20), 11), rng.sample(range(30), 11), strict=True)]
        rng.shuffle(pairs)
        read = await engine.make_read(
            local, numbers(*(a for a, _ in pairs)), remote, numbers(*(b for _, b in pairs)), b"n"
        )
        assert read.bytes == 25 * 1000 + 11 * 4096
        assert read.descriptors == 36
        result = await engine.post(read)
        assert result.bytes == read.bytes
        assert result.telemetry is not None
        assert result.telemetry.bytes == read.bytes
        assert 1 <= result.telemetry.descriptors <= 36
        expected, source = before.copy(), it.memory
        for a, b in pairs:
            to, length = (3 + 1777 * a, 1000) if a < 40 else (80_000 + 9000 * (a - 40), 4096)
            at = 50 + 5000 * b if b < 30 else 200_001 + 1001 * (b - 30)
            expected[to : to + length] = source[at : at + length]
        assert (expected != before).sum() > 60_000
        assert np.array_equal(memory, expected)
        assert state_of(read) is ReadState.DONE
        await asyncio.wait_for(read.quiesced, 10)
        assert await it.do("notes", 1) == [("reader-1", b"n")]
        assert await it.do("memory") is True


@pytest.mark.parametrize("environment", [{}, TCP], ids=["default", "tcp"])
def test_bytes_arrive_and_nothing_else_is_touched(environment: dict[str, str]) -> None:
    run(strided_and_shuffled, environment)


async def binary_notification() -> None:
    async with target() as it, reader() as engine:
        memory = np.zeros(it.size, dtype=np.uint8)
        await engine.register([span_of(memory)])
        peer = await meet(engine, it)
        local, remote = await whole(engine, it, memory, peer, 4096)
        note = bytes(range(256)) + b"\0end"
        await engine.post(await engine.make_read(local, numbers(3), remote, numbers(9), note))
        await engine.post(await engine.make_read(local, numbers(4), remote, numbers(8), b""))
        await engine.post(await engine.make_read(local, numbers(5), remote, numbers(7), b"last"))
        notes = await it.do("notes", 2)
        assert sorted(notes) == [("reader-1", note), ("reader-1", b"last")]


def test_a_notification_carries_any_bytes_and_an_empty_one_is_none() -> None:
    run(binary_notification)


async def polling_needed() -> None:
    async with target(serve=False) as it, reader(settings=EngineSettings(warm_up=0.3)) as engine:
        memory = np.zeros(it.size, dtype=np.uint8)
        await engine.register([span_of(memory)])
        peer = await meet(engine, it)
        assert peer.warm_seconds is None, "the target does not poll, so nothing can have been read"
        local, remote = await whole(engine, it, memory, peer, 4096)
        read = await engine.make_read(local, numbers(0), remote, numbers(1), b"x")
        posted = asyncio.ensure_future(engine.post(read))
        done, _ = await asyncio.wait([posted], timeout=0.5)
        assert not done
        assert await it.do("polls") == 0
        await it.do("connect")
        await asyncio.wait_for(posted, 10)
        assert await it.do("notes", 1) == [("reader-1", b"x")]
        await it.do("drop", "connected")
        before = await it.do("polls")
        await asyncio.sleep(0.1)
        assert await it.do("polls") <= before + 1


def test_a_target_must_poll_and_does_so_on_demand() -> None:
    run(polling_needed, TCP)


# --- refusals --------------------------------------------------------------------------------------------------------


async def refused(reason: Reason, doing: Awaitable[object]) -> None:
    with pytest.raises(KvxferError) as caught:
        await doing
    assert caught.value.reason is reason, caught.value
    assert caught.value.__cause__ is None
    assert "NIXL_" not in str(caught.value)


async def refusals() -> None:
    async with target() as it, target("target-2", seed=8) as other, reader() as engine:
        memory = np.zeros(it.size, dtype=np.uint8)
        registration = await engine.register([span_of(memory)])
        await refused(Reason.FIELD_INVALID, engine.register([span_of(memory)]))
        peer = await meet(engine, it)
        await refused(Reason.FIELD_INVALID, meet(engine, it))
        await refused(Reason.PEER_METADATA_INVALID, engine.add_peer(it.metadata, "somebody", spans=[it.span]))
        await refused(
            Reason.PEER_METADATA_INVALID, engine.add_peer(await engine.metadata(), engine.name, spans=[it.span])
        )
        await refused(Reason.PEER_METADATA_INVALID, engine.add_peer(await engine.metadata(), "x", spans=[it.span]))
        local, remote = await whole(engine, it, memory, peer, 4096)
        n = local.total
        ok = numbers(0)
        for bad in (numbers(n), numbers(-1), numbers(2**31 - 1)):
            await refused(Reason.BLOCK_OUT_OF_RANGE, engine.make_read(local, bad, remote, ok, b""))
            await refused(Reason.BLOCK_OUT_OF_RANGE, engine.make_read(local, ok, remote, bad, b""))
        empty = np.zeros(0, dtype=np.int32)
        await refused(Reason.FIELD_INVALID, engine.make_read(local, empty, remote, empty, b""))
        await refused(Reason.FIELD_INVALID, engine.make_read(local, ok, remote, numbers(0, 1), b""))
        await refused(Reason.FIELD_INVALID, engine.make_read(remote, ok, local, ok, b""))
        second = await meet(engine, other)
        foreign = await engine.prepare_remote(rows((other.span.address, 4096, 0, 4096, 2)), DRAM, second)
        await refused(Reason.NO_HANDSHAKE, engine.make_read(local, ok, foreign, ok, b""))
        await refused(Reason.REGISTRATION_BUSY, engine.deregister(registration))
        await engine.release_rows(local)
        await engine.release_rows(local)
        await refused(Reason.NO_HANDSHAKE, engine.make_read(local, ok, remote, ok, b""))
        await engine.remove_peer(peer)
        await refused(Reason.NO_HANDSHAKE, engine.prepare_local(rows((memory.ctypes.data, 1, 0, 1, 1)), DRAM, peer))
        await refused(Reason.NO_HANDSHAKE, engine.remove_peer(peer))
        peer = await meet(engine, it)  # and the name is free again
        await engine.deregister(registration)
        await refused(Reason.NOT_REGISTERED, engine.deregister(registration))
        await refused(Reason.NOT_REGISTERED, engine.prepare_local(rows((memory.ctypes.data, 1, 0, 1, 1)), DRAM, peer))
    await refused(Reason.SHUTTING_DOWN, engine.metadata())


def test_mistakes_are_refused_before_the_library_sees_them() -> None:
    run(refusals)


async def damaged_metadata() -> None:
    async with target("target-0") as damaged, target() as it, reader() as engine:
        blob = damaged.metadata
        rng = random.Random(3)
        for _ in range(50):
            await refused(
                Reason.PEER_METADATA_INVALID,
                engine.add_peer(rng.randbytes(rng.randrange(0, 600)), it.name, spans=[it.span]),
            )
        for end in range(len(blob)):
            await refused(Reason.PEER_METADATA_INVALID, engine.add_peer(blob[:end], damaged.name, spans=[it.span]))
        memory = np.zeros(it.size, dtype=np.uint8)
        await engine.register([span_of(memory)])
        peer = await meet(engine, it)  # others are unaffected
        local, remote = await whole(engine, it, memory, peer, 4096)
        await engine.post(await engine.make_read(local, numbers(1), remote, numbers(2), b""))
        assert np.array_equal(memory[4096:8192], it.memory[8192 : 3 * 4096])


def test_random_and_truncated_metadata_is_refused() -> None:
    run(damaged_metadata)


async def meet_with(engine: TransferEngine, blob: bytes, it: Target) -> Peer:
    return await engine.add_peer(blob, it.name, spans=[it.span])


async def flipped_metadata() -> None:
    """May abort: UCX asserts on some.  Anything else than success or a KvxferError fails the test."""
    async with reader(settings=EngineSettings(warm_up=0.0)) as engine:
        it = await Target().ready()
        try:
            rng = random.Random(11)
            for _ in range(150):
                blob = bytearray(it.metadata)
                at = rng.randrange(len(blob) * 8)
                blob[at // 8] ^= 1 << at % 8
                allowed = (Reason.PEER_METADATA_INVALID, Reason.PEER_UNREACHABLE, Reason.PEER_LOST)
                outcome = (await asyncio.gather(meet_with(engine, bytes(blob), it), return_exceptions=True))[0]
                if isinstance(outcome, Peer):
                    assert outcome.name == it.name
                    await engine.remove_peer(outcome)
                else:
                    assert isinstance(outcome, KvxferError), outcome
                    assert outcome.reason in allowed, outcome
        finally:
            it.end()


def test_flipped_bits_in_metadata_raise_or_abort_but_never_pass_for_another_agent() -> None:
    try:
        run(flipped_metadata)
    except AssertionError as error:
        if f"ended with {-signal.SIGABRT}" not in str(error) and f"ended with {-signal.SIGSEGV}" not in str(error):
            raise


# --- trouble ---------------------------------------------------------------------------------------------------------


async def big_read(engine: TransferEngine, it: Target) -> tuple[Bytes, Peer, Read, asyncio.Future[ReadResult]]:
    """A read of all of a target's memory, caught half-way: the target was stopped when its first bytes arrived."""
    memory = np.zeros(it.size, dtype=np.uint8)
    await engine.register([span_of(memory)])
    peer = await meet(engine, it)
    local, remote = await whole(engine, it, memory, peer, 1 << 20)
    every = np.arange(local.total, dtype=np.int32)
    assert it.process.pid is not None
    for _ in range(10):
        memory[:] = 0
        read = await engine.make_read(local, every, remote, every, b"done")
        posted = asyncio.ensure_future(engine.post(read))
        await until(lambda: bool(memory[:: 1 << 16].any()))
        os.kill(it.process.pid, signal.SIGSTOP)
        await asyncio.sleep(0.2)  # what was under way on the wire arrives
        if not memory[-4096:].any():
            return memory, peer, read, posted
        proceed(it)  # all was sent before the target was stopped: once more
        await posted
    raise AssertionError("no read was caught half-way: nothing can be tested")


def proceed(it: Target) -> None:
    assert it.process.pid is not None
    os.kill(it.process.pid, signal.SIGCONT)


async def target_killed() -> None:
    async with target(size=256 << 20) as it, reader() as engine:
        _, peer, read, posted = await big_read(engine, it)
        await refused(Reason.TRANSFER_STATE, engine.release(read))
        await refused(Reason.TRANSFER_STATE, engine.remove_peer(peer))
        it.process.kill()
        began = time.monotonic()
        with pytest.raises(KvxferError) as caught:
            await asyncio.wait_for(posted, 20)
        assert caught.value.reason in (Reason.PEER_LOST, Reason.TRANSFER_FAILED), caught.value
        assert caught.value.metadata["peer"] == it.name
        assert time.monotonic() - began < 10
        await asyncio.wait_for(read.quiesced, 10)
        assert state_of(read) is ReadState.FAILED
        await engine.remove_peer(peer)
        info = await engine.info()
        assert (info.in_flight, info.counters.failed, info.peers) == (0, 1, 0)
    async with target(size=1 << 20) as it, reader("reader-2") as engine:
        await meet(engine, it)


def test_a_target_that_is_killed_in_mid_transfer_is_an_error() -> None:
    run(target_killed, TCP)


async def cancelled() -> None:
    async with target(size=256 << 20) as it, reader() as engine:
        memory, peer, read, posted = await big_read(engine, it)
        posted.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await posted
        assert state_of(read) is ReadState.POSTED
        assert not read.is_quiesced
        await refused(Reason.TRANSFER_STATE, engine.release(read))
        await refused(Reason.TRANSFER_STATE, engine.remove_peer(peer))
        assert not memory[-4096:].any()
        proceed(it)
        waiter = asyncio.ensure_future(asyncio.wait_for(read.quiesced, 30))
        await asyncio.sleep(0)
        waiter.cancel()  # one waiter's end is not the others'
        await asyncio.wait_for(read.quiesced, 30)
        # It ends with the piece that was under way, which has arrived.
        assert state_of(read) is ReadState.FAILED
        assert not memory[-4096:].any()
        arrived = (memory == it.memory).reshape(-1, 1 << 20).all(axis=1)
        count = int(arrived.sum())
        assert count > 0
        assert arrived[:count].all()
        assert not memory[count << 20 :].any()
        await engine.remove_peer(peer)


def test_what_is_cancelled_ends_with_the_piece_under_way() -> None:
    run(cancelled, TCP)


def sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that the listing itself used
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


async def closed_in_flight() -> None:
    async with target(size=256 << 20) as it:
        before = sockets()
        engine = NixlEngine("reader-1", settings=EngineSettings(drain=0.0))
        await engine.start()
        memory, _, read, posted = await big_read(engine, it)
        assert sockets() > before
        await engine.close()
        assert sockets() == before, "the agent is still there"
        assert read.is_quiesced
        assert state_of(read) is ReadState.FAILED
        frozen = memory.copy()
        await refused(Reason.SHUTTING_DOWN, posted)
        assert not memory[-4096:].any()
        proceed(it)
        await asyncio.sleep(0.5)
        assert np.array_equal(memory, frozen), "bytes landed after the agent was destroyed"


def test_closing_destroys_the_agent_and_stops_the_read() -> None:
    run(closed_in_flight, TCP)


async def closed_politely() -> None:
    async with target(size=256 << 20) as it, reader() as engine:
        memory, _, _, posted = await big_read(engine, it)
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        await refused(Reason.SHUTTING_DOWN, engine.metadata())
        proceed(it)
        assert (await posted).bytes == it.size
        await closing
        assert np.array_equal(memory, it.memory)
        await engine.close()


def test_closing_waits_for_a_read_in_flight() -> None:
    run(closed_politely, TCP)


# --- costs -----------------------------------------------------------------------------------------------------------


async def idle() -> None:
    async with target(serve=False) as it, reader() as engine:
        assert await it.do("polls") == 0
        usage = await it.do("cpu", 2.0)
        assert usage < 0.01, f"idle: {usage:.1%}"
        await it.do("connect")
        for _ in range(5):  # the machine may stand still meanwhile
            before = await it.do("polls")
            usage = await it.do("cpu", 2.0)
            polls = await it.do("polls") - before
            print(f"connected: {usage:.2%} of a core, {polls} polls in 2 s")
            assert usage < 0.05, f"connected: {usage:.1%}"
            if polls >= 150:
                break
        assert polls >= 150, "a connected pump polls at least every 10 ms, give or take a busy machine"
        memory = np.zeros(it.size, dtype=np.uint8)
        await engine.register([span_of(memory)])
        await meet(engine, it)
        start = cpu_seconds()
        await asyncio.sleep(1.0)
        assert cpu_seconds() - start < 0.05


def test_an_idle_pump_costs_next_to_nothing() -> None:
    run(idle)


async def many_reads() -> None:
    async with target(size=4 << 20) as it, reader() as engine:
        memory = np.zeros(it.size, dtype=np.uint8)
        await engine.register([span_of(memory)])
        peer = await meet(engine, it)
        local, remote = await whole(engine, it, memory, peer, 4096)
        rng = np.random.default_rng(1)

        async def burst(count: int) -> None:
            for i in range(count):
                mine = rng.permutation(local.total)[:50].astype(np.int32)
                theirs = rng.permutation(remote.total)[:50].astype(np.int32)
                read = await engine.make_read(local, mine, remote, theirs, b"r%d" % i)
                if i % 10 == 9:
                    await engine.release(read)
                else:
                    await engine.post(read)

        await burst(500)
        resident = _resident()
        await burst(1500)
        grown = _resident() - resident
        assert grown < 4 << 20, f"{grown} bytes more after 1,500 reads"
        info = await engine.info()
        assert (info.reads, info.in_flight, info.rows) == (0, 0, 2)
        assert info.counters.made == 2001
        assert info.counters.released == 2001
        assert info.counters.done == 1801
        assert info.counters.bytes == 1800 * 50 * 4096 + 1
        await engine.release_rows(local)
        await engine.release_rows(remote)
        assert (await engine.info()).rows == 0
        assert len(await it.do("notes", 1800)) == 1800


def _resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_handles_do_not_leak() -> None:
    run(many_reads)


async def described() -> None:
    async with reader("described-7") as engine:
        info = await engine.info()
        assert info.name == "described-7"
        assert info.library == "nixl"
        assert info.library_version.split(".")[0].isdigit()
        assert info.transport_version.split(".")[0].isdigit()
        assert "UCX" in info.backends
        assert info.environment["UCX_TCP_TX_SEG_SIZE"] == "32K"
        assert set(info.defaults) == set(DEFAULTS) - {"UCX_TCP_TX_SEG_SIZE"}


def test_info_tells_defaults_from_the_users_settings() -> None:
    run(described, {"UCX_TCP_TX_SEG_SIZE": "32K"})


async def narrow() -> None:
    async with reader("narrow-7") as engine:
        info = await engine.info()
        assert Segments.of(info.environment) == (48 * 1024, 48 * 1024)
        assert set(info.defaults) == set(DEFAULTS) - {"UCX_TCP_RX_SEG_SIZE"}


def test_defaults_fit_what_the_user_has_set() -> None:
    """UCX would not start with segments that are larger than what it has room for."""
    run(narrow, {"UCX_TLS": "tcp", "UCX_TCP_RX_SEG_SIZE": "48K"})


class _Agent:
    """Stands for NIXL's, which is destroyed when nobody refers to it any more."""

    def fail(self) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")


def test_an_error_that_is_kept_does_not_keep_the_agent() -> None:
    agent = _Agent()
    gone = weakref.ref(agent)
    with pytest.raises(KvxferError) as kept, _translated(Reason.PEER_UNREACHABLE, "no connection"):
        agent.fail()
    gc.disable()  # which would come by some day, and not when an agent has to be destroyed
    try:
        del agent
        assert gone() is None
    finally:
        gc.enable()
    assert kept.value.reason is Reason.PEER_UNREACHABLE
