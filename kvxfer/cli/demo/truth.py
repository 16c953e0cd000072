"""What every byte must be, by definition: independent of plans, rows and descriptors.

A cache is an array ``value[layer, component, token, unit, inner]``; a snapshot's token is the number of tokens folded
into it.  Each value is a hash of its coordinates, so a wrong layer, head, token or byte order shows.  A rank holds a
slice of it where its layout says: the strides of views and components are used as NumPy strides over the memory.  All
other bytes, padding included, are noise that is different in every region of every rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import AxisKind, CacheLayout, Component, Group, GroupKind, View
from kvxfer.core.resolve import NULL_BLOCK, BlockList

Bytes = NDArray[np.uint8]
Int64 = NDArray[np.int64]

#: Elements that are made at a time: the arrays of one step stay in the processor's cache, or near it.
_STEP: Final = 2**19


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


def values(layer: str, component: str, tokens: Int64, units: Int64, inner: int) -> NDArray[np.uint32]:
    """The values of some tokens and units of a component: an array (token, unit, inner).

    An element of fewer than four bytes is the low end of it.
    """
    name = hashlib.blake2b(f"{layer}/{component}".encode(), digest_size=8).digest()
    seed = np.frombuffer(name, dtype="<u8")
    keys: NDArray[np.uint64] = tokens.astype(np.uint64) ^ seed
    rows: NDArray[np.uint64] = _mix64(keys)[:, None] + units.astype(np.uint64)
    steps = np.arange(inner, dtype=np.uint32) * np.uint32(0x9E3779B9)
    x: NDArray[np.uint32] = (_mix64(rows) >> np.uint64(32)).astype(np.uint32)[:, :, None] + steps
    # A 32-bit finaliser with full avalanche, in place: this is most of the demo's work.
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(16)
    return x


def noise(seed: Sequence[int], size: int) -> Bytes:
    """``size`` random bytes; another seed, other bytes."""
    words = np.random.SFC64(list(seed)).random_raw(-(-size // 8))
    return np.asarray(words, dtype=np.uint64).view(np.uint8)[:size]


@dataclass(frozen=True)
class Part:
    """One component of one layer on one rank, and the blocks of it that a request names.

    :param positions: for each block its first token, or the tokens folded into the snapshot.
    """

    group: Group
    view: View
    component: Component
    ids: Int64
    positions: Int64

    @property
    def is_state(self) -> bool:
        return self.group.kind is GroupKind.STATE

    def array(self, memory: Bytes) -> NDArray[Any]:
        """The region's bytes as this component: axes block, kernel block, token, unit, inner..."""
        view, component = self.view, self.component
        if component.element_bytes not in (1, 2, 4):
            raise KvxferError(
                Reason.UNSUPPORTED, f"component {component.name}: elements of {component.element_bytes} bytes"
            )
        whole: NDArray[Any] = np.ndarray(
            (view.num_blocks, view.kernel_blocks, *(a.extent for a in component.axes)),
            dtype=f"<u{component.element_bytes}",
            buffer=memory.data,
            offset=view.base + component.offset,
            strides=(view.block_stride, view.kernel_stride, *(a.stride for a in component.axes)),
        )
        kinds = [a.kind for a in component.axes]
        order = [kinds.index(AxisKind.UNIT), *(i for i, k in enumerate(kinds) if k is AxisKind.INNER)]
        if not self.is_state:
            order.insert(0, kinds.index(AxisKind.TOKEN))
        turned: NDArray[Any] = whole.transpose(0, 1, *(i + 2 for i in order))
        return turned[:, :, None] if self.is_state else turned

    def put(self, memory: Bytes, tokens: range, constant: int | None = None) -> None:
        """Write the values of ``tokens``, or every listed snapshot.

        :param constant: a byte to write instead of the values.
        """
        array = self.array(memory)
        kernel_blocks, kernel_tokens = array.shape[1:3]
        inner = math.prod(array.shape[4:])
        first = np.arange(kernel_blocks, dtype=np.int64)[:, None] * kernel_tokens
        offsets = first + np.arange(kernel_tokens, dtype=np.int64)
        held = np.arange(self.component.units.begin, self.component.units.end, dtype=np.int64)
        step = max(1, _STEP // math.prod(array.shape[1:]))
        for at in range(0, len(self.ids), step):
            ids = self.ids[at : at + step]
            positions = self.positions[at : at + step, None, None] + offsets
            chosen = np.ones(positions.shape, dtype=np.bool_)
            if not self.is_state:
                chosen = (positions >= tokens.start) & (positions < tokens.stop)
            if not chosen.any():
                continue
            content: NDArray[Any]
            if constant is None:
                made = values(self.view.layer, self.component.name, positions[chosen], held, inner)
                content = made.astype(array.dtype).reshape(-1, *array.shape[3:])
            else:
                filled = int.from_bytes(bytes([constant]) * array.dtype.itemsize, "little")
                content = np.full((int(chosen.sum()), *array.shape[3:]), filled, dtype=array.dtype)
            if chosen.all():
                array[ids] = content.reshape(len(ids), *array.shape[1:])
            else:
                block = array[ids]
                block[chosen] = content
                array[ids] = block


def parts(layout: CacheLayout, lists: Sequence[BlockList], region: int) -> Iterator[Part]:
    """Everything in a region that a request's blocks name."""
    by_group = {blocks.group: blocks for blocks in lists}
    for group in layout.groups:
        ids, positions = _placed(group, by_group[group.name])
        for view, component in group.parts():
            if view.region == region:
                yield Part(group, view, component, ids, positions)


def _placed(group: Group, blocks: BlockList) -> tuple[Int64, Int64]:
    ids = np.asarray(blocks.ids, dtype=np.int64)
    if group.kind is GroupKind.STATE:
        positions = np.asarray(blocks.positions, dtype=np.int64)
    else:
        positions = blocks.first_position + np.arange(len(ids), dtype=np.int64) * group.block_tokens
    real = ids != NULL_BLOCK
    return ids[real], positions[real]


@dataclass(frozen=True, slots=True)
class Wrong:
    """The first byte that is not what it must be.  ``due``: it should have been read; else it was touched."""

    region: int
    offset: int
    got: int
    want: int
    due: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the comparison of a whole memory image came to, in bytes.

    :param due: bytes that had to arrive.
    :param rounding: bytes behind the last token that the last granule brings along; unspecified.
    :param untouched: bytes that had to stay as they were.
    :param missing: due bytes that are wrong, and ``touched`` others that have changed.
    """

    due: int
    rounding: int
    untouched: int
    missing: int
    touched: int
    first: Wrong | None

    @property
    def least(self) -> int:
        """The least that a read can move: what is due, rounded up to granules."""
        return self.due + self.rounding


def verify(
    memory: Sequence[Bytes],
    before: Sequence[Sequence[int]],
    layout: CacheLayout,
    lists: Sequence[BlockList],
    tokens: range,
    granule: int,
) -> Verdict:
    """Compare every byte of D's memory with what it must be after reading ``tokens`` and the listed snapshots.

    :param before: the seed of the noise that each region held.
    :param granule: tokens to which the end of the range is rounded up.
    """
    due = rounding = missing = touched = total = 0
    first: Wrong | None = None
    tail = range(tokens.stop, -(-tokens.stop // granule) * granule)
    for region, got in enumerate(memory):
        want = noise(before[region], len(got))
        role = np.zeros(len(got), dtype=np.uint8)
        for part in parts(layout, lists, region):
            part.put(want, tokens)
            if not part.is_state:
                part.put(role, tail, constant=2)
            part.put(role, tokens, constant=1)
        is_due, free = role == 1, role == 2
        wrong = (got != want) & ~free
        due += int(is_due.sum())
        rounding += int(free.sum())
        bad = int(wrong.sum())
        lost = int((wrong & is_due).sum()) if bad else 0
        missing, touched, total = missing + lost, touched + bad - lost, total + len(got)
        if bad and first is None:
            at = int(np.argmax(wrong))
            first = Wrong(region, at, int(got[at]), int(want[at]), bool(is_due[at]))
    return Verdict(due, rounding, total - due - rounding, missing, touched, first)


def whole_pages(layout: CacheLayout, lists: Sequence[BlockList], tokens: range) -> int:
    """Bytes of the pages that are touched, with their padding: what a reader moves that knows pages only."""
    total = 0
    for group in layout.groups:
        if group.kind is GroupKind.STATE:
            pages = 1
        else:
            pages = -(-tokens.stop // group.block_tokens) - tokens.start // group.block_tokens
        total += pages * sum(view.block_stride for view in group.views)
    return total


def where(layout: CacheLayout, wrong: Wrong, lists: Sequence[BlockList]) -> str:
    """What lies at a wrong byte, for people."""
    block_of: Mapping[str, Int64] = {blocks.group: np.asarray(blocks.ids, dtype=np.int64) for blocks in lists}
    for group in layout.groups:
        for view in group.views:
            block, inside = divmod(wrong.offset - view.base, view.block_stride)
            if view.region == wrong.region and block in block_of[group.name] and 0 <= block < view.num_blocks:
                return f"block {block} of group {group.name}, layer {view.layer}, byte {inside} of its page"
    return "in no block of the request"
