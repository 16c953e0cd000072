"""What is read: a dense cache, of which one half of the blocks is moved, and what its bytes must be then."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Axis, AxisKind, CacheLayout, Component, Group, GroupKind, Region, UnitRange, View

Bytes = npt.NDArray[np.uint8]

#: Tokens in a block.
TOKENS: Final = 16
GROUP: Final = "attention"
_DTYPE, _ELEMENT = "bfloat16", 2
_LAYERS: Final = 16
#: Blocks of each layer's cache, for each that is read.
_SPARE: Final = 2
_BINARY: Final = {"k": 2**10, "m": 2**20, "g": 2**30, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_UNITS: Final = {"": 1, "b": 1, **_BINARY, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_LARGEST: Final = 64 * 2**30


def size(text: str, field: str) -> int:
    """Bytes from ``64MiB``, ``64M`` (the same), ``64 KiB`` or ``65536``.  :raises KvxferError: FIELD_INVALID."""
    match = re.fullmatch(r"(\d{1,15})\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS or not 0 < (found := int(match[1]) * _UNITS[match[2]]) <= _LARGEST:
        raise KvxferError(
            Reason.FIELD_INVALID,
            f"--{field} is {text!r}; it takes bytes up to {_LARGEST // 2**30}GiB, such as 65536, 64KiB, 64MiB or 1GiB "
            "(K, M and G are KiB, MiB and GiB)",
            field=field,
        )
    return found


def dense_layout(block: int, count: int, layers: int) -> CacheLayout:
    """A cache of attention layers, each a region of ``count`` blocks of ``block`` bytes and :data:`TOKENS` tokens."""
    axes = (
        Axis(AxisKind.UNIT, 1),
        Axis(AxisKind.TOKEN, TOKENS),
        Axis(AxisKind.INNER, block // TOKENS // _ELEMENT),
    )
    kv = Component("kv", _DTYPE, _ELEMENT, axes, UnitRange(0, 1, 1))
    views = tuple(View(f"layers.{i}", i, 0, block, count, (kv,)) for i in range(layers))
    regions = tuple(Region(count * block) for _ in range(layers))
    return CacheLayout(regions, (Group(GROUP, GroupKind.ATTENTION, views, TOKENS),))


@dataclass(frozen=True, slots=True)
class Case:
    """``blocks`` blocks of ``block`` bytes in each of ``layers`` layers.

    :param scrambled: block IDs in random order on both sides, as a busy scheduler's; else from 0 on.
    """

    block: int
    blocks: int
    layers: int
    scrambled: bool

    @classmethod
    def of(cls, total: int, block: int, scrambled: bool) -> Case:
        """A case that moves ``total`` bytes.

        :raises KvxferError: FIELD_INVALID where they do not fit together.
        """
        grain = TOKENS * _ELEMENT
        if block % grain:
            raise KvxferError(
                Reason.FIELD_INVALID, f"--block is {block}; it takes a multiple of {grain} bytes", field="block"
            )
        if total % block:
            raise KvxferError(
                Reason.FIELD_INVALID, f"--size is {total}; it takes a multiple of --block, {block} bytes", field="size"
            )
        layers = math.gcd(total // block, _LAYERS)
        return cls(block, total // block // layers, layers, scrambled)

    @property
    def bytes(self) -> int:
        """Bytes that a read moves."""
        return self.block * self.blocks * self.layers

    @property
    def tokens(self) -> int:
        """Tokens whose cache is moved."""
        return self.blocks * TOKENS

    @property
    def layout(self) -> CacheLayout:
        """Of both sides."""
        return dense_layout(self.block, self.blocks * _SPARE, self.layers)

    def ids(self, side: str) -> npt.NDArray[np.int64]:
        """Block IDs of ``P`` or ``D``, by position."""
        if not self.scrambled:
            return np.arange(self.blocks, dtype=np.int64)
        chosen = np.random.default_rng(ord(side)).permutation(self.blocks * _SPARE)[: self.blocks]
        return chosen.astype(np.int64)

    def fill(self, region: int, memory: Bytes) -> None:
        """Put P's noise into a region."""
        memory[:] = np.random.default_rng([ord("P"), region]).integers(0, 256, memory.size, dtype=np.uint8)

    def wrong(self, source: Bytes, target: Bytes) -> int:
        """Blocks of a region that are not what a read must leave in memory that was zero before."""
        shape = (self.blocks * _SPARE, self.block)
        due: np.ndarray[Any, np.dtype[np.uint8]] = np.zeros(shape, dtype=np.uint8)
        due[self.ids("D")] = source.reshape(shape)[self.ids("P")]
        return int((due != target.reshape(shape)).any(axis=1).sum())
