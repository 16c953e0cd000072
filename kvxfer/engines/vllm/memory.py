"""Where the cache lies: made by the sidecar, shared with it, or read in this very process.

vLLM makes its whole cache with one ``torch.zeros`` inside the context that the connector gives it; in host memory that
call can be answered with a tensor on shared memory.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import (
    Axis,
    AxisKind,
    CacheLayout,
    Component,
    Group,
    GroupKind,
    Region,
    UnitRange,
    View,
)
from kvxfer.engines.vllm.settings import MemoryMode
from kvxfer_client import SharedRegion


class Lent(TorchFunctionMode):
    """While it is active, the tensor of ``size`` bytes that is made lies in ``region``.

    :param make: makes the region; called once, when the tensor is made.
    """

    def __init__(self, size: int, make: Callable[[int], SharedRegion]) -> None:
        super().__init__()
        self._size = size
        self._make = make

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.zeros and args and args[0] == self._size and options.get("dtype") is torch.int8:
            if torch.device(options.get("device") or "cpu").type != "cpu":
                raise not_in_host_memory(str(options.get("device")))
            return self._make(self._size).torch(torch.int8, (self._size,))
        return func(*args, **options)


def not_in_host_memory(device: str) -> KvxferError:
    """An error about a cache on an accelerator."""
    return KvxferError(
        Reason.UNSUPPORTED,
        f"the cache is on {device}, and only host memory can be shared between engine and sidecar: use memory="
        f"{MemoryMode.EMBEDDED.value}",
    )


def shared(directory: str, size: int) -> SharedRegion:
    """Memory of this process for the sidecar to map: a file in ``directory``, or a memfd where there is none."""
    if not directory:
        return SharedRegion.create_memfd(size)
    return SharedRegion.create_file(Path(directory) / f"vllm-{os.getpid()}-{secrets.token_hex(8)}", size)


def bytes_only(size: int) -> CacheLayout:
    """A layout that says nothing but how large it is, to have the memory before the tensors are known."""
    whole = Component(
        "bytes", "uint8", 1, (Axis(AxisKind.UNIT, 1), Axis(AxisKind.INNER, size)), UnitRange(0, 1, 1)
    )
    view = View("memory", 0, 0, size, 1, (whole,))
    return CacheLayout((Region(size),), (Group("memory", GroupKind.STATE, (view,)),))
