"""ReadBlocks against the raw NIXL READ of the same descriptors, over the same memory, in turn.

Two sidecars of their own processes serve one shared cache each.  The raw pair maps the very same files: a target
process on P's, this process on D's, with the rows and index arrays that kvxfer's own plan and resolve give.  Each round
does one of each; what counts is the ratio within a round, so a machine that speeds up or slows down changes nothing.

    python benchmarks/read_blocks.py --mib 64 --block 65536 --rounds 60
    UCX_TLS=tcp python benchmarks/read_blocks.py ...

The raw time is from the posting call until completion is seen; making the request is told apart.  The time of
ReadBlocks is that of the whole call on the engine's socket: protobuf, validation, resolving, making, posting, moving,
confirming.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvxfer.core.layout import Axis, AxisKind, CacheLayout, Component, Group, GroupKind, Rank, Region, UnitRange, View
from kvxfer.core.pairing import Member, compile_plan
from kvxfer.core.resolve import BlockList, Request, resolve
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.pb import transfer_pb2_grpc
from kvxfer.wire.blocks import block_lists_to_pb
from kvxfer.wire.requests import PublishBlocks, RegisterCache, publish_to_pb, register_to_pb
from kvxfer.wire.tickets import Ticket, TicketRank, ticket_to_pb
from kvxfer_client.memory import SharedRegion

TOKENS = 16
#: Reads of each before any is measured.
WARM_UP = 5


@dataclass(frozen=True)
class Case:
    """What is read: ``blocks`` blocks of ``block`` bytes in each of ``layers`` layers, of ``spare`` times as many."""

    block: int
    blocks: int
    layers: int
    scrambled: bool
    spare: int = 2

    @property
    def layout(self) -> CacheLayout:
        """A dense cache, one region a layer."""
        count = self.blocks * self.spare
        kv = Component(
            "kv",
            "bfloat16",
            2,
            (Axis(AxisKind.UNIT, 1), Axis(AxisKind.TOKEN, TOKENS), Axis(AxisKind.INNER, self.block // TOKENS // 2)),
            UnitRange(0, 1, 1),
        )
        views = tuple(View(f"layers.{i}", i, 0, self.block, count, (kv,)) for i in range(self.layers))
        regions = tuple(Region(count * self.block) for _ in range(self.layers))
        return CacheLayout(regions, (Group("attention", GroupKind.ATTENTION, views, TOKENS),))

    def ids(self, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Block IDs of one side."""
        if not self.scrambled:
            return np.arange(self.blocks, dtype=np.int64)
        return np.random.default_rng(seed).permutation(self.blocks * self.spare)[: self.blocks].astype(np.int64)


def _raw_agent(name: str) -> Any:
    from kvxfer.xfer.environment import apply_defaults

    apply_defaults()
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, capture_telemetry=True))


def _raw_target(pipe: Connection, paths: list[str], sizes: list[int]) -> None:
    from kvxfer.memory.handles import FileHandle

    agent = _raw_agent("raw-target")
    regions = [SharedRegion.map(FileHandle(p, 0, s)) for p, s in zip(paths, sizes, strict=True)]
    addresses = [r.numpy(np.uint8, (r.size,)).ctypes.data for r in regions]
    agent.register_memory([(a, s, 0, "") for a, s in zip(addresses, sizes, strict=True)], "DRAM")
    pipe.send((agent.get_agent_metadata(), addresses))
    try:
        # As a sidecar does: polling without pause while a read is under way, else every few milliseconds.
        reading = False
        while True:
            if pipe.poll(0 if reading else 0.004):
                reading = pipe.recv()
            agent.get_new_notifs()
            os.sched_yield()
    except (EOFError, OSError):
        os._exit(0)


class Raw:
    """The yardstick: the same descriptors, nothing of kvxfer in the path."""

    def __init__(self, case: Case, local: list[SharedRegion], remote: list[SharedRegion]) -> None:
        member = Member(Rank(), case.layout)
        plan = compile_plan(member, [member])
        request = Request(
            [BlockList("attention", case.ids(2))], [BlockList("attention", case.ids(1))], case.blocks * TOKENS
        )
        read = resolve(plan, request).sources[0]
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        paths, sizes = [r.handle.path for r in remote], [r.size for r in remote]  # type: ignore[union-attr]
        self._process = context.Process(target=_raw_target, args=(theirs, paths, sizes), daemon=True)
        self._process.start()
        theirs.close()
        metadata, addresses = self._pipe.recv()
        self._agent = _raw_agent("raw-reader")
        mine = [r.numpy(np.uint8, (r.size,)).ctypes.data for r in local]
        self._agent.register_memory([(a, r.size, 0, "") for a, r in zip(mine, local, strict=True)], "DRAM")
        name = self._agent.add_remote_agent(metadata).decode()
        zeros = [0] * len(mine)
        self._here = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", plan.sources[0].local.bind(mine, zeros), "DRAM")
        self._there = self._agent.prep_xfer_dlist(name, plan.sources[0].remote.bind(addresses, zeros), "DRAM")
        self._read = read
        self.descriptors = read.descriptors

    def once(self) -> tuple[float, float]:
        """Seconds to make, and to move."""
        self._pipe.send(True)
        began = time.perf_counter()
        handle = self._agent.make_prepped_xfer(
            "READ", self._here, self._read.local_indices, self._there, self._read.remote_indices, b"done"
        )
        made = time.perf_counter()
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        done = time.perf_counter()
        if state != "DONE":
            raise RuntimeError(f"the raw read ended as {state}")
        self._agent.release_xfer_handle(handle)
        self._pipe.send(False)
        return made - began, done - made

    def close(self) -> None:
        """End the target."""
        self._pipe.close()
        self._process.join(10)


class Sidecars:
    """A P sidecar and D sidecars, and the call that reads from one to the other.

    :param mains: what each D sidecar's process runs, as arguments of Python.
    :param reads: reads of each D that will be asked for: their requests are published beforehand, as they would be.
    """

    def __init__(
        self,
        case: Case,
        directory: Path,
        local: list[SharedRegion],
        remote: list[SharedRegion],
        reads: int,
        mains: Sequence[Sequence[str]] = (("-m", "kvxfer"),),
    ) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        p = self.p = self._start(directory, "p", ("-m", "kvxfer"))
        self.readers = [self._start(directory, f"d{i}", main) for i, main in enumerate(mains)]
        done = self._register(p, "P", case, remote)
        self.requests: list[list[pb.ReadBlocksRequest]] = []
        for i, d in enumerate(self.readers):
            self._register(d, f"D{i}", case, local)
            tickets = [self._ticket(case, f"{i}-{n}", done) for n in range(reads)]
            for ticket in tickets:
                record = PublishBlocks(
                    "P", "", ticket.request_id, ticket.blocks, ticket.num_tokens, ticket.lease_token, 3600.0, None
                )
                p.PublishBlocks(publish_to_pb(record))
            d.Handshake(pb.HandshakeRequest(engine_id=f"D{i}", ticket=ticket_to_pb(tickets[0])), timeout=30)
            mine = block_lists_to_pb([BlockList("attention", case.ids(2))])
            self.requests.append(
                [
                    pb.ReadBlocksRequest(
                        spec=pb.TransferSpec(engine_id=f"D{i}", ticket=ticket_to_pb(t), local_blocks=mine)
                    )
                    for t in tickets
                ]
            )

    @staticmethod
    def _ticket(case: Case, request_id: str, p: pb.RegisterCacheResponse) -> Ticket:
        return Ticket(
            "P",
            "bench",
            1,
            1,
            (TicketRank(Rank(), p.incarnation, p.peer_address),),
            request_id,
            (BlockList("attention", case.ids(1)),),
            case.blocks * TOKENS,
            secrets.token_bytes(16),
            3600.0,
        )

    def _start(self, directory: Path, name: str, main: Sequence[str]) -> transfer_pb2_grpc.KvTransferStub:
        socket = directory / f"{name}.sock"
        command = [sys.executable, *main, "serve", "--engine-socket", str(socket)]
        command += ["--memory-directory", str(directory), "--log-level", "warning"]
        self._processes.append(subprocess.Popen(command))
        channel = grpc.insecure_channel(f"unix:{socket}")
        grpc.channel_ready_future(channel).result(30)
        return transfer_pb2_grpc.KvTransferStub(channel)

    @staticmethod
    def _register(stub: Any, engine_id: str, case: Case, regions: list[SharedRegion]) -> pb.RegisterCacheResponse:
        record = RegisterCache(engine_id, Rank(), "bench", case.layout, tuple(r.handle for r in regions))
        answer: pb.RegisterCacheResponse = stub.RegisterCache(register_to_pb(record), timeout=30)
        return answer

    def once(self, reader: int = 0) -> tuple[float, pb.Transfer]:
        """Seconds of one ReadBlocks, and what it says of itself."""
        request = self.requests[reader].pop()
        began = time.perf_counter()
        answer = self.readers[reader].ReadBlocks(request, timeout=60)
        return time.perf_counter() - began, answer.transfer

    @property
    def pids(self) -> list[int]:
        """Of P's sidecar, then of D's."""
        return [process.pid for process in self._processes]

    def empty(self) -> float:
        """Seconds of the cheapest call."""
        began = time.perf_counter()
        failed = pb.ListTransfersRequest(engine_id="D0", page_size=1, states=[pb.TRANSFER_STATE_FAILED])
        self.readers[0].ListTransfers(failed)
        return time.perf_counter() - began

    def close(self) -> None:
        """End both sidecars."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(20)


def _seconds(duration: Any) -> float:
    return float(duration.seconds + duration.nanos / 1e9)


@contextmanager
def shared(case: Case) -> Iterator[tuple[Path, list[SharedRegion], list[SharedRegion]]]:
    """A directory, and in it D's and P's cache, of which P's is filled."""
    directory = Path(tempfile.mkdtemp(prefix="kvxfer-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        local, remote = (
            [SharedRegion.create_file(directory / f"{side}{i}", r.size) for i, r in enumerate(case.layout.regions)]
            for side in ("d", "p")
        )
        rng = np.random.default_rng(0)
        for region in remote:
            region.numpy(np.uint8, (region.size,))[:] = rng.integers(0, 256, region.size, dtype=np.uint8)
        yield directory, local, remote
    finally:
        shutil.rmtree(directory)


def run(case: Case, rounds: int) -> dict[str, Any]:
    """All rounds of a case."""
    sidecars = raw = None
    made, moved, whole, empty, phases = [], [], [], [], []
    with shared(case) as (directory, local, remote):
        try:
            sidecars = Sidecars(case, directory, local, remote, rounds + WARM_UP)
            raw = Raw(case, local, remote)
            for _ in range(WARM_UP):
                raw.once()
                sidecars.once()
            for i in range(rounds):
                # Alternate who goes first: the second of a pair finds warmer caches.
                if i % 2:
                    seconds, transfer = sidecars.once()
                    make, move = raw.once()
                else:
                    make, move = raw.once()
                    seconds, transfer = sidecars.once()
                made.append(make)
                moved.append(move)
                whole.append(seconds)
                empty.append(sidecars.empty())
                phases.append({f.name: _seconds(v) for f, v in transfer.timings.ListFields()})
        finally:
            if sidecars is not None:
                sidecars.close()
            if raw is not None:
                raw.close()
    ratios = sorted(w / m for w, m in zip(whole, moved, strict=True))
    with_make = sorted(w / (m + k) for w, m, k in zip(whole, moved, made, strict=True))
    size = case.block * case.blocks * case.layers
    return {
        "bytes": size,
        "block": case.block,
        "descriptors": raw.descriptors,
        "order": "scrambled" if case.scrambled else "contiguous",
        "transport": os.environ.get("UCX_TLS", "default"),
        "rounds": rounds,
        "raw_move_ms": round(statistics.median(moved) * 1e3, 3),
        "raw_make_ms": round(statistics.median(made) * 1e3, 3),
        "read_blocks_ms": round(statistics.median(whole) * 1e3, 3),
        "empty_call_ms": round(statistics.median(empty) * 1e3, 3),
        "ratio_to_move": [round(x, 3) for x in _quartiles(ratios)],
        "ratio_to_make_and_move": [round(x, 3) for x in _quartiles(with_make)],
        "phases_ms": {k: round(statistics.median(p.get(k, 0.0) for p in phases) * 1e3, 3) for k in phases[0]},
        "raw_gb_per_s": round(size / statistics.median(moved) / 1e9, 2),
    }


def _quartiles(ordered: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(ordered, n=4)
    return low, middle, high


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=64.0, help="MiB a read")
    parser.add_argument("--block", type=int, default=65_536, help="bytes of a block in one layer")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--order", choices=("contiguous", "scrambled", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    blocks = round(arguments.mib * 2**20 / arguments.block / arguments.layers)
    if blocks < 1:
        parser.error("--mib is less than one block in every layer")
    orders = {"both": (False, True), "contiguous": (False,), "scrambled": (True,)}[arguments.order]
    for scrambled in orders:
        print(json.dumps(run(Case(arguments.block, blocks, arguments.layers, scrambled), arguments.rounds), indent=1))


if __name__ == "__main__":
    main()
