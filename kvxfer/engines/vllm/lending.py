"""The tensor that vLLM makes its cache in, on memory that another process sees.

vLLM makes its whole cache with one ``torch.zeros`` inside the context that the connector gives it; in host memory that
call can be answered with a tensor on shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvxfer.engines.vllm.settings import not_in_host_memory
from kvxfer_client import SharedRegion


class Lent(TorchFunctionMode):  # type: ignore[misc]
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
