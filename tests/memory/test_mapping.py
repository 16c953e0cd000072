"""Mapping: offsets, sizes, failures of the kernel, closing."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory import mapping
from kvxfer.memory.mapping import granularity, map_file
from tests.support.usage import usage

PAGE = mmap.PAGESIZE


@pytest.fixture
def numbered(tmp_path: Path) -> Any:
    """A file of three pages and a bit whose bytes tell their offset."""
    data = bytes(i * 7 % 251 for i in range(3 * PAGE + 100))
    path = tmp_path / "numbered"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDWR)
    yield SimpleNamespace(fd=fd, data=data, path=path)
    os.close(fd)


@pytest.mark.parametrize("offset", [0, 1, 64, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 99])
@pytest.mark.parametrize("size", [1, 64, PAGE, 2 * PAGE + 3, None])
def test_every_offset_shows_the_bytes_at_that_offset(numbered: Any, raw: Any, offset: int, size: int | None) -> None:
    size = len(numbered.data) - offset if size is None else min(size, len(numbered.data) - offset)
    region = map_file(numbered.fd, offset, size, field="path", what="it")
    assert raw.read(region, 0, size) == numbered.data[offset : offset + size]
    assert region.size == size
    region.close()


def test_writes_reach_the_file_and_do_not_change_its_size(numbered: Any, raw: Any) -> None:
    region = map_file(numbered.fd, 70, 10, field="path", what="it")
    raw.write(region, 0, b"0123456789")
    region.close()
    after = numbered.path.read_bytes()
    assert after == numbered.data[:70] + b"0123456789" + numbered.data[80:]


@pytest.mark.parametrize("offset, extra", [(0, 1), (1, 1), (3 * PAGE + 100, 1), (4 * PAGE, 0)])
def test_a_region_past_the_end_is_refused_before_mapping(numbered: Any, refused: Any, offset: int, extra: int) -> None:
    size = max(1, len(numbered.data) - offset + extra)
    before = usage()
    with refused(Reason.REGION_TOO_SMALL, "size") as caught:
        map_file(numbered.fd, offset, size, field="path", what="it")
    assert caught[0].metadata["actual"] == str(len(numbered.data))
    assert usage() == before


def test_a_file_shrunk_after_it_was_made_is_refused(numbered: Any, refused: Any) -> None:
    os.truncate(numbered.path, PAGE)
    with refused(Reason.REGION_TOO_SMALL, "size"):
        map_file(numbered.fd, 0, PAGE + 1, field="path", what="it")


def test_holes_are_filled_and_the_size_stays(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb+") as file:
        file.truncate(64 * PAGE)
        assert os.fstat(file.fileno()).st_blocks == 0
        map_file(file.fileno(), 0, 64 * PAGE, field="path", what="it").close()
        assert os.fstat(file.fileno()).st_blocks * 512 >= 64 * PAGE
        assert os.fstat(file.fileno()).st_size == 64 * PAGE
        # As if somebody had cut the file after its size was checked.
        mapping._reserve(file.fileno(), 0, 65 * PAGE)
        assert os.fstat(file.fileno()).st_size == 64 * PAGE


@pytest.mark.parametrize(
    "number, reason",
    [(errno.ENOSPC, Reason.MEMORY_LIMIT), (errno.EOPNOTSUPP, None), (errno.EPERM, Reason.MEMORY_NOT_ALLOWED)],
)
def test_what_a_file_system_without_room_or_without_fallocate_says(
    numbered: Any, refused: Any, monkeypatch: pytest.MonkeyPatch, number: int, reason: Reason | None
) -> None:
    answers = iter([errno.EINTR, number])

    def fallocate(fd: int, mode: int, offset: int, size: int) -> int:
        ctypes.set_errno(next(answers))
        return -1

    real = mapping._libc
    fake = SimpleNamespace(mmap=real.mmap, munmap=real.munmap, fallocate=fallocate)
    monkeypatch.setattr(mapping, "_libc", fake)
    if reason is None:
        map_file(numbered.fd, 0, 10, field="path", what="it").close()
    else:
        with refused(reason, "path"):
            map_file(numbered.fd, 0, 10, field="path", what="it")


def test_a_large_range_is_reserved_in_steps(monkeypatch: pytest.MonkeyPatch, numbered: Any) -> None:
    seen: list[tuple[int, int]] = []

    def fallocate(fd: int, mode: int, offset: int, size: int) -> int:
        seen.append((offset, size))
        return 0

    monkeypatch.setattr(mapping, "_libc", SimpleNamespace(fallocate=fallocate))
    mapping._reserve(numbered.fd, 5, (2 << 30) + 7)
    assert seen == [(5, 1 << 30), (5 + (1 << 30), 1 << 30), (5 + (2 << 30), 7)]


@pytest.mark.parametrize(
    "number, reason",
    [
        (errno.ENOMEM, Reason.MEMORY_LIMIT),
        (errno.EACCES, Reason.MEMORY_NOT_ALLOWED),
        (errno.ENODEV, Reason.UNSUPPORTED),
        (errno.EIO, Reason.INTERNAL),
    ],
)
def test_a_failing_mmap_is_an_error_of_ours(
    numbered: Any, refused: Any, monkeypatch: pytest.MonkeyPatch, number: int, reason: Reason
) -> None:
    def fail(*arguments: object) -> int:
        ctypes.set_errno(number)
        return int(2 ** (8 * ctypes.sizeof(ctypes.c_void_p))) - 1

    monkeypatch.setattr(mapping, "_libc", SimpleNamespace(mmap=fail, fallocate=lambda *arguments: 0))
    with refused(reason, "path") as caught:
        map_file(numbered.fd, 0, 10, field="path", what="it")
    assert caught[0].metadata["errno"] == errno.errorcode[number]


def test_the_kernels_own_refusal(numbered: Any, refused: Any) -> None:
    fd = os.open(numbered.path, os.O_RDONLY)
    try:
        # fallocate answers EBADF for it, mmap would answer EACCES; either way it is no crash.
        with pytest.raises(KvxferError):
            map_file(fd, 0, 10, field="path", what="it")
    finally:
        os.close(fd)


def test_close_twice_and_after_a_new_mapping_took_the_place(numbered: Any, raw: Any) -> None:
    first = map_file(numbered.fd, 0, PAGE, field="path", what="it")
    first.close()
    second = map_file(numbered.fd, 0, PAGE, field="path", what="it")
    first.close()
    assert raw.read(second, 0, 4) == numbered.data[:4]
    second.close()


def test_granularity_follows_large_blocks_only() -> None:
    def status(block: int) -> os.stat_result:
        return SimpleNamespace(st_blksize=block)  # type: ignore[return-value]

    assert granularity(status(512)) == PAGE
    assert granularity(status(PAGE)) == PAGE
    assert granularity(status(2 << 20)) == 2 << 20
    assert granularity(status(3 * PAGE)) == PAGE


def test_large_blocks_map_from_further_below(numbered: Any, raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "granularity", lambda status: 2 * PAGE)
    region = map_file(numbered.fd, 2 * PAGE + 5, PAGE, field="path", what="it")
    assert raw.read(region, 0, PAGE) == numbered.data[2 * PAGE + 5 : 3 * PAGE + 5]
    region.close()
    region = map_file(numbered.fd, PAGE + 5, PAGE, field="path", what="it")
    assert raw.read(region, 0, PAGE) == numbered.data[PAGE + 5 : 2 * PAGE + 5]
    region.close()


def test_it_exports_nothing_and_is_host_memory(numbered: Any) -> None:
    region = map_file(numbered.fd, 0, 1, field="path", what="it")
    assert region.export() is None
    assert (region.kind.value, region.device) == ("dram", 0)
    region.close(keep=True)
