"""Registering again, replacing, unregistering; incarnations; limits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvxfer.core.errors import Reason
from kvxfer.pb import peer_pb2
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.layouts import rank_to_pb
from tests.support.engines import registration
from tests.support.errors import refusal
from tests.support.loopback import Cluster, LoopEngine, Reading, soon


def unregister(engine_id: str, incarnation: str = "", drain: float | None = None) -> pb.UnregisterCacheRequest:
    request = pb.UnregisterCacheRequest(engine_id=engine_id, incarnation=incarnation)
    if drain is not None:
        request.drain_timeout.FromNanoseconds(round(drain * 1e9))
    return request


async def test_the_same_registration_again_is_the_same(reading: Reading) -> None:
    member = reading.d.members[0]
    before = member.registered
    for replace in (False, True):
        again = await reading.stub.RegisterCache(registration("engine-d", member, replace=replace))
        assert again == before
    assert before.layout_fingerprint == member.layout.fingerprint
    assert len(reading.d.nodes[0].engines) == 1
    await reading.good()


async def test_concurrent_registrations_share_one(cluster: Cluster) -> None:
    node = await cluster.node()
    engine = await cluster.engine("engine-x", [node], register=False)
    request = registration("engine-x", engine.members[0])
    answers = await asyncio.gather(*(node.stub.RegisterCache(request) for _ in range(6)))
    assert len({a.incarnation for a in answers}) == 1
    assert len(node.engines) == 1


async def test_other_content_is_refused_unless_it_shall_replace(reading: Reading) -> None:
    await reading.good()
    other = await reading.cluster.engine("engine-d", reading.d.nodes, register=False)
    request = registration("engine-d", other.members[0])
    error = await refusal(reading.stub.RegisterCache(request))
    assert (error.reason, error.field) == (Reason.REGISTRATION_BUSY, "engine_id")
    assert error.metadata["incarnation"] == reading.d.members[0].registered.incarnation
    await reading.good()
    await other.register(replace=True)
    assert other.members[0].registered.incarnation != reading.d.members[0].registered.incarnation
    reading.d = other
    await reading.good()
    error = await refusal(reading.stub.RegisterCache(registration("engine-d", other.members[0], key="another")))
    assert error.reason is Reason.REGISTRATION_BUSY


async def test_a_failed_replacement_leaves_the_old_one(reading: Reading) -> None:
    other = await reading.cluster.engine("engine-d", reading.d.nodes, register=False)
    request = registration("engine-d", other.members[0], replace=True)
    request.memory[0].file.path += "x"
    assert (await refusal(reading.stub.RegisterCache(request))).reason is Reason.MEMORY_HANDLE_INVALID
    await reading.good()


async def test_replacing_drains_what_is_under_way(cluster: Cluster) -> None:
    p = await cluster.engine("engine-p", [await cluster.node()])
    d = await cluster.engine("engine-d", [await cluster.node(drain_timeout=0.3)])
    reading = Reading(cluster, p, d)
    await reading.d.handshake(reading.ticket())
    reading.fabric.hold()
    waiting = asyncio.ensure_future(refusal(reading.stub.ReadBlocks(reading.request("t1"))))
    await soon(lambda: reading.fabric.posts == 1)
    other = await reading.cluster.engine("engine-d", reading.d.nodes, register=False)
    replacing = asyncio.ensure_future(other.register(replace=True))
    assert (await waiting).reason is Reason.TRANSFER_CANCELLED
    await replacing
    reading.fabric.let_go()
    reading.d = other
    await reading.good()


async def test_a_new_incarnation_of_p(reading: Reading) -> None:
    """An old ticket is stale, by whichever call; a new one works at once, and P still knows its reader."""
    await reading.good()
    old = reading.ticket()
    p_node = reading.p.nodes[0]
    await p_node.stub.UnregisterCache(unregister("engine-p"))
    await reading.p.register()
    new = reading.p.members[0].registered.incarnation
    request = reading.d.request(old, reading.d_lists)
    # D has not heard of it yet: the read finds out, one way or the other.
    error = await refusal(reading.stub.ReadBlocks(request))
    assert error.reason in (Reason.STALE_INCARNATION, Reason.PEER_LOST)
    for rpc, message in (
        ("ReadBlocks", request),
        ("PrepareTransfer", pb.PrepareTransferRequest(spec=request.spec)),
        ("Handshake", pb.HandshakeRequest(engine_id="engine-d", ticket=request.spec.ticket)),
    ):
        error = await refusal(getattr(reading.stub, rpc)(message))
        assert (error.reason, error.field) == (Reason.STALE_INCARNATION, "")
        assert (error.metadata["expected"], error.metadata["found"]) == (old.ranks[0].incarnation, new)
    await reading.good()


async def test_a_late_goodbye_does_not_end_a_newer_acquaintance(reading: Reading) -> None:
    """D meets P's new registration and then leaves the old one: P must go on polling for it."""
    await reading.good()
    replacement = await reading.cluster.engine("engine-p", reading.p.nodes, register=False)
    await replacement.register(replace=True)
    reading.p = replacement
    replacement.hold(reading.p_lists)
    await reading.d.handshake(reading.ticket())
    (theirs,) = reading.p.nodes[0].sidecar.registrations
    (mine,) = reading.d.nodes[0].sidecar.registrations
    await soon(lambda: not mine.links._tasks)
    assert [r.reader.engine_id for r in theirs.readers.status()] == ["engine-d"]
    await reading.good()


async def test_p_forgets_a_reader_that_leaves(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.service.links.COURTESY_TIMEOUT", 20.0)
    await reading.good()
    (theirs,) = reading.p.nodes[0].sidecar.registrations
    assert len(theirs.readers.status()) == 1
    await reading.stub.UnregisterCache(unregister("engine-d"))
    await soon(lambda: not theirs.readers.status())


async def test_unregistering_ends_what_is_under_way(reading: Reading) -> None:
    await reading.d.handshake(reading.ticket())
    await reading.stub.PrepareTransfer(pb.PrepareTransferRequest(spec=reading.request("t0", first=8).spec))
    reading.fabric.hold()
    waiting = asyncio.ensure_future(refusal(reading.stub.ReadBlocks(reading.request("t1"))))
    await soon(lambda: reading.fabric.posts == 1)
    # The read still writes: the memory may not be given back.
    error = await refusal(reading.stub.UnregisterCache(unregister("engine-d", drain=0.05)))
    assert (error.reason, error.field) == (Reason.REGISTRATION_BUSY, "drain_timeout")
    assert (await waiting).reason is Reason.TRANSFER_CANCELLED
    # It takes nothing new, and is not handed out as a good registration.
    assert (await refusal(reading.stub.ReadBlocks(reading.request("t2", first=8)))).reason is Reason.NOT_REGISTERED
    request = registration("engine-d", reading.d.members[0])
    assert (await refusal(reading.stub.RegisterCache(request))).reason is Reason.REGISTRATION_BUSY
    unregistering = asyncio.ensure_future(_awaited(reading.stub.UnregisterCache(unregister("engine-d", drain=5))))
    reading.fabric.let_go()
    await unregistering
    await reading.d.register()
    await reading.good()


async def _awaited(call: Any) -> Any:
    return await call


async def test_unregistering_waits_for_readers(reading: Reading) -> None:
    """P's memory stays while D reads from it."""
    late = reading.request()
    await reading.d.handshake(reading.ticket())
    reading.fabric.hold()
    await reading.stub.ReadBlocks(reading.request("t1", wait=False))
    (theirs,) = reading.p.nodes[0].sidecar.registrations
    await soon(lambda: theirs.leases.open_reads == 1)
    stub = reading.p.nodes[0].stub
    error = await refusal(stub.UnregisterCache(unregister("engine-p", drain=0.05)))
    assert (error.reason, error.metadata["reads_open"]) == (Reason.REGISTRATION_BUSY, "1")
    unregistering = asyncio.ensure_future(_awaited(stub.UnregisterCache(unregister("engine-p", drain=5))))
    reading.fabric.let_go()
    done = await reading.stub.ReadBlocks(pb.ReadBlocksRequest(engine_id="engine-d", transfer_id="t1"))
    assert done.transfer.state == pb.TRANSFER_STATE_DONE
    await unregistering
    assert (await refusal(reading.stub.ReadBlocks(late))).reason in (
        Reason.NOT_REGISTERED,
        Reason.PEER_LOST,
    )


async def test_unregistering_only_the_incarnation_that_is_meant(reading: Reading) -> None:
    error = await refusal(reading.stub.UnregisterCache(unregister("engine-d", "earlier")))
    assert (error.reason, error.field) == (Reason.STALE_INCARNATION, "incarnation")
    assert error.metadata["given"] == "earlier"
    await reading.good()
    await reading.stub.UnregisterCache(unregister("engine-d", reading.d.members[0].registered.incarnation))
    error = await refusal(reading.stub.UnregisterCache(unregister("engine-d")))
    assert error.reason is Reason.NOT_REGISTERED
    await reading.d.register()
    await reading.good()


async def test_the_number_of_registrations_is_limited(cluster: Cluster) -> None:
    node = await cluster.node(max_registrations=2)
    engines: list[LoopEngine] = []
    for i in range(4):
        engines.append(await cluster.engine(f"engine-{i}", [node], register=False))
    answers = await asyncio.gather(
        *(_awaited(node.stub.RegisterCache(registration(e.engine_id, e.members[0]))) for e in engines),
        return_exceptions=True,
    )
    assert sum(not isinstance(a, BaseException) for a in answers) == 2
    registered = {r.identity.engine_id for r in node.sidecar.registrations}
    left = next(e for e in engines if e.engine_id not in registered)
    error = await refusal(node.stub.RegisterCache(registration(left.engine_id, left.members[0])))
    assert (error.reason, error.metadata["limit"]) == (Reason.LIMIT_EXCEEDED, "2")
    await node.stub.UnregisterCache(unregister(registered.pop()))
    await left.register()


async def test_a_refused_registration_leaves_nothing(cluster: Cluster) -> None:
    node = await cluster.node()
    engine = await cluster.engine("engine-x", [node], register=False)
    for i in range(20):
        request = registration(f"engine-{i}", engine.members[0])
        request.memory[0].file.path += "x"
        await refusal(node.stub.RegisterCache(request))
        await refusal(node.stub.UnregisterCache(unregister(f"engine-{i}")))
    registrations = node.sidecar.registrations
    assert not registrations._lifetimes._locks
    assert not node.engines


async def test_readers_polls_are_wanted_only_while_there_are_readers(reading: Reading) -> None:
    """OpenRead of a stranger costs P something only until CloseReads."""
    node = reading.p.nodes[0]
    (known,) = node.sidecar.registrations
    ticket = reading.ticket()
    reader = peer_pb2.Reader(engine_id="stranger", rank=rank_to_pb(reading.d.members[0].rank), incarnation="i")
    ref: dict[str, Any] = {
        "engine_id": "engine-p",
        "rank": rank_to_pb(reading.p.members[0].rank),
        "incarnation": known.incarnation,
        "request_id": ticket.request_id,
        "lease_token": ticket.lease_token,
        "reader": reader,
        "readers": 1,
        "transfer_id": "t",
    }
    for _ in range(2):  # idempotent
        granted = (await node.peer_stub.OpenRead(peer_pb2.OpenReadRequest(**ref))).granted
        assert granted.seconds > 0
        assert known.readers.open_reads == 1
    whose = {name: ref[name] for name in ("engine_id", "rank", "incarnation", "reader")}
    read = {name: value for name, value in ref.items() if name not in whose}
    end = peer_pb2.ReadEnd(**read, outcome=peer_pb2.READ_OUTCOME_DONE)
    closing = peer_pb2.CloseReadsRequest(**whose, reads=[end])
    for _ in range(2):
        await node.peer_stub.CloseReads(closing)
        assert known.readers.open_reads == 0
    ref["incarnation"] = closing.incarnation = "earlier"
    for call in (node.peer_stub.OpenRead(peer_pb2.OpenReadRequest(**ref)), node.peer_stub.CloseReads(closing)):
        error = await refusal(call)
        assert (error.reason, error.field) == (Reason.STALE_INCARNATION, "incarnation")
    await reading.good()
