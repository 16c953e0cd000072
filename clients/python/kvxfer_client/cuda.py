"""The engine's side of memory that a sidecar has made on a GPU.  Untested on one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory.cuda import driver, number_of
from kvxfer.memory.handles import CudaIpc

if TYPE_CHECKING:
    import torch


class DeviceRegion:
    """A piece of a sidecar's device memory, opened in this process: what it exports for an :class:`Owned` region.

    Close it before the cache is unregistered: the sidecar frees the memory then, and the driver says nothing of what
    becomes of those who still have it open.  Tensors on it must be gone by then, too.  A context manager: closes at
    the end.
    """

    def __init__(self, handle: CudaIpc, device: int, base: int) -> None:
        """Not for callers; see :meth:`map`."""
        self.handle: Final = handle
        #: Number of the GPU in this process, which need not be the sidecar's.
        self.device: Final = device
        self._base = base

    @classmethod
    def map(cls, handle: CudaIpc) -> DeviceRegion:
        """Open what a sidecar has exported.

        :raises KvxferError: MEMORY_HANDLE_INVALID where it is none that this process may open, or of a GPU that it does
            not see; REGION_TOO_SMALL; UNSUPPORTED without NVIDIA's driver.
        """
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
        return cls(handle, device, base)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.handle.size

    @property
    def address(self) -> int:
        """Of the first byte, in this process.

        :raises KvxferError: FIELD_INVALID where it is closed.
        """
        if not self._base:
            raise KvxferError(Reason.FIELD_INVALID, "the region is closed", field="region")
        return self._base + self.handle.offset

    def torch(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        """A contiguous CUDA tensor on the region's bytes from ``offset`` on.

        :raises KvxferError: REGION_TOO_SMALL where it does not fit; FIELD_INVALID for a closed region.
        """
        import torch

        size = math.prod(shape) * dtype.itemsize
        if offset < 0 or offset + size > self.size:
            raise KvxferError(
                Reason.REGION_TOO_SMALL,
                f"{size} bytes from offset {offset} do not fit into {self.size}",
                field="shape",
                offset=offset,
                needed=offset + size,
                actual=self.size,
            )
        flat = torch.as_tensor(_Bytes(self.address + offset, size), device=f"cuda:{self.device}")
        return flat.view(dtype).reshape(tuple(shape))

    def close(self) -> None:
        """Close it.  Idempotent."""
        base, self._base = self._base, 0
        if base:
            driver().close(self.device, base)

    def __enter__(self) -> DeviceRegion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Bytes:
    """Device memory as others take it over: version 3 of Numba's CUDA array interface."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
