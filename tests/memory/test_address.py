"""Plain addresses, for embedded sidecars."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest

from kvxfer.core.errors import Reason
from kvxfer.core.layout import MemoryKind
from kvxfer.memory.address import open_address
from kvxfer.memory.handles import Address
from kvxfer.memory.policy import MemoryPolicy

EMBEDDED = MemoryPolicy(allow_address=True, max_region_bytes=1 << 40)


def test_an_array_is_taken_as_it_is_and_survives_close(raw: Any) -> None:
    array = np.arange(1_000_000, dtype=np.int32)
    region = open_address(Address(array.ctypes.data, array.nbytes), EMBEDDED)
    assert (region.address, region.size, region.kind, region.device) == (
        array.ctypes.data,
        array.nbytes,
        MemoryKind.DRAM,
        0,
    )
    raw.write(region, 0, b"\xff\xff\xff\xff")
    region.close()
    region.close(keep=True)
    assert array[0] == -1
    assert region.export() is None


def test_only_embedded(refused: Any) -> None:
    with refused(Reason.MEMORY_NOT_ALLOWED, "address"):
        open_address(Address(4096, 1), MemoryPolicy())


def test_the_limit(refused: Any) -> None:
    with refused(Reason.MEMORY_LIMIT, "size"):
        open_address(Address(4096, 11), MemoryPolicy(allow_address=True, max_region_bytes=10))


def test_what_is_not_mapped_to_its_end(refused: Any) -> None:
    with refused(Reason.REGION_TOO_SMALL, "size") as caught:
        open_address(Address(1, 1), EMBEDDED)
    assert caught[0].metadata["actual"] == "0"
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with refused(Reason.REGION_TOO_SMALL, "size"):
        open_address(Address(start, 1 << 39), EMBEDDED)
    open_address(Address(start, 4 * mmap.PAGESIZE), EMBEDDED)


def test_what_may_not_be_written(refused: Any) -> None:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        span = next(line.split()[0] for line in maps if line.split()[1].startswith("r--"))
    with refused(Reason.REGION_TOO_SMALL, "size"):
        open_address(Address(int(span.split("-")[0], 16), 1), EMBEDDED)


@pytest.mark.parametrize("device", [0, 3])
def test_device_memory_is_not_looked_at(device: int) -> None:
    region = open_address(Address(4096, 10, MemoryKind.VRAM, device), EMBEDDED)
    assert (region.kind, region.device) == (MemoryKind.VRAM, device)
    region.close()
