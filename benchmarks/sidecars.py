"""Sidecars in processes of their own, and the calls that engines make."""

from __future__ import annotations

import contextlib
import copy
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.caches import Case, Memory
from kvxfer.core.layout import CacheLayout, Rank
from kvxfer.core.resolve import BlockList
from kvxfer.memory.handles import Handle
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.pb import transfer_pb2_grpc
from kvxfer.wire.blocks import block_lists_to_pb
from kvxfer.wire.requests import PublishBlocks, RegisterCache, publish_to_pb, register_to_pb
from kvxfer.wire.tickets import Ticket, TicketRank, ticket_to_pb

_KEY = "kvxfer-bench"
_TTL = 600.0


class Sidecar:
    """One process; ends with the ``with`` block.

    :param more: further arguments of ``kvxfer serve``.
    """

    def __init__(
        self, directory: Path, name: str, more: Sequence[str] = (), main: Sequence[str] = ("-m", "kvxfer")
    ) -> None:
        self.name = name
        self.socket = directory / f"{name}.sock"
        command = [sys.executable, *main, "serve", "--engine-socket", str(self.socket)]
        command += ["--memory-directory", str(directory), "--log-level", "error", "--peer-host", "127.0.0.1"]
        self._process = subprocess.Popen([*command, "--peer-port", "0", *more])
        self._channel = grpc.insecure_channel(f"unix:{self.socket}")
        self.stub = transfer_pb2_grpc.KvTransferStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Sidecar:
        try:
            grpc.channel_ready_future(self._channel).result(60)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        self._channel.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def empty(self) -> float:
        """Seconds of the cheapest call on its engine socket."""
        began = time.perf_counter()
        self._health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        return time.perf_counter() - began

    def cpu_seconds(self) -> float:
        """Processor time that it has taken so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Bytes that only it has resident: not the shared caches."""
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return int(lines["RssAnon"].split()[0]) * 1024


@contextlib.contextmanager
def both(directory: Path, more: Sequence[str] = ()) -> Iterator[tuple[Sidecar, Sidecar]]:
    """P's and D's, which start at the same time."""
    with contextlib.ExitStack() as stack:
        started = []
        for side in "pd":
            started.append(one := Sidecar(directory, side, more))
            stack.callback(one.close)
        p, d = (one.__enter__() for one in started)
        yield p, d


def register(
    sidecar: Sidecar, engine_id: str, rank: Rank, layout: CacheLayout, handles: Sequence[Handle]
) -> pb.RegisterCacheResponse:
    """Register one rank's cache."""
    record = RegisterCache(engine_id, rank, _KEY, layout, tuple(handles))
    answer: pb.RegisterCacheResponse = sidecar.stub.RegisterCache(register_to_pb(record), timeout=60)
    return answer


def publish(
    sidecar: Sidecar, engine_id: str, registered: pb.RegisterCacheResponse, lists: Sequence[BlockList], tokens: int
) -> pb.Ticket:
    """Publish the blocks of a new request at an engine of one rank; its ticket."""
    request_id, token, blocks = f"bench-{secrets.token_hex(8)}", secrets.token_bytes(16), tuple(lists)
    record = PublishBlocks(engine_id, "", request_id, blocks, tokens, token, _TTL, None)
    sidecar.stub.PublishBlocks(publish_to_pb(record), timeout=60)
    ranks = (TicketRank(Rank(), registered.incarnation, registered.peer_address),)
    return ticket_to_pb(Ticket(engine_id, _KEY, 1, 1, ranks, request_id, blocks, tokens, token, _TTL))


def read_request(engine_id: str, ticket: pb.Ticket, local: Sequence[pb.BlockList]) -> pb.ReadBlocksRequest:
    """What D's engine sends."""
    return pb.ReadBlocksRequest(spec=pb.TransferSpec(engine_id=engine_id, ticket=ticket, local_blocks=local))


def timed_read(sidecar: Sidecar, request: pb.ReadBlocksRequest) -> tuple[float, pb.Transfer]:
    """Seconds of one ReadBlocks, and what it says of itself.

    :raises RuntimeError: where it is not done.
    """
    began = time.perf_counter()
    answer = sidecar.stub.ReadBlocks(request, timeout=120)
    seconds = time.perf_counter() - began
    if answer.transfer.state != pb.TRANSFER_STATE_DONE:
        raise RuntimeError(f"a read ended as {answer.transfer}")
    return seconds, answer.transfer


class Pair:
    """One case registered with both sidecars, and the read that goes with it."""

    def __init__(self, p: Sidecar, d: Sidecar, case: Case, memory: Memory, name: str = "") -> None:
        self.case, self.memory, self.p, self.d = case, memory, p, d
        self.engines = {side: f"{side}{name}" for side in "PD"}
        self.registered = {side: self._register(sidecar, side, memory) for side, sidecar in (("P", p), ("D", d))}
        self._local = block_lists_to_pb(case.lists("D"))
        self.handshake_seconds = self.handshake()

    def handshake(self) -> float:
        """Seconds of one, which finds what a former one has made."""
        request = pb.HandshakeRequest(engine_id=self.engines["D"], ticket=self.ticket())
        began = time.perf_counter()
        self.d.stub.Handshake(request, timeout=60)
        return time.perf_counter() - began

    def beside(self, name: str, memory: Memory) -> Pair:
        """A further engine at D, with memory of its own, that reads from the same one at P; without a handshake yet."""
        other = copy.copy(self)
        other.engines = {**self.engines, "D": name}
        other.registered = {**self.registered, "D": other._register(self.d, "D", memory)}
        return other

    def _register(self, sidecar: Sidecar, side: str, memory: Memory) -> pb.RegisterCacheResponse:
        return register(sidecar, self.engines[side], Rank(), self.case.layout, memory.handles(self.case, side))

    def close(self) -> None:
        """Unregister both."""
        for side, sidecar in (("D", self.d), ("P", self.p)):
            sidecar.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id=self.engines[side]), timeout=60)

    def ticket(self, blocks: Sequence[BlockList] | None = None, tokens: int | None = None) -> pb.Ticket:
        """Of a new request, which is published first."""
        lists = self.case.lists("P") if blocks is None else blocks
        count = self.case.tokens if tokens is None else tokens
        return publish(self.p, self.engines["P"], self.registered["P"], lists, count)

    def request(
        self, ticket: pb.Ticket | None = None, local: Sequence[pb.BlockList] | None = None
    ) -> pb.ReadBlocksRequest:
        """What D's engine sends."""
        mine = self._local if local is None else local
        return read_request(self.engines["D"], self.ticket() if ticket is None else ticket, mine)

    def read(self) -> tuple[float, pb.Transfer]:
        """Seconds of one ReadBlocks of a request that was published before, and what it says of itself."""
        return timed_read(self.d, self.request())


def phases(transfer: pb.Transfer) -> dict[str, float]:
    """The sidecar's own timings, seconds by name."""
    names = transfer.timings.DESCRIPTOR.fields_by_name
    return {name: _seconds(getattr(transfer.timings, name)) for name in names}


def _seconds(duration: Any) -> float:
    return float(duration.seconds + duration.nanos / 1e9)
