"""The engine's side of shared memory, against the sidecar's."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory.api import MemoryPolicy, open_region
from kvxfer.memory.handles import Address, FileHandle, Memfd, Owned, OwnedBacking, PosixShm
from kvxfer_client.memory import SharedRegion
from tests.support.usage import usage

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def policy(tmp_path: Path) -> MemoryPolicy:
    return MemoryPolicy(directories=(str(tmp_path),))


@pytest.fixture(params=["file", "shm", "memfd"])
def create(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], SharedRegion]]:
    """Makes regions of one kind; closes and removes them afterwards."""
    made: list[SharedRegion] = []

    def make(size: int) -> SharedRegion:
        match request.param:
            case "file":
                made.append(SharedRegion.create_file(tmp_path / secrets.token_hex(4), size))
            case "shm":
                made.append(SharedRegion.create_shm(size))
            case _:
                made.append(SharedRegion.create_memfd(size))
        return made[-1]

    yield make
    for region in made:
        region.close()
        region.unlink()


def reason_of(call: Callable[[], object]) -> tuple[Reason, str]:
    with pytest.raises(KvxferError) as info:
        call()
    return info.value.reason, info.value.field


def test_the_sidecar_maps_the_handle(create: Callable[[int], SharedRegion], policy: MemoryPolicy) -> None:
    region = create(10_000)
    array = region.numpy(np.float32, (50, 50))
    assert not array.any()
    mapped = open_region(region.handle, policy)
    array[49, 49] = 2.5
    assert ctypes.string_at(mapped.address + 9996, 4) == np.float32(2.5).tobytes()
    ctypes.memmove(mapped.address, np.float32(-1).tobytes(), 4)
    assert array[0, 0] == -1
    mapped.close()


def test_another_process_maps_the_handle(create: Callable[[int], SharedRegion]) -> None:
    region = create(10_000)
    array = region.numpy("u1", (10,), offset=9_990)
    array[:] = range(10)
    code = (
        "import sys\n"
        "from kvxfer.memory import handles\n"
        "from kvxfer_client.memory import SharedRegion\n"
        "with SharedRegion.map(eval(sys.argv[1], vars(handles))) as region:\n"
        "    array = region.numpy('u1', (10,), offset=9990)\n"
        "    print(array.tolist())\n"
        "    array[:] = array[::-1].copy()\n"
    )
    path = f"{ROOT}{os.pathsep}{ROOT / 'clients/python'}"
    done = subprocess.run(
        [sys.executable, "-c", code, repr(region.handle)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.stdout.strip() == str(list(range(10))), done.stderr
    assert array.tolist() == list(range(10))[::-1]


def test_handles(tmp_path: Path) -> None:
    with SharedRegion.create_file(str(tmp_path / "f"), 10) as region:
        assert region.handle == FileHandle(str(tmp_path / "f"), 0, 10)
        assert region.size == 10
        assert repr(region) == f"<SharedRegion {region.handle!r}>"
    with SharedRegion.create_shm(10, "/kvxfer-test-handles") as region:
        assert region.handle == PosixShm("/kvxfer-test-handles", 10)
        assert os.path.exists("/dev/shm/kvxfer-test-handles")
    assert not os.path.exists("/dev/shm/kvxfer-test-handles")
    with SharedRegion.create_memfd(10) as region:
        handle = region.handle
        assert isinstance(handle, Memfd)
        assert handle == Memfd(os.getpid(), handle.fd, 0, 10)
        for size in (0, 11):
            with pytest.raises(PermissionError):
                os.ftruncate(handle.fd, size)


@pytest.mark.parametrize("backing", [OwnedBacking.FILE, OwnedBacking.MEMFD])
def test_sidecar_owned_memory(backing: OwnedBacking, policy: MemoryPolicy) -> None:
    mapped = open_region(Owned(5000, backing), policy)
    handle = mapped.export()
    assert handle is not None
    with SharedRegion.map(handle) as region:
        region.numpy("u1", (5000,))[4999] = 9
        assert ctypes.string_at(mapped.address + 4999, 1) == b"\x09"
        assert region.handle == handle
    mapped.close()


def test_mapping_a_part(tmp_path: Path) -> None:
    data = np.arange(20_000, dtype=np.uint8)
    (tmp_path / "f").write_bytes(data.tobytes())
    for offset, size in ((0, 20_000), (64, 1), (4095, 2), (4096, 8192), (19_999, 1)):
        with SharedRegion.map(FileHandle(str(tmp_path / "f"), offset, size)) as region:
            assert np.array_equal(region.numpy("u1", (size,)), data[offset : offset + size])


def test_arrays_have_their_type_shape_and_place(create: Callable[[int], SharedRegion]) -> None:
    region = create(4096)
    array = region.numpy(np.int16, (3, 4, 5), offset=6)
    assert (array.dtype, array.shape) == (np.dtype(np.int16), (3, 4, 5))
    assert array.flags.c_contiguous
    assert array.flags.writeable
    array[:] = np.arange(60).reshape(3, 4, 5)
    assert region.numpy(np.int16, (), offset=6 + 2 * 59).item() == 59
    assert region.numpy(np.int16, (0, 4)).shape == (0, 4)
    assert region.numpy(np.int16, (0,), offset=4096).shape == (0,)
    assert region.numpy("u1", (4096,)).sum(dtype=int) == np.arange(60).sum()


def test_tensors(create: Callable[[int], SharedRegion]) -> None:
    torch = pytest.importorskip("torch")
    region = create(4096)
    tensor = region.torch(torch.bfloat16, (3, 4), offset=64)
    assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) == (torch.bfloat16, (3, 4), True)
    tensor.fill_(1.0)
    assert region.numpy(np.uint16, (12,), offset=64).tolist() == [0x3F80] * 12
    assert region.numpy("u1", (64,)).sum() == 0
    assert tuple(region.torch(torch.float32, (0, 3)).shape) == (0, 3)
    assert region.torch(torch.float32, ()).item() == 0
    region.close()
    assert tensor.sum().item() == 12


def test_torch_is_not_imported_before_it_is_asked_for() -> None:
    code = "import sys, kvxfer_client.memory; print(sorted({'torch', 'nixl'} & set(sys.modules)))"
    path = f"{ROOT}{os.pathsep}{ROOT / 'clients/python'}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=True
    )
    assert done.stdout.strip() == "[]"


def test_what_does_not_fit_is_refused(create: Callable[[int], SharedRegion]) -> None:
    region = create(100)
    assert reason_of(lambda: region.numpy("u1", (101,)))[0] is Reason.REGION_TOO_SMALL
    assert reason_of(lambda: region.numpy("u1", (1,), offset=100))[0] is Reason.REGION_TOO_SMALL
    assert reason_of(lambda: region.numpy("u8", (13,)))[0] is Reason.REGION_TOO_SMALL
    assert reason_of(lambda: region.numpy("u1", (2**40, 2**40)))[0] is Reason.REGION_TOO_SMALL
    assert reason_of(lambda: region.numpy("u1", (1,), offset=-1)) == (Reason.FIELD_INVALID, "offset")
    assert reason_of(lambda: region.numpy("u1", (-1, -1))) == (Reason.FIELD_INVALID, "shape")
    assert reason_of(lambda: region.numpy(object, (1,))) == (Reason.FIELD_INVALID, "dtype")
    region.close()
    assert reason_of(lambda: region.numpy("u1", (1,))) == (Reason.FIELD_INVALID, "region")


def test_arrays_outlive_close_and_then_nothing_is_left(create: Callable[[int], SharedRegion]) -> None:
    before = usage()
    region = create(10_000)
    array = region.numpy("u1", (10_000,))
    region.close()
    region.close()
    assert region.closed
    region.unlink()
    array[:] = 3
    assert array.sum(dtype=int) == 30_000
    assert usage() != before
    del array
    gc.collect()
    assert usage() == before


def test_five_hundred_times_leaves_nothing(create: Callable[[int], SharedRegion], policy: MemoryPolicy) -> None:
    before = usage()
    for _ in range(500):
        with create(5000) as region:
            open_region(region.handle, policy).close()
            SharedRegion.map(region.handle).close()
    assert usage() == before


def test_unlink_removes_only_what_was_created_and_only_once(tmp_path: Path) -> None:
    path = tmp_path / "f"
    region = SharedRegion.create_file(path, 10)
    with SharedRegion.map(region.handle):
        pass
    assert path.exists()
    region.unlink()
    assert not path.exists()
    path.touch()
    region.unlink()
    assert path.exists()
    region.close()


def test_unlink_after_somebody_else_did(tmp_path: Path) -> None:
    with SharedRegion.create_file(tmp_path / "f", 10):
        (tmp_path / "f").unlink()


def test_close_keeps_the_name(tmp_path: Path) -> None:
    region = SharedRegion.create_file(tmp_path / "f", 10)
    region.close()
    assert (tmp_path / "f").stat().st_size == 10


def test_mode_and_pages(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        for mode in (0o600, 0o660):
            with SharedRegion.create_file(tmp_path / "f", 100_000, mode=mode):
                status = os.stat(tmp_path / "f")
                assert stat.S_IMODE(status.st_mode) == mode
                assert status.st_blocks * 512 >= 100_000
    finally:
        os.umask(before)
    assert reason_of(lambda: SharedRegion.create_file(tmp_path / "f", 1, mode=0o4600)) == (
        Reason.FIELD_INVALID,
        "mode",
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to any group")
def test_group(tmp_path: Path) -> None:
    import grp

    name, number = grp.getgrall()[-1].gr_name, grp.getgrall()[-1].gr_gid
    for group in (name, number, 12345):
        with SharedRegion.create_file(tmp_path / "f", 10, mode=0o660, group=group):
            assert os.stat(tmp_path / "f").st_gid == (12345 if group == 12345 else number)


def test_bad_groups(tmp_path: Path) -> None:
    for group in ("no such group", -1, 2**32 - 1):
        assert reason_of(lambda group=group: SharedRegion.create_file(tmp_path / "f", 10, group=group)) == (  # type: ignore[misc]
            Reason.FIELD_INVALID,
            "group",
        )
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_or_followed(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"mine")
    (tmp_path / "link").symlink_to("elsewhere")
    for name in ("f", "link"):
        assert reason_of(lambda name=name: SharedRegion.create_file(tmp_path / name, 10))[1] == "path"  # type: ignore[misc]
    assert (tmp_path / "f").read_bytes() == b"mine"
    assert not (tmp_path / "elsewhere").exists()


def test_bad_sizes_and_names(tmp_path: Path) -> None:
    for size in (0, -1, 2**63):
        assert reason_of(lambda size=size: SharedRegion.create_shm(size)) == (Reason.MEMORY_HANDLE_INVALID, "size")  # type: ignore[misc]
        assert reason_of(lambda size=size: SharedRegion.create_memfd(size)) == (Reason.MEMORY_HANDLE_INVALID, "size")  # type: ignore[misc]
        assert reason_of(lambda size=size: SharedRegion.create_file(tmp_path / "f", size))[1] == "size"  # type: ignore[misc]
    assert reason_of(lambda: SharedRegion.create_shm(1, "a/b")) == (Reason.MEMORY_HANDLE_INVALID, "name")
    assert reason_of(lambda: SharedRegion.create_file("relative", 1)) == (Reason.MEMORY_HANDLE_INVALID, "path")


def test_more_than_there_is(tmp_path: Path) -> None:
    before = usage()
    assert reason_of(lambda: SharedRegion.create_memfd(2**50))[0] is Reason.MEMORY_LIMIT
    assert reason_of(lambda: SharedRegion.create_shm(2**50))[0] is Reason.MEMORY_LIMIT
    assert reason_of(lambda: SharedRegion.create_file(tmp_path / "f", 2**62))[0] is Reason.MEMORY_LIMIT
    assert usage() == before
    assert list(tmp_path.iterdir()) == []


def test_no_room_leaves_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = usage()
    assert reason_of(lambda: SharedRegion.create_file(tmp_path / "f", 10))[0] is Reason.MEMORY_LIMIT
    assert reason_of(lambda: SharedRegion.create_memfd(10))[0] is Reason.MEMORY_LIMIT
    assert usage() == before
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_mapped(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(10))
    (tmp_path / "link").symlink_to("f")
    os.mkfifo(tmp_path / "pipe")
    before = usage()
    assert reason_of(lambda: SharedRegion.map(Owned(10)))[0] is Reason.UNSUPPORTED
    assert reason_of(lambda: SharedRegion.map(Address(4096, 10)))[0] is Reason.UNSUPPORTED
    for name, size, reason in (
        ("none", 1, Reason.MEMORY_HANDLE_INVALID),
        ("link", 1, Reason.MEMORY_NOT_ALLOWED),
        ("pipe", 1, Reason.MEMORY_NOT_ALLOWED),
        ("f", 11, Reason.REGION_TOO_SMALL),
    ):
        handle = FileHandle(str(tmp_path / name), 0, size)
        assert reason_of(lambda handle=handle: SharedRegion.map(handle))[0] is reason  # type: ignore[misc]
    assert reason_of(lambda: SharedRegion.map(PosixShm("/kvxfer-none", 1))) == (Reason.MEMORY_HANDLE_INVALID, "name")
    assert reason_of(lambda: SharedRegion.map(Memfd(os.getpid(), 2**31 - 1, 0, 1))) == (
        Reason.MEMORY_HANDLE_INVALID,
        "fd",
    )
    assert usage() == before


def test_a_file_that_is_cut_between_looking_and_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(10_000))
    look = os.fstat

    def look_and_cut(fd: int) -> os.stat_result:
        status = look(fd)
        os.truncate(path, 10)
        return status

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", look_and_cut)
        assert reason_of(lambda: SharedRegion.map(FileHandle(str(path), 0, 10_000)))[0] is Reason.REGION_TOO_SMALL


def test_a_closed_memfd_is_gone_for_the_sidecar_and_a_mapped_one_is_not(policy: MemoryPolicy) -> None:
    region = SharedRegion.create_memfd(100)
    mapped = open_region(region.handle, policy)
    region.close()
    assert reason_of(lambda: open_region(region.handle, policy))[0] is Reason.MEMORY_HANDLE_INVALID
    assert ctypes.string_at(mapped.address, 100) == bytes(100)
    mapped.close()
