"""Strided boxes of bytes: the only geometry that the layout rule needs.

A *strided box* is the set of byte intervals ``[offset + sum(i_d * stride_d), ... + length)`` for every index
``i_d`` in ``[0, extent_d)``.  A component of a cache, over all the blocks of a view, is such a box.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

#: Work limit of :func:`overlap`; past it two boxes count as overlapping (a refusal, never a wrong answer).
OVERLAP_BUDGET: Final = 100_000


@dataclass(frozen=True, slots=True)
class Dim:
    """``extent`` steps of ``stride`` bytes."""

    extent: int
    stride: int


@dataclass(frozen=True, slots=True)
class Box:
    """Byte intervals of ``length`` bytes at ``offset`` plus every combination of ``dims`` (any order)."""

    offset: int
    length: int
    dims: tuple[Dim, ...] = ()

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.length + sum((d.extent - 1) * d.stride for d in self.dims)

    def shifted(self, by: int) -> Box:
        """The same box, ``by`` bytes further on."""
        return Box(self.offset + by, self.length, self.dims)

    def simplified(self) -> Box:
        """The same bytes with dimensions of one step dropped and contiguous ones merged, outermost first."""
        length = self.length
        outer: list[Dim] = []
        for dim in sorted((d for d in self.dims if d.extent > 1), key=lambda d: d.stride):
            if not outer and dim.stride == length:
                length *= dim.extent
            elif outer and dim.stride == outer[-1].stride * outer[-1].extent:
                outer[-1] = Dim(outer[-1].extent * dim.extent, outer[-1].stride)
            else:
                outer.append(dim)
        return Box(self.offset, length, tuple(reversed(outer)))

    def clashing_dim(self) -> Dim | None:
        """The first dimension whose step is shorter than what lies inside it, or ``None`` if no byte occurs twice.

        Dimensions must nest: in order of stride, each stride is at least the span of everything below it.
        """
        span = self.length
        for dim in sorted((d for d in self.dims if d.extent > 1), key=lambda d: d.stride):
            if dim.stride < span:
                return dim
            span += (dim.extent - 1) * dim.stride
        return None


def overlap(a: Box, b: Box) -> bool:
    """Whether two boxes share a byte.  Exact up to :data:`OVERLAP_BUDGET` steps, then pessimistic."""
    budget = [OVERLAP_BUDGET]
    return _overlap(a.simplified(), b.simplified(), budget)


def _overlap(a: Box, b: Box, budget: list[int]) -> bool:
    if a.offset >= b.end or b.offset >= a.end:
        return False
    budget[0] -= 1
    if budget[0] < 0 or not (a.dims or b.dims):
        return True
    if a.dims and b.dims and a.dims[0].stride == b.dims[0].stride:
        # Equal outer strides: only the difference of the two indices matters.
        stride = a.dims[0].stride
        inner_a, inner_b = Box(a.offset, a.length, a.dims[1:]), Box(b.offset, b.length, b.dims[1:])
        lowest = max(-(b.dims[0].extent - 1), _ceil_div(inner_b.offset - inner_a.end + 1, stride))
        highest = min(a.dims[0].extent - 1, (inner_b.end - inner_a.offset - 1) // stride)
        return any(_overlap(inner_a.shifted(d * stride), inner_b, budget) for d in range(lowest, highest + 1))
    if not a.dims or (b.dims and b.dims[0].stride > a.dims[0].stride):
        a, b = b, a
    outer, inner = a.dims[0], Box(a.offset, a.length, a.dims[1:])
    first = max(0, _ceil_div(b.offset - inner.end + 1, outer.stride))
    last = min(outer.extent - 1, (b.end - inner.offset - 1) // outer.stride)
    return any(_overlap(inner.shifted(i * outer.stride), b, budget) for i in range(first, last + 1))


def block_meetings(a: Box, b: Box, stride: int, blocks_a: int, blocks_b: int) -> tuple[bool, bool]:
    """How the blocks of two views with one block stride meet.

    :param a: block 0 of the first view; block ``i`` is ``i * stride`` further on; ``b`` likewise.
    :returns: whether a block meets the block of its own number, and whether any meets one of another number.
    """
    # Block i of a and block j of b meet as block 0 of a and block j - i of b do.
    lowest = max(1 - blocks_a, _ceil_div(a.offset - b.end + 1, stride))
    highest = min(blocks_b - 1, (a.end - b.offset - 1) // stride)
    if highest - lowest > OVERLAP_BUDGET:
        return True, True
    same = lowest <= 0 <= highest and overlap(a, b)
    other = any(overlap(a, b.shifted(d * stride)) for d in range(lowest, highest + 1) if d)
    return same, other


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class PairedDim:
    """A dimension walked on both sides at once: ``extent`` steps of ``local`` bytes here and ``remote`` there."""

    extent: int
    local: int
    remote: int


def common_runs(length: int, dims: Sequence[PairedDim]) -> tuple[int, int, Iterator[tuple[int, int]]]:
    """Cut a box that is walked on both sides into runs that are contiguous on both.

    :param length: bytes of one element, contiguous on both sides.
    :param dims: dimensions of the shared box, any order.
    :returns: the length of a run in bytes, the number of runs, and lazily for each run its byte offsets
        (local, remote) from the box's start.
    """
    rest = sorted((d for d in dims if d.extent > 1), key=lambda d: (d.local, d.remote))
    while grown := next((d for d in rest if d.local == length and d.remote == length), None):
        length *= grown.extent
        rest.remove(grown)

    def offsets() -> Iterator[tuple[int, int]]:
        steps = [[(i * d.local, i * d.remote) for i in range(d.extent)] for d in reversed(rest)]
        for at in product(*steps):
            yield sum(x for x, _ in at), sum(y for _, y in at)

    return length, math.prod(d.extent for d in rest), offsets()
