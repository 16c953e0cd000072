"""Which bytes of a block are a layer's, padding and all.

A block of a view repeats every ``block_stride`` bytes, but not all of them need be its layer's: where tensors are
block-major, the layers of a block lie side by side inside one stride.  A stride of a region and the components that
lie in it are a *slot* here.  Groups of one pool lie over the same bytes of a slot, so each owns all of it; groups with
block numbers of their own share it out.  Within a group a slot is divided among its layers by the bytes of their data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvxfer.core.geometry import Box
from kvxfer.core.layout import CacheLayout, Component, View


@dataclass(frozen=True, slots=True)
class _Part:
    group: int
    view: View
    component: Component

    @property
    def start(self) -> int:
        """Where its block 0 begins in the region."""
        return self.view.base + self.component.offset

    @property
    def data(self) -> int:
        """Its bytes in a logical block."""
        return self.component.data_bytes * self.view.kernel_blocks


def page_bytes(layout: CacheLayout) -> tuple[Mapping[str, int], ...]:
    """For each group, by layer: bytes of one block with its padding; K and V apart count together."""
    found: tuple[dict[str, int], ...] = tuple(defaultdict(int) for _ in layout.groups)
    for stride, parts in _slots(layout):
        data: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        pools: dict[int, int] = defaultdict(int)
        for part in parts:
            data[part.group][part.view.layer] += part.data
        for group, layers in data.items():
            pool = layout.pools[group]
            pools[pool] = max(pools[pool], sum(layers.values()))
        for group, layers in data.items():
            own = stride - sum(size for pool, size in pools.items() if pool != layout.pools[group])
            total, seen, given = sum(layers.values()), 0, 0
            for layer, size in layers.items():  # rounded so that nothing is lost
                seen += size
                found[group][layer] += own * seen // total - given
                given = own * seen // total
    return tuple(dict(layers) for layers in found)


def own_window(layout: CacheLayout, group: int, view: View) -> tuple[int, tuple[Box, ...]]:
    """The page of a view to look at, from its base on.

    :returns: its size in bytes, and what in it is of other views, from the view's base.  Where the view lies in one
        piece the page ends where another's begins; where views are interleaved it is the whole stride.
    """
    stride = view.block_stride
    boxes = []
    for part in _others(layout, group, view):
        box = part.view.block_box(part.component)
        boxes.append(Box((box.offset - view.base) % stride, box.length, box.dims))
    nearest = min((box.offset for box in boxes), default=stride)
    ends = (view.block_box(component).end - view.base for component in view.components if component.offset < stride)
    if max(ends, default=0) <= nearest:
        return nearest, ()
    return stride, tuple(boxes)


def _others(layout: CacheLayout, group: int, view: View) -> Iterator[_Part]:
    """Components of other views in the slots of a view, without those that may lie over the same bytes."""
    for stride, parts in _slots(layout):
        if stride == view.block_stride and any(part.view is view and part.group == group for part in parts):
            for part in parts:
                apart = layout.pools[part.group] != layout.pools[group]
                if apart or (part.group == group and part.view is not view):
                    yield part


def _slots(layout: CacheLayout) -> Iterator[tuple[int, Sequence[_Part]]]:
    """Each slot's stride, and the components whose block 0 begins in it."""
    alike: dict[tuple[int, int], list[_Part]] = defaultdict(list)
    for index, group in enumerate(layout.groups):
        for view, component in group.parts():
            alike[view.region, view.block_stride].append(_Part(index, view, component))
    for (_, stride), parts in alike.items():
        parts.sort(key=lambda part: part.start)
        slot: list[_Part] = []
        for part in parts:
            if slot and part.start >= slot[0].start + stride:
                yield stride, slot
                slot = []
            slot.append(part)
        yield stride, slot
