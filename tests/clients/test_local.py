"""Arrays and tensors as regions of an embedded sidecar."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import MemoryKind
from kvxfer_client import Address
from kvxfer_client.checks import handles
from kvxfer_client.local import LocalRegion, _at

torch = pytest.importorskip("torch")


def test_an_array() -> None:
    array = np.zeros((3, 4), np.float32)
    region = LocalRegion(array)
    assert region.handle == Address(array.ctypes.data, 48)
    assert region.size == 48
    assert handles([region]) == (region.handle,)
    assert LocalRegion(array.T).handle == region.handle
    assert LocalRegion(array[1:]).handle == Address(array.ctypes.data + 16, 32)


def test_a_tensor_and_its_storage() -> None:
    tensor = torch.zeros(4, 3, 2, dtype=torch.bfloat16)
    region = LocalRegion(tensor)
    assert region.handle == Address(tensor.data_ptr(), 48)
    assert LocalRegion(tensor.permute(2, 0, 1)).handle == region.handle
    part = tensor[:, 1:]
    with pytest.raises(KvxferError, match="gaps"):
        LocalRegion(part)
    assert LocalRegion(part.untyped_storage()).handle == region.handle


def test_it_keeps_the_storage_of_a_tensor_that_gets_another() -> None:
    tensor = torch.zeros(1000)
    region, storage = LocalRegion(tensor), weakref.ref(tensor.untyped_storage())
    tensor.set_(torch.zeros(10))
    del tensor
    gc.collect()
    assert storage() is not None
    del region
    gc.collect()
    assert storage() is None


READ_ONLY = np.zeros(3)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "memory, says",
    [
        (b"bytes", "memory is a bytes; allowed: a NumPy array"),
        ([1], "memory is a list"),
        (np.zeros(0), "empty"),
        (np.zeros((3, 3), np.uint8)[:, :2], r"strides \(3, 1\) has gaps"),
        (np.zeros(9)[::-1], "backwards"),
        (np.zeros(9)[::2], "gaps"),
        (np.lib.stride_tricks.as_strided(np.zeros(9), (3, 3), (16, 16)), "gaps"),
        (np.broadcast_to(np.zeros(3), (3, 3)).copy()[:1, :0], "empty"),
        (np.array([None]), "Python objects"),
        (READ_ONLY, "read-only"),
        (torch.zeros(0), "empty"),
        (torch.zeros(1).expand(3), "gaps"),
        (torch.zeros(3, device="meta"), "not there yet"),
    ],
)
def test_what_cannot_be_lent(memory: Any, says: str) -> None:
    with pytest.raises(KvxferError, match=says) as caught:
        LocalRegion(memory)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "memory")


def test_where_a_tensor_is() -> None:
    assert _at(4096, 8, torch.device("cuda", 3)) == Address(4096, 8, MemoryKind.VRAM, 3)
    assert _at(4096, 8, torch.device("cuda")) == Address(4096, 8, MemoryKind.VRAM, 0)
    with pytest.raises(KvxferError, match="device xpu"):
        _at(4096, 8, torch.device("xpu"))
