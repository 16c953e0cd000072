"""A peer that answers Exchange with garbage, as somebody else, or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_status import rpc_status

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.pb import peer_pb2, peer_pb2_grpc
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.layouts import layout_from_pb, rank_to_pb
from kvxfer.wire.requests import handshake_to_pb
from kvxfer.wire.status import to_status
from tests.support.engines import make_target
from tests.support.errors import refusal, told
from tests.support.loopback import Reading, soon
from tests.support.spoil import spoilt


class FakePeer(peer_pb2_grpc.KvPeerServicer):
    """Hands on to the real one what it is asked, and changes its answer."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.answer: peer_pb2.ExchangeResponse | None = None
        self.speaks = asyncio.Event()
        self.speaks.set()
        self.refuse_reads = False
        self.closed: list[peer_pb2.ReadEnd] = []
        self.readers: list[str] = []

    async def Exchange(self, request: peer_pb2.ExchangeRequest, context: Any) -> peer_pb2.ExchangeResponse:
        await self.speaks.wait()
        if self.answer is not None and not request.goodbye:
            return self.answer
        answer: peer_pb2.ExchangeResponse = await self._real.Exchange(request)
        return answer

    async def OpenRead(self, request: peer_pb2.OpenReadRequest, context: Any) -> peer_pb2.OpenReadResponse:
        if self.refuse_reads:
            error = KvxferError(Reason.LEASE_UNKNOWN, "no such request", request_id=request.request_id)
            await context.abort_with_status(rpc_status.to_status(to_status(error)))
        answer: peer_pb2.OpenReadResponse = await self._real.OpenRead(request)
        return answer

    async def CloseReads(self, request: peer_pb2.CloseReadsRequest, context: Any) -> peer_pb2.CloseReadsResponse:
        self.closed.extend(request.reads)
        self.readers.append(request.reader.engine_id)
        answer: peer_pb2.CloseReadsResponse = await self._real.CloseReads(request)
        return answer


@pytest.fixture
async def fake(reading: Reading) -> AsyncIterator[FakePeer]:
    """Between D and P."""
    server = grpc.aio.server()
    peer = FakePeer(reading.p.nodes[0].peer_stub)
    peer_pb2_grpc.add_KvPeerServicer_to_server(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    peer.address = f"127.0.0.1:{port}"  # type: ignore[attr-defined]
    yield peer
    await server.stop(0)


def through(reading: Reading, fake: Any) -> pb.HandshakeRequest:
    """A handshake with P by way of the fake."""
    request = handshake_to_pb("engine-d", make_target("engine-p", reading.p.members), timeout=20)
    request.engine.ranks[0].address = fake.address
    return request


async def sound_answer(reading: Reading) -> peer_pb2.ExchangeResponse:
    member = reading.p.members[0]
    query = peer_pb2.ExchangeRequest(
        protocol_version_min=1,
        protocol_version_max=1,
        engine_id="engine-p",
        rank=rank_to_pb(member.rank),
        reader=peer_pb2.Reader(engine_id="r", rank=rank_to_pb(member.rank), incarnation="i"),
        compatibility_key="model@rev/fp8",
    )
    answer: peer_pb2.ExchangeResponse = await reading.p.nodes[0].peer_stub.Exchange(query)
    query.goodbye = True
    await reading.p.nodes[0].peer_stub.Exchange(query)
    return answer


async def test_through_the_fake_all_is_well(reading: Reading, fake: FakePeer) -> None:
    await reading.stub.Handshake(through(reading, fake))
    await reading.good()


async def test_garbage_in_each_field(reading: Reading, fake: FakePeer) -> None:
    answer = await sound_answer(reading)
    refused = 0
    for number, (path, change, message) in enumerate(spoilt(answer)):
        assert isinstance(message, peer_pb2.ExchangeResponse)
        fake.answer = message
        sound = peer_pb2.ExchangeResponse()
        sound.CopyFrom(answer)
        request = through(reading, fake)
        request.options.min_run_bytes = number  # other options than before ask for a handshake of its own
        try:
            await reading.stub.Handshake(request, timeout=10)
        except grpc.aio.AioRpcError as failure:
            error = told(failure)
            refused += 1
            assert not error.field, (path, change, error)
        else:
            # What is taken must mean the same as what was sent.
            for one in (message, sound):
                one.ClearField("dp_rank")
                one.ClearField("dp_size")
                one.ClearField("idle_timeout")
                one.ClearField("host")
                one.ClearField("tcp_segment")
                for span in one.spans:
                    span.ClearField("address")  # where its memory lies only the peer knows
                one.ClearField("incarnation")  # none was asked for
            if layout_from_pb(message.layout).fingerprint == message.layout_fingerprint:
                message.layout.CopyFrom(sound.layout)
            assert message == sound, (path, change)
    assert refused > 200
    fake.answer = None
    await reading.good()


@pytest.mark.parametrize("size", [0, 1, 10, 1000, 100_000])
async def test_random_bytes_as_agent_metadata(reading: Reading, fake: FakePeer, size: int) -> None:
    """With the digest of the bytes that were meant, and with one that fits."""
    answer = await sound_answer(reading)
    answer.agent_metadata = random.Random(size).randbytes(size)
    for digest in (answer.metadata_sha256, hashlib.sha256(answer.agent_metadata).digest()):
        answer.metadata_sha256 = digest
        fake.answer = answer
        error = await refusal(reading.stub.Handshake(through(reading, fake)))
        assert error.reason is Reason.PEER_METADATA_INVALID
    fake.answer = None
    await reading.good()


async def test_metadata_over_its_limit(reading: Reading, fake: FakePeer) -> None:
    answer = await sound_answer(reading)
    answer.agent_metadata = b"x" * (1024 * 1024 + 1)
    answer.metadata_sha256 = hashlib.sha256(answer.agent_metadata).digest()
    fake.answer = answer
    error = await refusal(reading.stub.Handshake(through(reading, fake)))
    assert (error.reason, error.metadata["answer_field"]) == (Reason.PEER_METADATA_INVALID, "agent_metadata")
    fake.answer = None
    await reading.good()


async def test_a_peer_that_answers_as_somebody_else(reading: Reading, fake: FakePeer) -> None:
    answer = await sound_answer(reading)
    for change, reason in (
        (peer_pb2.ExchangeResponse(engine_id="engine-q"), Reason.PEER_METADATA_INVALID),
        (peer_pb2.ExchangeResponse(rank=rank_to_pb(Rank(0, 2))), Reason.PEER_METADATA_INVALID),
        (peer_pb2.ExchangeResponse(agent_name="another"), Reason.PEER_METADATA_INVALID),
        (peer_pb2.ExchangeResponse(compatibility_key="another"), Reason.INCOMPATIBLE_PEER),
        (peer_pb2.ExchangeResponse(protocol_version=2), Reason.INCOMPATIBLE_PEER),
    ):
        fake.answer = peer_pb2.ExchangeResponse()
        fake.answer.CopyFrom(answer)
        fake.answer.MergeFrom(change)
        error = await refusal(reading.stub.Handshake(through(reading, fake)))
        assert error.reason is reason, change
    # Another incarnation than the one that a ticket names.
    fake.answer = answer
    request = reading.request()
    request.spec.ticket.ranks[0].address = fake.address  # type: ignore[attr-defined]
    request.spec.ticket.ranks[0].incarnation = "promised"
    error = await refusal(reading.stub.ReadBlocks(request))
    assert (error.reason, error.metadata["expected"]) == (Reason.STALE_INCARNATION, "promised")
    fake.answer = None
    await reading.good()


async def test_a_peer_that_sends_more_at_once_than_there_is_room_for(reading: Reading, fake: FakePeer) -> None:
    answer = await sound_answer(reading)
    assert answer.tcp_segment == 8 * 1024
    answer.tcp_segment = 64 * 1024 + 1
    fake.answer = answer
    error = await refusal(reading.stub.Handshake(through(reading, fake)))
    assert (error.reason, error.metadata["local"]) == (Reason.INCOMPATIBLE_PEER, "65536")
    assert error.metadata["remote"] == "65537"
    assert "UCX_TCP_TX_SEG_SIZE there" in error.message
    assert "UCX_TCP_RX_SEG_SIZE here" in error.message
    answer.tcp_segment = 64 * 1024  # for which there is just room
    await reading.stub.Handshake(through(reading, fake))
    fake.answer = None
    await reading.good()


async def test_a_layout_that_cannot_be_paired(reading: Reading, fake: FakePeer) -> None:
    """Sound in itself, but of another type: both values are named."""
    answer = await sound_answer(reading)
    for part in answer.layout.formats:
        for component in part.components:
            if component.name == "ssm":
                component.dtype = "int8"
    answer.layout_fingerprint = layout_from_pb(answer.layout).fingerprint
    fake.answer = answer
    error = await refusal(reading.stub.Handshake(through(reading, fake)))
    assert error.reason is Reason.LAYOUT_MISMATCH
    assert {"uint8", "int8", "ssm"} <= set(error.metadata.values())
    fake.answer = None
    await reading.good()


async def test_a_peer_that_does_not_answer(reading: Reading, fake: FakePeer) -> None:
    """The call ends within its time, and other engines are not held up."""
    fake.speaks.clear()
    request = through(reading, fake)
    request.engine.engine_id = "engine-q"
    waiting = asyncio.ensure_future(refusal(reading.stub.Handshake(request)))
    await reading.good()
    assert not waiting.done()
    waiting.cancel()
    request.timeout.FromMilliseconds(200)
    error = await refusal(reading.stub.Handshake(request))
    assert (error.reason, error.metadata["timeout_s"]) == (Reason.DEADLINE_EXCEEDED, "0.2")
    # A read's own time is that of the handshake that has to come first, too.
    read = reading.request()
    read.spec.ticket.ranks[0].address = fake.address  # type: ignore[attr-defined]
    read.timeout.FromMilliseconds(300)
    error = await refusal(reading.stub.ReadBlocks(read))
    assert (error.reason, error.metadata["timeout_s"]) == (Reason.DEADLINE_EXCEEDED, "0.3")
    # Without a time of its own the sidecar's setting ends it.
    request.ClearField("timeout")
    request.engine_id = "engine-e"
    e = await reading.cluster.engine("engine-e", [await reading.cluster.node(handshake_timeout=0.2)])
    error = await refusal(e.nodes[0].stub.Handshake(request))
    assert error.reason in (Reason.PEER_UNREACHABLE, Reason.DEADLINE_EXCEEDED)
    await reading.good()


async def test_each_caller_of_one_transfer_has_a_time_of_its_own(reading: Reading, fake: FakePeer) -> None:
    """The first one's is over while the peer is silent; whoever waits with it goes on."""
    fake.speaks.clear()
    read = reading.request("t1")
    read.spec.ticket.ranks[0].address = fake.address  # type: ignore[attr-defined]
    hasty = pb.ReadBlocksRequest()
    hasty.CopyFrom(read)
    hasty.timeout.FromMilliseconds(300)
    first = asyncio.ensure_future(refusal(reading.stub.ReadBlocks(hasty)))
    registration = reading.d.nodes[0].sidecar.registrations.get("engine-d")
    await soon(lambda: registration.transfers.room.taken == 1)
    second = asyncio.ensure_future(reading.stub.ReadBlocks(read))
    error = await first
    assert (error.reason, error.metadata["timeout_s"]) == (Reason.DEADLINE_EXCEEDED, "0.3")
    fake.speaks.set()
    assert (await second).transfer.state == pb.TRANSFER_STATE_DONE


async def test_a_read_that_the_peer_does_not_confirm_does_not_count(reading: Reading, fake: FakePeer) -> None:
    """Nothing is posted; the read has failed, and its end is told."""
    request = reading.request("t1")
    request.spec.ticket.ranks[0].address = fake.address  # type: ignore[attr-defined]
    fake.refuse_reads = True
    error = await refusal(reading.stub.ReadBlocks(request))
    assert (error.reason, error.metadata["transfer_id"]) == (Reason.LEASE_UNKNOWN, "t1")
    await soon(lambda: len(fake.closed) == 1)
    assert fake.closed[0].outcome == peer_pb2.READ_OUTCOME_FAILED
    assert (await reading.d.get("t1")).state == pb.TRANSFER_STATE_FAILED
    fake.refuse_reads = False
    request.spec.transfer_id = "t2"
    assert (await reading.stub.ReadBlocks(request)).transfer.state == pb.TRANSFER_STATE_DONE
    await soon(lambda: len(fake.closed) == 2)
    assert fake.closed[1].outcome == peer_pb2.READ_OUTCOME_DONE
    assert set(fake.readers) == {"engine-d"}


async def test_protocol_versions_that_do_not_meet(reading: Reading) -> None:
    member = reading.p.members[0]
    query = peer_pb2.ExchangeRequest(
        protocol_version_min=2,
        protocol_version_max=9,
        engine_id="engine-p",
        rank=rank_to_pb(member.rank),
        reader=peer_pb2.Reader(engine_id="r", rank=rank_to_pb(member.rank), incarnation="i"),
        compatibility_key="model@rev/fp8",
    )
    error = await refusal(reading.p.nodes[0].peer_stub.Exchange(query))
    assert (error.reason, error.metadata["reader"], error.metadata["engine"]) == (
        Reason.INCOMPATIBLE_PEER,
        "2-9",
        "1-1",
    )
    query.protocol_version_min = 1
    assert (await reading.p.nodes[0].peer_stub.Exchange(query)).protocol_version == 1
    await reading.good()
