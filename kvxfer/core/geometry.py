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

#: Most steps of comparing two boxes, and of all comparisons that share a :class:`Budget`: about two seconds.
PAIR_STEPS: Final = 100_000
ALL_STEPS: Final = 1_000_000


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


class TooIntricateError(Exception):
    """Boxes that cannot be compared within the steps allowed."""


class Budget:
    """Steps that a series of comparisons may take, each and all of them together."""

    def __init__(self, total: int = ALL_STEPS, each: int = PAIR_STEPS) -> None:
        self._total, self._each = total, each

    def meet(self, a: Shape, b: Shape) -> tuple[bool, bool]:
        """Compare two shapes, see :func:`overlap` and :func:`block_meetings`.

        :raises TooIntricateError: where the steps run out.
        """
        allowed = min(self._each, self._total)
        work = _Work(allowed)
        try:
            other = _meet(a.outermost, b.outermost, b.offset - a.offset, work)
        finally:
            self._total -= allowed - work.left
        return work.same, other


class _Work:
    """What one comparison may still spend, and whether it has seen blocks of one number meet."""

    __slots__ = ("left", "same")

    def __init__(self, left: int) -> None:
        self.left = left
        self.same = False


class _Level:
    """A dimension of a shape and all inside it; without ``inner`` it is a run of ``span`` bytes."""

    __slots__ = ("blocks", "extent", "inner", "span", "stride")

    def __init__(self, span: int, dim: Dim | None = None, inner: _Level | None = None, *, blocks: bool = False) -> None:
        self.span, self.inner, self.blocks = span, inner, blocks
        self.extent, self.stride = (dim.extent, dim.stride) if dim else (1, 0)


class Shape:
    """A box made ready to be compared with many others.

    :param blocks: the dimension that counts blocks, over all of which the shape extends; ``None`` where the numbers of
        blocks do not matter.
    """

    __slots__ = ("offset", "outermost")

    def __init__(self, box: Box, blocks: Dim | None = None) -> None:
        self.offset = box.offset
        simple = box.simplified()
        # By stride, and the blocks outside a dimension of equal stride: two shapes come to their blocks together.
        dims = [(d.stride, False, d) for d in simple.dims]
        if blocks is not None:
            dims.append((blocks.stride, True, blocks))
        level = _Level(simple.length)
        for stride, counts, dim in sorted(dims, key=lambda d: d[:2]):
            level = _Level(level.span + (dim.extent - 1) * stride, dim, level, blocks=counts)
        self.outermost = level


def overlap(a: Box, b: Box, budget: Budget | None = None) -> bool:
    """Whether two boxes share a byte.

    :raises TooIntricateError: where that takes too many steps.
    """
    return (budget or Budget()).meet(Shape(a), Shape(b))[1]


def block_meetings(
    a: Box, b: Box, stride: int, blocks_a: int, blocks_b: int, budget: Budget | None = None
) -> tuple[bool, bool]:
    """How the blocks of two views with one block stride meet.

    :param a: block 0 of the first view; block ``i`` is ``i * stride`` further on; ``b`` likewise.
    :returns: whether a block meets the block of its own number, and whether any meets one of another number; the first
        is only told for certain where the second is false.
    :raises TooIntricateError: where that takes too many steps.
    """
    return (budget or Budget()).meet(Shape(a, Dim(blocks_a, stride)), Shape(b, Dim(blocks_b, stride)))


def _meet(a: _Level, b: _Level, by: int, work: _Work) -> bool:
    """Whether two shapes share a byte, other than of blocks of one number; ``b`` begins ``by`` bytes after ``a``."""
    if by >= a.span or -by >= b.span:
        return False
    work.left -= 1
    if work.left < 0:
        raise TooIntricateError
    if a.inner is not None and b.inner is not None and a.stride == b.stride:
        # Equal outer strides: only the difference of the two indices matters.
        stride = a.stride
        lowest = max(1 - b.extent, _ceil_div(by - a.inner.span + 1, stride))
        highest = min(a.extent - 1, (by + b.inner.span - 1) // stride)
        for d in range(lowest, highest + 1):
            if d == 0 and a.blocks:
                work.same = work.same or _meet(a.inner, b.inner, by, work)
            elif _meet(a.inner, b.inner, by - d * stride, work):
                return True
        return False
    if a.inner is None or (b.inner is not None and b.stride > a.stride):
        a, b, by = b, a, -by
    if a.inner is None:
        return True
    stride = a.stride
    first = max(0, _ceil_div(by - a.inner.span + 1, stride))
    last = min(a.extent - 1, (by + b.span - 1) // stride)
    return any(_meet(a.inner, b, by - i * stride, work) for i in range(first, last + 1))


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
