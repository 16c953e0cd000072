"""The life of a transfer: held, cancelled, failed, late, forgotten, watched and listed."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.service import engine, transfers, watch
from kvxfer.wire.requests import spec_from_pb
from kvxfer.xfer.api import Read, ReadResult
from kvxfer.xfer.loopback import LoopbackEngine
from tests.support.engines import as_bytes
from tests.support.errors import refusal
from tests.support.loopback import BLOCK, Cluster, Reading, small_layout, small_lists, soon

PREPARED, POSTED, DRAINING = pb.TRANSFER_STATE_PREPARED, pb.TRANSFER_STATE_POSTED, pb.TRANSFER_STATE_DRAINING
DONE, FAILED, CANCELLED = pb.TRANSFER_STATE_DONE, pb.TRANSFER_STATE_FAILED, pb.TRANSFER_STATE_CANCELLED


async def reach(reading: Reading, transfer_id: str, state: int) -> pb.Transfer:
    """Follow a transfer until it is in a state."""
    call = reading.stub.WatchTransfers(pb.WatchTransfersRequest(engine_id="engine-d", include_current=True))
    found = (await events_until(call, transfer_id, state))[-1].transfer
    call.cancel()
    return found


def untouched(reading: Reading) -> bool:
    """Nothing has arrived at D."""
    member = reading.d.members[0]
    return not member.differences(member.model.image)


async def counts(reading: Reading) -> pb.Counts:
    status: pb.GetStatusResponse = await reading.stub.GetStatus(pb.GetStatusRequest())
    return status.counts


async def test_prepare_moves_nothing_and_reading_it_does(reading: Reading) -> None:
    spec = reading.request("t1").spec
    prepared = (await reading.stub.PrepareTransfer(pb.PrepareTransferRequest(spec=spec))).transfer
    assert (prepared.state, prepared.quiesced, prepared.transfer_id) == (PREPARED, True, "t1")
    # Three tokens of the last block are not needed, but the granule is the block: 3 blocks and a snapshot.
    assert prepared.bytes == 3 * 64 + 12 + 64
    assert {g.group: g.bytes for g in prepared.sources[0].groups} == {"attn": 192, "ssm": 76}
    assert not prepared.sources[0].HasField("reported_bytes")
    assert untouched(reading)
    assert reading.fabric.posts == 0
    assert (await counts(reading)).prepared == 1
    read = pb.ReadBlocksRequest(engine_id="engine-d", transfer_id="t1")
    done = (await reading.stub.ReadBlocks(read)).transfer
    assert (done.state, done.sources[0].reported_bytes) == (DONE, prepared.bytes)
    assert reading.fabric.posts == 1
    # Reading it again answers as it ended, and reads nothing.
    again = (await reading.stub.ReadBlocks(read)).transfer
    assert (again.state, again.create_time) == (DONE, done.create_time)
    assert reading.fabric.posts == 1
    assert (await counts(reading)).done == 1


async def test_a_read_takes_at_least_as_long_as_its_phases(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    """Posting goes on beside the event loop, which may come back to the read late."""
    submit = LoopbackEngine.submit

    def slow(engine: LoopbackEngine, read: Read) -> asyncio.Future[ReadResult]:
        time.sleep(0.05)
        return submit(engine, read)

    monkeypatch.setattr(LoopbackEngine, "submit", slow)
    done = await reading.good()
    assert done.timings.total.ToTimedelta().total_seconds() > 0.05


async def test_the_same_id_is_the_same_transfer_and_other_content_an_error(reading: Reading) -> None:
    request = reading.request("t1")
    first = (await reading.stub.ReadBlocks(request)).transfer
    posts = reading.fabric.posts
    assert (await reading.stub.ReadBlocks(request)).transfer.create_time == first.create_time
    prepare = pb.PrepareTransferRequest(spec=request.spec)
    assert (await reading.stub.PrepareTransfer(prepare)).transfer.state == DONE
    assert reading.fabric.posts == posts
    for change in (
        lambda s: s.local_blocks[0].block_ids.__setitem__(0, 20),
        lambda s: setattr(s.ticket, "request_id", "other"),
        lambda s: setattr(s, "skip_tokens", 4),
    ):
        other = reading.request("t1")
        change(other.spec)
        error = await refusal(reading.stub.ReadBlocks(other))
        assert (error.reason, error.field) == (Reason.TRANSFER_ID_REUSED, "spec.transfer_id")
        assert error.metadata["transfer_id"] == "t1"
    # The same while it is being prepared.
    fresh = reading.request("t2")
    answers = await asyncio.gather(*(reading.stub.ReadBlocks(fresh) for _ in range(8)))
    assert {a.transfer.state for a in answers} == {DONE}
    assert (await counts(reading)).done == 2
    await reading.good()


async def test_a_held_transfer_keeps_its_blocks_busy(reading: Reading) -> None:
    await reading.d.handshake(reading.ticket())
    reading.fabric.hold()
    posted = (await reading.stub.ReadBlocks(reading.request("t1", wait=False))).transfer
    assert (posted.state, posted.quiesced) == (POSTED, False)
    now = await counts(reading)
    assert (now.posted, now.bytes_in_flight) == (1, posted.bytes)
    for first in (1, 2, 4):  # the same blocks; some of them; only the snapshot's
        error = await refusal(reading.stub.ReadBlocks(reading.request(first=first)))
        assert (error.reason, error.field) == (Reason.LOCAL_BLOCK_BUSY, "spec.local_blocks")
        assert error.metadata["transfer_id"] == "t1"
        assert int(error.metadata["block"]) in range(1, 5)
    # Preparing is allowed: it may be read once the other has ended.
    prepared = reading.request("t2")
    await reading.stub.PrepareTransfer(pb.PrepareTransferRequest(spec=prepared.spec))
    error = await refusal(reading.stub.ReadBlocks(pb.ReadBlocksRequest(engine_id="engine-d", transfer_id="t2")))
    assert error.reason is Reason.LOCAL_BLOCK_BUSY
    assert (await reading.d.get("t2")).state == PREPARED
    # Other blocks are free.
    other = (await reading.stub.ReadBlocks(reading.request("t3", first=8, wait=False))).transfer
    assert other.state == POSTED
    assert untouched(reading)
    reading.fabric.let_go()
    for transfer_id in ("t1", "t3"):
        done = await reading.stub.ReadBlocks(pb.ReadBlocksRequest(engine_id="engine-d", transfer_id=transfer_id))
        assert done.transfer.state == DONE
    done = await reading.stub.ReadBlocks(pb.ReadBlocksRequest(engine_id="engine-d", transfer_id="t2"))
    assert done.transfer.state == DONE
    assert (await counts(reading)).bytes_in_flight == 0
    await reading.good()


async def test_the_first_block_is_busy_as_well(reading: Reading) -> None:
    await reading.good()
    reading.fabric.hold()
    await reading.stub.ReadBlocks(reading.request("t1", wait=False, first=0))
    error = await refusal(reading.stub.ReadBlocks(reading.request(first=0)))
    assert error.reason is Reason.LOCAL_BLOCK_BUSY
    reading.fabric.let_go()


async def test_blocks_are_free_as_soon_as_a_read_has_answered(reading: Reading) -> None:
    for _ in range(100):
        await reading.stub.ReadBlocks(reading.request())
    assert (await counts(reading)).done == 100


async def test_a_read_is_answered_before_it_is_counted(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    registration, order = reading.d.nodes[0].sidecar.registrations.get("engine-d"), list[str]()

    def noted(what: str, really: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            order.append(what)
            return really(*args)

        return call

    monkeypatch.setattr(engine, "transfer_to_pb", noted("answered", engine.transfer_to_pb))
    monkeypatch.setattr(registration.events, "transfer_ended", noted("counted", registration.events.transfer_ended))
    await reading.good()
    assert order == ["answered", "counted"]


async def test_a_ticket_is_given_back_by_reading_nothing(reading: Reading) -> None:
    """Its blocks are free at once, though there are snapshots, of which no part can be read."""
    ticket = reading.ticket("r1")
    request = reading.d.request(ticket, reading.d_lists)
    request.spec.ClearField("local_blocks")
    request.spec.skip_tokens = ticket.num_tokens
    done = (await reading.stub.ReadBlocks(request)).transfer
    assert (done.state, done.bytes, done.descriptors) == (DONE, 0, 0)
    assert untouched(reading) and reading.fabric.posts == 0
    request = pb.WatchLeasesRequest(engine_id="engine-p", include_current=True)
    async for message in reading.p.nodes[0].stub.WatchLeases(request, timeout=10):
        if message.event.lease.state == pb.LEASE_STATE_RELEASED:
            break


async def test_lists_that_were_forgotten_are_no_wish_to_read_nothing(reading: Reading) -> None:
    request = reading.d.request(reading.ticket(), reading.d_lists)
    request.spec.ClearField("local_blocks")
    for skip in (0, BLOCK):
        request.spec.skip_tokens = skip
        refused = await refusal(reading.stub.ReadBlocks(request))
        assert (refused.reason, refused.field) == (Reason.FIELD_INVALID, "spec.local_blocks")


async def test_cancelling_a_prepared_transfer(reading: Reading) -> None:
    await reading.stub.PrepareTransfer(pb.PrepareTransferRequest(spec=reading.request("t1").spec))
    cancelled = await reading.d.cancel("t1")
    assert (cancelled.state, cancelled.quiesced) == (CANCELLED, True)
    error = await refusal(reading.stub.ReadBlocks(pb.ReadBlocksRequest(engine_id="engine-d", transfer_id="t1")))
    assert error.reason is Reason.TRANSFER_CANCELLED
    assert (error.metadata["transfer_id"], error.metadata["quiesced"]) == ("t1", "true")
    assert reading.fabric.posts == 0
    assert untouched(reading)
    await reading.good()


async def test_cancelling_a_posted_transfer_answers_when_nothing_writes_any_more(reading: Reading) -> None:
    await reading.d.handshake(reading.ticket())
    reading.fabric.hold()
    waiting = asyncio.ensure_future(refusal(reading.stub.ReadBlocks(reading.request("t1"))))
    await soon(lambda: reading.fabric.posts == 1)
    late = await reading.d.cancel("t1", 0.05)
    assert (late.state, late.quiesced) == (DRAINING, False)
    # Whoever waits for the read hears of it at once, and that its blocks are not free yet.
    error = await waiting
    assert (error.reason, error.metadata["quiesced"]) == (Reason.TRANSFER_CANCELLED, "false")
    error = await refusal(reading.stub.ReadBlocks(reading.request()))
    assert (error.reason, error.metadata["transfer_id"]) == (Reason.LOCAL_BLOCK_BUSY, "t1")
    cancelling = asyncio.ensure_future(reading.d.cancel("t1"))
    now = await counts(reading)
    assert (now.draining, now.bytes_in_flight > 0) == (1, True)
    assert untouched(reading)
    assert not cancelling.done()
    # What is in flight lands in the end, whatever was said: only now may the blocks be reused.
    reading.fabric.let_go()
    ended = await cancelling
    assert (ended.state, ended.quiesced) == (CANCELLED, True)
    assert not untouched(reading)
    assert (await counts(reading)).bytes_in_flight == 0
    await reading.good()


async def test_cancelling_what_has_ended_changes_nothing(reading: Reading) -> None:
    await reading.stub.ReadBlocks(reading.request("t1"))
    assert (await reading.d.cancel("t1")).state == DONE
    reading.fabric.fail_post(1)
    await refusal(reading.stub.ReadBlocks(reading.request("t2")))
    assert (await reading.d.cancel("t2")).state == FAILED


@pytest.mark.parametrize("reachable", [True, False])
async def test_cancelling_what_is_being_prepared(
    reading: Reading, monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    """Whoever gave up the call may use its blocks at once, and nothing that the call still does writes them."""
    (registration,) = reading.d.nodes[0].sidecar.registrations
    asked, answer, get = asyncio.Event(), asyncio.Event(), registration.links.get

    async def slow(*args: Any) -> Any:
        asked.set()
        await answer.wait()
        if not reachable:
            raise KvxferError(Reason.PEER_UNREACHABLE, "for the test")
        return await get(*args)

    monkeypatch.setattr(registration.links, "get", slow)
    calls = [asyncio.ensure_future(refusal(reading.stub.ReadBlocks(reading.request("t1")))) for _ in range(2)]
    await asked.wait()
    ended = await reading.d.cancel("t1")
    assert (ended.state, ended.quiesced, ended.bytes) == (CANCELLED, True, 0)
    assert (ended.transfer_id, ended.HasField("end_time")) == ("t1", True)
    answer.set()
    expected = Reason.TRANSFER_CANCELLED if reachable else Reason.PEER_UNREACHABLE
    assert [error.reason for error in await asyncio.gather(*calls)] == [expected] * 2
    if reachable:
        assert (await reach(reading, "t1", CANCELLED)).quiesced
    assert (await counts(reading)).cancelled == reachable
    late = await refusal(reading.stub.ReadBlocks(reading.request("t1")))
    assert late.reason is Reason.TRANSFER_CANCELLED
    assert reading.fabric.posts == 0
    assert untouched(reading)
    monkeypatch.undo()
    await reading.good()


async def test_cancelling_ends_whoever_tries_again(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has joined a transfer goes on where the time of the one who began it is over, but not once it is
    cancelled, however many others were cancelled since."""
    monkeypatch.setattr(transfers, "KEPT_CANCELLED", 1)
    (registration,) = reading.d.nodes[0].sidecar.registrations
    asked, answer, get = asyncio.Event(), asyncio.Event(), registration.links.get

    async def late(*_: Any) -> Any:
        monkeypatch.setattr(registration.links, "get", get)
        asked.set()
        await answer.wait()
        raise KvxferError(Reason.DEADLINE_EXCEEDED, "for the test")

    monkeypatch.setattr(registration.links, "get", late)
    first = asyncio.ensure_future(refusal(reading.stub.ReadBlocks(reading.request("t1"))))
    await asked.wait()
    spec = spec_from_pb(reading.request("t1").spec)
    joined = asyncio.ensure_future(registration.transfers.prepare(spec))
    await asyncio.sleep(0)
    assert (await reading.d.cancel("t1")).quiesced
    await refusal(reading.stub.CancelTransfer(pb.CancelTransferRequest(engine_id="engine-d", transfer_id="another")))
    answer.set()
    assert (await first).reason is Reason.DEADLINE_EXCEEDED
    with pytest.raises(KvxferError) as caught:
        await joined
    assert caught.value.reason is Reason.TRANSFER_CANCELLED
    assert untouched(reading)


async def test_cancelling_what_is_tried_again(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken back before, since its blocks were busy; what is being prepared is another one of its ID."""
    await reading.good()
    (registration,) = reading.d.nodes[0].sidecar.registrations
    reading.fabric.hold()
    await reading.stub.ReadBlocks(reading.request("t1", wait=False))
    assert (await refusal(reading.stub.ReadBlocks(reading.request("t2")))).reason is Reason.LOCAL_BLOCK_BUSY
    asked, answer, get = asyncio.Event(), asyncio.Event(), registration.links.get

    async def slow(*args: Any) -> Any:
        asked.set()
        await answer.wait()
        return await get(*args)

    monkeypatch.setattr(registration.links, "get", slow)
    again = asyncio.ensure_future(refusal(reading.stub.ReadBlocks(reading.request("t2"))))
    await asked.wait()
    reading.fabric.let_go()
    await reach(reading, "t1", DONE)
    posts = reading.fabric.posts
    ended = await reading.d.cancel("t2")
    assert (ended.state, ended.quiesced) == (CANCELLED, True)
    answer.set()
    assert (await again).reason is Reason.TRANSFER_CANCELLED
    assert reading.fabric.posts == posts


async def test_what_is_cancelled_is_never_read(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that was given up may come after its cancellation, and after the transfer has been forgotten."""
    monkeypatch.setattr(transfers, "KEPT_CANCELLED", 3)
    p = await cluster.engine("engine-p", [await cluster.node()])
    d = await cluster.engine("engine-d", [await cluster.node(kept_transfers=0)])
    reading = Reading(cluster, p, d)

    async def cancel(name: str) -> None:
        """One that is not known."""
        cancelling = reading.stub.CancelTransfer(pb.CancelTransferRequest(engine_id="engine-d", transfer_id=name))
        error = await refusal(cancelling)
        assert (error.reason, error.field) == (Reason.TRANSFER_UNKNOWN, "transfer_id")

    await cancel("t1")
    await cancel("t2")
    await cancel("t1")
    await cancel("t3")
    await reading.stub.PrepareTransfer(pb.PrepareTransferRequest(spec=reading.request("t4").spec))
    assert (await reading.d.cancel("t4")).state == CANCELLED
    for name in ("t1", "t3", "t4"):
        request = reading.request(name)
        for call in (
            reading.stub.ReadBlocks(request),
            reading.stub.PrepareTransfer(pb.PrepareTransferRequest(spec=request.spec)),
        ):
            error = await refusal(call)
            assert (error.reason, error.metadata["transfer_id"]) == (Reason.TRANSFER_CANCELLED, name)
    assert reading.fabric.posts == 0
    assert untouched(reading)
    assert (await reading.stub.ReadBlocks(reading.request("t2"))).transfer.state == DONE


async def test_a_deadline_fails_the_read_and_drains(reading: Reading) -> None:
    await reading.d.handshake(reading.ticket())
    reading.fabric.hold()
    request = reading.request("t1")
    request.timeout.FromMilliseconds(3500)  # in which P answers, and is asked for more
    error = await refusal(reading.stub.ReadBlocks(request))
    assert (error.reason, error.metadata["timeout_s"]) == (Reason.DEADLINE_EXCEEDED, "3.5")
    assert error.metadata["quiesced"] == "false"
    draining = await reading.d.get("t1")
    assert (draining.state, draining.quiesced) == (DRAINING, False)
    assert draining.error.message == error.message
    reading.fabric.let_go()
    failed = await reach(reading, "t1", FAILED)
    assert failed.quiesced
    await reading.good()


async def test_a_caller_that_goes_away_changes_nothing(reading: Reading) -> None:
    await reading.d.handshake(reading.ticket())
    reading.fabric.hold()
    call = reading.stub.ReadBlocks(reading.request("t1"))
    await soon(lambda: reading.fabric.posts == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    with pytest.raises(grpc.aio.AioRpcError):
        await reading.stub.ReadBlocks(pb.ReadBlocksRequest(engine_id="engine-d", transfer_id="t1"), timeout=0.05)
    assert (await reading.d.get("t1")).state == POSTED
    reading.fabric.let_go()
    assert (await reach(reading, "t1", DONE)).quiesced


async def test_a_caller_that_goes_away_during_a_handshake_that_fails(reading: Reading) -> None:
    """Nobody is there to hear why; that is no reason to complain of a failure that nobody has looked at."""

    def preparing() -> bool:
        return any("prepare" in repr(task.get_coro()) for task in asyncio.all_tasks())

    complaints: list[dict[str, Any]] = []

    def complain(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # gRPC has one poller for all event loops of a process, and wakes those of earlier tests, too.
        if "PollerCompletionQueue" not in str(context.get("message")):
            complaints.append(context)

    asyncio.get_running_loop().set_exception_handler(complain)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        request = reading.request("t1")
        request.spec.ticket.ranks[0].address = f"127.0.0.1:{mute.getsockname()[1]}"
        call = reading.stub.ReadBlocks(request)
        connection, _ = await asyncio.to_thread(mute.accept)
        assert preparing()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        connection.close()
    await soon(lambda: not preparing())
    gc.collect()
    await asyncio.sleep(0)
    assert not complaints


@pytest.mark.parametrize("reason", [Reason.TRANSFER_FAILED, Reason.PEER_LOST])
async def test_one_of_several_sources_fails(cluster: Cluster, reason: Reason, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the read fails; the blocks are free only once the other source has let go as well."""
    p = await cluster.engine("engine-p", [await cluster.node(), await cluster.node()])
    d = await cluster.engine("engine-d", [await cluster.node()])
    reading = Reading(cluster, p, d)
    await reading.good()
    client = next(iter(d.nodes[0].sidecar.registrations.get("engine-d").links)).sources[1].client
    posts, really = reading.fabric.posts, client.open_read

    async def second(*args: Any) -> float:
        granted = await really(*args)
        await soon(lambda: reading.fabric.posts == posts + 1)
        return granted

    reading.fabric.hold()
    reading.fabric.fail_post(2, reason)
    monkeypatch.setattr(client, "open_read", second)
    error = await refusal(reading.stub.ReadBlocks(reading.request("t1")))
    assert (error.reason, error.metadata["quiesced"]) == (reason, "false")
    draining = await reading.d.get("t1")
    assert (draining.state, draining.quiesced, len(draining.sources)) == (DRAINING, False, 2)
    assert (await refusal(reading.stub.ReadBlocks(reading.request(), timeout=5))).reason is Reason.LOCAL_BLOCK_BUSY
    monkeypatch.undo()
    reading.fabric.let_go()
    failed = await reach(reading, "t1", FAILED)
    assert (failed.quiesced, (await counts(reading)).failed) == (True, 1)
    # A lost peer is met again, a failed read is not the peer's end.
    await reading.good()


async def test_a_prepared_transfer_is_not_kept_for_ever(cluster: Cluster) -> None:
    p = await cluster.engine("engine-p", [await cluster.node()])
    d = await cluster.engine("engine-d", [await cluster.node(prepared_ttl=2.5)])
    reading = Reading(cluster, p, d)
    await reading.stub.PrepareTransfer(pb.PrepareTransferRequest(spec=reading.request("t1").spec))
    assert (await reach(reading, "t1", CANCELLED)).quiesced
    error = await refusal(reading.stub.ReadBlocks(pb.ReadBlocksRequest(engine_id="engine-d", transfer_id="t1")))
    assert (error.reason, error.metadata["ttl_s"]) == (Reason.TRANSFER_CANCELLED, "2.5")
    await reading.good()


async def test_limits(cluster: Cluster) -> None:
    p = await cluster.engine("engine-p", [await cluster.node()])
    d = await cluster.engine("engine-d", [await cluster.node(max_transfers=2, max_bytes_in_flight=2**20)])
    reading = Reading(cluster, p, d)
    for name in ("t1", "t2"):
        await reading.stub.PrepareTransfer(pb.PrepareTransferRequest(spec=reading.request(name).spec))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reading.stub.PrepareTransfer(pb.PrepareTransferRequest(spec=reading.request("t3").spec))
    assert "RetryInfo" in str(dict(caught.value.trailing_metadata()))
    error = await refusal(reading.stub.ReadBlocks(reading.request("t3")))
    assert (error.reason, error.metadata["limit"]) == (Reason.LIMIT_EXCEEDED, "2")
    await reading.d.cancel("t1")
    await reading.good()


async def test_bytes_in_flight_are_limited_but_one_read_always_goes(cluster: Cluster) -> None:
    blocks = 40_000
    p = await cluster.engine("engine-p", [await cluster.node()], [small_layout(blocks=blocks)])
    limit = 2**20
    d = await cluster.engine("engine-d", [await cluster.node(max_bytes_in_flight=limit)], [small_layout(blocks=blocks)])
    reading = Reading(cluster, p, d)
    reading.TOKENS = 17_000 * BLOCK  # more than the limit in one read
    reading.p_lists = small_lists(reading.TOKENS, 0)
    await reading.d.handshake(reading.ticket())
    reading.fabric.hold()
    first = (await reading.stub.ReadBlocks(reading.request("t1", wait=False))).transfer
    assert first.bytes > limit
    error = await refusal(reading.stub.ReadBlocks(reading.request("t2", first=20_000)))
    assert (error.reason, error.metadata["limit"]) == (Reason.LIMIT_EXCEEDED, str(limit))
    reading.fabric.let_go()
    await reach(reading, "t1", DONE)
    assert (await reading.stub.ReadBlocks(reading.request("t3", first=20_000))).transfer.state == DONE


async def test_ended_transfers_are_forgotten_in_the_end(cluster: Cluster) -> None:
    p = await cluster.engine("engine-p", [await cluster.node()])
    d = await cluster.engine("engine-d", [await cluster.node(kept_transfers=3)])
    reading = Reading(cluster, p, d)
    for i in range(5):
        await reading.stub.ReadBlocks(reading.request(f"t{i}"))
        await reading.quiet()  # a read has ended a little later than it is answered
    known = (await reading.stub.ListTransfers(pb.ListTransfersRequest(engine_id="engine-d"))).transfers
    assert [t.transfer_id for t in known] == ["t4", "t3", "t2"]
    error = await refusal(reading.stub.GetTransfer(pb.GetTransferRequest(engine_id="engine-d", transfer_id="t0")))
    assert (error.reason, error.field) == (Reason.TRANSFER_UNKNOWN, "transfer_id")
    assert error.metadata["transfer_id"] == "t0"


async def test_listing_in_pages(reading: Reading) -> None:
    for i in range(7):
        await reading.stub.PrepareTransfer(pb.PrepareTransferRequest(spec=reading.request(f"t{i}").spec))
        if i % 2:
            await reading.d.cancel(f"t{i}")

    async def pages(**more: Any) -> list[list[str]]:
        found, token = [], ""
        while True:
            request = pb.ListTransfersRequest(engine_id="engine-d", page_token=token, **more)
            answer = await reading.stub.ListTransfers(request)
            found.append([t.transfer_id for t in answer.transfers])
            token = answer.next_page_token
            if not token:
                return found

    assert await pages() == [["t6", "t5", "t4", "t3", "t2", "t1", "t0"]]
    assert await pages(page_size=3) == [["t6", "t5", "t4"], ["t3", "t2", "t1"], ["t0"]]
    assert await pages(page_size=2, states=[CANCELLED]) == [["t5", "t3"], ["t1"]]
    assert await pages(states=[DONE]) == [[]]
    # New ones do not shift the pages.
    first = await reading.stub.ListTransfers(pb.ListTransfersRequest(engine_id="engine-d", page_size=2))
    await reading.stub.PrepareTransfer(pb.PrepareTransferRequest(spec=reading.request("t7").spec))
    following = pb.ListTransfersRequest(engine_id="engine-d", page_size=2, page_token=first.next_page_token)
    assert [t.transfer_id for t in (await reading.stub.ListTransfers(following)).transfers] == ["t4", "t3"]
    for token in ("x", "-1", "9" * 257):
        error = await refusal(
            reading.stub.ListTransfers(pb.ListTransfersRequest(engine_id="engine-d", page_token=token))
        )
        assert (error.reason, error.field) == (Reason.FIELD_INVALID, "page_token")


async def events_until(call: Any, transfer_id: str, state: int) -> list[pb.TransferEvent]:
    """The events of a stream up to one that tells of ``state``."""
    found = []
    while True:
        answer = await asyncio.wait_for(call.read(), 20)
        if answer.HasField("ready"):
            continue
        found.append(answer.event)
        if (answer.event.transfer.transfer_id, answer.event.transfer.state) == (transfer_id, state):
            return found


async def test_watching_tells_every_change_in_order(reading: Reading) -> None:
    await reading.d.handshake(reading.ticket())
    await reading.stub.ReadBlocks(reading.request("t0"))
    # Its end is told once everything is given back, which is after the answer.
    await reading.d.nodes[0].sidecar.registrations.get("engine-d").transfers.get("t0").finished.wait()
    call = reading.stub.WatchTransfers(pb.WatchTransfersRequest(engine_id="engine-d", include_current=True))
    first = await call.read()
    assert (first.event.transfer.transfer_id, first.event.transfer.state) == ("t0", DONE)
    assert (await call.read()).HasField("ready")
    seen, posts = [], reading.fabric.posts
    reading.fabric.hold()
    await reading.stub.PrepareTransfer(pb.PrepareTransferRequest(spec=reading.request("t1").spec))
    seen += await events_until(call, "t1", PREPARED)
    await reading.stub.ReadBlocks(pb.ReadBlocksRequest(engine_id="engine-d", transfer_id="t1", wait=False))
    seen += await events_until(call, "t1", POSTED)
    await soon(lambda: reading.fabric.posts > posts)  # or it would not have to drain
    await reading.d.cancel("t1", 0.02)
    seen += await events_until(call, "t1", DRAINING)
    reading.fabric.let_go()
    seen += await events_until(call, "t1", CANCELLED)
    assert [e.transfer.state for e in seen] == [PREPARED, POSTED, DRAINING, CANCELLED]
    assert [e.transfer.quiesced for e in seen] == [True, False, False, True]
    assert [e.sequence for e in seen] == [2, 3, 4, 5]
    # Without include_current the stream is live at once.
    other = reading.stub.WatchTransfers(pb.WatchTransfersRequest(engine_id="engine-d"))
    assert (await other.read()).HasField("ready")
    await reading.stub.ReadBlocks(reading.request("t2"))
    assert {e.transfer.transfer_id for e in await events_until(other, "t2", DONE)} == {"t2"}
    # The end of the registration ends the streams with a reason.
    await reading.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id="engine-d"))
    for stream in (call, other):
        error = await refusal(_drain(stream))
        assert (error.reason, error.field) == (Reason.NOT_REGISTERED, "engine_id")


async def _drain(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_watcher_that_is_too_slow_is_told(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    await reading.d.handshake(reading.ticket())
    monkeypatch.setattr(watch, "BACKLOG", 4)
    (registration,) = reading.d.nodes[0].sidecar.registrations
    call = reading.stub.WatchTransfers(pb.WatchTransfersRequest(engine_id="engine-d"))
    assert (await call.read()).HasField("ready")
    (watcher,) = registration.transfers.watchers._all
    # More changes than fit, all within one turn of the event loop.
    transfer = await registration.transfers.prepare(_spec(reading))
    for _ in range(10):
        registration.transfers.watchers.tell(transfer)
    assert watcher.overrun
    error = await refusal(_drain(call))
    assert error.reason is Reason.LIMIT_EXCEEDED
    again = reading.stub.WatchTransfers(pb.WatchTransfersRequest(engine_id="engine-d", include_current=True))
    assert (await again.read()).event.transfer.transfer_id == "slow"
    again.cancel()
    await reading.good()


def _spec(reading: Reading) -> Any:
    return spec_from_pb(reading.request("slow").spec)


async def test_notifications_may_be_lost_or_come_twice(reading: Reading) -> None:
    await reading.good()
    reading.fabric.lose_notifications()
    await reading.good()
    reading.fabric.duplicate_notifications()
    await reading.good()


async def test_a_peer_that_vanishes_in_mid_read(reading: Reading) -> None:
    await reading.d.handshake(reading.ticket())
    reading.fabric.hold()
    waiting = asyncio.ensure_future(refusal(reading.stub.ReadBlocks(reading.request("t1"))))
    await soon(lambda: reading.fabric.posts == 1)
    reading.fabric.vanish(reading.p.nodes[0].engines[0].name)
    error = await waiting
    assert error.reason is Reason.PEER_LOST
    assert (await reach(reading, "t1", FAILED)).quiesced
    assert untouched(reading)
    assert reading.d.members[0].image().tobytes() == as_bytes(reading.d.members[0].model.image).tobytes()


async def test_a_peer_that_vanishes_under_a_read_that_was_given_up(reading: Reading) -> None:
    """Its transfer had its outcome before; the next read must not be the first to find out."""
    await reading.d.handshake(reading.ticket())
    (link,) = reading.d.nodes[0].sidecar.registrations.get("engine-d").links
    reading.fabric.hold()
    await reading.stub.ReadBlocks(reading.request("t1", wait=False))
    await soon(lambda: reading.fabric.posts == 1)
    assert not (await reading.d.cancel("t1", 0.05)).quiesced
    assert link.alive
    reading.fabric.vanish(reading.p.nodes[0].engines[0].name)
    assert (await reach(reading, "t1", pb.TRANSFER_STATE_CANCELLED)).quiesced
    assert link.lost.result().reason is Reason.PEER_LOST


async def test_a_prepared_transfer_ends_with_its_peer(reading: Reading) -> None:
    late = reading.request()
    await reading.stub.PrepareTransfer(pb.PrepareTransferRequest(spec=reading.request("t1").spec))
    await reading.p.nodes[0].stop()
    failed = await reach(reading, "t1", FAILED)
    assert failed.quiesced
    error = await refusal(reading.stub.ReadBlocks(pb.ReadBlocksRequest(engine_id="engine-d", transfer_id="t1")))
    assert error.reason is Reason.PEER_LOST
    error = await refusal(reading.stub.ReadBlocks(late))
    assert error.reason is Reason.PEER_UNREACHABLE


async def test_a_source_is_asked_before_anything_is_posted(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    """P may not poll, and its blocks may be another request's, until it has answered."""
    await reading.good()
    source = next(iter(reading.d.nodes[0].sidecar.registrations.get("engine-d").links)).sources[0]
    posts, asked, answer = reading.fabric.posts, asyncio.Event(), asyncio.Event()
    really = source.client.open_read

    async def slowly(*args: Any) -> float:
        asked.set()
        await answer.wait()
        return await really(*args)

    monkeypatch.setattr(source.client, "open_read", slowly)
    running = asyncio.ensure_future(reading.good())
    await asyncio.wait_for(asked.wait(), 20)
    await reach_nothing(reading, posts)
    answer.set()
    await asyncio.wait_for(running, 20)
    assert reading.fabric.posts == posts + 1


async def test_a_read_that_is_refused_is_never_posted(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    await reading.good()
    link = next(iter(reading.d.nodes[0].sidecar.registrations.get("engine-d").links))
    source = link.sources[0]
    posts = reading.fabric.posts

    async def refuse(*_: Any) -> float:
        raise KvxferError(Reason.LIMIT_EXCEEDED, "too many reads")

    with monkeypatch.context() as patched:
        patched.setattr(source.client, "open_read", refuse)
        error = await refusal(reading.stub.ReadBlocks(reading.request("t1")))
    assert (error.reason, error.metadata["quiesced"]) == (Reason.LIMIT_EXCEEDED, "true")
    assert (await reading.d.get("t1")).quiesced
    assert reading.fabric.posts == posts
    await reading.good()


async def reach_nothing(reading: Reading, posts: int) -> None:
    """Everything that is due has been done, and nothing was posted."""
    for _ in range(100):
        await asyncio.sleep(0)
    engine = reading.d.nodes[0].engines[0]
    await engine.metadata()  # the engine's thread has come by
    assert reading.fabric.posts == posts
