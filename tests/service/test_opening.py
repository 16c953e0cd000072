"""Sources are told of a read before it is posted, and again where it never is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvxfer.core.errors import Reason
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.service import making, opening, transfers
from kvxfer.service.link import LinkSource
from kvxfer.wire.fields import MAX_SECONDS
from kvxfer.wire.peer import CloseRead, Outcome
from kvxfer.wire.requests import spec_from_pb
from tests.support.errors import refusal
from tests.support.loopback import Cluster, Reading, soon


def source_of(reading: Reading) -> LinkSource:
    """How D reads from P; after a first read."""
    return next(iter(reading.d.nodes[0].sidecar.registrations.get("engine-d").links)).sources[0]


def open_at_p(reading: Reading) -> int:
    """Reads that P thinks are under way."""
    registered = reading.p.nodes[0].sidecar.registrations.get("engine-p")
    return registered.readers.open_reads + registered.leases.open_reads


@pytest.mark.parametrize("name", ["", "t1"], ids=["anonymous", "named"])
async def test_what_is_read_is_announced_while_it_is_resolved(
    reading: Reading, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reading.good()
    source, events = source_of(reading), []
    really_open, really_resolve = source.client.open_read, making.resolve

    def opening(*args: Any) -> Any:
        events.append("OpenRead")
        return really_open(*args)

    def resolving(*args: Any) -> Any:
        events.append("resolve")
        return really_resolve(*args)

    monkeypatch.setattr(source.client, "open_read", opening)
    monkeypatch.setattr(making, "resolve", resolving)
    done = (await reading.stub.ReadBlocks(reading.request(name))).transfer
    assert done.state == pb.TRANSFER_STATE_DONE
    assert events == ["OpenRead", "resolve"]


@pytest.mark.parametrize("name", ["", "t2"], ids=["anonymous", "named"])
async def test_what_cannot_be_posted_is_taken_back(reading: Reading, name: str) -> None:
    await reading.good()
    reading.fabric.hold()
    await reading.stub.ReadBlocks(reading.request("t1", wait=False))
    await soon(lambda: open_at_p(reading) == 2)
    ticket = reading.ticket()
    again = reading.d.request(ticket, reading.d_lists, transfer_id=name)
    for _ in range(2):
        assert (await refusal(reading.stub.ReadBlocks(again))).reason is Reason.LOCAL_BLOCK_BUSY
    if name:
        was = await reading.d.get(name)
        assert (was.state, was.quiesced) == (pb.TRANSFER_STATE_CANCELLED, True)
        assert "still being written by transfer t1" in was.error.message
    await soon(lambda: open_at_p(reading) == 2)  # that of t1
    reading.fabric.let_go()
    await reading.stub.ReadBlocks(pb.ReadBlocksRequest(engine_id="engine-d", transfer_id="t1"))
    # Nothing was read, so the request is still there to be read, and a name is free again.
    assert (await reading.stub.ReadBlocks(again)).transfer.state == pb.TRANSFER_STATE_DONE
    if name:
        assert (await reading.d.get(name)).state == pb.TRANSFER_STATE_DONE
    await soon(lambda: open_at_p(reading) == 0)


async def test_what_was_announced_and_is_not_posted_is_given_up(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wanted it has hung up: no source waits for as long as a prepared transfer may stay."""
    await reading.good()
    monkeypatch.setattr(transfers, "ANNOUNCED_TTL", 0.05)
    registered = reading.d.nodes[0].sidecar.registrations.get("engine-d")
    prepared = await registered.transfers.prepare(spec_from_pb(reading.request("t1").spec), read=5.0)
    await soon(lambda: open_at_p(reading) == 2)
    await soon(lambda: open_at_p(reading) == 0)
    assert prepared.error is not None
    assert "not read within 0.05 s" in prepared.error.message
    # Its blocks were told to be quiet: whoever comes late may not write them.
    assert (await refusal(reading.stub.ReadBlocks(reading.request("t1")))).reason is Reason.TRANSFER_CANCELLED


async def test_a_name_that_was_cancelled_is_not_free(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where it was before: its caller reuses the blocks."""
    monkeypatch.setattr(transfers, "KEPT_CANCELLED", 0)  # only what is known of it counts
    await reading.good()
    reading.fabric.hold()
    await reading.stub.ReadBlocks(reading.request("t1", wait=False))
    assert (await refusal(reading.stub.ReadBlocks(reading.request("t2")))).reason is Reason.LOCAL_BLOCK_BUSY
    await reading.d.cancel("t2")
    reading.fabric.let_go()
    await reading.stub.ReadBlocks(pb.ReadBlocksRequest(engine_id="engine-d", transfer_id="t1"))
    late = await refusal(reading.stub.ReadBlocks(reading.request("t2")))
    assert late.reason is Reason.TRANSFER_CANCELLED
    found = await reading.d.get("t2")
    assert (found.state, "was cancelled" in found.error.message) == (pb.TRANSFER_STATE_CANCELLED, True)


async def test_a_name_that_was_given_again_outlives_the_former_one(cluster: Cluster) -> None:
    """What is forgotten is the transfer that was taken back, not the one that has its name now."""
    p = await cluster.engine("engine-p", [await cluster.node()])
    d = await cluster.engine("engine-d", [await cluster.node(kept_transfers=1)])
    reading = Reading(cluster, p, d)
    await reading.good()
    reading.fabric.hold()
    await reading.stub.ReadBlocks(reading.request("t1", wait=False))
    assert (await refusal(reading.stub.ReadBlocks(reading.request("t2")))).reason is Reason.LOCAL_BLOCK_BUSY
    await reading.stub.ReadBlocks(reading.request("t2", first=8, wait=False))  # other content: it is another one
    await reading.stub.PrepareTransfer(pb.PrepareTransferRequest(spec=reading.request("t3").spec))
    await reading.d.cancel("t3")  # and with this there are more than are kept
    assert (await reading.d.get("t2")).state == pb.TRANSFER_STATE_POSTED
    reading.fabric.let_go()
    done = await reading.stub.ReadBlocks(pb.ReadBlocksRequest(engine_id="engine-d", transfer_id="t2"))
    assert done.transfer.state == pb.TRANSFER_STATE_DONE


async def test_a_name_that_was_prepared_before_stays_prepared(reading: Reading) -> None:
    await reading.good()
    reading.fabric.hold()
    await reading.stub.ReadBlocks(reading.request("t1", wait=False))
    prepared = reading.request("t2")
    await reading.stub.PrepareTransfer(pb.PrepareTransferRequest(spec=prepared.spec))
    assert (await refusal(reading.stub.ReadBlocks(prepared))).reason is Reason.LOCAL_BLOCK_BUSY
    assert (await reading.d.get("t2")).state == pb.TRANSFER_STATE_PREPARED
    reading.fabric.let_go()
    await reading.stub.ReadBlocks(pb.ReadBlocksRequest(engine_id="engine-d", transfer_id="t1"))
    assert (await reading.stub.ReadBlocks(prepared)).transfer.state == pb.TRANSFER_STATE_DONE


async def test_what_cannot_be_resolved_is_taken_back(reading: Reading) -> None:
    await reading.good()
    ticket = reading.ticket()
    wrong = reading.d.request(ticket, reading.d_lists)
    wrong.spec.local_blocks[0].block_ids.pop()
    assert (await refusal(reading.stub.ReadBlocks(wrong))).reason is Reason.RANGE_NOT_COVERED
    await soon(lambda: open_at_p(reading) == 0)
    good = reading.d.request(ticket, reading.d_lists)
    assert (await reading.stub.ReadBlocks(good)).transfer.state == pb.TRANSFER_STATE_DONE


async def test_the_end_is_told_after_the_beginning(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be resolved is taken back only once the source has answered: it would be granted after its end."""
    await reading.good()
    source, answer, events = source_of(reading), asyncio.Event(), []
    really_open, really_close = source.client.open_read, source.client.close_reads

    async def opening(*args: Any) -> Any:
        await answer.wait()
        granted = await really_open(*args)
        events.append("granted")
        return granted

    async def closing(records: Sequence[CloseRead], timeout: float) -> None:
        # And not that of the first read.
        events.extend("closed" for record in records if record.outcome is Outcome.FAILED)
        await really_close(records, timeout)

    monkeypatch.setattr(source.client, "open_read", opening)
    monkeypatch.setattr(source.client, "close_reads", closing)
    wrong = reading.request()
    wrong.spec.local_blocks[0].block_ids.pop()
    assert (await refusal(reading.stub.ReadBlocks(wrong))).reason is Reason.RANGE_NOT_COVERED
    assert not events
    answer.set()
    await soon(lambda: len(events) == 2)
    assert events == ["granted", "closed"]


async def test_a_read_may_take_as_long_as_any(reading: Reading) -> None:
    """What is asked for is a little longer than the read's own deadline, but never longer than may be asked for."""
    request = reading.request()
    request.timeout.FromSeconds(MAX_SECONDS)
    assert (await reading.stub.ReadBlocks(request)).transfer.state == pb.TRANSFER_STATE_DONE


@pytest.mark.parametrize("name", ["", "t1"], ids=["anonymous", "named"])
async def test_a_source_that_is_silent_meets_the_deadline_of_the_read(
    reading: Reading, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told first, and is not lost because a read had little time."""
    await reading.good()
    really = making.resolve

    def resolving(*args: Any) -> Any:
        time.sleep(0.3)  # the read has its time from here on
        return really(*args)

    async def silent(*_: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(making, "resolve", resolving)
    monkeypatch.setattr(reading.p.nodes[0].sidecar.registrations.get("engine-p").leases, "open", silent)
    request = reading.request(name)
    request.timeout.FromMilliseconds(500)
    (link,) = reading.d.nodes[0].sidecar.registrations.get("engine-d").links
    assert (await refusal(reading.stub.ReadBlocks(request))).reason is Reason.DEADLINE_EXCEEDED
    assert link.alive


@pytest.mark.parametrize("milliseconds, anew", [(100, False), (400, True)])
async def test_a_source_that_has_not_answered_for_long_is_met_anew(
    reading: Reading, milliseconds: int, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been cut off, and the connection for reads given up with nobody noticing."""
    await reading.good()
    monkeypatch.setattr(opening, "SILENT", 0.25)
    links = reading.d.nodes[0].sidecar.registrations.get("engine-d").links
    (link,) = links
    request = reading.request()
    request.timeout.FromMilliseconds(milliseconds)

    async def silent(*_: Any) -> Any:
        await asyncio.Event().wait()

    with monkeypatch.context() as cut_off:
        cut_off.setattr(reading.p.nodes[0].sidecar.registrations.get("engine-p").leases, "open", silent)
        assert (await refusal(reading.stub.ReadBlocks(request))).reason is Reason.DEADLINE_EXCEEDED
    await reading.good()
    (after,) = links
    assert (after is not link) is anew
    await soon(lambda: len(links._open) == 1)


async def test_a_source_stops_polling_when_the_read_has_ended(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notification says so before CloseReads does."""
    await reading.good()
    await soon(lambda: open_at_p(reading) == 0)
    source, closing = source_of(reading), asyncio.Event()
    really_close = source.client.close_reads

    async def late(records: Sequence[CloseRead], timeout: float) -> None:
        await closing.wait()
        await really_close(records, timeout)

    monkeypatch.setattr(source.client, "close_reads", late)
    registered = reading.p.nodes[0].sidecar.registrations.get("engine-p")
    readers, ticket = registered.readers, reading.ticket()
    reading.fabric.hold()
    running = asyncio.ensure_future(reading.stub.ReadBlocks(reading.d.request(ticket, reading.d_lists)))
    await soon(lambda: readers.open_reads == 1)
    told = (await registered.engine.info()).counters.notifications
    reading.fabric.let_go()
    await running
    while (await registered.engine.info()).counters.notifications == told:
        continue
    await registered.engine.metadata()  # what came before it has been taken
    assert readers.open_reads == 0
    closing.set()
