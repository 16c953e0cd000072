from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import MAX_BYTES, MemoryKind, Region
from kvxfer.memory.handles import Address, CudaIpc, FileHandle, Handle, Memfd, Owned, OwnedBacking, PosixShm
from kvxfer.pb import layout_pb2 as pb
from kvxfer.wire.handles import handle_from_pb, handle_to_pb, handles_from_pb

sizes = st.integers(1, 2**62)
offsets = st.integers(0, 2**62 - 1)
ints = st.integers(0, 2**31 - 1)
handles = st.one_of(
    st.builds(PosixShm, st.sampled_from(["/a", "/kvxfer-7", "/ü"]), sizes),
    st.builds(FileHandle, st.sampled_from(["/dev/shm/a", "/x/ü.kv"]), offsets, sizes),
    st.builds(Memfd, st.integers(1, 2**31 - 1), ints, offsets, sizes),
    st.builds(Owned, sizes, st.sampled_from(OwnedBacking)),
    st.builds(
        CudaIpc, st.binary(min_size=64, max_size=64), offsets, sizes, st.just(0), st.sampled_from([b"", b"u" * 16])
    ),
    st.builds(Address, st.integers(1, 2**62 - 1), sizes),
)


@given(handles)
def test_round_trip(handle: Handle) -> None:
    message = pb.MemoryHandle.FromString(handle_to_pb(handle).SerializeToString())
    assert handle_from_pb(message, "memory[0]") == handle
    on_gpu = isinstance(handle, CudaIpc) or (isinstance(handle, Owned) and handle.backing is OwnedBacking.CUDA)
    region = Region(handle.size, MemoryKind.VRAM if on_gpu else MemoryKind.DRAM)
    assert handle_from_pb(message, "memory[0]", region) == handle


def test_address_takes_kind_and_device_of_its_region() -> None:
    message = handle_to_pb(Address(4096, 64, MemoryKind.VRAM, 2))
    assert handle_from_pb(message, "m", Region(64, MemoryKind.VRAM, 2)) == Address(4096, 64, MemoryKind.VRAM, 2)


def test_memory_of_a_gpu_takes_the_device_of_its_region() -> None:
    region = Region(64, MemoryKind.VRAM, 2)
    for handle in (CudaIpc(bytes(64), 8, 64, 2, bytes(16)), Owned(64, OwnedBacking.CUDA, 2)):
        assert handle_from_pb(handle_to_pb(handle), "m", region) == handle
        with pytest.raises(KvxferError, match="is memory of a GPU; the region says dram"):
            handle_from_pb(handle_to_pb(handle), "m", Region(64))


FILE = pb.FileMemory(path="/dev/shm/a")


@pytest.mark.parametrize(
    "message, field, reason",
    [
        (pb.MemoryHandle(size=64), "kind", Reason.FIELD_INVALID),
        (pb.MemoryHandle(file=FILE), "size", Reason.MEMORY_HANDLE_INVALID),
        (pb.MemoryHandle(size=65, file=FILE), "size", Reason.MEMORY_HANDLE_INVALID),
        (pb.MemoryHandle(size=2**64 - 1, file=FILE), "size", Reason.MEMORY_HANDLE_INVALID),
        (pb.MemoryHandle(size=64, file=pb.FileMemory()), "file.path", Reason.MEMORY_HANDLE_INVALID),
        (pb.MemoryHandle(size=64, file=pb.FileMemory(path="/a/../b")), "file.path", Reason.MEMORY_HANDLE_INVALID),
        (pb.MemoryHandle(size=64, file=pb.FileMemory(path="/a\0b")), "file.path", Reason.MEMORY_HANDLE_INVALID),
        (
            pb.MemoryHandle(size=64, file=pb.FileMemory(path="/a", offset=2**64 - 1)),
            "file.offset",
            Reason.MEMORY_HANDLE_INVALID,
        ),
        (pb.MemoryHandle(size=64, posix_shm=pb.PosixShmMemory()), "posix_shm.name", Reason.MEMORY_HANDLE_INVALID),
        (pb.MemoryHandle(size=64, posix_shm=pb.PosixShmMemory(name="/a/b")), "posix_shm.name", None),
        (pb.MemoryHandle(size=64, memfd=pb.MemfdMemory(fd=1)), "memfd.pid", Reason.MEMORY_HANDLE_INVALID),
        (pb.MemoryHandle(size=64, memfd=pb.MemfdMemory(pid=1, fd=2**32 - 1)), "memfd.fd", None),
        (pb.MemoryHandle(size=64, owned=pb.OwnedMemory()), "owned.backing", Reason.FIELD_INVALID),
        (pb.MemoryHandle(size=64, owned=pb.OwnedMemory(backing=7)), "owned.backing", Reason.FIELD_INVALID),  # type: ignore[arg-type]
        (pb.MemoryHandle(size=64, cuda_ipc=pb.CudaIpcMemory(handle=b"x" * 64)), "cuda_ipc", None),
        (pb.MemoryHandle(size=64, owned=pb.OwnedMemory(backing=pb.OWNED_BACKING_CUDA)), "owned", None),
        (pb.MemoryHandle(size=64, address=pb.AddressMemory()), "address.address", Reason.MEMORY_HANDLE_INVALID),
        (pb.MemoryHandle(size=64, address=pb.AddressMemory(address=2**64 - 1)), "address.address", None),
    ],
)
def test_refuses_and_names_the_field(message: pb.MemoryHandle, field: str, reason: Reason | None) -> None:
    with pytest.raises(KvxferError) as caught:
        handles_from_pb([message], (Region(64),))
    assert caught.value.field == f"memory[0].{field}"
    assert caught.value.reason is (reason or Reason.MEMORY_HANDLE_INVALID)


def test_size_that_overflows_is_named() -> None:
    message = pb.MemoryHandle(size=MAX_BYTES, file=pb.FileMemory(path="/a", offset=MAX_BYTES))
    with pytest.raises(KvxferError) as caught:
        handle_from_pb(message, "m")
    assert caught.value.field == "m.size"


def test_host_memory_is_no_vram() -> None:
    message = pb.MemoryHandle(size=64, file=FILE)
    with pytest.raises(KvxferError) as caught:
        handle_from_pb(message, "m", Region(64, MemoryKind.VRAM))
    assert (caught.value.field, caught.value.reason) == ("m.file", Reason.MEMORY_HANDLE_INVALID)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_one_handle_for_each_region(count: int) -> None:
    with pytest.raises(KvxferError) as caught:
        handles_from_pb([pb.MemoryHandle(size=64, file=FILE)] * count, (Region(64), Region(64)))
    assert (caught.value.field, caught.value.reason) == ("memory", Reason.FIELD_INVALID)


@pytest.mark.parametrize("handle", [PosixShm("/\udcff", 1), FileHandle("/\udcff", 0, 1)])
def test_names_that_are_not_utf8_cannot_travel(handle: Handle) -> None:
    with pytest.raises(KvxferError) as caught:
        handle_to_pb(handle)
    assert caught.value.field in ("posix_shm.name", "file.path")


@pytest.mark.parametrize(
    "message, field",
    [
        (pb.CudaIpcMemory(), "handle"),
        (pb.CudaIpcMemory(handle=bytes(63)), "handle"),
        (pb.CudaIpcMemory(handle=bytes(64), device_uuid=bytes(15)), "device_uuid"),
        (pb.CudaIpcMemory(handle=bytes(64), offset=2**63), "offset"),
    ],
)
def test_bad_cuda_handles(message: pb.CudaIpcMemory, field: str) -> None:
    with pytest.raises(KvxferError) as caught:
        handle_from_pb(pb.MemoryHandle(size=64, cuda_ipc=message), "m", Region(64, MemoryKind.VRAM))
    assert (caught.value.reason, caught.value.field) == (Reason.MEMORY_HANDLE_INVALID, f"m.cuda_ipc.{field}")
