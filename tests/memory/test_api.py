"""The one entrance: every kind of handle gets to its opener and comes back as a MappedRegion."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.core.errors import Reason
from kvxfer.core.layout import MemoryKind
from kvxfer.memory.api import MappedRegion, MemoryPolicy, open_region
from kvxfer.memory.handles import Address, FileHandle, Memfd, Owned, OwnedBacking, PosixShm
from tests.support.usage import usage


@pytest.fixture
def open_policy(allowed: Path) -> MemoryPolicy:
    return MemoryPolicy(directories=(str(allowed),), allow_address=True)


def test_every_kind(allowed: Path, open_policy: MemoryPolicy, raw: Any) -> None:
    path, shm = allowed / "f", Path(f"/dev/shm/kvxfer-test-{os.getpid()}")
    array = np.zeros(4096, dtype=np.uint8)
    before = usage()
    maker = open_region(Owned(4096, OwnedBacking.MEMFD), open_policy)
    memfd = maker.export()
    assert isinstance(memfd, Memfd)
    path.write_bytes(bytes(4096))
    shm.write_bytes(bytes(4096))
    try:
        for handle in (
            PosixShm(f"/{shm.name}", 4096),
            FileHandle(str(path), 0, 4096),
            memfd,
            Owned(4096),
            Address(array.ctypes.data, 4096),
        ):
            region: MappedRegion = open_region(handle, open_policy)
            assert (region.size, region.kind, region.device) == (4096, MemoryKind.DRAM, 0)
            assert (region.export() is not None) is isinstance(handle, Owned)
            raw.write(region, 4091, b"hello")
            assert raw.read(region, 4091, 5) == b"hello"
            region.close()
            region.close()
    finally:
        shm.unlink()
    maker.close()
    assert usage() == before
    assert list(allowed.iterdir()) == [path]


def test_what_is_no_handle(open_policy: MemoryPolicy, refused: Any) -> None:
    with refused(Reason.UNSUPPORTED):
        open_region("/dev/shm/x", open_policy)  # type: ignore[arg-type]
