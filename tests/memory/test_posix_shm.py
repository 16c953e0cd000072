"""POSIX shared memory, made by the standard library."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest

from kvxfer.core.errors import Reason
from kvxfer.memory.handles import PosixShm
from kvxfer.memory.policy import MemoryPolicy
from kvxfer.memory.posix_shm import open_posix_shm


@pytest.fixture
def shm() -> Iterator[SharedMemory]:
    memory = SharedMemory(f"kvxfer-test-{secrets.token_hex(8)}", create=True, size=10_000)
    yield memory
    memory.close()
    memory.unlink()


def test_both_sides_see_each_others_writes(shm: SharedMemory, policy: MemoryPolicy, raw: Any) -> None:
    region = open_posix_shm(PosixShm(f"/{shm.name}", 10_000), policy)
    assert shm.buf is not None
    shm.buf[9_999] = 7
    assert raw.read(region, 9_999, 1) == b"\x07"
    raw.write(region, 5, b"hello")
    assert bytes(shm.buf[5:10]) == b"hello"
    region.close()
    region.close()


def test_too_small(shm: SharedMemory, policy: MemoryPolicy, refused: Any) -> None:
    with refused(Reason.REGION_TOO_SMALL, "size"):
        open_posix_shm(PosixShm(f"/{shm.name}", 10_001), policy)


def test_an_empty_object_is_too_small(policy: MemoryPolicy, refused: Any) -> None:
    name = f"/kvxfer-test-{secrets.token_hex(8)}"
    open(f"/dev/shm{name}", "xb").close()
    try:
        with refused(Reason.REGION_TOO_SMALL, "size"):
            open_posix_shm(PosixShm(name, 1), policy)
    finally:
        os.unlink(f"/dev/shm{name}")


def test_no_such_object(policy: MemoryPolicy, refused: Any) -> None:
    with refused(Reason.MEMORY_HANDLE_INVALID, "name"):
        open_posix_shm(PosixShm("/kvxfer-no-such-thing", 1), policy)


def test_the_policy_decides_on_names(shm: SharedMemory, refused: Any) -> None:
    handle = PosixShm(f"/{shm.name}", 1)
    open_posix_shm(handle, MemoryPolicy(shm_prefix="/")).close()
    for policy in (MemoryPolicy(shm_prefix="/other-"), MemoryPolicy(allow_posix_shm=False)):
        with refused(Reason.MEMORY_NOT_ALLOWED, "name"):
            open_posix_shm(handle, policy)


def test_the_limit(shm: SharedMemory, refused: Any) -> None:
    with refused(Reason.MEMORY_LIMIT, "size"):
        open_posix_shm(PosixShm(f"/{shm.name}", 11), MemoryPolicy(max_region_bytes=10))


def test_a_link_in_dev_shm_is_not_followed(shm: SharedMemory, policy: MemoryPolicy, refused: Any) -> None:
    name = f"/kvxfer-test-{secrets.token_hex(8)}"
    os.symlink(shm.name, f"/dev/shm{name}")
    try:
        with refused(Reason.MEMORY_NOT_ALLOWED, "name"):
            open_posix_shm(PosixShm(name, 1), policy)
    finally:
        os.unlink(f"/dev/shm{name}")
