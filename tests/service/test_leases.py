"""Leases over gRPC: what P holds, for whom, how long; and what D takes for good."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.pb import peer_pb2
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.service import leases as service_leases
from kvxfer.service import reading as reading_of
from kvxfer.service.leases import Leases
from kvxfer.service.opening import Grant, clock
from kvxfer.wire.peer import CloseRead, OpenRead, Outcome, Reader, ReadNotice, ReadRef
from kvxfer.wire.requests import PublishBlocks
from kvxfer.wire.tickets import Ticket
from tests.support.engines import block_lists, publication, published, read_request
from tests.support.errors import refusal
from tests.support.loopback import Cluster, LoopEngine, Reading, small_layout, small_lists, soon

HELD, RELEASED = pb.LEASE_STATE_HELD, pb.LEASE_STATE_RELEASED
EXPIRED, WITHDRAWN = pb.LEASE_STATE_EXPIRED, pb.LEASE_STATE_WITHDRAWN


def leases_of(engine: LoopEngine, rank: int = 0) -> Leases:
    return engine.nodes[rank].sidecar.registrations.get(engine.engine_id).leases


async def listed(engine: LoopEngine, rank: int = 0, *states: int) -> list[pb.Lease]:
    request = pb.ListLeasesRequest(engine_id=engine.engine_id, states=states)  # type: ignore[arg-type]
    return list((await engine.nodes[rank].stub.ListLeases(request)).leases)


async def state(engine: LoopEngine, request_id: str, rank: int = 0) -> int:
    return next(x.state for x in await listed(engine, rank) if x.request_id == request_id)


def unpublished(reading: Reading) -> Ticket:
    return reading.p.ticket(reading.p_lists, reading.TOKENS, publish=False)


def reads(reading: Reading, ticket: Ticket, *, first: int = 1, transfer_id: str = "") -> Any:
    return reading.d.request(ticket, small_lists(reading.TOKENS, first), transfer_id=transfer_id)


async def test_a_read_releases_its_lease(reading: Reading) -> None:
    ticket = reading.ticket()
    assert await state(reading.p, ticket.request_id) == HELD
    done = (await reading.stub.ReadBlocks(reads(reading, ticket))).transfer
    assert done.state == pb.TRANSFER_STATE_DONE
    await soon(lambda: len(leases_of(reading.p)) == 0)
    (lease,) = await listed(reading.p)
    assert (lease.state, lease.ending, lease.open_reads, lease.HasField("expires_in")) == (RELEASED, False, 0, False)
    assert [(r.engine_id, r.expected, r.done) for r in lease.readers] == [("engine-d", 1, 1)]
    # Its blocks may belong to somebody else by now.
    error = await refusal(reading.stub.ReadBlocks(reads(reading, ticket)))
    assert (error.reason, error.field) == (Reason.LEASE_EXPIRED, "")


async def test_every_rank_of_the_ticket_is_told_also_where_nothing_is_read(cluster: Cluster) -> None:
    """A cache that all four P ranks have alike, read by one D rank: all four leases end at once."""
    p = await cluster.engine("engine-p", [await cluster.node() for _ in range(4)], [small_layout()] * 4)
    d = await cluster.engine("engine-d", [await cluster.node()])
    reading = Reading(cluster, p, d)
    ticket = reading.ticket()
    done = (await reading.stub.ReadBlocks(reads(reading, ticket))).transfer
    assert len(done.sources) == 1
    for rank in range(4):
        await soon(lambda rank=rank: len(leases_of(p, rank)) == 0)
        assert await state(p, ticket.request_id, rank) == RELEASED
    await reading.good()


async def test_a_lease_waits_for_every_rank_that_reads(cluster: Cluster) -> None:
    p = await cluster.engine("engine-p", [await cluster.node()])
    d = await cluster.engine("engine-d", [await cluster.node(), await cluster.node()])
    reading = Reading(cluster, p, d)
    ticket = reading.ticket()
    for rank in range(2):
        assert await state(p, ticket.request_id) == HELD
        request = read_request("engine-d", ticket, block_lists(d.groups, reading.d_lists))
        await d.nodes[rank].stub.ReadBlocks(request)
        await soon(lambda rank=rank: not leases_of(p).open_reads)
    await soon(lambda: len(leases_of(p)) == 0)
    assert await state(p, ticket.request_id) == RELEASED


async def test_watching_leases(reading: Reading) -> None:
    stub = reading.p.nodes[0].stub
    call = stub.WatchLeases(pb.WatchLeasesRequest(engine_id="engine-p"))
    assert (await call.read()).HasField("ready")
    released, expired, withdrawn = (unpublished(reading) for _ in range(3))
    for ticket, ttl in ((released, 60.0), (withdrawn, 60.0), (expired, 0.2)):  # the last, for it may end at once
        await stub.PublishBlocks(publication("engine-p", ticket, ttl))
    await reading.stub.ReadBlocks(reads(reading, released))
    token = withdrawn.lease_token
    withdraw = pb.WithdrawBlocksRequest(engine_id="engine-p", request_id=withdrawn.request_id, lease_token=token)
    assert not (await stub.WithdrawBlocks(withdraw)).HasField("held_for")
    events = [(await call.read()).event for _ in range(6)]
    assert [e.sequence for e in events] == [1, 2, 3, 4, 5, 6]
    told = [(e.lease.request_id, e.lease.state) for e in events]
    published = (released, withdrawn, expired)
    assert told[:3] == [(t.request_id, HELD) for t in published]
    assert sorted(told[3:]) == sorted(
        zip((t.request_id for t in published), (RELEASED, WITHDRAWN, EXPIRED), strict=True)
    )
    call.cancel()
    # From the beginning, for who has missed something.
    again = stub.WatchLeases(pb.WatchLeasesRequest(engine_id="engine-p", include_current=True))
    found = [(await again.read()).event.lease.state for _ in range(3)]
    assert sorted(found) == sorted([RELEASED, EXPIRED, WITHDRAWN])
    assert (await again.read()).HasField("ready")
    await stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id="engine-p"))
    assert (await refusal(again.read())).reason is Reason.NOT_REGISTERED


async def test_listing_leases_in_pages(reading: Reading) -> None:
    stub = reading.p.nodes[0].stub
    tickets = [reading.ticket() for _ in range(5)]
    found: list[str] = []
    token = ""
    while not found or token:
        request = pb.ListLeasesRequest(engine_id="engine-p", page_size=2, page_token=token, states=[HELD])
        answer = await stub.ListLeases(request)
        found.extend(x.request_id for x in answer.leases)
        token = answer.next_page_token
    assert found == [t.request_id for t in reversed(tickets)]
    error = await refusal(stub.ListLeases(pb.ListLeasesRequest(engine_id="engine-p", page_token="x")))
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "page_token")
    error = await refusal(stub.ListLeases(pb.ListLeasesRequest(engine_id="engine-p", states=[77])))
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "states[0]")


async def test_renewing(reading: Reading) -> None:
    stub = reading.p.nodes[0].stub
    ticket = unpublished(reading)
    request = publication("engine-p", ticket, None)
    left = (await stub.PublishBlocks(request)).expires_in
    assert 20 <= left.seconds + left.nanos / 1e9 <= 30
    renew = pb.RenewLeaseRequest(engine_id="engine-p", request_id=ticket.request_id, lease_token=ticket.lease_token)
    renew.ttl.FromSeconds(50)
    assert (await stub.RenewLease(renew)).expires_in.seconds in range(40, 51)
    renew.ClearField("ttl")  # never shorter
    assert (await stub.RenewLease(renew)).expires_in.seconds in range(40, 51)
    renew.lease_token = bytes(16)
    assert (await refusal(stub.RenewLease(renew))).reason is Reason.LEASE_TOKEN_MISMATCH
    renew.ttl.FromSeconds(3601)
    assert (await refusal(stub.RenewLease(renew))).field == "ttl"
    await reading.stub.ReadBlocks(reads(reading, ticket))
    await soon(lambda: len(leases_of(reading.p)) == 0)
    renew.lease_token = ticket.lease_token
    renew.ttl.FromSeconds(5)
    assert (await refusal(stub.RenewLease(renew))).reason is Reason.LEASE_EXPIRED
    # The same publication, once more: what was held has ended, and is not held anew by a late retry.
    assert (await refusal(stub.PublishBlocks(request))).reason is Reason.LEASE_EXPIRED
    renew.request_id = "nobody's"
    assert (await refusal(stub.RenewLease(renew))).reason is Reason.LEASE_UNKNOWN


async def test_a_token_is_used_once(reading: Reading) -> None:
    stub = reading.p.nodes[0].stub
    ticket = reading.ticket()
    await reading.stub.ReadBlocks(reads(reading, ticket))
    await soon(lambda: len(leases_of(reading.p)) == 0)
    other = publication("engine-p", ticket)
    other.blocks[0].block_ids[0] = 9
    assert (await refusal(stub.PublishBlocks(other))).reason is Reason.REQUEST_ID_REUSED
    other.lease_token = bytes(16)
    await stub.PublishBlocks(other)
    assert (await refusal(reading.stub.ReadBlocks(reads(reading, ticket)))).reason is Reason.LEASE_TOKEN_MISMATCH


async def test_withdrawing_waits_for_granted_reads(reading: Reading) -> None:
    await reading.d.handshake(reading.ticket())
    ticket = reading.ticket()
    reading.fabric.hold()
    waiting = asyncio.ensure_future(_awaited(reading.stub.ReadBlocks(reads(reading, ticket))))
    await soon(lambda: leases_of(reading.p).open_reads == 1)
    stub = reading.p.nodes[0].stub
    withdraw = pb.WithdrawBlocksRequest(
        engine_id="engine-p", request_id=ticket.request_id, lease_token=ticket.lease_token
    )
    held = (await stub.WithdrawBlocks(withdraw)).held_for
    assert 10 <= held.seconds + held.nanos / 1e9 <= 15
    lease = next(x for x in await listed(reading.p) if x.request_id == ticket.request_id)
    assert (lease.state, lease.ending, lease.open_reads) == (HELD, True, 1)
    # Nothing new is granted, and what was granted counts.
    assert (await refusal(reading.stub.ReadBlocks(reads(reading, ticket, first=8)))).reason is Reason.LEASE_EXPIRED
    reading.fabric.let_go()
    assert (await waiting).transfer.state == pb.TRANSFER_STATE_DONE
    await soon(lambda: leases_of(reading.p).totals.withdrawn == 1)


async def _awaited(call: Any) -> Any:
    return await call


async def test_a_long_read_renews(cluster: Cluster) -> None:
    """It takes longer than what is granted at a time, and longer than the lease."""
    p = await cluster.engine("engine-p", [await cluster.node(read_grant=4.0)])
    d = await cluster.engine("engine-d", [await cluster.node()])
    reading = Reading(cluster, p, d)
    await reading.good()
    ticket = unpublished(reading)
    p.publish(ticket, ttl=3.0)
    cluster.fabric.hold()
    waiting = asyncio.ensure_future(_awaited(reading.stub.ReadBlocks(reads(reading, ticket))))
    await soon(lambda: any(lease.state.value == "EXPIRING" for _, lease in leases_of(p)))
    began = asyncio.get_running_loop().time()
    await soon(lambda: asyncio.get_running_loop().time() > began + 4.0)  # a grant more
    cluster.fabric.let_go()
    assert (await waiting).transfer.state == pb.TRANSFER_STATE_DONE
    await soon(lambda: not leases_of(p).open_reads)
    assert await state(p, ticket.request_id) == RELEASED


@pytest.mark.parametrize("heard", [False, True])
async def test_a_read_that_is_not_renewed_is_refused(
    heard: bool, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P forgets the grant when its time has passed; D knows without being told, and says why it was not renewed."""
    p = await cluster.engine("engine-p", [await cluster.node(read_grant=4.0)])
    d = await cluster.engine("engine-d", [await cluster.node()])
    reading = Reading(cluster, p, d)
    await reading.good()
    source = next(iter(d.nodes[0].sidecar.registrations.get("engine-d").links)).sources[0]

    async def no_more(*_: Any) -> float:
        if heard:
            return 0.0
        raise KvxferError(Reason.PEER_UNREACHABLE, "nobody answers")

    monkeypatch.setattr(source.client, "renew_read", no_more)
    cluster.fabric.hold()
    error = await refusal(reading.stub.ReadBlocks(reads(reading, reading.ticket(), transfer_id="t")))
    assert error.reason is (Reason.LEASE_EXPIRED if heard else Reason.PEER_UNREACHABLE)
    assert error.metadata["quiesced"] == "false"
    if heard:  # a little less than was granted: no two clocks run alike
        assert error.metadata["granted_s"] == "3.996"
    await soon(lambda: not leases_of(p).open_reads)
    cluster.fabric.let_go()
    await soon(lambda: d.nodes[0].sidecar.registrations.get("engine-d").transfers.get("t").finished.is_set())
    await reading.good()


async def test_reading_before_it_is_published(cluster: Cluster) -> None:
    """OpenRead waits a little, and nothing is read meanwhile."""
    p = await cluster.engine("engine-p", [await cluster.node(publish_wait=20.0)])
    d = await cluster.engine("engine-d", [await cluster.node()])
    reading = Reading(cluster, p, d)
    await reading.good()
    ticket = unpublished(reading)
    member = reading.p.members[0]
    truth = member.model.image
    member.model.image = member.model.labels.noise(truth.size)
    member.write()
    posts = reading.fabric.posts
    waiting = asyncio.ensure_future(_awaited(reading.stub.ReadBlocks(reads(reading, ticket))))
    await soon(lambda: leases_of(reading.p)._waiters == 1)
    registered = reading.p.nodes[0].sidecar.registrations.get("engine-p")
    assert registered.readers.open_reads == 1
    # P finishes writing, and publishes.
    member.model.image = truth
    member.write()
    reading.p.publish(ticket)
    await waiting
    assert reading.fabric.posts == posts + 1
    here, there = reading.d.members[0].regions.arrays[0], member.regions.arrays[0]
    first, second = (small_lists(reading.TOKENS, n)["attn"].ids for n in (1, 3))
    for i, j in zip(first, second, strict=True):
        assert (here[i * 96 : i * 96 + 64] == there[j * 96 : j * 96 + 64]).all()
    await soon(lambda: leases_of(reading.p).totals.released == 2)


async def test_a_request_that_is_never_published(cluster: Cluster) -> None:
    p = await cluster.engine("engine-p", [await cluster.node(publish_wait=0.1)])
    d = await cluster.engine("engine-d", [await cluster.node()])
    reading = Reading(cluster, p, d)
    error = await refusal(reading.stub.ReadBlocks(reads(reading, unpublished(reading))))
    assert error.reason is Reason.LEASE_UNKNOWN
    assert (await reading.p.nodes[0].stub.GetStatus(pb.GetStatusRequest())).counts.reads_refused == 1
    await reading.good()


class Extends:
    """A source that is asked for more time, and what happens then."""

    def __init__(self, then: Callable[[], float]) -> None:
        self._then = then

    async def renew_read(self, *_: object) -> float:
        return self._then()


async def test_a_renewal_that_crosses_the_end_of_its_read_costs_nothing() -> None:
    """P has closed the read on its notification, and says that there is none."""
    moving: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def too_late() -> float:
        moving.set_result("read")
        raise KvxferError(Reason.LEASE_EXPIRED, "no such read is open")

    grant = Grant(0.3, clock() + 20.0)
    assert await reading_of._finish(moving, grant, Extends(too_late), None, 60.0) == "read"  # type: ignore[arg-type]


async def test_more_is_asked_for_in_time_where_the_answer_came_late() -> None:
    """Of the time that was granted most had passed when D heard of it."""
    moving: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def more() -> float:
        moving.set_result("read")
        return 60.0

    grant = Grant(60.0, clock() + 2.0)
    assert await reading_of._finish(moving, grant, Extends(more), None, 60.0) == "read"  # type: ignore[arg-type]


# -- messages that come in the wrong order, twice, or never ---------------------------------------------------------


@pytest.fixture
def held(reading: Reading) -> tuple[Leases, PublishBlocks, ReadRef]:
    """P's leases, what will be published, and a read of it."""
    ticket = unpublished(reading)
    (known,) = reading.p.nodes[0].sidecar.registrations
    known.leases._settings = replace(known.leases._settings, publish_wait=20.0)  # none of these waits in vain
    reader = Reader("engine-x", Rank(), "inc")
    ref = ReadRef("engine-p", Rank(), known.incarnation, ticket.request_id, ticket.lease_token, reader, 1, "transfer-1")
    return known.leases, published("engine-p", ticket), ref


def notice(ref: ReadRef) -> ReadNotice:
    return ReadNotice(ref.engine_id, ref.incarnation, ref.request_id, ref.lease_token, ref.reader, ref.transfer_id)


async def test_a_close_that_comes_before_the_publication(held: tuple[Leases, PublishBlocks, ReadRef]) -> None:
    """A rank from which nothing is read may be told before its worker has published."""
    leases, record, ref = held
    leases.close_read(CloseRead(ref, Outcome.NOT_NEEDED))
    leases.close_read(CloseRead(ref, Outcome.NOT_NEEDED))
    leases.publish(record)
    assert leases.totals.released == 1


async def test_an_early_close_with_another_token_means_nothing(held: tuple[Leases, PublishBlocks, ReadRef]) -> None:
    leases, record, ref = held
    wrong = replace(ref, lease_token=bytes(16))
    leases.close_read(CloseRead(wrong, Outcome.DONE))
    leases.publish(record)
    assert len(leases) == 1
    with pytest.raises(KvxferError) as caught:
        leases.close_read(CloseRead(wrong, Outcome.DONE))
    assert caught.value.reason is Reason.LEASE_TOKEN_MISMATCH


async def test_early_closes_are_forgotten(
    held: tuple[Leases, PublishBlocks, ReadRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    leases, record, ref = held
    monkeypatch.setattr(service_leases, "EARLY_TTL", 0.0)
    leases.close_read(CloseRead(ref, Outcome.NOT_NEEDED))
    leases.publish(record)
    assert len(leases) == 1
    monkeypatch.setattr(service_leases, "MAX_EARLY", 3)
    monkeypatch.setattr(service_leases, "EARLY_TTL", 60.0)
    for i in range(20):
        other = replace(ref, request_id=f"r{i}")
        leases.close_read(CloseRead(other, Outcome.NOT_NEEDED))
    assert set(leases._early) == {"r17", "r18", "r19"}


async def test_a_notification_without_a_grant_means_nothing(
    held: tuple[Leases, PublishBlocks, ReadRef],
) -> None:
    leases, record, ref = held
    leases.publish(record)
    assert not leases.finished(notice(ref))
    await leases.open(OpenRead(ref))
    assert len(leases) == 1


async def test_a_notification_with_a_wrong_token_or_of_nothing(held: tuple[Leases, PublishBlocks, ReadRef]) -> None:
    leases, record, ref = held
    leases.finished(notice(ref))
    leases.publish(record)
    await leases.open(OpenRead(ref))
    assert not leases.finished(replace(notice(ref), lease_token=bytes(16)))
    assert len(leases) == 1
    assert leases.finished(notice(ref))
    assert len(leases) == 0


async def test_a_lost_notification_costs_nothing_and_a_second_one_changes_nothing(reading: Reading) -> None:
    for script in (reading.fabric.lose_notifications, reading.fabric.duplicate_notifications):
        ticket = reading.ticket()
        script()
        await reading.stub.ReadBlocks(reads(reading, ticket))
        await soon(lambda: len(leases_of(reading.p)) == 0)
        assert await state(reading.p, ticket.request_id) == RELEASED
        assert reading.p.nodes[0].sidecar.registrations.get("engine-p").events.reads_refused == 0


async def test_other_blocks_than_the_ticket_says(held: tuple[Leases, PublishBlocks, ReadRef]) -> None:
    leases, record, ref = held
    leases.publish(record)
    for wrong in (
        OpenRead(ref, 10, (("attn", bytes(32)),)),
        OpenRead(ref, 10, (("other", bytes(32)),)),
        OpenRead(ref, 9),
    ):
        with pytest.raises(KvxferError) as caught:
            await leases.open(wrong)
        assert caught.value.reason is Reason.LEASE_UNKNOWN


async def test_waiting_reads_are_limited_and_end_with_the_registration(
    held: tuple[Leases, PublishBlocks, ReadRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    leases, _, ref = held
    monkeypatch.setattr(service_leases, "MAX_WAITING", 2)
    waiting = [asyncio.ensure_future(leases.open(OpenRead(ref))) for _ in range(2)]
    await soon(lambda: leases._waiters == 2)
    with pytest.raises(KvxferError) as caught:
        await leases.open(OpenRead(ref))
    assert caught.value.reason is Reason.LEASE_UNKNOWN
    assert await leases.drain(1.0)
    for future in waiting:
        with pytest.raises(KvxferError) as caught:
            await future
        assert caught.value.reason is Reason.SHUTTING_DOWN


async def test_ended_leases_are_forgotten_in_the_end(cluster: Cluster) -> None:
    p = await cluster.engine("engine-p", [await cluster.node(kept_leases=3, max_leases=5)])
    d = await cluster.engine("engine-d", [await cluster.node()])
    reading = Reading(cluster, p, d)
    tickets = [reading.ticket() for _ in range(5)]
    with pytest.raises(KvxferError) as caught:
        reading.ticket()
    assert (caught.value.reason, caught.value.metadata["limit"]) == (Reason.LIMIT_EXCEEDED, "5")
    for ticket in tickets:
        leases_of(p).withdraw(ticket.request_id, ticket.lease_token)
    assert [x.request_id for x in await listed(p)] == [t.request_id for t in reversed(tickets[2:])]
    await reading.good()


async def test_a_failed_read_may_be_tried_again_and_a_cancelled_one_is_done(reading: Reading) -> None:
    await reading.good()
    ticket = reading.ticket()
    reading.fabric.fail_post(1)
    error = await refusal(reading.stub.ReadBlocks(reads(reading, ticket, transfer_id="t1")))
    assert error.reason is Reason.TRANSFER_FAILED
    await soon(lambda: not leases_of(reading.p).open_reads)
    assert await state(reading.p, ticket.request_id) == HELD
    again = reads(reading, ticket, first=8)  # the first blocks may still be written
    assert (await reading.stub.ReadBlocks(again)).transfer.state == pb.TRANSFER_STATE_DONE

    ticket = reading.ticket()
    reading.fabric.hold()
    request = reads(reading, ticket, transfer_id="t2", first=14)
    request.wait = False
    await reading.stub.ReadBlocks(request)
    cancelling = asyncio.ensure_future(reading.d.cancel("t2", 5.0))
    await soon(lambda: reading.d.nodes[0].sidecar.registrations.get("engine-d").transfers.get("t2").stop.done())
    assert await state(reading.p, ticket.request_id) == HELD  # it still drains
    reading.fabric.let_go()
    assert (await cancelling).state == pb.TRANSFER_STATE_CANCELLED
    await soon(lambda: len(leases_of(reading.p)) == 0)
    assert await state(reading.p, ticket.request_id) == RELEASED


async def test_readers_that_disagree(reading: Reading) -> None:
    """The number of readers is compared, with what was published and with what others say."""
    stub = reading.p.nodes[0].stub
    ticket = unpublished(reading)
    await stub.PublishBlocks(publication("engine-p", ticket, readers=2))
    error = await refusal(reading.stub.ReadBlocks(reads(reading, ticket)))
    assert (error.reason, error.metadata["known"]) == (Reason.FIELD_INVALID, "2")
    assert await state(reading.p, ticket.request_id) == HELD


async def test_openread_of_a_stranger_without_a_token(reading: Reading) -> None:
    ticket = reading.ticket()
    (known,) = reading.p.nodes[0].sidecar.registrations
    request = peer_pb2.OpenReadRequest(
        engine_id="engine-p",
        incarnation=known.incarnation,
        request_id=ticket.request_id,
        lease_token=bytes(16),
        readers=1,
        transfer_id="t",
    )
    request.rank.CopyFrom(request.rank.__class__(tp_size=1, pp_size=1))
    request.reader.engine_id, request.reader.incarnation = "x", "i"
    request.reader.rank.CopyFrom(request.rank)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reading.p.nodes[0].peer_stub.OpenRead(request)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


# -- what has gone wrong once ---------------------------------------------------------------------------------------


async def test_a_transfer_id_that_is_used_again_is_another_read(cluster: Cluster) -> None:
    """D has forgotten the first transfer, and P must not take the second for it: the blocks are somebody else's."""
    p = await cluster.engine("engine-p", [await cluster.node()])
    d = await cluster.engine("engine-d", [await cluster.node(kept_transfers=0)])
    reading = Reading(cluster, p, d)
    ticket = reading.ticket()
    await reading.stub.ReadBlocks(reads(reading, ticket, transfer_id="t1"))
    await soon(lambda: len(leases_of(p)) == 0)
    await soon(lambda: not d.nodes[0].sidecar.registrations.get("engine-d").transfers.current())
    error = await refusal(reading.stub.ReadBlocks(reads(reading, ticket, transfer_id="t1")))
    assert error.reason is Reason.LEASE_EXPIRED


async def test_the_end_of_a_lease_is_told_also_where_what_brought_it_about_is_refused(
    held: tuple[Leases, PublishBlocks, ReadRef],
) -> None:
    leases, record, ref = held
    watcher = leases.watchers.watch()
    leases.publish(replace(record, ttl=0.001, readers=1))
    await soon(lambda: leases._known[ref.request_id].lease.deadline <= time.monotonic())
    leases.close_read(CloseRead(replace(ref, readers=2), Outcome.FAILED, will_retry=True))
    assert [watcher.queue.get_nowait().state.value for _ in range(2)] == ["HELD", "EXPIRED"]  # type: ignore[union-attr]
    assert await leases.drain(0.0)


async def test_readers_that_give_up_waiting_leave_nothing_and_wake_nobody_less(
    held: tuple[Leases, PublishBlocks, ReadRef],
) -> None:
    leases, record, ref = held
    gone = [asyncio.ensure_future(leases.open(OpenRead(replace(ref, request_id=f"r{i}")))) for i in range(9)]
    gone.append(asyncio.ensure_future(leases.open(OpenRead(ref))))
    stays = asyncio.ensure_future(leases.open(OpenRead(replace(ref, transfer_id="stays"))))
    await soon(lambda: leases._waiters == 11)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    assert (list(leases._waiting), leases._waiters) == ([ref.request_id], 1)
    leases.publish(record)
    await asyncio.wait_for(stays, 10.0)
    assert not leases._waiting


async def test_messages_that_are_told_again_and_again_take_no_memory(
    held: tuple[Leases, PublishBlocks, ReadRef],
) -> None:
    leases, record, ref = held
    leases.publish(replace(record, ttl=3600.0))
    for i in range(1000):
        await leases.open(OpenRead(replace(ref, readers=2)))
        leases.renew_read(replace(ref, readers=2), None)
        leases.close_read(CloseRead(replace(ref, readers=2, transfer_id=f"t{i % 3}"), Outcome.FAILED, will_retry=True))
    assert len(leases._due) < 10


async def test_ends_of_reads_that_come_early_are_forgotten_one_by_one(
    held: tuple[Leases, PublishBlocks, ReadRef],
) -> None:
    """Each costs as much as one, however many there are; and one request takes no more than its share."""
    leases, _, ref = held
    for i in range(2 * service_leases.MAX_EARLY_EACH):
        leases.close_read(CloseRead(replace(ref, transfer_id=f"t{i}"), Outcome.NOT_NEEDED))
    assert len(leases._early[ref.request_id]) == len(leases._early_order) == service_leases.MAX_EARLY_EACH
    leases.tick(time.monotonic() + 2 * service_leases.EARLY_TTL)
    assert not leases._early
    assert not leases._early_order


async def test_what_p_wants_back_is_not_read_longer_than_it_was_told(
    held: tuple[Leases, PublishBlocks, ReadRef],
) -> None:
    leases, record, ref = held
    leases.publish(record)
    slow = replace(ref, reader=Reader("engine-slow", Rank(), "i"), transfer_id="slow")
    await leases.open(OpenRead(slow))
    leases.close_read(CloseRead(ref, Outcome.DONE))  # the readers of another engine are done
    assert leases.withdraw(ref.request_id, ref.lease_token) is not None
    with pytest.raises(KvxferError) as caught:
        leases.renew_read(slow, None)
    assert caught.value.reason is Reason.LEASE_EXPIRED


async def test_a_lease_is_withdrawn_right_when_it_is_forgotten(cluster: Cluster) -> None:
    p = await cluster.engine("engine-p", [await cluster.node(kept_leases=0)])
    p.nodes[0].sidecar._ticker.cancel()  # which would forget it before it is withdrawn
    ticket = p.ticket(small_lists(10, 3), 10, publish=False)
    p.publish(ticket, ttl=0.001)
    lease = leases_of(p)._known[ticket.request_id].lease
    await soon(lambda: lease.deadline <= time.monotonic())
    assert leases_of(p).withdraw(ticket.request_id, ticket.lease_token) is None
    assert not leases_of(p)._known


async def test_a_request_that_is_published_anew_is_another_publication(reading: Reading) -> None:
    """What is told late of the first is no word about the blocks of the second."""
    stub = reading.p.nodes[0].stub
    call = stub.WatchLeases(pb.WatchLeasesRequest(engine_id="engine-p"))
    assert (await call.read()).HasField("ready")
    ticket = unpublished(reading)
    first = await stub.PublishBlocks(publication("engine-p", ticket))
    leases_of(reading.p).withdraw(ticket.request_id, ticket.lease_token)
    second = await stub.PublishBlocks(publication("engine-p", replace(ticket, lease_token=bytes(16))))
    assert first.publication != second.publication
    told = [(await call.read()).event.lease for _ in range(3)]
    assert [(x.publication, x.state) for x in told] == [
        (first.publication, HELD),
        (first.publication, WITHDRAWN),
        (second.publication, HELD),
    ]
    call.cancel()


async def test_granted_reads_survive_a_p_that_is_being_unregistered(reading: Reading) -> None:
    """It refuses what is new, is known as alive, tells its leases, and waits."""
    await reading.good()
    await soon(lambda: leases_of(reading.p).open_reads == 0)
    node = reading.p.nodes[0]
    watch = node.stub.WatchLeases(pb.WatchLeasesRequest(engine_id="engine-p"))
    ticket, late = reading.ticket(), reading.ticket()
    reading.fabric.hold()
    waiting = asyncio.ensure_future(_awaited(reading.stub.ReadBlocks(reads(reading, ticket))))
    await soon(lambda: leases_of(reading.p).open_reads == 1)
    unregister = pb.UnregisterCacheRequest(engine_id="engine-p")
    unregister.drain_timeout.FromMilliseconds(50)
    assert (await refusal(node.stub.UnregisterCache(unregister))).reason is Reason.REGISTRATION_BUSY
    renew = pb.RenewLeaseRequest(engine_id="engine-p", request_id=ticket.request_id, lease_token=ticket.lease_token)
    assert (await refusal(node.stub.RenewLease(renew))).reason is Reason.LEASE_EXPIRED
    again = node.stub.WatchLeases(pb.WatchLeasesRequest(engine_id="engine-p", include_current=True))
    first = (await again.read()).event.lease
    assert first.engine_id == "engine-p"
    (link,) = reading.d.nodes[0].sidecar.registrations.get("engine-d").links
    await reading.d.nodes[0].sidecar.registrations.get("engine-d").links.beat(link.sources[0].rank)
    # A read that is new is refused, and that is no reason to give up the one that is granted.
    assert (await refusal(reading.stub.ReadBlocks(reads(reading, late, first=8)))).reason is not Reason.PEER_LOST
    assert link.alive
    reading.fabric.let_go()
    assert (await waiting).transfer.state == pb.TRANSFER_STATE_DONE
    unregister.drain_timeout.FromSeconds(5)
    await node.stub.UnregisterCache(unregister)
    for call in (watch, again):
        call.cancel()


async def test_unregistering_while_nobody_hears_of_the_end_of_a_read(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D's side of a link ends with its registration, also where P does not answer any more."""
    await reading.good()
    registration = reading.d.nodes[0].sidecar.registrations.get("engine-d")
    (link,) = registration.links
    stuck = asyncio.Event()

    async def mute(*_: Any) -> None:
        stuck.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(link.ranks[0].client, "close_reads", mute)
    monkeypatch.setattr("kvxfer.service.closing.BACKOFF", (0.01,))
    await reading.stub.ReadBlocks(reads(reading, reading.ticket()))
    await asyncio.wait_for(stuck.wait(), 5)
    await reading.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id="engine-d"))
    assert link._users == 0
    assert not registration.links._open


async def test_leases_that_end_early_leave_nothing_that_is_due(
    held: tuple[Leases, PublishBlocks, ReadRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hold may be long and a read short: what would have been due in ten minutes is not kept till then."""
    monkeypatch.setattr(service_leases, "SPARE_DUE", 4)
    leases, record, _ = held
    record = replace(record, ttl=600.0)
    leases.publish(replace(record, request_id="stays"))
    for number in range(100):
        leases.publish(replace(record, request_id=f"r{number}"))
        leases.withdraw(f"r{number}", record.lease_token)
    assert len(leases._due) <= 2 * 2 + 4
    assert len(leases) == 1
    # What is held is still looked at in time.
    leases.tick(time.monotonic() + 601.0)
    assert len(leases) == 0
    assert leases.totals.expired == 1
