"""Opening memory handles: the one entrance to this package.

:func:`open_region` checks a handle against the policy and the real object, maps it and returns a
:class:`MappedRegion`.  It may block while the kernel allocates pages; call it off the event loop.
"""

from __future__ import annotations

from typing import Protocol

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import MemoryKind
from kvxfer.memory.address import open_address
from kvxfer.memory.cuda_ipc import create_cuda, open_cuda
from kvxfer.memory.file import open_file
from kvxfer.memory.handles import (
    Address,
    CudaIpc,
    FileHandle,
    Handle,
    Mappable,
    Memfd,
    Owned,
    OwnedBacking,
    PosixShm,
)
from kvxfer.memory.mapping import MemoryIdentity
from kvxfer.memory.memfd import open_memfd
from kvxfer.memory.owned import adopt_owned, create_owned, is_owned, list_owned
from kvxfer.memory.policy import MemoryPolicy
from kvxfer.memory.posix_shm import open_posix_shm

__all__ = ["MappedRegion", "MemoryPolicy", "adopt_owned", "list_owned", "open_region", "take_region"]


class MappedRegion(Protocol):
    """Memory that this process can hand to the transfer engine."""

    @property
    def address(self) -> int:
        """Of the first byte, in this process."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def kind(self) -> MemoryKind:
        """Host or device memory."""

    @property
    def device(self) -> int:
        """Number of the GPU; 0 for host memory."""

    @property
    def identity(self) -> MemoryIdentity:
        """Which bytes it really is, however it was named."""

    def export(self) -> Mappable | None:
        """What the engine maps, for memory that the sidecar created; None otherwise."""

    def close(self, *, keep: bool = False) -> None:
        """Unmap, and remove what was created unless ``keep``; idempotent.

        Nobody may use the address afterwards: deregister it first, and wait for the peers
        (a NIXL target whose readable memory is unmapped crashes).
        """


def open_region(handle: Handle, policy: MemoryPolicy) -> MappedRegion:
    """Check and map what ``handle`` names.

    :raises KvxferError: MEMORY_NOT_ALLOWED where the policy or the kernel refuses; REGION_TOO_SMALL where the object is
        smaller than the handle says; MEMORY_LIMIT where it is larger than allowed or there is no room;
        MEMORY_HANDLE_INVALID where there is no such object; LIMIT_EXCEEDED where file descriptors ran out; UNSUPPORTED
        where it cannot be mapped.  The field is that of the handle.  Nothing stays open or mapped after an error.
    """
    match handle:
        case PosixShm():
            return open_posix_shm(handle, policy)
        case FileHandle():
            return open_file(handle, policy)
        case Memfd():
            return open_memfd(handle, policy)
        case Owned(backing=OwnedBacking.CUDA):
            return create_cuda(handle, policy)
        case CudaIpc():
            return open_cuda(handle, policy)
        case Owned():
            return create_owned(handle, policy)
        case Address():
            return open_address(handle, policy)
    raise KvxferError(
        Reason.UNSUPPORTED,
        f"memory handles of type {type(handle).__name__} are not supported",
        type=type(handle).__name__,
    )


def take_region(handle: Handle, policy: MemoryPolicy) -> MappedRegion:
    """As :func:`open_region`, for good: a file that a sidecar made is this one's from now on, and goes with the region.

    That is how a cache outlives its sidecar: the engine names the file that it was told of, and still has mapped.

    :raises KvxferError: as :func:`open_region`.
    """
    if isinstance(handle, FileHandle) and is_owned(handle, policy):
        return adopt_owned(handle, policy)
    return open_region(handle, policy)
