"""What a peer client leaves behind once it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
import psutil
import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.pb import peer_pb2 as pb
from kvxfer.pb import peer_pb2_grpc
from kvxfer.service.peer_client import GrpcPeerClient
from kvxfer.wire.peer import CloseRead, OpenRead, Outcome, Reader, ReadRef


class Service(peer_pb2_grpc.KvPeerServicer):
    """Refuses every read, and never answers what is said of one that goes on or has ended."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def OpenRead(self, request: pb.OpenReadRequest, context: object) -> pb.OpenReadResponse:
        assert isinstance(context, grpc.aio.ServicerContext)
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such request")
        raise AssertionError

    async def RenewRead(self, request: pb.RenewReadRequest, context: object) -> pb.RenewReadResponse:
        return await self._never()

    async def CloseReads(self, request: pb.CloseReadsRequest, context: object) -> pb.CloseReadsResponse:
        return await self._never()

    async def _never(self) -> NoReturn:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


REF = ReadRef("p", Rank(), "i", "request", bytes(16), Reader("d", Rank(), "i"), 1, "transfer")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """The collector of an idle process does not come by for a long time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def connections(port: int) -> int:
    return sum(
        c.status == psutil.CONN_ESTABLISHED and bool(c.raddr) and c.raddr.port == port
        for c in psutil.Process(os.getpid()).net_connections("tcp")
    )


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[Service, GrpcPeerClient]]:
    """A service and its client; in the end the client is closed, which must end the connection."""
    server, service = grpc.aio.server(), Service()
    peer_pb2_grpc.add_KvPeerServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = GrpcPeerClient(f"127.0.0.1:{port}", 1 << 20)
    yield service, client
    assert connections(port) == 1
    await client.close()
    deadline = time.monotonic() + 20
    while connections(port):
        assert time.monotonic() < deadline, "the connection outlives its client"
        await asyncio.sleep(0.01)
    await server.stop(0)


@pytest.mark.usefixtures("no_collector")
async def test_an_error_that_is_kept_does_not_keep_the_connection() -> None:
    async with connected() as (_, client):
        with pytest.raises(KvxferError) as caught:
            await client.open_read(OpenRead(REF, 1, (), 5.0), 5.0)
        assert caught.value.reason is not Reason.PEER_UNREACHABLE


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.close_reads([CloseRead(REF, Outcome.FAILED)], 60.0),
        lambda client: client.renew_read(REF, 1.0, 60.0),
    ],
    ids=["CloseReads", "RenewRead"],
)
async def test_a_cancelled_task_that_is_kept_does_not_keep_the_connection(
    call: Callable[[GrpcPeerClient], Coroutine[Any, Any, object]],
) -> None:
    """A finished task has its exception, that has a traceback, and that the frames of the call."""
    async with connected() as (service, client):
        task = asyncio.ensure_future(call(client))
        await service.asked.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("iptables"), reason="needs root and iptables")
@pytest.mark.parametrize("how", ["stop", "drop"])
def test_a_peer_that_moved_is_found_by_its_name(tmp_path: Path, how: str) -> None:
    """gRPC itself asks for a name's address once in 30 seconds, and tries the old one for 20."""
    hosts = tmp_path / "hosts"
    hosts.touch()
    inside = f'ip link set lo up && mount --bind {hosts} /etc/hosts && exec "$@"'
    unshared = ("unshare", "--mount", "--net", "sh", "-c", inside, "sh")
    done = subprocess.run(
        [*unshared, sys.executable, "-m", "tests.support.moved_peer", how],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 20
