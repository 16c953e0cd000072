"""Reads that must not count, although the READ itself would succeed.

A one-sided READ takes whatever lies in P's memory.  Each case brings about that this is not what the ticket promised,
and sees over real NIXL that the read is refused *and* that nothing has moved.  Then the same with the check taken out,
to see that it is the check that refuses: the stale bytes arrive, and are told as good.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from kvxfer.core.errors import Reason
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.service.leases import Leases
from kvxfer.service.opening import Grant
from kvxfer.service.peer_client import GrpcPeerClient
from kvxfer.wire.peer import OpenRead
from kvxfer.wire.tickets import Ticket
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
async def test_a_stale_read_is_refused_and_nothing_moves(
    scene: Reading,
    make_stale: Callable[[Reading], Awaitable[Ticket]],
    checked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticket = await make_stale(scene)
    if not checked:
        take_the_check_out(monkeypatch)
    somebody_elses(scene)
    request = scene.d.request(ticket, scene.d_lists, transfer_id="stale")
    if checked:
        assert (await refusal(scene.stub.ReadBlocks(request))).reason is CASES[make_stale]
    else:
        assert (await scene.stub.ReadBlocks(request)).transfer.state == pb.TRANSFER_STATE_DONE
    await finished(scene, "stale")
    assert stale_bytes_are_there(scene) != checked
    transfer = await scene.d.get("stale")
    assert transfer.quiesced
    assert (transfer.state == pb.TRANSFER_STATE_FAILED) == checked
    if checked:
        scene.p.members[0].write()
        await scene.good()


def take_the_check_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def anything(self: Leases, record: OpenRead) -> float:
        return 60.0

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
async def test_nothing_is_read_before_it_is_published(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """D is quicker than P's worker, which is still writing the blocks when D asks for them."""
    async with new_cluster() as cluster:
        # P waits for the publication for as long as it takes.
        scene = await pair(cluster, publish_wait=20.0)
        ticket = scene.p.ticket(scene.p_lists, scene.TOKENS, publish=False)
        somebody_elses(scene)
        if not checked:
            take_the_check_out(monkeypatch)
        waiting = asyncio.ensure_future(ask(scene, ticket))
        await soon(lambda: leases_of(scene)._waiters == 1 if checked else waiting.done())
        assert stale_bytes_are_there(scene) != checked
        scene.p.members[0].write()
        if checked:
            scene.p.publish(ticket)
        assert (await waiting).transfer.state == pb.TRANSFER_STATE_DONE
        assert stale_bytes_are_there(scene) == checked  # which are the good ones now


async def ask(scene: Reading, ticket: Ticket) -> pb.ReadBlocksResponse:
    answer: pb.ReadBlocksResponse = await scene.stub.ReadBlocks(scene.d.request(ticket, scene.d_lists))
    return answer


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("late", ["answer", "read"])
async def test_what_ends_after_the_granted_time_does_not_count(
    late: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P may free the blocks when the time that it has granted is over, and D does not hear of it."""
    async with new_cluster() as cluster:
        scene = await pair(cluster)
        leases = leases_of(scene)
        link = next(iter(scene.d.nodes[0].sidecar.registrations.get("engine-d").links))
        over, posted = asyncio.Event(), []
        really_ask, really_read = GrpcPeerClient.open_read, link.engine.submit

        async def slow(self: GrpcPeerClient, record: OpenRead, timeout: float) -> float:
            answer = await really_ask(self, record, timeout)
            if late == "answer":
                await soon(lambda: leases.open_reads == 0)
                over.set()
            return answer

        def slower(read: Any) -> asyncio.Future[Any]:
            posted.append(read)
            return asyncio.ensure_future(ended(really_read(read)))

        async def ended(moving: asyncio.Future[Any]) -> Any:
            result = await moving
            await over.wait()
            return result

        async def no_more(self: GrpcPeerClient, ref: Any, wanted: float, timeout: float) -> float:
            await soon(lambda: leases.open_reads == 0)
            over.set()
            return 0.0

        monkeypatch.setattr(leases, "_settings", replace(leases._settings, read_grant=0.05))
        monkeypatch.setattr(leases, "finished", lambda notice: False)  # the end of the READ is not that of the grant
        monkeypatch.setattr(GrpcPeerClient, "open_read", slow)
        monkeypatch.setattr(GrpcPeerClient, "renew_read", no_more)
        monkeypatch.setattr(link.engine, "submit", slower)
        if not checked:
            monkeypatch.setattr(Grant, "check", lambda self, ended: None)
        somebody_elses(scene)
        request = scene.d.request(scene.ticket(), scene.d_lists)
        if checked:
            assert (await refusal(scene.stub.ReadBlocks(request))).reason is Reason.LEASE_EXPIRED
        else:
            assert (await scene.stub.ReadBlocks(request)).transfer.state == pb.TRANSFER_STATE_DONE
        # What is too late before it was posted never is.
        assert stale_bytes_are_there(scene) == bool(posted) == (late == "read" or not checked)
