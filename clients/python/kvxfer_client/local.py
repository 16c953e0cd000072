"""Memory of the engine's own process, for a sidecar that is embedded in it (:mod:`kvxfer.embedded`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import MemoryKind
from kvxfer.memory.handles import Address, Handle
from kvxfer.memory.lent import lend
from kvxfer_client.memory import SharedRegion

if TYPE_CHECKING:
    import torch


class LocalRegion:
    """An array or tensor of this process, lent to a sidecar that is embedded in it.

    Give it to :meth:`Client.session` or :meth:`Client.register` as it is.  The memory then stays until the registration
    has ended, also where the engine has let go of the array before: nothing is read or written that was freed.  It is
    the object that is kept; who shrinks or moves its storage in place (``resize_``, a sleep mode) unregisters first.

    Any order of axes will do, since a region is bytes, but there may be no gaps: of a tensor that is a part of a larger
    one hand over the storage (``tensor.untyped_storage()``), and give views their offset in the layout.

    :param memory: a NumPy array, or a tensor or storage of torch, on the CPU or a CUDA device.

    :raises KvxferError: FIELD_INVALID where it is something else, empty, read-only, or has gaps.
    """

    def __init__(self, memory: npt.NDArray[Any] | torch.Tensor | torch.UntypedStorage) -> None:
        torch: Any = sys.modules.get("torch")  # a tensor cannot be there without it
        if isinstance(memory, np.ndarray):
            self._kept: Any = memory
            found = _of_array(memory)
        elif torch is not None and isinstance(memory, torch.Tensor):
            self._kept = (memory, memory.untyped_storage())
            found = _of_tensor(memory)
        elif torch is not None and isinstance(memory, torch.UntypedStorage):
            self._kept = memory
            found = _at(memory.data_ptr(), memory.nbytes(), memory.device)
        else:
            raise _unfit(f"memory is a {type(memory).__name__}", "a NumPy array, or a tensor or storage of torch")
        #: What the sidecar is told.
        self.handle: Final[Address] = found
        lend(self)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.handle.size

    def __repr__(self) -> str:
        return f"<LocalRegion {self.handle!r}>"


#: What an engine gives for a region of its layout.
Memory: TypeAlias = Handle | SharedRegion | LocalRegion


def _of_array(array: npt.NDArray[Any]) -> Address:
    if array.dtype.hasobject:
        raise _unfit("the array holds Python objects", "numbers")
    if not array.flags.writeable:
        raise _unfit("the array is read-only", "one that can be written")
    if array.size:
        _check_dense(array.shape, array.strides, array.itemsize)
    return _at(array.ctypes.data, array.nbytes, None)


def _of_tensor(tensor: torch.Tensor) -> Address:
    if tensor.numel():
        _check_dense(tuple(tensor.shape), tensor.stride(), 1)
    return _at(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor.device)


def _check_dense(shape: Sequence[int], strides: Sequence[int], item: int) -> None:
    """No element is there twice, and nothing lies between them."""
    expected = item
    for stride, extent in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride != expected:
            raise _unfit(
                f"memory of shape {tuple(shape)} with strides {tuple(strides)} has gaps or runs backwards",
                "memory without gaps; of a part of a larger tensor, its untyped_storage()",
            )
        expected *= extent


def _at(address: int, size: int, device: torch.device | None) -> Address:
    if size == 0 or address == 0:
        raise _unfit("memory is empty, or not there yet", "1 byte or more")
    if device is None or device.type == "cpu":
        return Address(address, size)
    if device.type != "cuda":
        raise _unfit(f"memory is on device {device}", "the CPU or a CUDA device")
    return Address(address, size, MemoryKind.VRAM, device.index or 0)


def _unfit(what: str, allowed: str) -> KvxferError:
    return KvxferError(Reason.FIELD_INVALID, f"{what}; allowed: {allowed}", field="memory", allowed=allowed)
