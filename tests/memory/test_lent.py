"""Whoever lends memory by its address is kept for as long as it is registered."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from kvxfer.memory.address import open_address
from kvxfer.memory.handles import Address
from kvxfer.memory.lent import lend, lenders
from kvxfer.memory.policy import MemoryPolicy


class Lent:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.handle = Address(array.ctypes.data, array.nbytes)
        lend(self)


def test_a_lender_stays_until_the_region_is_closed() -> None:
    array = np.zeros(100, np.uint8)
    handle, seen = Address(array.ctypes.data, array.nbytes), weakref.ref(array)
    first, second = Lent(array), Lent(array)
    assert set(lenders(handle)) == {first, second}
    region = open_address(handle, MemoryPolicy(allow_address=True))
    del array, first, second
    gc.collect()
    assert seen() is not None
    region.close()
    gc.collect()
    assert seen() is None
    assert lenders(handle) == ()


def test_others_are_not_kept() -> None:
    lent, other = Lent(np.zeros(10, np.uint8)), Lent(np.zeros(10, np.uint8))
    assert lenders(lent.handle) == (lent,)
    assert lenders(Address(other.handle.address, 9)) == ()
