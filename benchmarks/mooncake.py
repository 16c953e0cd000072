"""The same blocks through Mooncake's transfer engine, over TCP."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.aside import Aside
from benchmarks.caches import Case, Memory
from kvxfer.memory.handles import FileHandle
from kvxfer_client.memory import SharedRegion

_MISSING = """\
Mooncake's transfer engine can not be loaded: {why}
`make bench` brings all that it needs.  By hand:
  pip install --no-deps mooncake-transfer-engine-non-cuda
  apt-get install --no-install-recommends libibverbs1 librdmacm1 libnuma1    (as root, on Debian and Ubuntu)
"""
#: Read when an engine starts.  By default it refuses a batch of more than 1,024 transfers.
_SETTINGS = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
}
_POOL, _LANES = "MC_TCP_ENABLE_CONNECTION_POOL", "MC_TCP_LANES_PER_PEER"
#: Most connections that it keeps to one peer.
MOST_LANES = 16


def _engine(lanes: int) -> Any:
    """One that listens on a port of its own.

    :raises SystemExit: it is not installed; says what to do.
    """
    os.environ.update(_SETTINGS)
    for name in (_POOL, _LANES):
        os.environ.pop(name, None)
    if lanes:
        os.environ.update({_POOL: "1", _LANES: str(lanes)})
    try:
        from mooncake.engine import TransferEngine
    except ImportError as why:
        raise SystemExit(_MISSING.format(why=why)) from None
    engine = TransferEngine()
    _done(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "it did not start")
    return engine


def _done(status: int, otherwise: str) -> None:
    if status != 0:
        raise RuntimeError(f"Mooncake: {otherwise}: status {status}")


def _serve(path: str, size: int, lanes: int) -> tuple[tuple[str, int], object]:
    engine, region = _engine(lanes), SharedRegion.map(FileHandle(path, 0, size))
    address = region.numpy(np.uint8, (size,)).ctypes.data
    _done(engine.register_memory(address, size), "memory was not registered")
    return (f"127.0.0.1:{engine.get_rpc_port()}", address), (engine, region)


class Mooncake(Aside):
    """A reader in this process, and P's engine in one of its own, over the files of a :class:`Memory`.

    :param lanes: connections to keep open; 0 is the default, which makes them anew.
    """

    def __init__(self, memory: Memory, lanes: int = 0) -> None:
        self._engine = _engine(lanes)
        super().__init__(_serve, str(memory.directory / "P"), memory.bytes["P"].size, lanes)
        self._memory = memory
        here = memory.bytes["D"]
        _done(self._engine.register_memory(here.ctypes.data, here.size), "memory was not registered")

    def prepare(self, case: Case) -> Callable[[], float]:
        """Seconds of one read."""
        target, there = self.told
        here = self._memory.bytes["D"].ctypes.data
        buffers, addresses = (
            [start + offset + i * case.block for offset in self._memory.offsets(case) for i in case.ids(side).tolist()]
            for side, start in (("D", here), ("P", there))
        )
        lengths = [case.block] * len(buffers)

        def read() -> float:
            began = time.perf_counter()
            status = self._engine.batch_transfer_sync_read(target, buffers, addresses, lengths)
            seconds = time.perf_counter() - began
            _done(status, f"a read failed: {case}")
            return seconds

        return read
