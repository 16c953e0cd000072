"""Reads that must not count, although the READ itself succeeds and the bytes are there.

A one-sided READ takes whatever lies in P's memory.  Each case brings about that this is not what the ticket promised,
lets D read over real NIXL, and sees that the read is refused *and* that the stale bytes did arrive.  Then the same with
the check taken out, to see that it is the check that refuses: the stale bytes are told as good.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from kvxfer.core import leases as core_leases
from kvxfer.core.errors import Reason
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.service.leases import Leases
from kvxfer.service.opening import Grant
from kvxfer.service.peer_client import GrpcPeerClient
from kvxfer.wire.peer import Granted, OpenRead
from kvxfer.wire.tickets import Ticket
from kvxfer.xfer.api import ReadState
from tests.support.engines import as_bytes
from tests.support.errors import refusal
from tests.support.loopback import STRIDE, Cluster, Reading, new_cluster, small_lists, soon


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """NIXL is loaded in this process, with our defaults in its environment; those of later tests start without."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
async def scene() -> AsyncIterator[Reading]:
    async with new_cluster() as cluster:
        yield await pair(cluster)


#: Seconds that sidecars take for what is no matter of time here.
PATIENT: Final = {"handshake_timeout": 20.0, "drain_timeout": 10.0}


async def pair(cluster: Cluster, **settings: Any) -> Reading:
    """Two sidecars over NIXL, which have read from one another."""
    p = await cluster.engine("engine-p", [await cluster.node(real=True, **PATIENT, **settings)])
    d = await cluster.engine("engine-d", [await cluster.node(real=True, **PATIENT)])
    made = Reading(cluster, p, d)
    await made.good()
    return made


def leases_of(scene: Reading) -> Leases:
    return scene.p.nodes[0].sidecar.registrations.get("engine-p").leases


# -- how a ticket becomes stale --------------------------------------------------------------------------------------


async def expired(scene: Reading) -> Ticket:
    ticket = scene.p.ticket(scene.p_lists, scene.TOKENS, publish=False)
    scene.p.publish(ticket, ttl=0.05)
    await soon(lambda: leases_of(scene).totals.expired == 1)
    return ticket


async def withdrawn(scene: Reading) -> Ticket:
    ticket = scene.ticket()
    leases_of(scene).withdraw(ticket.request_id, ticket.lease_token)
    return ticket


async def another_requests_now(scene: Reading) -> Ticket:
    """Its blocks are published again, for somebody else."""
    ticket = await withdrawn(scene)
    scene.ticket()
    return ticket


async def same_request_published_anew(scene: Reading) -> Ticket:
    """The request is computed once more, into the same blocks, with another token."""
    ticket = await withdrawn(scene)
    scene.p.ticket(scene.p_lists, scene.TOKENS, ticket.request_id)
    return ticket


async def read_already(scene: Reading) -> Ticket:
    ticket = scene.ticket()
    await scene.stub.ReadBlocks(scene.d.request(ticket, scene.d_lists))
    await soon(lambda: len(leases_of(scene)) == 0)
    return ticket


async def wrong_token(scene: Reading) -> Ticket:
    return replace(scene.ticket(), lease_token=bytes(16))


async def unknown_request(scene: Reading) -> Ticket:
    return replace(scene.ticket(), request_id="nobody's")


async def other_blocks(scene: Reading) -> Ticket:
    """What is held for the request lies elsewhere."""
    lists = small_lists(scene.TOKENS, 12)
    elsewhere = scene.p.ticket(lists, scene.TOKENS)
    return replace(elsewhere, blocks=scene.p.ticket(scene.p_lists, scene.TOKENS, publish=False).blocks)


async def restarted_engine(scene: Reading) -> Ticket:
    """A ticket of before, brought up to date by somebody who knows the new incarnation only."""
    ticket = scene.ticket()
    node = scene.p.nodes[0]
    await node.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id="engine-p"))
    await scene.p.register()
    scene.p.hold(scene.p_lists)
    await scene.good()
    return replace(ticket, ranks=scene.ticket().ranks)


async def restarted_sidecar(scene: Reading) -> Ticket:
    ticket = scene.ticket()
    await scene.p.nodes[0].stop()
    scene.p.nodes[0] = await scene.cluster.node(real=True, publish_wait=0.2, **PATIENT)
    await scene.p.register()
    scene.p.hold(scene.p_lists)
    await scene.good()
    return replace(ticket, ranks=scene.ticket().ranks)


CASES: Final[dict[Callable[[Reading], Awaitable[Ticket]], Reason]] = {
    expired: Reason.LEASE_EXPIRED,
    withdrawn: Reason.LEASE_EXPIRED,
    another_requests_now: Reason.LEASE_EXPIRED,
    same_request_published_anew: Reason.LEASE_TOKEN_MISMATCH,
    read_already: Reason.LEASE_EXPIRED,
    wrong_token: Reason.LEASE_TOKEN_MISMATCH,
    unknown_request: Reason.LEASE_UNKNOWN,
    other_blocks: Reason.LEASE_UNKNOWN,
    restarted_engine: Reason.LEASE_UNKNOWN,
    restarted_sidecar: Reason.LEASE_UNKNOWN,
}


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("make_stale", CASES, ids=lambda case: case.__name__)
async def test_a_stale_read_is_refused_though_the_bytes_are_there(
    scene: Reading,
    make_stale: Callable[[Reading], Awaitable[Ticket]],
    checked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticket = await make_stale(scene)
    if not checked:
        take_the_check_out(monkeypatch)
    somebody_elses(scene)
    # Some refusals are there before the read is posted, and then nothing moves: until one has come too late for that.
    for i in range(20):
        name = f"stale-{i}"
        request = scene.d.request(ticket, scene.d_lists, transfer_id=name)
        if checked:
            assert (await refusal(scene.stub.ReadBlocks(request))).reason is CASES[make_stale]
        else:
            assert (await scene.stub.ReadBlocks(request)).transfer.state == pb.TRANSFER_STATE_DONE
        await finished(scene, name)
        if stale_bytes_are_there(scene):
            break
    assert stale_bytes_are_there(scene)
    transfer = await scene.d.get(name)
    assert transfer.quiesced
    assert (transfer.state == pb.TRANSFER_STATE_FAILED) == checked
    if checked:
        scene.p.members[0].write()
        await scene.good()


def take_the_check_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def anything(self: Leases, record: OpenRead) -> Granted:
        return Granted(60.0, 3600.0, settled=True)

    monkeypatch.setattr(Leases, "open", anything)
    monkeypatch.setattr(Leases, "close_read", lambda self, record: None)


def somebody_elses(scene: Reading) -> None:
    """P's engine uses its blocks for something else; D's hold yet something else."""
    for member in (*scene.p.members, *scene.d.members):
        (array,) = member.regions.arrays
        array[:] = as_bytes(member.model.labels.noise(array.size))


async def finished(scene: Reading, transfer_id: str) -> None:
    transfers = scene.d.nodes[0].sidecar.registrations.get("engine-d").transfers
    await asyncio.wait_for(transfers.get(transfer_id).finished.wait(), 10)


def stale_bytes_are_there(scene: Reading) -> bool:
    here, there = (e.members[0].regions.arrays[0].reshape(-1, STRIDE)[:, :64] for e in (scene.d, scene.p))
    mine, theirs = (list(lists["attn"].ids) for lists in (scene.d_lists, scene.p_lists))
    return bool((here[mine] == there[theirs]).all())


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
async def test_what_was_read_before_it_was_published_does_not_count(
    checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D is quicker than P's worker: the READ is over when the blocks are written and published."""
    async with new_cluster() as cluster:
        # P waits for the publication for as long as it takes.
        await read_before_it_was_published(await pair(cluster, publish_wait=20.0), checked, monkeypatch)


async def read_before_it_was_published(scene: Reading, checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = scene.p.ticket(scene.p_lists, scene.TOKENS, publish=False)
    somebody_elses(scene)
    early = scene.p.members[0].image().copy()
    if not checked:
        really = GrpcPeerClient.open_read

        async def sure(self: GrpcPeerClient, record: OpenRead, timeout: float) -> Granted:
            return replace(await really(self, record, timeout), published=3600.0)

        monkeypatch.setattr(GrpcPeerClient, "open_read", sure)
    waiting = asyncio.ensure_future(ask(scene, ticket))
    await soon(lambda: leases_of(scene)._waiters == 1 and stale_bytes_are_there(scene))
    member = scene.p.members[0]
    member.write()
    scene.p.publish(ticket)
    assert (await waiting).transfer.state == pb.TRANSFER_STATE_DONE
    assert stale_bytes_are_there(scene) == checked  # which are the good ones now
    assert (early != member.image()).any()


async def ask(scene: Reading, ticket: Ticket) -> pb.ReadBlocksResponse:
    answer: pb.ReadBlocksResponse = await scene.stub.ReadBlocks(scene.d.request(ticket, scene.d_lists))
    return answer


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
async def test_what_ends_after_the_granted_time_does_not_count(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """P may free the blocks when the time that it has granted is over, and D does not hear of it."""
    async with new_cluster() as cluster:
        scene = await pair(cluster)
        leases = leases_of(scene)
        monkeypatch.setattr(leases, "_settings", replace(leases._settings, read_grant=0.05))
        registered = scene.d.nodes[0].sidecar.registrations.get("engine-d")
        source = next(iter(registered.links)).sources[0]
        really = source.client.open_read

        def moved() -> bool:
            live = registered.transfers.current()[-1].live  # none while it is not known yet
            return bool(live) and live[0].read.state is ReadState.DONE

        async def slow(record: OpenRead, timeout: float) -> Granted:
            answer = await really(record, timeout)
            # The answer takes longer than the grant; and than the READ, which needs no more time then.
            await soon(lambda: leases.open_reads == 0 and moved())
            return answer

        monkeypatch.setattr(source.client, "open_read", slow)
        if not checked:
            monkeypatch.setattr(Grant, "check", lambda self, ended: None)
        ticket = scene.ticket()
        # It was not read too early; nor is the end of the READ the end of the grant.
        leases._known[ticket.request_id].lease.__dict__["published"] -= 60.0
        monkeypatch.setattr(core_leases, "SETTLED", 3_600.0)
        request = scene.d.request(ticket, scene.d_lists)
        if checked:
            assert (await refusal(scene.stub.ReadBlocks(request))).reason is Reason.LEASE_EXPIRED
        else:
            assert (await scene.stub.ReadBlocks(request)).transfer.state == pb.TRANSFER_STATE_DONE
