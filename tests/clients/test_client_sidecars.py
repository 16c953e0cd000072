"""Both clients against real sidecars: two in one process, over the loopback engine, with shared memory files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvxfer.config import Settings
from kvxfer.core.layout import Axis, AxisKind
from kvxfer.sidecar import Sidecar
from kvxfer.xfer.loopback import Fabric, LoopbackEngine
from kvxfer_client import (
    AsyncClient,
    BlockList,
    CacheLayout,
    Client,
    Component,
    Group,
    GroupKind,
    KvxferError,
    Owned,
    Rank,
    RankAddress,
    Reason,
    Region,
    Registered,
    RemoteEngine,
    SharedRegion,
    Ticket,
    TransferState,
    UnitRange,
    View,
    attention_blocks,
    grouped,
    make_ticket,
    new_lease_token,
    snapshot,
    ticket_to_string,
)
from tests.support.loopback import soon

KEY = "model@1/bf16"
BLOCK_TOKENS, BLOCKS, SNAPSHOTS = 16, 8, 4
TOKEN_BYTES, STATE_BYTES = 4 * 2 * 32 * 2, 4 * 16 * 4


def layout() -> CacheLayout:
    """One attention and one state group, each in a region of its own; an attention block is 8 KiB."""
    heads = UnitRange(0, 4, 4)
    axes = (Axis(AxisKind.TOKEN, BLOCK_TOKENS), Axis(AxisKind.UNIT, 4), Axis(AxisKind.INNER, 64))
    kv = Component("kv", "bfloat16", 2, axes, heads)
    ssm = Component("ssm", "float32", 4, (Axis(AxisKind.UNIT, 4), Axis(AxisKind.INNER, 16)), heads)
    page = BLOCK_TOKENS * TOKEN_BYTES
    return CacheLayout(
        (Region(page * BLOCKS), Region(STATE_BYTES * SNAPSHOTS)),
        (
            Group("attn", GroupKind.ATTENTION, (View("0", 0, 0, page, BLOCKS, (kv,)),), BLOCK_TOKENS),
            Group("ssm", GroupKind.STATE, (View("1", 1, 0, STATE_BYTES, SNAPSHOTS, (ssm,)),)),
        ),
    )


@dataclass
class Side:
    """One engine with its sidecar."""

    sidecar: Sidecar
    client: AsyncClient
    regions: list[SharedRegion]
    registered: Registered | None = None

    async def register(self) -> Registered:
        self.registered = await self.client.register(layout(), self.regions, compatibility_key=KEY)
        return self.registered

    def page(self, block: int) -> np.ndarray:
        return self.regions[0].numpy(np.uint8, (BLOCKS, BLOCK_TOKENS * TOKEN_BYTES))[block]

    def state(self, block: int) -> np.ndarray:
        return self.regions[1].numpy(np.uint8, (SNAPSHOTS, STATE_BYTES))[block]


@dataclass
class World:
    """A prefill and a decode engine, and what lies between them."""

    p: Side
    d: Side
    fabric: Fabric

    async def register(self) -> None:
        """Both, with P's memory full of noise."""
        noise = np.random.default_rng(7)
        for region in self.p.regions:
            array = region.numpy(np.uint8, (region.size,))
            array[:] = noise.integers(1, 256, region.size, dtype=np.uint8)
        await self.p.register()
        await self.d.register()

    def ticket(self, blocks: list[BlockList], num_tokens: int, request_id: str = "r1") -> Ticket:
        assert self.p.registered is not None
        return make_ticket(
            engine_id="prefill",
            compatibility_key=KEY,
            ranks=[self.p.registered.ticket_rank],
            request_id=request_id,
            blocks=blocks,
            num_tokens=num_tokens,
            lease_token=new_lease_token(),
            ttl=60.0,
        )

    async def publish(self, ticket: Ticket) -> float:
        return await self.p.client.publish(
            ticket.request_id, ticket.blocks, ticket.num_tokens, ticket.lease_token, ttl=ticket.ttl
        )


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    fabric = Fabric()
    sides = []
    for name in ("prefill", "decode"):
        settings = Settings(engine_socket=tmp_path / f"{name}.sock", memory_directories=(str(tmp_path),))
        sidecar = Sidecar(settings, lambda agent, notify: LoopbackEngine(agent, fabric, notify))
        await sidecar.start()
        regions = [SharedRegion.create_file(tmp_path / f"{name}-{i}", r.size) for i, r in enumerate(layout().regions)]
        sides.append(Side(sidecar, AsyncClient(sidecar.engine_target, engine_id=name), regions))
    yield World(*sides, fabric)
    fabric.let_go()
    for side in reversed(sides):  # the reader has still to tell its source
        await side.client.close()
        await side.sidecar.stop()
        for region in side.regions:
            region.close()


def blocks_on_p() -> list[BlockList]:
    """40 tokens in three blocks, and the snapshot of all of them."""
    return [attention_blocks("attn", [5, 1, 6]), snapshot("ssm", 2, 40)]


def blocks_on_d() -> tuple[BlockList, ...]:
    return grouped([[0, 7, 3], [1]], layout(), 40)


def assert_arrived(world: World) -> None:
    for theirs, mine in ((5, 0), (1, 7)):
        assert (world.p.page(theirs) == world.d.page(mine)).all()
    held = 8 * TOKEN_BYTES
    assert (world.p.page(6)[:held] == world.d.page(3)[:held]).all()
    assert (world.p.state(2) == world.d.state(1)).all()


async def test_a_request_goes_from_p_to_d(world: World) -> None:
    await world.register()
    assert world.p.registered is not None
    assert world.p.registered.fingerprint == layout().fingerprint
    assert world.p.registered.peer_address == world.p.sidecar.peer_address
    ticket = world.ticket(blocks_on_p(), 40)
    assert 0 < await world.publish(ticket) <= 60.0

    plan = await world.d.client.handshake(ticket)
    assert plan.remote_engine_id == "prefill"
    assert [s.incarnation for s in plan.sources] == [world.p.registered.incarnation]
    assert plan.granule_tokens in (1, 2, 4, 8, 16)
    assert {g.group: g.kind for g in plan.sources[0].groups} == {"attn": GroupKind.ATTENTION, "ssm": GroupKind.STATE}

    # The string is what a router would carry.
    prepared = await world.d.client.prepare(ticket_to_string(ticket), blocks_on_d())
    assert (prepared.state, prepared.quiesced, prepared.error) == (TransferState.PREPARED, True, None)
    assert (prepared.skip_tokens, prepared.num_tokens, prepared.request_id) == (0, 40, "r1")
    assert prepared.bytes >= 40 * TOKEN_BYTES + STATE_BYTES
    assert not world.d.page(0).any()

    done = await world.d.client.read_prepared(prepared.id)
    assert (done.id, done.state, done.quiesced, done.bytes) == (prepared.id, TransferState.DONE, True, prepared.bytes)
    assert done.timings.total is not None
    assert done.end_time is not None
    assert done.sources[0].groups["ssm"] == STATE_BYTES
    assert_arrived(world)
    assert not world.d.page(1).any()


async def test_a_read_in_one_call_from_the_blocking_client(world: World) -> None:
    await world.register()
    ticket = world.ticket(blocks_on_p(), 40)
    await world.publish(ticket)

    def engine() -> TransferState:
        with Client(world.d.sidecar.engine_target, engine_id="decode") as client:
            assert client.wait_ready().registrations[0].engine_id == "decode"
            transfer = client.read(ticket, blocks_on_d(), transfer_id="t-1")
            assert client.get_transfer("t-1") == transfer
            assert [t.id for t in client.list_transfers()] == ["t-1"]
            return transfer.state

    assert await asyncio.to_thread(engine) is TransferState.DONE
    assert_arrived(world)


async def test_handshake_by_addresses(world: World) -> None:
    await world.register()
    remote = RemoteEngine("prefill", (RankAddress(Rank(), world.p.sidecar.peer_address),))
    plan = await world.d.client.handshake(remote)
    assert plan.sources[0].address == world.p.sidecar.peer_address
    with pytest.raises(KvxferError) as caught:
        await world.d.client.handshake(RemoteEngine("other", remote.ranks))
    assert caught.value.reason is Reason.NOT_REGISTERED


async def test_pages_of_transfers_newest_first(world: World) -> None:
    await world.register()
    ticket = world.ticket(blocks_on_p(), 40)
    for i in range(5):
        await world.d.client.prepare(ticket, blocks_on_d(), transfer_id=f"t{i}")
    found = [t.id async for t in world.d.client.list_transfers(page_size=2)]
    assert found == ["t4", "t3", "t2", "t1", "t0"]
    await world.d.client.cancel("t3")
    states = [TransferState.CANCELLED]
    assert [t.id async for t in world.d.client.list_transfers(states)] == ["t3"]


async def test_watch_tells_of_every_change(world: World) -> None:
    await world.register()
    ticket = world.ticket(blocks_on_p(), 40)
    await world.publish(ticket)
    async with await world.d.client.watch() as watch:
        await world.d.client.read(ticket, blocks_on_d(), transfer_id="t")
        states = []
        async for transfer in watch:
            assert transfer.id == "t"
            states.append(transfer.state)
            if transfer.state.ended:
                break
    assert states[-1] is TransferState.DONE
    current = await world.d.client.watch(include_current=True)
    assert (await anext(aiter(current))).state is TransferState.DONE
    current.close()


async def test_cancel_waits_until_the_blocks_are_safe(world: World) -> None:
    await world.register()
    ticket = world.ticket(blocks_on_p(), 40)
    await world.publish(ticket)
    await world.d.client.handshake(ticket)
    world.fabric.hold()
    posted = await world.d.client.read(ticket, blocks_on_d(), wait=False)
    assert (posted.state, posted.quiesced) == (TransferState.POSTED, False)
    await soon(lambda: world.fabric.posts == 1)  # what is cancelled before that is never posted
    with pytest.raises(KvxferError) as caught:
        await world.d.client.read(ticket, blocks_on_d())
    assert caught.value.reason is Reason.LOCAL_BLOCK_BUSY
    assert caught.value.metadata["other_transfer_id"] == posted.id
    assert caught.value.metadata["transfer_id"] != posted.id
    draining = await world.d.client.cancel(posted.id, timeout=0.05)
    assert (draining.state, draining.quiesced) == (TransferState.DRAINING, False)
    world.fabric.let_go()
    ended = await world.d.client.cancel(posted.id)
    assert (ended.state, ended.quiesced) == (TransferState.CANCELLED, True)
    assert ended.error is not None
    assert ended.error.reason is Reason.TRANSFER_CANCELLED


async def test_bad_requests_name_their_field(world: World) -> None:
    client = world.d.client
    with pytest.raises(KvxferError) as caught:
        await client.prepare(world_ticket(), blocks_on_d())
    assert caught.value.reason is Reason.NOT_REGISTERED
    await world.register()
    ticket = world.ticket(blocks_on_p(), 40)

    async def refused(*local: BlockList) -> KvxferError:
        with pytest.raises(KvxferError) as caught:
            await client.prepare(ticket, local)
        return caught.value

    far = await refused(attention_blocks("attn", [0, 7, 8]), snapshot("ssm", 1, 40))
    assert (far.reason, far.field) == (Reason.BLOCK_OUT_OF_RANGE, "spec.local_blocks[0].block_ids")
    assert far.metadata["group"] == "attn"
    short = await refused(attention_blocks("attn", [0, 7]), snapshot("ssm", 1, 40))
    assert short.reason is Reason.RANGE_NOT_COVERED
    old = await refused(attention_blocks("attn", [0, 7, 3]), snapshot("ssm", 1, 32))
    assert old.reason is Reason.STATE_POSITION_MISMATCH


async def test_registration_errors_and_unregister(world: World, tmp_path: Path) -> None:
    client = world.p.client
    with pytest.raises(KvxferError) as caught:
        await client.register(layout(), world.p.regions[:1], compatibility_key=KEY)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "memory")
    first = await world.p.register()
    assert await world.p.register() == first
    with pytest.raises(KvxferError) as caught:
        await client.register(layout(), world.p.regions, compatibility_key="other")
    assert caught.value.reason is Reason.REGISTRATION_BUSY
    assert float(caught.value.metadata["retry_delay_s"]) > 0
    with pytest.raises(KvxferError) as caught:
        await client.unregister("another")
    assert caught.value.reason is Reason.STALE_INCARNATION
    await client.unregister(first.incarnation)
    with pytest.raises(KvxferError) as caught:
        await client.unregister()
    assert caught.value.reason is Reason.NOT_REGISTERED


async def test_memory_that_the_sidecar_owns(world: World) -> None:
    registered = await world.p.client.register(
        layout(), [Owned(r.size) for r in layout().regions], compatibility_key=KEY
    )
    assert sorted(registered.exported) == [0, 1]
    with SharedRegion.map(registered.exported[1]) as region:
        assert region.size == STATE_BYTES * SNAPSHOTS


async def test_withdraw_takes_the_token_of_publish(world: World) -> None:
    await world.register()
    ticket = world.ticket(blocks_on_p(), 40)
    await world.publish(ticket)
    with pytest.raises(KvxferError) as caught:
        await world.p.client.withdraw("r1", new_lease_token())
    assert caught.value.reason is Reason.LEASE_TOKEN_MISMATCH
    assert await world.p.client.withdraw("r1", ticket.lease_token) == 0.0
    assert await world.p.client.withdraw("r1", ticket.lease_token) == 0.0  # it has ended
    with pytest.raises(KvxferError) as caught:
        await world.p.client.withdraw("r2", ticket.lease_token)
    assert caught.value.reason is Reason.LEASE_UNKNOWN


async def test_failed_read_raises_and_is_remembered(world: World) -> None:
    await world.register()
    ticket = world.ticket(blocks_on_p(), 40)
    await world.publish(ticket)
    await world.d.client.handshake(ticket)
    world.fabric.fail_post(1)
    with pytest.raises(KvxferError) as caught:
        await world.d.client.read(ticket, blocks_on_d())
    assert caught.value.reason is Reason.TRANSFER_FAILED
    # The call ends as soon as it is known; what may still be under way drains first.
    failed = await world.d.client.get_transfer(caught.value.metadata["transfer_id"])
    while failed.state is TransferState.DRAINING:  # the test's own timeout ends it
        failed = await world.d.client.get_transfer(failed.id)
    assert failed.state is TransferState.FAILED
    assert failed.error is not None
    assert failed.error.reason is Reason.TRANSFER_FAILED


async def test_ticket_of_an_earlier_registration(world: World) -> None:
    await world.register()
    ticket = world.ticket(blocks_on_p(), 40)
    await world.p.client.unregister()
    await world.p.register()
    with pytest.raises(KvxferError) as caught:
        await world.d.client.handshake(ticket)
    assert caught.value.reason is Reason.STALE_INCARNATION


async def test_status(world: World) -> None:
    await world.register()
    ticket = world.ticket(blocks_on_p(), 40)
    await world.publish(ticket)
    await world.d.client.read(ticket, blocks_on_d())
    status = await world.d.client.status()
    assert status.serving
    assert (status.counts.done, status.counts.posted) == (1, 0)
    assert status.counts.bytes_read >= 40 * TOKEN_BYTES
    assert [r.groups for r in status.registrations] == [("attn", "ssm")]
    assert [(p.remote_engine_id, p.role.value) for p in status.peers] == [("prefill", "source")]


def world_ticket() -> Ticket:
    """A sound ticket of an engine that is not there."""
    from kvxfer_client import TicketRank

    return make_ticket(
        engine_id="nobody",
        compatibility_key=KEY,
        ranks=[TicketRank(Rank(), "i", "127.0.0.1:1")],
        request_id="r",
        blocks=blocks_on_p(),
        num_tokens=40,
        lease_token=new_lease_token(),
        ttl=1.0,
    )
