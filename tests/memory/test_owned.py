"""Memory that the sidecar creates."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory import owned
from kvxfer.memory.file import open_file
from kvxfer.memory.handles import FileHandle, Memfd, Owned, OwnedBacking
from kvxfer.memory.memfd import F_GET_SEALS, open_memfd
from kvxfer.memory.owned import adopt_owned, create_owned, list_owned
from kvxfer.memory.policy import MemoryPolicy
from tests.support.usage import usage

ENGINE = """
import os, sys
from kvxfer.memory import handles
from kvxfer_client.memory import SharedRegion
region = SharedRegion.map(eval(sys.argv[1], vars(handles)))
array = region.numpy("u1", (region.size,))
for line in sys.stdin:
    verb, data = line.split()
    if verb == "write":
        array[-len(data):] = list(data.encode())
    print(bytes(array[-10:]).hex(), flush=True)
"""

BOTH = pytest.mark.parametrize("backing", [OwnedBacking.FILE, OwnedBacking.MEMFD])


@BOTH
def test_an_engine_maps_it_and_it_outlives_the_engine(
    backing: OwnedBacking, policy: MemoryPolicy, raw: Any, child: Any
) -> None:
    region = create_owned(Owned(5000, backing), policy)
    assert raw.read(region, 0, 5000) == bytes(5000)
    engine = child(ENGINE, repr(region.export()))
    assert engine.ask("write abcdefghij") == b"abcdefghij".hex()
    assert raw.read(region, 4990, 10) == b"abcdefghij"
    raw.write(region, 4990, b"0123456789")
    assert engine.ask("read .") == b"0123456789".hex()
    engine.end()
    raw.write(region, 0, b"still here")
    assert raw.read(region, 4990, 10) == b"0123456789"
    second = child(ENGINE, repr(region.export()))
    assert second.ask("read .") == b"0123456789".hex()
    region.close()


@BOTH
def test_the_engine_keeps_it_when_the_sidecar_closes(backing: OwnedBacking, policy: MemoryPolicy, child: Any) -> None:
    region = create_owned(Owned(5000, backing), policy)
    engine = child(ENGINE, repr(region.export()))
    engine.ask("write abcdefghij")
    region.close()
    assert engine.ask("read .") == b"abcdefghij".hex()


def test_the_file_has_its_mode_whatever_the_umask(allowed: Path) -> None:
    before = os.umask(0o777)
    try:
        for mode in (0o600, 0o660):
            region = create_owned(Owned(10), MemoryPolicy(directories=(str(allowed),), file_mode=mode))
            handle = region.export()
            assert isinstance(handle, FileHandle)
            status = os.stat(handle.path)
            assert stat.S_IMODE(status.st_mode) == mode
            assert status.st_blocks * 512 >= 10
            region.close()
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to any group")
def test_the_group(tmp_path: Path) -> None:
    policy = MemoryPolicy(directories=(str(tmp_path / "new"),), file_mode=0o660, group=12345)
    region = create_owned(Owned(10), policy)
    handle = region.export()
    assert isinstance(handle, FileHandle)
    assert os.stat(handle.path).st_gid == 12345
    made = os.stat(tmp_path / "new")
    assert (stat.S_IMODE(made.st_mode), made.st_gid) == (0o710, 12345)
    region.close()


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    create_owned(Owned(10), MemoryPolicy(owned_directory=str(tmp_path / "new"))).close()
    assert stat.S_IMODE(os.stat(tmp_path / "new").st_mode) == 0o700


def test_close_removes_the_file_once(allowed: Path, policy: MemoryPolicy) -> None:
    region = create_owned(Owned(10), policy)
    (path,) = allowed.iterdir()
    region.close()
    assert list(allowed.iterdir()) == []
    path.touch()
    region.close()
    assert path.exists()


def test_close_when_somebody_removed_it_already(allowed: Path, policy: MemoryPolicy) -> None:
    region = create_owned(Owned(10), policy)
    for path in allowed.iterdir():
        path.unlink()
    region.close()


def test_a_kept_file_is_found_again(allowed: Path, policy: MemoryPolicy, raw: Any) -> None:
    region = create_owned(Owned(100), policy)
    handle = region.export()
    raw.write(region, 95, b"hello")
    region.close(keep=True)
    assert list_owned(policy) == (handle,)
    assert isinstance(handle, FileHandle)
    visitor = open_file(handle, policy)
    assert raw.read(visitor, 95, 5) == b"hello"
    visitor.close()
    assert list_owned(policy) == (handle,)
    again = adopt_owned(handle, policy)
    assert raw.read(again, 95, 5) == b"hello"
    assert again.export() == handle
    again.close()
    assert list_owned(policy) == ()


def test_a_sidecar_that_was_killed_leaves_the_file(allowed: Path, policy: MemoryPolicy, raw: Any, child: Any) -> None:
    sidecar = child(
        "import ctypes, sys\n"
        "from kvxfer.memory.handles import Owned\n"
        "from kvxfer.memory.api import MemoryPolicy, open_region\n"
        "region = open_region(Owned(100), MemoryPolicy(directories=(sys.argv[1],)))\n"
        "ctypes.memmove(region.address, b'hello', 5)\n"
        "print(region.export().path, flush=True)\n"
        "sys.stdin.read()\n",
        allowed,
    )
    path = sidecar.hear()
    sidecar.process.kill()
    sidecar.process.wait()
    region = adopt_owned(FileHandle(path, 0, 100), policy)
    assert raw.read(region, 0, 5) == b"hello"
    region.close()
    assert not os.path.exists(path)


def test_only_our_own_files_are_adopted(tmp_path: Path, allowed: Path, policy: MemoryPolicy, refused: Any) -> None:
    (allowed / "sub").mkdir()
    for path in (allowed / "engine", allowed / "sub/kvxfer-1.kv", tmp_path / "kvxfer-1.kv"):
        path.write_bytes(bytes(10))
        with refused(Reason.MEMORY_NOT_ALLOWED, "path"):
            adopt_owned(FileHandle(str(path), 0, 10), policy)
        assert path.exists()


def test_the_list_has_only_what_sidecars_made(allowed: Path, policy: MemoryPolicy) -> None:
    (allowed / "engine").write_bytes(bytes(10))
    (allowed / "kvxfer-empty.kv").touch()
    (allowed / "kvxfer-dir.kv").mkdir()
    (allowed / "kvxfer-link.kv").symlink_to("engine")
    assert list_owned(policy) == ()
    assert list_owned(MemoryPolicy(directories=())) == ()
    assert list_owned(MemoryPolicy(directories=(str(allowed / "none"),))) == ()


def test_a_memfd_can_neither_shrink_nor_grow(policy: MemoryPolicy) -> None:
    before = usage()
    region = create_owned(Owned(5000, OwnedBacking.MEMFD), policy)
    handle = region.export()
    assert isinstance(handle, Memfd)
    assert handle == Memfd(os.getpid(), handle.fd, 0, 5000)
    assert fcntl.fcntl(handle.fd, F_GET_SEALS) & 0x7 == 0x7
    for size in (0, 6000):
        with pytest.raises(PermissionError):
            os.ftruncate(handle.fd, size)
    open_memfd(handle, policy).close()
    region.close()
    region.close(keep=True)
    assert usage() == before


@BOTH
def test_five_hundred_times_leaves_nothing(backing: OwnedBacking, policy: MemoryPolicy, allowed: Path) -> None:
    before = usage()
    for _ in range(500):
        create_owned(Owned(5000, backing), policy).close()
    assert usage() == before
    assert list(allowed.iterdir()) == []


@BOTH
def test_limits(backing: OwnedBacking, policy: MemoryPolicy, refused: Any) -> None:
    with refused(Reason.MEMORY_LIMIT, "size"):
        create_owned(Owned((1 << 30) + 1, backing), policy)


@BOTH
def test_no_room_leaves_nothing(
    backing: OwnedBacking,
    policy: MemoryPolicy,
    allowed: Path,
    refused: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = usage()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with refused(Reason.MEMORY_LIMIT, "size"):
        create_owned(Owned(5000, backing), policy)
    assert usage() == before
    assert list(allowed.iterdir()) == []


@BOTH
def test_a_failing_map_leaves_nothing(
    backing: OwnedBacking, policy: MemoryPolicy, allowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise KvxferError(Reason.MEMORY_LIMIT, "no")

    before = usage()
    monkeypatch.setattr(owned, "map_file", fail)
    with pytest.raises(KvxferError):
        create_owned(Owned(5000, backing), policy)
    assert usage() == before
    assert list(allowed.iterdir()) == []


def test_a_real_tmpfs_that_is_full(refused: Any) -> None:
    status = os.statvfs("/dev/shm")
    space = status.f_blocks * status.f_frsize
    if space == 0:
        pytest.skip("/dev/shm has no limit")
    directory = Path("/dev/shm") / f"kvxfer-test-{os.getpid()}"
    directory.mkdir()
    try:
        policy = MemoryPolicy(directories=(str(directory),), max_region_bytes=2**62)
        with refused(Reason.MEMORY_LIMIT, "size"):
            create_owned(Owned(space + 4096), policy)
        assert list(directory.iterdir()) == []
    finally:
        directory.rmdir()


def test_no_directory(tmp_path: Path, refused: Any) -> None:
    with refused(Reason.MEMORY_NOT_ALLOWED, "backing"):
        create_owned(Owned(10), MemoryPolicy(directories=()))
    with refused(Reason.MEMORY_HANDLE_INVALID, "backing"):
        create_owned(Owned(10), MemoryPolicy(directories=(str(tmp_path / "a/b"),)))
