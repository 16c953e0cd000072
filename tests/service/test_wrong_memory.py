"""Ways in which bytes could have gone wrong, or calls could have hung, without anybody being told."""

from __future__ import annotations

import asyncio
import os

import pytest

from kvxfer.core.errors import Reason
from kvxfer.core.layout import Rank
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.requests import handshake_to_pb
from tests.support.engines import Member, SharedRegions, registration
from tests.support.errors import refusal
from tests.support.loopback import Reading, small_layout


async def test_memory_made_anew_under_the_same_name_is_not_the_registered_one(reading: Reading) -> None:
    """The answer "the same again" would leave the sidecar with files that nobody sees any more."""
    layout = small_layout()
    directory = reading.cluster.directory
    regions = SharedRegions.files(directory, "again", layout)
    request = registration("engine-x", Member(Rank(), layout, reading.cluster.labels, regions))
    first = await reading.stub.RegisterCache(request)
    assert (await reading.stub.RegisterCache(request)).incarnation == first.incarnation
    for i in range(len(layout.regions)):
        os.unlink(directory / f"again.{i}")
    anew = SharedRegions.files(directory, "again", layout)
    error = await refusal(reading.stub.RegisterCache(request))
    assert error.reason is Reason.REGISTRATION_BUSY
    assert "made anew" in error.message
    request.replace = True
    second = await reading.stub.RegisterCache(request)
    assert second.incarnation != first.incarnation
    await reading.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id="engine-x"))
    anew.close()


@pytest.mark.parametrize("how", ["same name", "hard link"])
async def test_memory_of_another_engine_is_refused(reading: Reading, how: str) -> None:
    layout = small_layout()
    directory = reading.cluster.directory
    regions = SharedRegions.files(directory, "one", layout)
    request = registration("engine-x", Member(Rank(), layout, reading.cluster.labels, regions))
    await reading.stub.RegisterCache(request)
    request.engine_id = "engine-y"
    if how == "hard link":
        os.link(directory / "one.0", directory / "two.0")
        request.memory[0].file.path = str(directory / "two.0")
    error = await refusal(reading.stub.RegisterCache(request))
    assert (error.reason, error.field) == (Reason.MEMORY_HANDLE_INVALID, "memory[0]")
    assert error.metadata["engine_id"] == "engine-x"
    await reading.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id="engine-x"))
    regions.close()


async def test_nothing_is_read_beyond_what_the_ticket_promises(reading: Reading) -> None:
    request = reading.request()
    request.spec.num_tokens = request.spec.ticket.num_tokens + 1
    error = await refusal(reading.stub.ReadBlocks(request))
    assert (error.reason, error.field) == (Reason.RANGE_NOT_COVERED, "spec.num_tokens")


async def test_an_unregistered_cache_ends_a_handshake_under_way(reading: Reading) -> None:
    """The peer is mute; the caller must hear of the end, not wait for ever."""

    met = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        met.set()
        await reader.read()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    ticket = reading.ticket()
    message = handshake_to_pb("engine-d", ticket)
    message.ticket.engine_id = "mute"
    for rank in message.ticket.ranks:
        rank.address = f"127.0.0.1:{port}"
    call = reading.stub.Handshake(message, timeout=60)
    waiting = asyncio.ensure_future(refusal(call))
    registered = next(iter(reading.d.nodes[0].sidecar.registrations))
    await asyncio.wait_for(met.wait(), 10)
    assert registered.links._attempts
    await reading.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id="engine-d"))
    error = await asyncio.wait_for(waiting, 20)
    assert error.reason is Reason.SHUTTING_DOWN
    server.close()
    for writer in writers:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


async def test_an_ended_transfer_keeps_no_arrays(reading: Reading) -> None:
    done = (await reading.stub.ReadBlocks(reading.request())).transfer
    registered = next(iter(reading.d.nodes[0].sidecar.registrations))
    transfer = registered.transfers.get(done.transfer_id)
    await transfer.finished.wait()
    assert not transfer.claims
    assert not transfer.openings
    assert all(part.live is None for part in transfer.parts)
    query = pb.GetTransferRequest(engine_id="engine-d", transfer_id=done.transfer_id)
    told = (await reading.stub.GetTransfer(query)).transfer
    assert [s.bytes for s in told.sources] == [s.bytes for s in done.sources]
