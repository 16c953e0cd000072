"""What is no message at all: cut short, random, too long."""

from __future__ import annotations

import random
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from kvxfer.core.errors import Reason
from kvxfer.pb import peer_pb2, transfer_pb2
from kvxfer.pb import transfer_pb2 as pb
from tests.support.engines import registration
from tests.support.errors import refusal, told
from tests.support.loopback import Reading

METHODS = [
    (service.full_name, method.name, method.server_streaming)
    for service in (
        transfer_pb2.DESCRIPTOR.services_by_name["KvTransfer"],
        peer_pb2.DESCRIPTOR.services_by_name["KvPeer"],
    )
    for method in service.methods
]


async def send(reading: Reading, service: str, method: str, streams: bool, data: bytes) -> None:
    """Send bytes as a request; an answer or a clear error, nothing else."""
    node = reading.d.nodes[0]
    channel = node.peer_channel if service.endswith("KvPeer") else node.channel
    make: Any = channel.unary_stream if streams else channel.unary_unary
    call = make(f"/{service}/{method}")(data, timeout=10)
    try:
        await (call.read() if streams else call)
    except grpc.aio.AioRpcError as failure:
        told(failure)
    finally:
        call.cancel()


@pytest.mark.parametrize("service, method, streams", METHODS)
async def test_random_bytes(reading: Reading, service: str, method: str, streams: bool) -> None:
    rng = random.Random(method)
    for size in (1, 2, 7, 40, 300, 5_000, 100_000):
        await send(reading, service, method, streams, rng.randbytes(size))
    # Fields of every number and wire type.
    for wire in range(8):
        for number in (1, 2, 3, 15, 100):
            tag = number << 3 | wire
            await send(reading, service, method, streams, bytes([tag & 0x7F | (0x80 if tag > 127 else 0), tag >> 7]))
    # Not every string of bytes is refused by the decoder, but this one is.
    channel = reading.d.nodes[0].peer_channel if service.endswith("KvPeer") else reading.d.nodes[0].channel
    make: Any = channel.unary_stream if streams else channel.unary_unary
    call = make(f"/{service}/{method}")(b"\xff" * 20)
    error = await refusal(call.read() if streams else call)
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "")
    await reading.good()


@pytest.mark.parametrize("rpc", ["RegisterCache", "ReadBlocks"])
async def test_messages_cut_short_or_damaged(reading: Reading, rpc: str) -> None:
    message: Message = reading.request("cut")
    if rpc == "RegisterCache":
        message = registration("engine-x", reading.p.members[0])
    whole = message.SerializeToString()
    rng = random.Random(7)
    streams = False
    for size in sorted({*range(0, len(whole), max(1, len(whole) // 80)), len(whole) - 1}):
        await send(reading, "kvxfer.v1.KvTransfer", rpc, streams, whole[:size])
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        await send(reading, "kvxfer.v1.KvTransfer", rpc, streams, bytes(damaged))
    for known in tuple(reading.d.nodes[0].sidecar.registrations):
        if known.identity.engine_id != "engine-d":
            await reading.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id=known.identity.engine_id))
    # A bit of the sound message may have asked for another read; whatever it was, it is over.
    reading.d.members[0].write()
    await reading.good()


async def test_a_message_over_the_limit(reading: Reading) -> None:
    node = reading.d.nodes[0]
    for channel, method in (
        (node.channel, "/kvxfer.v1.KvTransfer/ReadBlocks"),
        (node.peer_channel, "/kvxfer.v1.KvPeer/Exchange"),
    ):
        call: Any = channel.unary_unary(method)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"x" * (16 * 1024 * 1024 + 1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await reading.good()
