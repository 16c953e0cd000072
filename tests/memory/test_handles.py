"""Handles: what can be built, and what is said about the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import MemoryKind
from kvxfer.memory.handles import Address, FileHandle, Memfd, Owned, OwnedBacking, PosixShm

T = TypeVar("T")

TOO_LARGE = 2**63


@pytest.mark.parametrize(
    "handle",
    [
        PosixShm("/a", 1),
        PosixShm("/" + "n" * 255, 2**63 - 1),
        PosixShm("/...", 1),
        FileHandle("/a/b..c/.d", 64, 10),
        FileHandle("/a", 0, 2**63 - 1),
        FileHandle("/" + "\udcff", 0, 1),
        Memfd(1, 0, 3, 1),
        Owned(5),
        Owned(5, OwnedBacking.MEMFD),
        Address(2**63 - 2, 1),
        Address(4096, 10, MemoryKind.VRAM, 7),
    ],
)
def test_good_handles_are_frozen_and_compare_by_value(handle: object) -> None:
    assert dataclasses.replace(handle) == handle  # type: ignore[type-var]
    assert hash(dataclasses.replace(handle)) == hash(handle)  # type: ignore[type-var]
    with pytest.raises(dataclasses.FrozenInstanceError):
        handle.size = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "build, field",
    [
        (lambda: PosixShm("a", 1), "name"),
        (lambda: PosixShm("", 1), "name"),
        (lambda: PosixShm("/", 1), "name"),
        (lambda: PosixShm("/a/b", 1), "name"),
        (lambda: PosixShm("//a", 1), "name"),
        (lambda: PosixShm("/..", 1), "name"),
        (lambda: PosixShm("/.", 1), "name"),
        (lambda: PosixShm("/a\0b", 1), "name"),
        (lambda: PosixShm("/" + "n" * 256, 1), "name"),
        (lambda: PosixShm("/" + "ü" * 128, 1), "name"),
        (lambda: PosixShm("/\ud800", 1), "name"),
        (lambda: PosixShm(b"/a", 1), "name"),  # type: ignore[arg-type]
        (lambda: PosixShm("/a", 0), "size"),
        (lambda: PosixShm("/a", -1), "size"),
        (lambda: PosixShm("/a", TOO_LARGE), "size"),
        (lambda: PosixShm("/a", True), "size"),
        (lambda: PosixShm("/a", 1.0), "size"),  # type: ignore[arg-type]
        (lambda: FileHandle("a", 0, 1), "path"),
        (lambda: FileHandle("", 0, 1), "path"),
        (lambda: FileHandle("/", 0, 1), "path"),
        (lambda: FileHandle("/a/", 0, 1), "path"),
        (lambda: FileHandle("/a//b", 0, 1), "path"),
        (lambda: FileHandle("/a/../b", 0, 1), "path"),
        (lambda: FileHandle("/a/./b", 0, 1), "path"),
        (lambda: FileHandle("/a/..", 0, 1), "path"),
        (lambda: FileHandle("/a\0", 0, 1), "path"),
        (lambda: FileHandle("/" + "a" * 4095, 0, 1), "path"),
        (lambda: FileHandle("/a", -1, 1), "offset"),
        (lambda: FileHandle("/a", TOO_LARGE, 1), "offset"),
        (lambda: FileHandle("/a", 1, 2**63 - 1), "size"),
        (lambda: FileHandle("/a", 0, 0), "size"),
        (lambda: Memfd(0, 0, 0, 1), "pid"),
        (lambda: Memfd(-1, 0, 0, 1), "pid"),
        (lambda: Memfd(2**31, 0, 0, 1), "pid"),
        (lambda: Memfd("self", 0, 0, 1), "pid"),  # type: ignore[arg-type]
        (lambda: Memfd(1, -1, 0, 1), "fd"),
        (lambda: Memfd(1, 2**31, 0, 1), "fd"),
        (lambda: Memfd(1, 0, -1, 1), "offset"),
        (lambda: Memfd(1, 0, 2**62, 2**62), "size"),
        (lambda: Memfd(1, 0, 0, 0), "size"),
        (lambda: Owned(0), "size"),
        (lambda: Owned(1, "file"), "backing"),  # type: ignore[arg-type]
        (lambda: Address(0, 1), "address"),
        (lambda: Address(-8, 1), "address"),
        (lambda: Address(2**63 - 1, 1), "size"),
        (lambda: Address(1, 0), "size"),
        (lambda: Address(1, 1, "dram"), "kind"),  # type: ignore[arg-type]
        (lambda: Address(1, 1, MemoryKind.DRAM, 1), "device"),
        (lambda: Address(1, 1, MemoryKind.VRAM, -1), "device"),
    ],
)
def test_bad_handles_name_field_value_and_what_is_allowed(build: object, field: str) -> None:
    with pytest.raises(KvxferError) as info:
        build()  # type: ignore[operator]
    assert info.value.reason is Reason.MEMORY_HANDLE_INVALID
    assert info.value.field == field
    assert set(info.value.metadata) == {"value", "allowed"}
    assert info.value.metadata["allowed"] in info.value.message
    assert len(info.value.metadata["value"]) < 250


def built(build: Callable[[], T]) -> T | None:
    """The handle, or None where it was refused as one."""
    try:
        return build()
    except KvxferError as error:
        if error.reason is not Reason.MEMORY_HANDLE_INVALID:
            raise
        return None


@given(st.text(max_size=12), st.integers(), st.integers())
def test_a_file_handle_that_exists_is_plain_and_inside_63_bits(path: str, offset: int, size: int) -> None:
    handle = built(lambda: FileHandle("/" + path, offset, size))
    if handle is None:
        return
    assert not {"", ".", ".."} & set(handle.path.split("/")[1:])
    assert "\0" not in handle.path
    assert 0 <= handle.offset < handle.offset + handle.size < 2**63


@given(st.integers(), st.integers())
def test_an_address_that_exists_does_not_overflow(address: int, size: int) -> None:
    handle = built(lambda: Address(address, size))
    if handle is None:
        return
    assert 0 < handle.address < handle.address + handle.size < 2**63
