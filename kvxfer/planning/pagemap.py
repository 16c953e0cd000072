"""A map of one page: what its bytes are to each group, and which of them each D rank takes.

The page is logical block 0 of a region of P's first rank that its groups share (of one region a group, where they share
none).  Offsets are bytes from the start of the page.  What D ranks take is looked up in the rows of their compiled
plans, not worked out again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.core.geometry import Box, Dim
from kvxfer.core.layout import AxisKind, CacheLayout, Component, Group, GroupKind, View
from kvxfer.core.plan import Int64, Section, SourcePlan
from kvxfer.planning.pages import own_window
from kvxfer.planning.pair import Pair

#: Most views that a map shows, and most spans that one component or lane may fall into.
MAX_VIEWS: Final = 4
MAX_SPANS: Final = 200_000
#: K and V packed in the content dimension are one component of this name: the first half of its inner axis is K.
PACKED: Final = "kv"
#: Bytes of a page that are another view's, mostly another layer's, interleaved with this one's.
OTHERS: Final = "others"


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``[begin, end)`` of a page; ``name`` says of what component, or ``padding`` or ``others``."""

    begin: int
    end: int
    name: str


@dataclass(frozen=True, slots=True)
class Lane:
    """What a D rank takes from the page of a P rank, with no two spans touching."""

    d_rank: str
    p_rank: str
    d_number: int
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PageView:
    """A page as one or more alike groups see it.

    :param groups: their names.
    :param layer: the layer whose page this is; the other layers of the group are alike.
    :param size: bytes of the page.
    :param spans: all of it, in order: components and padding.
    :param fine: the same of the window ``zoom``, with K and V of packed heads apart; empty where a closer look shows
        nothing new.
    :param edges: where kernel blocks begin, without the first.
    """

    groups: tuple[str, ...]
    kind: GroupKind
    layer: str
    region: int
    size: int
    block_tokens: int
    kernel_blocks: int
    spans: tuple[Span, ...]
    zoom: tuple[int, int] | None
    fine: tuple[Span, ...]
    edges: tuple[int, ...]
    lanes: tuple[Lane, ...]

    def lanes_in(self, begin: int, end: int) -> tuple[Lane, ...]:
        """What of ``[begin, end)`` each rank takes, in the same order."""
        found = []
        for lane in self.lanes:
            cut = ((max(a, begin), min(b, end)) for a, b in lane.spans if a < end and b > begin)
            found.append(Lane(lane.d_rank, lane.p_rank, lane.d_number, tuple(cut)))
        return tuple(found)


@dataclass(frozen=True)
class PageMap:
    """The page of P's first rank.

    :param views: attention first.
    :param shared: whether all views are of the very same bytes.
    """

    views: tuple[PageView, ...]
    shared: bool


def page_map(pair: Pair) -> PageMap:
    """The map of a pair's page."""
    layout = pair.p.layouts[pair.p.first]
    views = tuple(_view(pair, layout, groups, view) for groups, view in _chosen(layout))
    return PageMap(views, len({(v.region, v.size) for v in views}) == 1)


def _chosen(layout: CacheLayout) -> Iterator[tuple[list[Group], View]]:
    """One view for every form that a block takes, and the groups whose first layer has it; attention first."""
    forms: dict[tuple[object, ...], tuple[list[Group], View]] = {}
    for group in sorted(layout.groups, key=lambda g: g.kind is GroupKind.STATE):
        first = group.views[0].layer
        for view in (v for v in group.views if v.layer == first):
            form = (group.kind, view.block_stride, view.kernel_blocks, view.kernel_stride, view.components)
            forms.setdefault(form, ([], view))[0].append(group)
    return iter(list(forms.values())[:MAX_VIEWS])


def _view(pair: Pair, layout: CacheLayout, groups: Sequence[Group], view: View) -> PageView:
    group = groups[0]
    size, others = own_window(layout, layout.index[group.name], view)
    named = [
        Span(begin, end, component.name)
        for component in view.components
        for begin, end in _merged(_starts(view.block_box(component), view.base), 0, size)
    ]
    spans = _with_padding([*named, *_of_others(others, 0, size)], 0, size)
    lanes = tuple(_lanes(pair, group, view))
    zoom = _zoom(view, spans, lanes)
    fine = _with_padding([*_fine(view, *zoom), *_of_others(others, *zoom)], *zoom) if zoom else ()
    if len(fine) < 2:
        zoom, fine = None, ()
    steps = range(1, view.kernel_blocks)
    return PageView(
        groups=tuple(g.name for g in groups),
        kind=group.kind,
        layer=view.layer,
        region=view.region,
        size=size,
        block_tokens=group.block_tokens,
        kernel_blocks=view.kernel_blocks,
        spans=spans,
        zoom=zoom,
        fine=fine,
        edges=tuple(k * view.kernel_stride for k in steps),
        lanes=lanes,
    )


# -- bytes of components ---------------------------------------------------------------------------------------------


def _starts(box: Box, base: int) -> tuple[Int64, int]:
    """Where the runs of a box begin, from ``base``, and how long they are."""
    simple = box.simplified()
    starts = np.array([simple.offset - base], dtype=np.int64)
    for dim in simple.dims:
        if len(starts) * dim.extent > MAX_SPANS:
            break  # too fine to be drawn: the first of them stand for all
        starts = (starts[:, None] + np.arange(dim.extent, dtype=np.int64) * dim.stride).ravel()
    return starts, simple.length


def _merged(runs: tuple[Int64, int | Int64], begin: int, end: int) -> list[tuple[int, int]]:
    """Runs as spans inside ``[begin, end)``, in order, joined where they touch."""
    starts, lengths = runs[0], np.broadcast_to(np.asarray(runs[1], dtype=np.int64), runs[0].shape)
    order = np.argsort(starts, kind="stable")
    low, high = np.maximum(starts[order], begin), np.minimum(starts[order] + lengths[order], end)
    low, high = low[low < high], high[low < high]
    if not low.size:
        return []
    reach = np.maximum.accumulate(high)
    opens = np.concatenate(([True], low[1:] > reach[:-1]))
    closes = np.concatenate((opens[1:], [True]))
    return list(zip(low[opens].tolist(), reach[closes].tolist(), strict=True))


def _with_padding(spans: list[Span], begin: int, end: int) -> tuple[Span, ...]:
    """The spans in order, and what lies between them as padding."""
    found: list[Span] = []
    at = begin
    for span in sorted(spans, key=lambda s: s.begin):
        if span.begin > at:
            found.append(Span(at, span.begin, "padding"))
        found.append(span)
        at = max(at, span.end)
    if at < end:
        found.append(Span(at, end, "padding"))
    return tuple(found)


def _zoom(view: View, spans: Sequence[Span], lanes: Sequence[Lane]) -> tuple[int, int] | None:
    """What deserves a closer look.

    State: the parts that are too small to be seen, if there are any.  Attention: one kernel block, or, where that is
    the whole page, some tokens on both sides of where what a D rank takes ends, or of the first.
    """
    size = spans[-1].end
    if not view.components[0].tokens:
        small = [s for s in spans if s.name not in ("padding", OTHERS) and s.end - s.begin < size / 12]
        if not small:
            return None
        begin, end = small[0].begin, small[-1].end
        return (begin, end) if end - begin < size / 2 else None
    if view.kernel_blocks > 1:
        return 0, min(view.kernel_stride, size)
    component = view.components[0]
    run = _content(component)
    ends = [spans[0][1] for spans in (lane.spans for lane in lanes) if spans and spans[0][1] < size]
    middle = min(ends, default=component.offset + 4 * run)
    begin, end = max(0, middle - 4 * run), min(size, middle + 4 * run)
    return (begin, end) if end - begin <= size / 2 else None


def _content(component: Component) -> int:
    """Bytes of one token of one unit, from the first to the last."""
    return component.element_bytes + sum((axis.extent - 1) * axis.stride for axis in component.inner)


def _fine(view: View, begin: int, end: int) -> Iterator[Span]:
    """The components inside a window, packed K and V apart."""
    for component in view.components:
        for name, box in _halves(view, component):
            for low, high in _merged(_starts(box, view.base), begin, end):
                yield Span(low, high, name)


def _of_others(boxes: Iterable[Box], begin: int, end: int) -> Iterator[Span]:
    """What other views have inside a window."""
    for box in boxes:
        for low, high in _merged(_starts(box, 0), begin, end):
            yield Span(low, high, OTHERS)


def _halves(view: View, component: Component) -> Iterator[tuple[str, Box]]:
    """K's and V's bytes of a packed component; any other component whole."""
    box = view.block_box(component)
    inner = component.inner
    dense = len(inner) == 1 and inner[0].stride == component.element_bytes and inner[0].extent % 2 == 0
    if component.name != PACKED or not dense:
        yield component.name, box
        return
    half = inner[0].extent // 2 * component.element_bytes
    others = [Dim(a.extent, a.stride) for a in component.axes if a.kind is not AxisKind.INNER]
    dims = (Dim(view.kernel_blocks, view.kernel_stride), *others)
    for i, name in enumerate("kv"):
        yield name, Box(view.base + component.offset + i * half, half, dims)


# -- bytes of D ranks ------------------------------------------------------------------------------------------------


def _lanes(pair: Pair, group: Group, view: View) -> Iterator[Lane]:
    """For each D rank and each of its sources: what it takes from that source's page of this layer."""
    for number, (rank, plan) in enumerate(pair.plans.items()):
        for source in plan.sources:
            found = next(
                (
                    (index, theirs)
                    for index, other in enumerate(source.layout.groups)
                    for theirs in other.views
                    if theirs.layer == view.layer and theirs.components[0].name == view.components[0].name
                ),
                None,
            )
            if found is None:
                continue  # P's other stage has it
            index, theirs = found
            sections = [s for s in source.sections if s.remote_group == index and view.layer in s.layers]
            if not sections:
                continue  # D's other stage reads it
            taken = [_taken(source, section, theirs) for section in sections]
            starts, lengths = (np.concatenate(column) for column in zip(*taken, strict=True))
            size, others = own_window(source.layout, index, theirs)
            spans = _merged((starts, lengths), 0, size)
            of_others = [(span.begin, span.end) for span in _of_others(others, 0, size)]
            yield Lane(str(rank), str(source.rank), number, tuple(_without(spans, sorted(of_others))))


def _without(spans: Iterable[tuple[int, int]], cuts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What is left of spans where others are cut out; both are in order."""
    first = 0
    for begin, end in spans:
        while first < len(cuts) and cuts[first][1] <= begin:
            first += 1
        for low, high in itertools.islice(cuts, first, None):
            if low >= end:
                break
            if low > begin:
                yield begin, low
            begin = max(begin, high)
        if begin < end:
            yield begin, end


def _taken(source: SourcePlan, section: Section, view: View) -> tuple[Int64, Int64]:
    """Where the descriptors of P's block 0 begin, from the start of the view's page, and how long they are."""
    tier = section.tiers[-1]
    where = tier.remote
    numbers: NDArray[np.int64] = where.start[:, None, None]
    if where.kernel_tokens:
        group = source.layout.groups[section.remote_group]
        kernels = np.arange(group.block_tokens // where.kernel_tokens, dtype=np.int64)
        parts = np.arange(where.kernel_tokens // tier.tokens, dtype=np.int64)
        numbers = numbers + where.per_kernel[:, None, None] * kernels[:, None] + where.per_part[:, None, None] * parts
    flat = numbers.ravel()
    rows = source.remote
    row = np.searchsorted(rows.start, flat, side="right") - 1
    offset = rows.offset[row] + (flat - rows.start[row]) * rows.stride[row] - view.base
    here = (rows.region[row] == view.region) & (offset >= 0) & (offset < view.block_stride)
    return offset[here], rows.length[row][here]
