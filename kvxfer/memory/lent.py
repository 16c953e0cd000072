"""Memory of this process that is lent by its address: kept for as long as it is registered.

An address keeps nothing alive.  Where engine and sidecar are one process, whoever makes an address of an object says so
here, and the sidecar takes a reference to it with the region and drops it once nobody reads or writes there any more.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Final, Protocol
from weakref import WeakValueDictionary


class Lender(Protocol):
    """Something that keeps memory alive by being there; can be referred to weakly."""

    @property
    def handle(self) -> Hashable:
        """What the memory is called."""


_lenders: Final[WeakValueDictionary[int, Lender]] = WeakValueDictionary()
_lock: Final = threading.Lock()


def lend(lender: Lender) -> None:
    """Tell of memory that is there as long as ``lender`` is."""
    with _lock:
        _lenders[id(lender)] = lender


def lenders(handle: Hashable) -> tuple[Lender, ...]:
    """Everybody who keeps the memory of this name; keep them, to have it kept."""
    with _lock:
        return tuple(lender for lender in _lenders.values() if lender.handle == handle)
