"""Memory handles as messages."""

from __future__ import annotations

from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import MemoryKind, Region
from kvxfer.memory.handles import Address, CudaIpc, FileHandle, Handle, Memfd, Owned, OwnedBacking, PosixShm
from kvxfer.pb import layout_pb2 as pb
from kvxfer.wire.fields import at, choice, refuse, under, variant

BACKINGS: Final = {
    pb.OWNED_BACKING_FILE: OwnedBacking.FILE,
    pb.OWNED_BACKING_MEMFD: OwnedBacking.MEMFD,
    pb.OWNED_BACKING_CUDA: OwnedBacking.CUDA,
}
BACKINGS_OUT: Final = {backing: number for number, backing in BACKINGS.items()}

#: The fields of a MemoryHandle that stand for each type.
KINDS_OUT: Final = {
    PosixShm: "posix_shm",
    FileHandle: "file",
    Memfd: "memfd",
    Owned: "owned",
    Address: "address",
    CudaIpc: "cuda_ipc",
}


def handle_path(handle: Handle, field: str) -> str:
    """Where an attribute of a handle stands in its message: the size belongs to the handle, the rest to its kind."""
    return field if field == "size" else at(KINDS_OUT[type(handle)], field) if field else ""


def handle_from_pb(message: pb.MemoryHandle, field: str, region: Region | None = None) -> Handle:
    """Check and convert a handle.

    :param region: what it stands for, where that is known: its size and kind of memory must agree, and an address and
        memory of a GPU take their device from there.
    :raises KvxferError: FIELD_INVALID (no kind), MEMORY_HANDLE_INVALID.
    """
    kind = variant(message, "kind", field)
    size = message.size
    if region is not None and size != region.size:
        raise _invalid(
            at(field, "size"), f"is {size}; the region has {region.size}", value=size, region_size=region.size
        )
    on_gpu = kind == "cuda_ipc" or (kind == "owned" and message.owned.backing == pb.OWNED_BACKING_CUDA)
    if region is not None and kind != "address" and on_gpu != (region.memory is MemoryKind.VRAM):
        what = "memory of a GPU" if on_gpu else "host memory"
        said = region.memory.value
        raise _invalid(at(field, kind), f"is {what}; the region says {said}", memory=said)
    device = 0 if region is None else region.device
    if size == 0:
        raise _invalid(at(field, "size"), "is 0; it takes at least 1 byte", value=size)
    # The size belongs to the handle, everything else to its kind.
    inside = at(field, kind)
    try:
        match kind:
            case "posix_shm":
                return PosixShm(message.posix_shm.name, size)
            case "file":
                return FileHandle(message.file.path, message.file.offset, size)
            case "memfd":
                return Memfd(message.memfd.pid, message.memfd.fd, message.memfd.offset, size)
            case "owned":
                return Owned(size, choice(message.owned.backing, BACKINGS, "backing"), device if on_gpu else 0)
            case "cuda_ipc":
                named = message.cuda_ipc
                return CudaIpc(named.handle, named.offset, size, device, named.device_uuid)
            case "address":
                memory = MemoryKind.DRAM if region is None else region.memory
                return Address(message.address.address, size, memory, device)
    except KvxferError as error:
        raise error.within(field if error.field == "size" else inside) from None
    raise KvxferError(Reason.UNSUPPORTED, f"{inside} is not supported", field=inside, kind=kind)


def handles_from_pb(
    messages: list[pb.MemoryHandle], regions: tuple[Region, ...], field: str = "memory"
) -> tuple[Handle, ...]:
    """One handle for each region.  :raises KvxferError: as :func:`handle_from_pb`; FIELD_INVALID for the number."""
    if len(messages) != len(regions):
        raise refuse(
            field,
            f"are {len(messages)} handles for {len(regions)} regions; one for each is needed",
            value=len(messages),
            regions=len(regions),
        )
    return tuple(
        handle_from_pb(message, f"{field}[{i}]", region)
        for i, (message, region) in enumerate(zip(messages, regions, strict=True))
    )


def handle_to_pb(handle: Handle) -> pb.MemoryHandle:
    """A handle as a message.

    :raises KvxferError: MEMORY_HANDLE_INVALID where a name or path is not UTF-8, as messages need it.
    """
    match handle:
        case PosixShm():
            with under("posix_shm"):
                return pb.MemoryHandle(size=handle.size, posix_shm=pb.PosixShmMemory(name=_utf8(handle.name, "name")))
        case FileHandle():
            with under("file"):
                return pb.MemoryHandle(
                    size=handle.size, file=pb.FileMemory(path=_utf8(handle.path, "path"), offset=handle.offset)
                )
        case Memfd():
            return pb.MemoryHandle(
                size=handle.size, memfd=pb.MemfdMemory(pid=handle.pid, fd=handle.fd, offset=handle.offset)
            )
        case Owned():
            return pb.MemoryHandle(size=handle.size, owned=pb.OwnedMemory(backing=BACKINGS_OUT[handle.backing]))
        case CudaIpc():
            named = pb.CudaIpcMemory(handle=handle.handle, offset=handle.offset, device_uuid=handle.uuid)
            return pb.MemoryHandle(size=handle.size, cuda_ipc=named)
        case Address():
            return pb.MemoryHandle(size=handle.size, address=pb.AddressMemory(address=handle.address))


def _utf8(value: str, field: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _invalid(field, f"is {value!r}, which is not UTF-8") from None
    return value


def _invalid(field: str, message: str, **values: object) -> KvxferError:
    return refuse(field, message, reason=Reason.MEMORY_HANDLE_INVALID, **values)
