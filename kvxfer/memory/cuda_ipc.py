"""Memory of a GPU: made here and exported to the engine, or the engine's, opened here.

**Untested on a GPU.**  Of the two the first is the likelier way: a maintainer of NIXL doubts that memory which was
opened by CUDA IPC can be registered (github.com/ai-dynamo/nixl/issues/154).
"""

from __future__ import annotations

import threading
from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import MemoryKind
from kvxfer.memory.cuda import driver, number_of
from kvxfer.memory.handles import CudaIpc, Owned
from kvxfer.memory.mapping import MemoryIdentity
from kvxfer.memory.policy import MemoryPolicy


class CudaRegion:
    """Device memory that :meth:`close` gives back.

    :param owned: it was made here, and ``handle`` is what the engine opens.
    """

    kind: Final = MemoryKind.VRAM

    def __init__(self, device: int, base: int, handle: CudaIpc, *, owned: bool) -> None:
        self.device: Final = device
        self.size: Final = handle.size
        self.address: Final = base if owned else base + handle.offset
        self.identity: Final = MemoryIdentity(
            ("cuda", handle.uuid.hex(), handle.handle.hex()), handle.offset, handle.size
        )
        self._base: Final = base
        self._handle: Final = handle
        self._owned: Final = owned
        self._open = True
        self._lock: Final = threading.Lock()

    def export(self) -> CudaIpc | None:
        """What the engine opens, of memory that was made here."""
        return self._handle if self._owned else None

    def close(self, *, keep: bool = False) -> None:
        """Free it, or close it where it is the engine's.  Idempotent.

        The engine must have closed what it has open by then: the driver says that anything else is undefined.

        :param keep: has no meaning: device memory does not outlive its process.
        """
        with self._lock:
            was, self._open = self._open, False
        if was:
            undo = driver().free if self._owned else driver().close
            undo(self.device, self._base)


def create_cuda(handle: Owned, policy: MemoryPolicy) -> CudaRegion:
    """Memory on GPU ``handle.device``, zeroed, to be exported.

    :raises KvxferError: MEMORY_NOT_ALLOWED, MEMORY_LIMIT, MEMORY_HANDLE_INVALID (no such GPU), UNSUPPORTED (no driver).
    """
    _check_allowed(policy, "backing")
    policy.check_size(handle.size)
    cuda = driver()
    device = number_of(cuda, b"", handle.device)
    address = cuda.allocate(device, handle.size)
    try:
        exported, offset = cuda.export(device, address)
        named = CudaIpc(exported, offset, handle.size, device, cuda.devices()[device])
    except BaseException:
        cuda.free(device, address)
        raise
    return CudaRegion(device, address, named, owned=True)


def open_cuda(handle: CudaIpc, policy: MemoryPolicy) -> CudaRegion:
    """An allocation of the engine's.

    :raises KvxferError: as :func:`create_cuda`, and REGION_TOO_SMALL.
    """
    _check_allowed(policy, "handle")
    policy.check_size(handle.size)
    cuda = driver()
    device = number_of(cuda, handle.uuid, handle.device)
    base, actual = cuda.open(device, handle.handle)
    if handle.offset + handle.size > actual:
        cuda.close(device, base)
        raise KvxferError(
            Reason.REGION_TOO_SMALL,
            f"the allocation has {actual} bytes; offset {handle.offset} + size {handle.size} does not fit",
            field="size",
            actual=actual,
            offset=handle.offset,
            size=handle.size,
        )
    return CudaRegion(device, base, handle, owned=False)


def _check_allowed(policy: MemoryPolicy, field: str) -> None:
    if not policy.allow_cuda:
        raise KvxferError(
            Reason.MEMORY_NOT_ALLOWED,
            "memory of a GPU is not allowed here (allow_cuda); it was never tested on one",
            field=field,
        )
