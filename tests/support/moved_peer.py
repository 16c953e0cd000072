"""A peer that moves: the same name leads to another address, as when a pod starts anew.

Run in a mount and a network namespace of its own (``unshare --mount --net``), with an /etc/hosts that may be written:
``python -m tests.support.moved_peer stop|drop``.  Prints how long the client's next call took to get through, seconds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import grpc.aio

from kvxfer.core.errors import KvxferError
from kvxfer.core.layout import Rank
from kvxfer.pb import peer_pb2 as pb
from kvxfer.pb import peer_pb2_grpc
from kvxfer.service.peer_client import GrpcPeerClient
from kvxfer.wire.peer import CloseRead, Outcome, Reader, ReadRef

CLOSE = CloseRead(
    ReadRef("p", Rank(), "i", "request", bytes(16), Reader("d", Rank(), "i"), 1, "transfer"), Outcome.FAILED
)
OLD, NEW = "127.0.0.2", "127.0.0.3"


class Service(peer_pb2_grpc.KvPeerServicer):
    async def CloseReads(self, request: pb.CloseReadsRequest, context: object) -> pb.CloseReadsResponse:
        return pb.CloseReadsResponse()


def named(address: str) -> None:
    Path("/etc/hosts").write_text(f"127.0.0.1 localhost\n{address} peer.test\n")


async def serve(host: str, port: int = 0) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server()
    peer_pb2_grpc.add_KvPeerServicer_to_server(Service(), server)
    bound = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    return server, bound


async def main(how: str) -> None:
    named(OLD)
    first, port = await serve(OLD)
    client = GrpcPeerClient(f"peer.test:{port}", 1 << 20)
    await client.close_reads([CLOSE], 10)
    if how == "drop":  # the node is gone: not even a refusal comes back
        dropping = await asyncio.create_subprocess_exec("iptables", "-A", "INPUT", "-d", OLD, "-j", "DROP")
        assert await dropping.wait() == 0
    else:
        await first.stop(0)
    second, _ = await serve(NEW, port)
    named(NEW)
    begin = time.monotonic()
    while True:
        try:
            await client.close_reads([CLOSE], 2)
            break
        except KvxferError:
            await asyncio.sleep(0.05)
    print(time.monotonic() - begin)
    await client.close()
    for server in (first, second):
        await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
