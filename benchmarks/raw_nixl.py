"""What a bare NIXL READ of given descriptors costs between two processes: the yardstick for everything above it.

Nothing of kvxfer is in the path: two agents, prepared lists, one request, polled without pause by both sides.  The same
descriptors through ``ReadBlocks`` give the ratio that the performance page shows.

    python benchmarks/raw_nixl.py --block 65536 --count 2000 --order shuffled --repeat 20
    UCX_TLS=tcp python benchmarks/raw_nixl.py ...

:func:`measure` is for other benchmarks: it takes any rows (offsets into one buffer) and index arrays.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

RowArray = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Sample:
    """One READ; seconds.

    :param make: making the request.
    :param post: inside the posting call.
    :param total: from the posting call until completion was seen.
    """

    make: float
    post: float
    total: float


@dataclass(frozen=True)
class Measurement:
    """All READs of one set of descriptors, the first (which makes the connection) apart."""

    bytes: int
    descriptors: int
    merged_descriptors: int
    first: Sample
    samples: list[Sample]

    def summary(self) -> dict[str, Any]:
        """Medians and the spread, for printing."""
        totals = sorted(s.total for s in self.samples)
        middle = statistics.median(totals)
        return {
            "bytes": self.bytes,
            "descriptors": self.descriptors,
            "merged_descriptors": self.merged_descriptors,
            "reads": len(totals),
            "first_s": round(self.first.total, 6),
            "make_median_s": round(statistics.median(s.make for s in self.samples), 6),
            "post_median_s": round(statistics.median(s.post for s in self.samples), 6),
            "total_median_s": round(middle, 6),
            "total_min_s": round(totals[0], 6),
            "total_max_s": round(totals[-1], 6),
            "gb_per_s": round(self.bytes / middle / 1e9, 3),
        }


def _agent(name: str) -> Any:
    os.environ.setdefault("UCX_TCP_TX_SEG_SIZE", "64K")
    os.environ.setdefault("UCX_TCP_RX_SEG_SIZE", "256K")
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, capture_telemetry=True))


def _target(pipe: Connection, size: int) -> None:
    agent = _agent("raw-target")
    memory = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    agent.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    try:
        while not pipe.poll(0):
            for _ in range(100):
                agent.get_new_notifs()
            os.sched_yield()
    except (EOFError, OSError):
        pass  # the reader is gone: so are we
    os._exit(0)  # no destructors: see kvxfer.xfer.environment.hard_exit


def measure(
    size: int, local: RowArray, local_indices: Indices, remote: RowArray, remote_indices: Indices, repeat: int = 20
) -> Measurement:
    """Read the same descriptors ``repeat`` + 1 times, in place, and check that the bytes arrived.

    :param size: bytes of the buffer of either side.
    :param local: N x 5 uint64 (offset into the buffer, length, device, stride, count); ``remote`` likewise.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_target, args=(theirs, size))
    process.start()
    theirs.close()
    try:
        metadata, address = ours.recv()
        agent = _agent("raw-reader")
        memory = np.zeros(size, dtype=np.uint8)
        agent.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
        name = agent.add_remote_agent(metadata).decode()
        here, there = local.copy(), remote.copy()
        here[:, 0] += np.uint64(memory.ctypes.data)
        there[:, 0] += np.uint64(address)
        mine = agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM")
        its = agent.prep_xfer_dlist(name, there, "DRAM")
        samples = []
        for _ in range(repeat + 1):
            start = time.perf_counter()
            request = agent.make_prepped_xfer("READ", mine, local_indices, its, remote_indices, b"done")
            made = time.perf_counter()
            state = agent.transfer(request)
            posted = time.perf_counter()
            while state == "PROC":
                state = agent.check_xfer_state(request)
            end = time.perf_counter()
            if state != "DONE":
                raise RuntimeError("the READ failed")
            figures = agent.get_xfer_telemetry(request)
            request.release()
            samples.append(Sample(made - start, posted - made, end - made))
        _verify(memory, size, local, local_indices, remote, remote_indices)
        return Measurement(int(figures.totalBytes), len(local_indices), int(figures.descCount), samples[0], samples[1:])
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def _verify(
    memory: npt.NDArray[np.uint8],
    size: int,
    local: RowArray,
    local_indices: Indices,
    remote: RowArray,
    remote_indices: Indices,
) -> None:
    source = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    for (into, length), (at, _) in zip(_find(local, local_indices), _find(remote, remote_indices), strict=True):
        if not np.array_equal(memory[into : into + length], source[at : at + length]):
            raise RuntimeError("wrong bytes arrived")


def _find(rows: RowArray, indices: Indices) -> list[tuple[int, int]]:
    starts = np.concatenate([[0], np.cumsum(rows[:, 4].astype(np.int64))])
    which = np.searchsorted(starts, indices, side="right") - 1
    offsets = rows[which, 0].astype(np.int64) + (indices - starts[which]) * rows[which, 3].astype(np.int64)
    return list(zip(offsets.tolist(), rows[which, 1].tolist(), strict=True))


def main() -> int:
    """Measure blocks of one size, in one order, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", type=int, default=65536, help="bytes of a block")
    parser.add_argument("--count", type=int, default=1000, help="blocks to read")
    parser.add_argument("--pool", type=int, help="blocks in the buffer (default: twice as many)")
    parser.add_argument("--order", choices=("contiguous", "sorted", "shuffled"), default="contiguous")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--samples", action="store_true", help="print every sample too")
    chosen = parser.parse_args()
    pool = chosen.pool or 2 * chosen.count
    rng = np.random.default_rng(2)
    if chosen.order == "contiguous":
        mine = theirs = np.arange(chosen.count, dtype=np.int32)
    else:
        mine, theirs = (rng.permutation(pool)[: chosen.count].astype(np.int32) for _ in range(2))
        if chosen.order == "sorted":
            mine, theirs = np.sort(mine), np.sort(theirs)
    rows = np.array([[0, chosen.block, 0, chosen.block, pool]], dtype=np.uint64)
    result = measure(chosen.block * pool, rows, mine, rows, theirs, chosen.repeat)
    report = {
        "order": chosen.order,
        "block": chosen.block,
        "ucx_tls": os.environ.get("UCX_TLS", ""),
        **result.summary(),
    }
    if chosen.samples:
        report["samples"] = [asdict(s) for s in result.samples]
    print(json.dumps(report, indent=2))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    os._exit(main())  # an ordinary exit can crash in a destructor where ibverbs-providers is installed
