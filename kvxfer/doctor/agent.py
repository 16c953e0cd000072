"""Child processes with a NIXL agent each; see :mod:`kvxfer.doctor.probe`, which starts them.

    python -m kvxfer.doctor.agent PARENT_PID survey
    python -m kvxfer.doctor.agent PARENT_PID source
    python -m kvxfer.doctor.agent PARENT_PID reader < what the source said

Each answers with one line of JSON on standard output; what NIXL and UCX print goes to standard error.  They end with
their parent.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import json
import os
import signal
import sys
import time
from typing import IO, Any, Final

import numpy as np

from kvxfer.core.errors import KvxferError
from kvxfer.xfer.api import MemoryKind, Span
from kvxfer.xfer.environment import hard_exit, ucx_version
from kvxfer.xfer.nixl import NixlDriver, NixlEngine, nixl_version, preload

#: What is read in one go, bytes, in blocks of so many.
SIZE: Final = 16 * 2**20
BLOCK: Final = 64 * 1024
#: The first read also makes the connection's ways; the best of the others is told.
ROUNDS: Final = 5
_SEED: Final = 20
_PR_SET_PDEATHSIG: Final = 1

Answer = dict[str, Any]


def _noise() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(_SEED).integers(0, 256, SIZE, dtype=np.uint8)


def _about() -> Answer:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {parts[-1].strip() for line in maps if len(parts := line.split(maxsplit=5)) == 6}
    mapped = sorted(path for path in paths if "/libuc" in path)
    places = {os.path.dirname(path) for path in mapped if "/libuct_" in path}
    beside = sorted(os.path.join(place, name) for place in places for name in os.listdir(place))
    return {"nixl": nixl_version(), "ucx": ucx_version(), "maps": mapped, "shipped": beside}


def survey() -> Answer:
    """Load NIXL and UCX.  The agent may well fail: what UCX logs on the way is what is wanted."""
    driver = NixlDriver()
    try:
        driver.open(f"kvxfer-doctor-{os.getpid()}")
    except KvxferError as error:
        return {**_about(), "error": error.message}
    driver.close()
    return {**_about(), "error": ""}


async def source(answers: IO[str]) -> None:
    """Hold memory for a reader until standard input ends."""
    engine = NixlEngine(f"kvxfer-doctor-source-{os.getpid()}")
    await engine.start()
    memory = _noise()
    span = Span(memory.ctypes.data, memory.nbytes)
    await engine.register([span])
    metadata = base64.b64encode(await engine.metadata()).decode()
    with engine.serving():
        _tell(answers, {"name": engine.name, "metadata": metadata, "address": span.address, **_about()})
        await asyncio.to_thread(sys.stdin.read)
    await engine.close()


async def reader(answers: IO[str]) -> None:
    """Read a source's memory, and compare."""
    told = json.loads(sys.stdin.readline())
    engine = NixlEngine(f"kvxfer-doctor-reader-{os.getpid()}")
    await engine.start()
    memory = np.zeros(SIZE, dtype=np.uint8)
    mine, theirs = Span(memory.ctypes.data, SIZE), Span(told["address"], SIZE)
    await engine.register([mine])
    peer = await engine.add_peer(base64.b64decode(told["metadata"]), told["name"], spans=[theirs])
    rows = [np.array([[s.address, BLOCK, 0, BLOCK, SIZE // BLOCK]], dtype=np.uint64) for s in (mine, theirs)]
    local = await engine.prepare_local(rows[0], MemoryKind.DRAM, peer)
    remote = await engine.prepare_remote(rows[1], MemoryKind.DRAM, peer)
    every = np.arange(SIZE // BLOCK, dtype=np.int32)
    seconds, right = [], True
    for _ in range(ROUNDS):
        memory[:] = 0
        read = await engine.make_read(local, every, remote, every, b"")
        began = time.perf_counter()
        await engine.post(read)
        seconds.append(time.perf_counter() - began)
        right = right and bool((memory == _noise()).all())
        await engine.release(read)
    await engine.close()
    _tell(answers, {"right": right, "seconds": min(seconds[1:]), "bytes": SIZE, **_about()})


def _tell(answers: IO[str], answer: Answer) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def main(parent: int, role: str) -> int:
    """Run as a child; the exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return 1
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        try:
            preload()
            if role == "survey":
                _tell(answers, survey())
            else:
                asyncio.run(source(answers) if role == "source" else reader(answers))
        except KvxferError as error:
            _tell(answers, {"error": error.message, "detail": error.metadata.get("detail", "")})
            return 1
    return 0


if __name__ == "__main__":
    hard_exit(main(int(sys.argv[1]), sys.argv[2]))
