"""Engines that die: their registrations end with the streams that held them, and not before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.memory.handles import OwnedBacking
from kvxfer.pb import transfer_pb2 as pb
from tests.support.engines import Member, OwnedRegions, publication, registration
from tests.support.errors import refusal
from tests.support.loopback import Cluster, LoopEngine, Node, Reading, small_layout, small_lists, soon

#: What the sidecars of these tests are told: seconds.  The long grace is for what has to happen within it.
GRACE, LONG_GRACE, GRANT = 0.3, 3.0, 4.0


async def pair(cluster: Cluster, **settings: Any) -> Reading:
    """As ``reading``, with a short grace, unless P's sidecar is told otherwise."""
    p = await cluster.engine("engine-p", [await cluster.node(**{"engine_grace": GRACE, **settings})])
    d = await cluster.engine("engine-d", [await cluster.node(engine_grace=GRACE, drain_timeout=0.3)])
    return Reading(cluster, p, d)


@pytest.fixture
async def mortal(cluster: Cluster) -> Reading:
    """As ``reading``, with a short grace."""
    return await pair(cluster)


async def hold(engine: LoopEngine, *, keep_leases: bool = False) -> Any:
    """A stream that is live."""
    call = engine.nodes[0].stub.HoldRegistration(
        pb.HoldRegistrationRequest(
            engine_id=engine.engine_id,
            incarnation=engine.members[0].registered.incarnation,
            keep_leases=keep_leases,
        )
    )
    assert (await call.read()).grace.ToTimedelta().total_seconds() in (GRACE, LONG_GRACE)
    return call


def known(node: Node, engine_id: str) -> Any:
    """A registration, also one that is ending."""
    return node.sidecar.registrations._by_engine.get(engine_id)


def files(node: Node) -> list[str]:
    """Sidecar-owned files."""
    return [p.name for p in Path(node.sidecar.settings.memory_directories[0]).glob("kvxfer-*.kv")]


def mapped(directory: Path, name: str) -> bool:
    """Whether this process, sidecars and all, has a file mapped."""
    return any(str(directory / name) in line for line in Path("/proc/self/maps").read_text().splitlines())


async def after_the_grace(times: float = 2.0) -> None:
    """Let the grace pass: what is to be seen here is that nothing happens."""
    loop = asyncio.get_running_loop()
    end = loop.time() + times * GRACE
    await soon(lambda: loop.time() >= end)


async def status(node: Node) -> pb.RegistrationStatus:
    (one,) = (await node.stub.GetStatus(pb.GetStatusRequest())).registrations
    found: pb.RegistrationStatus = one
    return found


async def owned(cluster: Cluster, node: Node, name: str = "engine-o") -> LoopEngine:
    """An engine whose memory the sidecar owns."""
    layout = small_layout()
    regions = OwnedRegions(layout, OwnedBacking.FILE)
    engine = LoopEngine(name, [Member(Rank(), layout, cluster.labels, regions)], [node])
    member = engine.members[0]
    member.registered = await node.stub.RegisterCache(registration(name, member))
    regions.map(member.registered)
    member.write()
    cluster._engines.append(engine)
    return engine


async def test_a_registration_ends_with_its_engine(mortal: Reading) -> None:
    """Memory is unmapped, leases are gone, and so is the agent; D hears a clear error."""
    node = mortal.p.nodes[0]
    await mortal.good()
    late = mortal.request()
    call = await hold(mortal.p)
    assert (await status(node)).holders == 1
    assert not (await status(node)).HasField("undone_in")
    await after_the_grace()
    await mortal.good()
    registration_of_p = known(node, "engine-p")
    await soon(lambda: len(registration_of_p.leases) == 1)  # that of what comes too late
    call.cancel()
    await soon(lambda: known(node, "engine-p") is None)
    assert not len(registration_of_p.leases)
    assert registration_of_p.leases.totals.withdrawn == 1
    error = await refusal(mortal.stub.ReadBlocks(late))
    assert error.reason in (Reason.NOT_REGISTERED, Reason.PEER_LOST, Reason.PEER_UNREACHABLE)
    # The same engine may come back, in another incarnation.
    await mortal.p.register()
    mortal.p.hold(mortal.p_lists)
    await mortal.good()


async def test_within_the_grace_nothing_changes(cluster: Cluster) -> None:
    mortal = await pair(cluster, engine_grace=LONG_GRACE)
    node = mortal.p.nodes[0]
    call = await hold(mortal.p)
    call.cancel()
    await soon(lambda: known(node, "engine-p").hold.streams == 0)
    left = (await status(node)).undone_in.ToTimedelta().total_seconds()
    assert 0 < left <= LONG_GRACE
    await mortal.good()


async def test_what_was_never_held_stays(mortal: Reading) -> None:
    await after_the_grace()
    assert (await status(mortal.p.nodes[0])).holders == 0
    await mortal.good()


async def test_a_second_stream_keeps_it(mortal: Reading) -> None:
    first, second = await hold(mortal.p), await hold(mortal.p)
    assert (await status(mortal.p.nodes[0])).holders == 2
    first.cancel()
    await after_the_grace()
    await mortal.good()
    second.cancel()
    await soon(lambda: known(mortal.p.nodes[0], "engine-p") is None)


async def test_a_stream_within_the_grace_keeps_everything(cluster: Cluster) -> None:
    mortal = await pair(cluster, engine_grace=LONG_GRACE)
    ticket = mortal.ticket()
    request = mortal.d.request(ticket, mortal.d_lists)
    for _ in range(3):
        call = await hold(mortal.p)
        await after_the_grace(0.5)
        call.cancel()
        await soon(lambda: known(mortal.p.nodes[0], "engine-p").hold.streams == 0)
    call = await hold(mortal.p)
    await after_the_grace(1.1 * LONG_GRACE / GRACE)
    done = (await mortal.stub.ReadBlocks(request)).transfer
    assert done.state == pb.TRANSFER_STATE_DONE
    call.cancel()


async def test_streams_that_are_cut_off_at_once_are_counted_right(mortal: Reading) -> None:
    node = mortal.p.nodes[0]
    keeper = await hold(mortal.p)
    for i in range(60):
        call = node.stub.HoldRegistration(
            pb.HoldRegistrationRequest(engine_id="engine-p", incarnation=mortal.p.members[0].registered.incarnation)
        )
        if i % 3:
            await asyncio.sleep(0)
        if i % 3 == 2:
            await call.read()
        call.cancel()
    await soon(lambda: known(node, "engine-p").hold.streams == 1)
    await after_the_grace()
    await mortal.good()
    keeper.cancel()


async def test_another_incarnation_is_not_held(mortal: Reading) -> None:
    """Neither by a stream that names it now, nor by one that named it when it was the one."""
    node = mortal.p.nodes[0]
    request = pb.HoldRegistrationRequest(engine_id="engine-p", incarnation="earlier")
    error = await refusal(node.stub.HoldRegistration(request).read())
    assert (error.reason, error.field) == (Reason.STALE_INCARNATION, "incarnation")
    request.engine_id = "nobody"
    error = await refusal(node.stub.HoldRegistration(request).read())
    assert (error.reason, error.field) == (Reason.NOT_REGISTERED, "engine_id")
    call = await hold(mortal.p)
    await node.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id="engine-p"))
    assert (await refusal(call.read())).reason is Reason.NOT_REGISTERED
    await mortal.p.register()
    mortal.p.hold(mortal.p_lists)
    await after_the_grace()
    await mortal.good()


async def test_what_replaces_it_ends_its_streams(mortal: Reading) -> None:
    call = await hold(mortal.p)
    other = await mortal.cluster.engine("engine-p", mortal.p.nodes, register=False)
    await other.register(replace=True)
    error = await refusal(call.read())
    assert (error.reason, error.field) == (Reason.STALE_INCARNATION, "incarnation")
    assert error.metadata["registered"] == other.members[0].registered.incarnation
    mortal.p = other
    other.hold(mortal.p_lists)
    await after_the_grace()
    await mortal.good()


async def test_a_sidecar_that_stops_says_so(mortal: Reading) -> None:
    call = await hold(mortal.p)
    stopping = asyncio.ensure_future(mortal.p.nodes[0].sidecar.stop())
    assert (await refusal(call.read())).reason is Reason.SHUTTING_DOWN
    await stopping


async def test_who_dies_before_it_can_hold_leaves_nothing(cluster: Cluster) -> None:
    """A call that is cut off goes on in the sidecar; what comes of it does not stay."""
    node = await cluster.node(engine_grace=GRACE)
    engine = await cluster.engine("engine-x", [node], register=False)
    request = registration("engine-x", engine.members[0])
    request.held = True
    call = node.stub.RegisterCache(request)
    name = Path(request.memory[0].file.path).name
    await soon(lambda: node.engines)
    call.cancel()
    await soon(lambda: known(node, "engine-x") is not None)
    assert mapped(cluster.directory, name)
    await soon(lambda: known(node, "engine-x") is None)
    # The engine itself has it mapped, once; nobody else has any more.
    engine.members[0].regions.close()
    await soon(lambda: not mapped(cluster.directory, name))
    assert not node.sidecar.registrations._lifetimes._locks


async def test_registering_again_is_a_sign_of_life(cluster: Cluster) -> None:
    node = await cluster.node(engine_grace=LONG_GRACE)
    engine = await cluster.engine("engine-x", [node], register=False)
    request = registration("engine-x", engine.members[0])
    request.held = True
    answers = []
    for _ in range(4):
        answers.append((await node.stub.RegisterCache(request)).incarnation)
        await after_the_grace(0.3 * LONG_GRACE / GRACE)  # less than a third of the time, four times
    assert len(set(answers)) == 1
    engine.members[0].registered.incarnation = answers[0]
    call = await hold(engine)
    await after_the_grace(1.1 * LONG_GRACE / GRACE)
    assert (await status(node)).incarnation == answers[0]
    call.cancel()


async def test_granted_reads_are_waited_for(mortal: Reading) -> None:
    """P's memory stays while D reads from it, also when P's engine is dead; and D's read counts."""
    await mortal.d.handshake(mortal.ticket())
    node = mortal.p.nodes[0]
    call = await hold(mortal.p)
    late = mortal.request("t2", first=8)
    mortal.fabric.hold()
    await mortal.stub.ReadBlocks(mortal.request("t1", wait=False))
    theirs = known(node, "engine-p")
    await soon(lambda: theirs.leases.open_reads == 1)
    call.cancel()
    await soon(lambda: theirs.closing)
    error = await refusal(mortal.stub.ReadBlocks(late))
    assert error.reason in (Reason.NOT_REGISTERED, Reason.SHUTTING_DOWN, Reason.LEASE_EXPIRED)
    # An engine that was taken for dead hears of its end only when its blocks are its own again.
    holding = pb.HoldRegistrationRequest(engine_id="engine-p", incarnation=theirs.incarnation)
    again = asyncio.ensure_future(refusal(node.stub.HoldRegistration(holding).read()))
    await after_the_grace()
    assert known(node, "engine-p") is theirs
    assert not again.done()
    assert theirs.leases.open_reads == 1
    mortal.fabric.let_go()
    done = await mortal.stub.ReadBlocks(pb.ReadBlocksRequest(engine_id="engine-d", transfer_id="t1"))
    assert done.transfer.state == pb.TRANSFER_STATE_DONE
    assert (await again).reason is Reason.NOT_REGISTERED
    await soon(lambda: known(node, "engine-p") is None)


async def test_reads_that_do_not_end_are_waited_for_as_long_as_they_were_granted(cluster: Cluster) -> None:
    mortal = await pair(cluster, read_grant=GRANT)
    await mortal.d.handshake(mortal.ticket())
    node = mortal.p.nodes[0]
    call = await hold(mortal.p)
    mortal.fabric.hold()
    await mortal.stub.ReadBlocks(mortal.request("t1", wait=False))
    theirs = known(node, "engine-p")
    await soon(lambda: theirs.leases.open_reads == 1)
    call.cancel()
    await soon(lambda: known(node, "engine-p") is None)
    mortal.fabric.let_go()
    error = await refusal(mortal.stub.ReadBlocks(pb.ReadBlocksRequest(engine_id="engine-d", transfer_id="t1")))
    assert error.reason in (Reason.LEASE_EXPIRED, Reason.PEER_LOST, Reason.TRANSFER_FAILED, Reason.NOT_REGISTERED)


async def test_transfers_of_a_dead_reader_end(mortal: Reading) -> None:
    await mortal.d.handshake(mortal.ticket())
    node = mortal.d.nodes[0]
    call = await hold(mortal.d)
    mortal.fabric.hold()
    waiting = asyncio.ensure_future(refusal(mortal.stub.ReadBlocks(mortal.request("t1"))))
    await soon(lambda: mortal.fabric.posts == 1)
    call.cancel()
    assert (await waiting).reason is Reason.TRANSFER_CANCELLED
    # It does not drain, and its agent is destroyed: memory does not stay held.
    await soon(lambda: known(node, "engine-d") is None)
    mortal.fabric.let_go()
    await mortal.d.register()
    await mortal.good()


async def test_an_engine_that_dies_while_it_unregisters(mortal: Reading) -> None:
    """Unregistering gave up waiting: the registration takes no work, and its engine dies."""
    await mortal.d.handshake(mortal.ticket())
    node = mortal.d.nodes[0]
    call = await hold(mortal.d)
    mortal.fabric.hold()
    await mortal.stub.ReadBlocks(mortal.request("t1", wait=False))
    await soon(lambda: mortal.fabric.posts == 1)
    unregister = pb.UnregisterCacheRequest(engine_id="engine-d")
    unregister.drain_timeout.FromMilliseconds(50)
    assert (await refusal(node.stub.UnregisterCache(unregister))).reason is Reason.REGISTRATION_BUSY
    call.cancel()
    await soon(lambda: known(node, "engine-d") is None)
    mortal.fabric.let_go()


# -- leases that outlive their engine ---------------------------------------------------------------------------------


@pytest.fixture
async def surviving(cluster: Cluster) -> Reading:
    """P's memory is its sidecar's."""
    node = await cluster.node(engine_grace=GRACE, read_grant=GRANT)
    p = await owned(cluster, node)
    d = await cluster.engine("engine-d", [await cluster.node(engine_grace=GRACE)])
    return Reading(cluster, p, d)


async def test_keep_leases_needs_owned_memory(mortal: Reading) -> None:
    incarnation = mortal.p.members[0].registered.incarnation
    request = pb.HoldRegistrationRequest(engine_id="engine-p", incarnation=incarnation, keep_leases=True)
    error = await refusal(mortal.p.nodes[0].stub.HoldRegistration(request).read())
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "keep_leases")
    assert known(mortal.p.nodes[0], "engine-p").hold.streams == 0


async def orphan(reading: Reading) -> Any:
    """P's engine dies; its registration."""
    node = reading.p.nodes[0]
    call = await hold(reading.p, keep_leases=True)
    call.cancel()
    theirs = known(node, reading.p.engine_id)
    await soon(lambda: theirs.hold.over)
    return theirs


async def test_leases_outlive_their_engine(surviving: Reading) -> None:
    node = surviving.p.nodes[0]
    first, second = surviving.ticket(), surviving.ticket()
    requests = [surviving.d.request(t, small_lists(surviving.TOKENS, 1)) for t in (first, second)]
    theirs = await orphan(surviving)
    told = await status(node)
    assert (told.orphaned, told.holders, told.HasField("undone_in"), told.published) == (True, 0, False, 2)
    # Nothing new: not from its engine, nor from whoever says that it is.
    stub = node.stub
    assert (await refusal(stub.PublishBlocks(publication("engine-o", first)))).reason is Reason.NOT_REGISTERED
    error = await refusal(stub.RegisterCache(registration("engine-o", surviving.p.members[0])))
    assert (error.reason, error.metadata["incarnation"]) == (Reason.REGISTRATION_BUSY, theirs.incarnation)
    holding = pb.HoldRegistrationRequest(engine_id="engine-o", incarnation=theirs.incarnation)
    late = asyncio.ensure_future(refusal(stub.HoldRegistration(holding).read()))
    # Readers notice nothing, also those that come only now.
    for request in requests:
        assert files(node)
        assert not late.done()
        done = (await surviving.stub.ReadBlocks(request)).transfer
        assert done.state == pb.TRANSFER_STATE_DONE
    member, lists = surviving.p.members[0], (surviving.p_lists, surviving.d_lists)
    there, here = member.regions.arrays[0], surviving.d.members[0].regions.arrays[0]
    for i, j in zip(lists[0]["attn"].ids, lists[1]["attn"].ids, strict=True):
        assert (there[i * 96 : i * 96 + 64] == here[j * 96 : j * 96 + 64]).all()
    await soon(lambda: known(node, "engine-o") is None)
    assert (await late).reason is Reason.NOT_REGISTERED
    assert not files(node)
    await surviving.p.nodes[0].stub.RegisterCache(registration("engine-o", member))


async def test_leases_that_outlive_their_engine_expire(surviving: Reading) -> None:
    node = surviving.p.nodes[0]
    surviving.p.publish(surviving.p.ticket(surviving.p_lists, surviving.TOKENS, publish=False), ttl=0.8)
    await orphan(surviving)
    await soon(lambda: known(node, "engine-o") is None)
    assert not files(node)


async def test_its_transfers_end_at_once(surviving: Reading) -> None:
    """An engine that reads, too: nobody waits for what it reads."""
    back = Reading(surviving.cluster, surviving.d, surviving.p)
    await back.d.handshake(back.ticket())
    surviving.ticket()
    back.fabric.hold()
    await back.stub.ReadBlocks(back.request("t1", wait=False))
    theirs = await orphan(surviving)
    await soon(lambda: theirs.transfers.get("t1").error is not None)
    back.fabric.let_go()
    await soon(lambda: theirs.transfers.get("t1").finished.is_set())
    assert (await back.d.get("t1")).state == pb.TRANSFER_STATE_CANCELLED
    assert known(surviving.p.nodes[0], "engine-o") is theirs
    assert len(theirs.leases) == 1


async def test_without_leases_nothing_is_kept(surviving: Reading) -> None:
    await orphan(surviving)
    await soon(lambda: known(surviving.p.nodes[0], "engine-o") is None)


async def test_an_orphan_may_be_replaced_or_unregistered(surviving: Reading) -> None:
    node, member = surviving.p.nodes[0], surviving.p.members[0]
    surviving.ticket()
    theirs = await orphan(surviving)
    again = await node.stub.RegisterCache(registration("engine-o", member, replace=True))
    assert again.incarnation != theirs.incarnation
    assert theirs.ended.done()
    member.registered = again
    surviving.ticket()
    await orphan(surviving)
    await node.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id="engine-o"))
    assert not files(node)
    await soon(lambda: not node.sidecar.registrations._lifetimes._ending)


async def test_a_sidecar_stops_with_an_orphan(surviving: Reading) -> None:
    """Also where a granted read is open, for which it waits as long as was granted."""
    await surviving.d.handshake(surviving.ticket())
    surviving.fabric.hold()
    await surviving.stub.ReadBlocks(surviving.request("t1", wait=False))
    node = surviving.p.nodes[0]
    await soon(lambda: known(node, "engine-o").leases.open_reads == 1)
    await orphan(surviving)
    await asyncio.wait_for(node.sidecar.stop(), 20.0)
    assert not files(node)  # nobody will come for it


# -- memory that outlives its sidecar --------------------------------------------------------------------------------


def by_path(engine: LoopEngine) -> pb.RegisterCacheRequest:
    """To register again the file that the sidecar made."""
    member = engine.members[0]
    request = registration(engine.engine_id, member)
    del request.memory[:]
    request.memory.extend(e.handle for e in member.registered.exported)
    return request


async def test_a_file_that_a_sidecar_made_is_taken_again(cluster: Cluster) -> None:
    node = await cluster.node()
    engine = await owned(cluster, node)
    request = by_path(engine)
    await node.sidecar.stop()
    (name,) = files(node)
    fresh = await cluster.node()
    engine.nodes = [fresh]
    answer = await fresh.stub.RegisterCache(request)
    assert answer.exported == engine.members[0].registered.exported
    assert known(fresh, "engine-o").owned
    assert files(fresh) == [name]
    await fresh.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id="engine-o"))
    assert not files(fresh)


async def test_replacing_a_registration_by_its_own_file_keeps_the_file(cluster: Cluster) -> None:
    node = await cluster.node()
    engine = await owned(cluster, node)
    request = by_path(engine)
    request.replace = True
    (name,) = files(node)
    for key in ("model@rev/fp8", "another"):
        request.compatibility_key = key
        await node.stub.RegisterCache(request)
        assert files(node) == [name]
    await node.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id="engine-o"))
    assert not files(node)


async def test_a_refused_registration_leaves_the_file(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await cluster.node()
    engine = await owned(cluster, node)
    request = by_path(engine)
    await node.sidecar.stop()
    fresh = await cluster.node()

    def broken(*_: Any) -> Any:
        raise KvxferError(Reason.MEMORY_LIMIT, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(fresh.sidecar.registrations, "_make_engine", broken)
        assert (await refusal(fresh.stub.RegisterCache(request))).reason is Reason.MEMORY_LIMIT
    assert files(fresh)
    await fresh.stub.RegisterCache(request)
