"""Links: how many, how they end, and who waits for whom."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.service.links import Links
from kvxfer.service.room import Room
from kvxfer.wire.requests import spec_from_pb
from tests.support.errors import refusal
from tests.support.loopback import Cluster, LoopEngine, Reading, small_layout, small_lists, soon


def links_of(engine: LoopEngine) -> Links:
    return engine.nodes[0].sidecar.registrations.get(engine.engine_id).links


async def many(cluster: Cluster, count: int, **settings: Any) -> tuple[list[LoopEngine], LoopEngine]:
    """Engines to read from, and one that reads."""
    sources = [await cluster.engine(f"engine-{i}", [await cluster.node()]) for i in range(count)]
    return sources, await cluster.engine("engine-d", [await cluster.node(**settings)])


async def read(source: LoopEngine, d: LoopEngine, transfer_id: str = "", *, wait: bool = True) -> pb.Transfer:
    lists = small_lists(10, 3)
    source.hold(lists)
    first = 1 if not transfer_id else 1 + 6 * int(transfer_id[-1])
    request = d.request(source.ticket(lists, 10), small_lists(10, first), transfer_id=transfer_id, wait=wait)
    transfer: pb.Transfer = (await d.nodes[0].stub.ReadBlocks(request)).transfer
    return transfer


async def test_a_peer_that_dies_and_is_never_replaced_leaves_nothing(reading: Reading) -> None:
    await reading.good()
    node = reading.d.nodes[0]
    (link,) = links_of(reading.d)
    await reading.p.nodes[0].stop()
    await soon(lambda: not link.alive)
    await soon(lambda: not links_of(reading.d)._open)
    with pytest.raises(KvxferError) as caught:
        await link.engine.metadata()
    assert caught.value.reason is Reason.SHUTTING_DOWN
    assert all(engine._state == "closed" for engine in node.engines[1:])
    status = await node.stub.GetStatus(pb.GetStatusRequest())
    assert not status.peers


async def test_reads_behind_a_handshake_that_fails_all_end(cluster: Cluster) -> None:
    (source,), d = await many(cluster, 1)
    source.hold(small_lists(10, 3))
    requests = [d.request(source.ticket(small_lists(10, 3), 10), small_lists(10, 1 + 6 * i)) for i in range(3)]
    await source.nodes[0].stop()
    errors = await asyncio.gather(*(refusal(d.nodes[0].stub.ReadBlocks(request)) for request in requests))
    assert {error.reason for error in errors} == {Reason.PEER_UNREACHABLE}
    status = (await d.nodes[0].stub.GetStatus(pb.GetStatusRequest())).counts
    assert (status.prepared, status.posted, status.bytes_in_flight) == (0, 0, 0)
    assert not links_of(d)._attempts
    assert not links_of(d)._open


async def test_one_transfer_prepared_twice_at_once(reading: Reading) -> None:
    """The same content is the same transfer, other content is refused, whichever comes first."""
    transfers = reading.d.nodes[0].sidecar.registrations.get("engine-d").transfers
    spec = spec_from_pb(reading.request("t1").spec)
    other = reading.request("t1").spec
    other.local_blocks[0].block_ids[0] = 20
    first, same, refused = await asyncio.gather(
        transfers.prepare(spec),
        transfers.prepare(spec),
        transfers.prepare(spec_from_pb(other)),
        return_exceptions=True,
    )
    assert first is same
    assert isinstance(refused, KvxferError)
    assert refused.reason is Reason.TRANSFER_ID_REUSED
    await reading.d.cancel("t1")
    await reading.good()


async def test_the_engine_of_a_dead_peer_comes_back_with_another_layout(reading: Reading) -> None:
    """The same engine ID, and more blocks: what was prepared for the old one is not used for the new one."""
    await reading.good()
    (before,) = links_of(reading.d)
    await reading.p.nodes[0].stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id="engine-p"))
    reading.p = await reading.cluster.engine("engine-p", reading.p.nodes, [small_layout(blocks=40)])
    reading.p_lists = small_lists(reading.TOKENS, 33)
    reading.p.hold(reading.p_lists)
    await reading.good()
    (after,) = links_of(reading.d)
    assert after is not before
    await soon(lambda: before not in links_of(reading.d)._open)


async def test_idle_links_make_room_for_others(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.service.links.COURTESY_TIMEOUT", 20.0)
    sources, d = await many(cluster, 3, max_peers=2)
    for source in (*sources, *sources):
        assert (await read(source, d)).state == pb.TRANSFER_STATE_DONE
        await soon(lambda: all(link.idle for link in links_of(d)))
    assert [link.target.engine_id for link in links_of(d)] == ["engine-1", "engine-2"]
    await soon(lambda: len(links_of(d)._open) == 2)
    # P is told, and polls for its reader no more.
    (left,) = sources[0].nodes[0].sidecar.registrations
    await soon(lambda: not left.readers.status())


async def test_links_that_have_only_an_end_to_tell_make_room(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for that, and what is to be told is not lost."""
    monkeypatch.setattr("kvxfer.service.closing.GATHER", 0.5)
    sources, d = await many(cluster, 2, max_peers=1)
    transfer = await read(sources[0], d)
    (link,) = links_of(d)
    registered = d.nodes[0].sidecar.registrations.get("engine-d")
    await registered.transfers.get(transfer.transfer_id).finished.wait()
    assert (await read(sources[1], d)).state == pb.TRANSFER_STATE_DONE
    assert link.sources[0].rank.ends._running
    told = []
    really = link.sources[0].client.close_reads

    async def closing(records: Any, timeout: float) -> None:
        await really(records, timeout)
        told.append(len(records))

    monkeypatch.setattr(link.sources[0].client, "close_reads", closing)
    await soon(lambda: told == [1])
    await soon(lambda: len(links_of(d)._open) == 1)


async def test_links_in_use_make_no_room(cluster: Cluster) -> None:
    sources, d = await many(cluster, 2, max_peers=1)
    await read(sources[0], d)
    cluster.fabric.hold()
    await read(sources[0], d, "t1", wait=False)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(sources[1], d)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_peers" in str(caught.value.details())
    assert (await d.nodes[0].stub.GetStatus(pb.GetStatusRequest())).counts.limited == 1
    cluster.fabric.let_go()
    await soon(lambda: links_of(d)._links["engine-0"].idle)
    assert (await read(sources[1], d)).state == pb.TRANSFER_STATE_DONE


async def test_one_peer_does_not_take_all_the_room(cluster: Cluster) -> None:
    sources, d = await many(cluster, 2, max_transfers=3, max_transfers_per_peer=2)
    transfers = d.nodes[0].sidecar.registrations.get("engine-d").transfers
    for source in sources:
        await read(source, d)
    await soon(lambda: not transfers.room.taken)  # given back a little later than a read is answered
    cluster.fabric.hold()
    for name in ("t1", "t2"):
        await read(sources[0], d, name, wait=False)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(sources[0], d, "t3", wait=False)
    assert "max_transfers_per_peer" in str(caught.value.details())
    assert (await read(sources[1], d, "t3", wait=False)).state == pb.TRANSFER_STATE_POSTED
    cluster.fabric.let_go()
    for name in ("t1", "t2", "t3"):
        await asyncio.wait_for(transfers.get(name).finished.wait(), 5)
    assert transfers.room.taken == transfers.bytes_in_flight == 0
    assert (await read(sources[0], d)).state == pb.TRANSFER_STATE_DONE


async def test_a_link_that_is_lost_while_a_read_is_made_is_met_anew(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reading.good()
    (link,) = links_of(reading.d)
    really = link.engine.make_read

    async def lost(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(link.engine, "make_read", really)
        await link.cut(KvxferError(Reason.PEER_LOST, "the script cuts this link"))
        return await really(*args, **kwargs)

    monkeypatch.setattr(link.engine, "make_read", lost)
    await reading.good()
    (again,) = links_of(reading.d)
    assert again is not link


def test_room() -> None:
    room = Room("bytes", ("in_all", "each"), 100, 60)
    room.take("a", 500)  # a single one always goes
    with pytest.raises(KvxferError) as caught:
        room.take("b", 1)
    assert (caught.value.metadata["limit_name"], caught.value.metadata["limit"]) == ("in_all", "100")
    room.give("a", 500)
    room.take("a", 40)
    with pytest.raises(KvxferError) as caught:
        room.take("a", 21)
    assert (caught.value.metadata["limit_name"], caught.value.metadata["taken"]) == ("each", "40")
    room.take("a", 20)
    room.take("b", 40)
    assert (room.taken, room.refused) == (100, 2)
    room.give("a", 60)
    assert not room._by_peer["a"]
    assert "a" not in room._by_peer
