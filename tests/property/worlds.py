"""Random pairs of engines and a read between them: everything that the layout rule says it covers.

A world is made from a string of bytes.  Byte 0 always means the plainest choice, so whatever minimises the bytes
minimises the world; and one draw of bytes is far cheaper than hundreds of small draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvxfer.core.layout import (
    Axis,
    AxisKind,
    CacheLayout,
    Component,
    Group,
    GroupKind,
    Rank,
    Region,
    UnitRange,
    View,
)
from tests.truth import NULL, Blocks, Want

T = TypeVar("T")

#: Bytes that a world is made from; after the last one every choice is the plainest.
CHOICES = 512

_KINDS = {"t": AxisKind.TOKEN, "u": AxisKind.UNIT, "i": AxisKind.INNER}
_ATTENTION = (("kv",), ("k", "v"), ("mla",), ("k", "v", "k_scale"), ("kv", "kv_scale"))
_STATE = (("conv.x", "conv.B", "ssm"), ("ssm",), ("conv.q", "conv.k", "conv.v", "ssm"), ("conv", "ssm"))
_LAYERS = ((1, 0), (1, 1), (2, 1), (1, 2), (0, 1), (2, 0), (0, 2), (2, 2))
_TOKENS = (4, 1, 2, 3, 6, 8, 12, 5)
_PARALLEL = ((1, 1), (2, 1), (3, 1), (1, 1), (2, 1), (1, 2), (4, 1), (2, 1), (1, 1), (2, 2))


class Recipe(bytes):
    """What a world is made from; shown short, for ``@example(Recipe(bytes.fromhex("...")))``."""

    def __repr__(self) -> str:
        return f'Recipe(bytes.fromhex("{self.rstrip(bytes(1)).hex()}"))'


class Choices:
    """Small decisions, one byte each."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, n: int) -> int:
        """A number in ``[0, n)``."""
        if n <= 1 or self._at >= len(self._data):
            return 0
        self._at += 1
        return self._data[self._at - 1] % n

    def one(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def chance(self, percent: int) -> bool:
        if self._at >= len(self._data):
            return False
        self._at += 1
        return self._data[self._at - 1] * 100 >= (100 - percent) * 256

    def shuffled(self, items: Sequence[T]) -> list[T]:
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in range(len(rest))]


@dataclass(frozen=True)
class Spec:
    """A component as both sides must see it."""

    name: str
    kind: GroupKind
    total: int
    element_bytes: int
    inner: tuple[int, ...]
    order: str
    """The axes' order that a side uses unless it has an order of its own: ``t``, ``u`` and one ``i`` an inner axis."""


@dataclass
class Placing:
    """How one side stores one component: equal on all of its ranks."""

    order: str
    pads: tuple[int, ...]
    spell_strides: bool
    merge_inner: bool


@dataclass
class Style:
    """How one side lays out a layer's page."""

    placings: dict[str, Placing]
    sequence: list[str]
    split: int
    """How many of the components go to a view of their own (K and V in two regions)."""
    form: str
    """``plain``: one after the other; ``rows``: interleaved along the outermost axis; ``page``: each in a part of the
    logical page; ``region``: each in a part of the region."""
    ratios: tuple[int, ...]
    kernel_pad: int
    page_pad: int
    gap: int


@dataclass
class Side:
    """One side: its ranks, how it shards, groups and places."""

    letter: str
    tp: int
    pp: int
    units: dict[tuple[str, str], list[tuple[int, int]]] = field(default_factory=dict)
    stage: dict[str, int] = field(default_factory=dict)
    groups: dict[str, tuple[GroupKind, int, list[str]]] = field(default_factory=dict)
    styles: dict[str, Style] = field(default_factory=dict)
    tensors: str = "own"
    num_blocks: int = 1
    extra_blocks: list[int] = field(default_factory=list)
    base_pad: int = 0


@dataclass(frozen=True)
class World:
    """Two engines and a read: D's ranks read from P's."""

    p: list[tuple[Rank, CacheLayout]]
    d: list[tuple[Rank, CacheLayout]]
    p_lists: dict[str, Blocks]
    d_lists: dict[str, Blocks]
    wants: dict[str, Want]
    num_tokens: int
    skip_tokens: int


def make_world(recipe: bytes | Choices) -> World:
    """The world that ``recipe`` spells; from :class:`Choices`, what is left of them can serve for more."""
    c = recipe if isinstance(recipe, Choices) else Choices(recipe)
    layers = _layers(c)
    p = _side(c, "p", layers, covers=True, like=None)
    d = _side(c, "d", layers, covers=False, like=p)
    wants, num_tokens, skip_tokens = _wants(c, p, d, layers)
    p_needs = {
        name: [wants[g] for g, (_, _, mine) in d.groups.items() if set(mine) & set(theirs)]
        for name, (_, _, theirs) in p.groups.items()
    }
    p_lists = _lists(c, p, p_needs)
    d_lists = _lists(c, d, {g: [w] for g, w in wants.items()})
    return World(
        p=[_rank(p, layers, i) for i in range(p.tp * p.pp)],
        d=[_rank(d, layers, i) for i in range(d.tp * d.pp)],
        p_lists=p_lists,
        d_lists=d_lists,
        wants=wants,
        num_tokens=num_tokens,
        skip_tokens=skip_tokens,
    )


# -- what both sides share -------------------------------------------------------------------------------------------


def _layers(c: Choices) -> dict[str, dict[str, Spec]]:
    attention, state = c.one(_LAYERS)
    layers: dict[str, dict[str, Spec]] = {}
    for kind, count in ((GroupKind.ATTENTION, attention), (GroupKind.STATE, state)):
        names: tuple[str, ...] = ()
        for i in range(count):
            if i == 0 or c.chance(25):
                names = c.one(_ATTENTION if kind is GroupKind.ATTENTION else _STATE)
                specs = {n: _spec(c, n, kind) for n in names}
                if "v" in specs and not c.chance(20):
                    specs["v"] = Spec("v", *_but_name(specs["k"]))
            layers[f"{kind.value}.{i}"] = specs
    return layers


def _but_name(spec: Spec) -> tuple[GroupKind, int, int, tuple[int, ...], str]:
    return spec.kind, spec.total, spec.element_bytes, spec.inner, spec.order


def _spec(c: Choices, name: str, kind: GroupKind) -> Spec:
    if name == "mla":
        total = 1
    elif kind is GroupKind.ATTENTION:
        total = c.one((2, 1, 4, 6, 3))
    else:
        total = c.one((4, 2, 6, 1, 3, 8))
    inner = c.one(((2,), (3,), (2, 2), (1,), (2, 3)))
    if name.endswith("scale"):
        inner = (1,)
    letters = ("t" if kind is GroupKind.ATTENTION else "") + "u" + "i" * len(inner)
    return Spec(name, kind, total, c.one((1, 2, 4)), inner, _order(c, letters))


def _order(c: Choices, letters: str) -> str:
    if c.chance(60):
        return "".join(c.shuffled(letters))
    return letters.replace("tu", "ut") if c.chance(50) else letters


# -- one side --------------------------------------------------------------------------------------------------------


def _side(c: Choices, letter: str, layers: dict[str, dict[str, Spec]], covers: bool, like: Side | None) -> Side:
    tp, pp = (like.tp, like.pp) if like and c.chance(25) else c.one(_PARALLEL)
    side = Side(letter, tp, pp)
    if like and (like.tp, like.pp) == (tp, pp) and c.chance(40):
        # Equal engines: what should collapse to a few long runs.
        side.units, side.stage = like.units, like.stage
        same_groups = c.chance(60)
        side.styles = like.styles if same_groups else {}
        side.groups = {g.replace("p", "d", 1): v for g, v in like.groups.items()} if same_groups else {}
        side.tensors = like.tensors if same_groups else "own"
    names = list(layers)
    if not side.stage:
        _stages(c, side, names)
    if not side.units:
        _shards(c, side, layers, covers)
    if not side.groups:
        _group(c, side, names, layers)
    if not side.styles:
        for layer, specs in layers.items():
            earlier = next((n for n in side.styles if layers[n] is specs and _fits(side, n, layer)), None)
            if earlier is None or c.chance(25):
                side.styles[layer] = _style(c, side, layer, specs)
            else:
                side.styles[layer] = side.styles[earlier]
        side.tensors = c.one(("own", "chain", "block", "pool", "pool-block"))
    side.base_pad = c.below(9) if c.chance(30) else 0
    side.extra_blocks = [c.below(3) if c.chance(20) else 0 for _ in range(side.tp * side.pp)]
    return side


def _stages(c: Choices, side: Side, names: list[str]) -> None:
    """Which pipeline stage holds each layer: every stage holds one at least."""
    if len(names) < 2:
        side.pp = 1
    first = 1 + c.below(len(names) - 1) if side.pp == 2 else len(names)
    ordered = c.shuffled(names) if side.pp == 2 and c.chance(30) else names
    side.stage = {n: int(i >= first) for i, n in enumerate(ordered)}


def _shards(c: Choices, side: Side, layers: dict[str, dict[str, Spec]], covers: bool) -> None:
    """The units of every component on each TP rank; layers of a kind are mostly cut alike, and so are K and V."""
    for layer, specs in layers.items():
        lead = next(iter(specs.values()))
        for name, spec in specs.items():
            alike = next((k for k in side.units if k[1] == name and specs is layers[k[0]]), None)
            if alike is not None and not c.chance(10):
                side.units[layer, name] = side.units[alike]
            elif spec is not lead and spec.total == lead.total and not c.chance(20):
                side.units[layer, name] = side.units[layer, lead.name]
            else:
                side.units[layer, name] = _units(c, spec.total, side.tp, covers)


def _fits(side: Side, a: str, b: str) -> bool:
    return _block_tokens(side, a) == _block_tokens(side, b)


def _block_tokens(side: Side, layer: str) -> int:
    return next(tokens for _, tokens, names in side.groups.values() if layer in names)


def _units(c: Choices, total: int, tp: int, covers: bool) -> list[tuple[int, int]]:
    """The units of each TP rank."""
    mode = c.below(6)
    if mode == 1:
        return [(0, total)] * tp
    if mode == 2 and total >= tp:
        cuts = sorted(c.shuffled(range(1, total))[: tp - 1])
        return list(zip([0, *cuts], [*cuts, total], strict=True))
    if mode == 3:
        ranges = []
        for _ in range(tp):
            begin = c.below(total)
            ranges.append((begin, begin + 1 + c.below(total - begin)))
        if covers and set().union(*(range(*r) for r in ranges)) != set(range(total)):
            ranges[c.below(tp)] = (0, total)
        return ranges
    if mode == 4 and total <= tp:
        return [(i % total, i % total + 1) for i in range(tp)]
    if mode == 5 and tp > 1 and total > 1:
        # Two halves, each held by every rank of its half of the engine.
        return [(0, total // 2) if i < tp / 2 else (total // 2, total) for i in range(tp)]
    if total < tp:
        return [(i * total // tp, i * total // tp + 1) for i in range(tp)]
    return [(i * total // tp, (i + 1) * total // tp) for i in range(tp)]


def _group(c: Choices, side: Side, names: list[str], layers: dict[str, dict[str, Spec]]) -> None:
    for kind in (GroupKind.ATTENTION, GroupKind.STATE):
        mine = [n for n in names if next(iter(layers[n].values())).kind is kind]
        if not mine:
            continue
        count = 1 + c.below(len(mine))
        members: list[list[str]] = [[] for _ in range(count)]
        for i, name in enumerate(c.shuffled(mine) if c.chance(20) else mine):
            members[i % count].append(name)
        tokens = c.one(_TOKENS)
        for i, group in enumerate(members):
            if i and c.chance(30):
                tokens = c.one(_TOKENS)
            side.groups[f"{side.letter}.{kind.value}.{i}"] = (kind, tokens if kind is GroupKind.ATTENTION else 0, group)


def _style(c: Choices, side: Side, layer: str, specs: dict[str, Spec]) -> Style:
    placings = {}
    for name, spec in specs.items():
        order = _order(c, "".join(sorted(spec.order))) if c.chance(30) else spec.order
        pads = tuple(c.below(4) if c.chance(8) else 0 for _ in order)
        placings[name] = Placing(order, pads, c.chance(50), c.chance(50))
    tokens = _block_tokens(side, layer)
    ratios = tuple(r for r in range(1, tokens + 1) if tokens % r == 0) if tokens else (1,)
    split = c.below(len(specs)) if c.chance(30) else 0
    ratio = c.one(ratios)
    form = c.one(("plain", "plain", "rows", "page", "region"))
    return Style(
        placings=placings,
        sequence=c.shuffled(list(specs)) if c.chance(30) else list(specs),
        split=split,
        form=form,
        ratios=(ratio, c.one(ratios) if c.chance(30) else ratio),
        kernel_pad=c.below(8) if c.chance(25) else 0,
        page_pad=c.below(24) if c.chance(35) else 0,
        gap=c.below(6) if c.chance(20) else 0,
    )


# -- one rank --------------------------------------------------------------------------------------------------------


@dataclass
class _Page:
    """A view before its place in memory is known."""

    group: str
    layer: str
    components: list[tuple[str, int, tuple[Axis, ...], UnitRange, Spec]]
    ratio: int
    kernel_stride: int
    bytes: int
    whole_regions: int
    """Parts of the region that the components are spread over, one page each; 1 where they share their pages."""


def _rank(side: Side, layers: dict[str, dict[str, Spec]], number: int) -> tuple[Rank, CacheLayout]:
    rank = Rank(number % side.tp, side.tp, number // side.tp, side.pp)
    pages: dict[str, list[_Page]] = {}
    for name, (_, tokens, members) in side.groups.items():
        for layer in members:
            if side.stage[layer] == rank.pp_rank:
                pages.setdefault(name, []).extend(_pages(side, name, tokens, layer, layers[layer], rank.tp_rank))
    regions, views = _place(side, pages, side.num_blocks + side.extra_blocks[number])
    groups = tuple(Group(name, side.groups[name][0], tuple(views[name]), side.groups[name][1]) for name in pages)
    return rank, CacheLayout(tuple(Region(size) for size in regions), groups)


def _pages(side: Side, group: str, tokens: int, layer: str, specs: dict[str, Spec], tp_rank: int) -> list[_Page]:
    style = side.styles[layer]
    names = style.sequence
    found = []
    for i, some in enumerate((names[: len(names) - style.split], names[len(names) - style.split :])):
        if some:
            units = {n: UnitRange(*side.units[layer, n][tp_rank], specs[n].total) for n in some}
            found.append(_page(side, group, layer, style, [specs[n] for n in some], units, tokens, style.ratios[i]))
    return found


def _axes(spec: Spec, placing: Placing, kernel_tokens: int, units: int) -> list[tuple[str, int]]:
    inner = iter(spec.inner)
    extents = {"t": lambda: kernel_tokens, "u": lambda: units, "i": lambda: next(inner)}
    axes = [(letter, extents[letter]()) for letter in placing.order]
    if placing.merge_inner and placing.order.endswith("ii"):
        axes[-2:] = [("i", math.prod(spec.inner))]
    return axes


def _page(
    side: Side,
    group: str,
    layer: str,
    style: Style,
    specs: list[Spec],
    units: dict[str, UnitRange],
    tokens: int,
    ratio: int,
) -> _Page:
    pooled = side.tensors.startswith("pool")
    form = style.form
    if form == "region" and (side.tensors in ("block", "pool-block") or pooled):
        form = "page"
    built = []
    for spec in specs:
        placing = style.placings[spec.name]
        built.append((spec, placing, _axes(spec, placing, tokens // ratio if tokens else 0, len(units[spec.name]))))
    rows = 0
    if form == "rows":
        # K and V of a token side by side: they share the step of their outermost axis.
        rows = next((i for i, b in enumerate(built) if b[2][0] != built[0][2][0]), len(built))
        sizes = [_strides(spec, axes[1:], placing.pads)[1] for spec, placing, axes in built[:rows]]
    components = []
    at = 0
    widest = 0
    for i, (spec, placing, axes) in enumerate(built):
        if i < rows:
            strides, _ = _strides(spec, axes[1:], placing.pads)
            strides.insert(0, sum(sizes) + style.gap)
            offset, size = sum(sizes[:i]), sum(sizes) + style.gap
            end = size * axes[0][1]
        else:
            strides, size = _strides(spec, axes, placing.pads)
            offset = at
            end = offset + size
        widest = max(widest, end - offset)
        at = max(at, end) + (style.gap if i >= rows else 0)
        spelled = [
            0 if s == w and not placing.spell_strides else s
            for s, w in zip(strides, _dense_from(spec, axes, strides), strict=True)
        ]
        made = tuple(Axis(_KINDS[a], extent, s) for (a, extent), s in zip(axes, spelled, strict=True))
        if 0 in spelled:
            # A stride that is left out must come out as what was meant.
            filled = Component(spec.name, "any", spec.element_bytes, made, units[spec.name])
            assert [a.stride for a in filled.axes] == strides
        components.append((spec.name, offset, made, units[spec.name], spec))
    if form in ("page", "region") and len(components) > 1:
        stride = widest + style.kernel_pad
        part = ratio * stride + (style.page_pad if form == "region" else 0)
        # In a region's halves the second component's distance is the half's size, which _place fills in.
        step = part if form == "page" else 0
        components = [(n, j * step, axes, held, spec) for j, (n, _, axes, held, spec) in enumerate(components)]
        if form == "page":
            return _Page(group, layer, components, ratio, stride, len(components) * part + style.page_pad, 1)
        return _Page(group, layer, components, ratio, stride, part, len(components))
    stride = at + style.kernel_pad
    return _Page(group, layer, components, ratio, stride, ratio * stride + style.page_pad, 1)


def _strides(spec: Spec, axes: Sequence[tuple[str, int]], pads: tuple[int, ...]) -> tuple[list[int], int]:
    """The strides of ``axes`` and the bytes that they span, a padded axis stepping further than what lies inside it."""
    size = spec.element_bytes
    strides: list[int] = []
    for i, (_, extent) in enumerate(reversed(axes)):
        step = size + (pads[i] if i < len(pads) else 0)
        strides.insert(0, step)
        size = step * extent
    return strides, size


def _dense_from(spec: Spec, axes: Sequence[tuple[str, int]], strides: Sequence[int]) -> list[int]:
    """For each axis the stride that leaving it out would mean."""
    inside = [s * extent for s, (_, extent) in zip(strides, axes, strict=True)][1:]
    return [*inside, spec.element_bytes]


def _place(side: Side, pages: dict[str, list[_Page]], num_blocks: int) -> tuple[list[int], dict[str, list[View]]]:
    """Give every view its memory: regions' sizes, and the views of each group."""
    regions: list[int] = []
    views: dict[str, list[View]] = {name: [] for name in pages}
    every = [(name, i, page) for name, mine in pages.items() for i, page in enumerate(mine)]
    if side.tensors in ("own", "chain"):
        base = side.base_pad
        for name, _, page in every:
            region = len(regions)
            if side.tensors == "chain" and regions:
                region, base = 0, regions[0]
            end = base + page.bytes * num_blocks * page.whole_regions
            regions[region:] = [end]
            views[name].append(_view(page, region, base, page.bytes, num_blocks))
            base = side.base_pad
        return regions, views
    slots: dict[int, int] = {}
    if side.tensors == "block":
        where = {(name, i): n for n, (name, i, _) in enumerate(every)}
    else:
        where = {(name, i): i for name, i, _ in every}
    for name, i, page in every:
        slot = where[name, i]
        slots[slot] = max(slots.get(slot, 0), page.bytes)
    if side.tensors == "pool":
        stride = max(slots.values())
        for name, i, page in every:
            views[name].append(_view(page, where[name, i], side.base_pad, stride, num_blocks))
        return [side.base_pad + stride * num_blocks] * len(slots), views
    stride = sum(slots.values())
    starts = {slot: sum(slots[s] for s in slots if s < slot) for slot in slots}
    for name, i, page in every:
        views[name].append(_view(page, 0, side.base_pad + starts[where[name, i]], stride, num_blocks))
    return [side.base_pad + stride * num_blocks], views


def _view(page: _Page, region: int, base: int, block_stride: int, num_blocks: int) -> View:
    half = block_stride * num_blocks if page.whole_regions > 1 else 0
    components = tuple(
        Component(name, f"e{spec.element_bytes}", spec.element_bytes, axes, units, offset + j * half)
        for j, (name, offset, axes, units, spec) in enumerate(page.components)
    )
    # Leaving the kernel stride out means an even split; it is left out where that is what it is.
    even = page.kernel_stride * page.ratio == block_stride
    stride = 0 if even else page.kernel_stride
    return View(page.layer, region, base, block_stride, num_blocks, components, page.ratio, stride)


# -- one read --------------------------------------------------------------------------------------------------------


def _wants(c: Choices, p: Side, d: Side, layers: dict[str, dict[str, Spec]]) -> tuple[dict[str, Want], int, int]:
    """What is read of each D group, and the request's own range."""
    steps: dict[str, int] = {}
    longest = 1
    for name, (kind, tokens, members) in d.groups.items():
        if kind is GroupKind.ATTENTION:
            longest = max(longest, tokens)
            step = 1
            for layer in members:
                theirs = _block_tokens(p, layer)
                longest = max(longest, theirs)
                for component in layers[layer]:
                    step = math.lcm(step, math.gcd(_kernel(d, layer, component), _kernel(p, layer, component)))
            steps[name] = step

    def tokens_read() -> int:
        return 1 + c.below(3 * longest + 2)

    def skipped(tokens: int, step: int) -> int:
        return step * c.below(-(-tokens // step)) if c.chance(60) else 0

    num_tokens = tokens_read()
    # The request's skip must suit every group that has none of its own.
    skip_tokens = skipped(num_tokens, math.lcm(*steps.values()))
    wants = {}
    for name, (kind, _, _) in d.groups.items():
        wants[name] = Want(skip_tokens, num_tokens)
        if kind is GroupKind.ATTENTION and c.chance(20):
            tokens = tokens_read()
            wants[name] = Want(skipped(tokens, steps[name]), tokens)
        if kind is GroupKind.STATE:
            wants[name] = Want(0, num_tokens)
    return wants, num_tokens, skip_tokens


def _kernel(side: Side, layer: str, component: str) -> int:
    style = side.styles[layer]
    second = component in style.sequence[len(style.sequence) - style.split :] if style.split else False
    return _block_tokens(side, layer) // style.ratios[int(second)]


def _lists(c: Choices, side: Side, needs: dict[str, list[Want]]) -> dict[str, Blocks]:
    """Each group's blocks, and how many blocks the side must have for them."""
    shapes: dict[str, tuple[list[int], list[bool]]] = {}
    for name, (kind, tokens, _) in side.groups.items():
        wanted = needs[name]
        if kind is GroupKind.ATTENTION:
            first = min(w.skip for w in wanted) // tokens
            first -= c.below(first + 1) if c.chance(75) else first
            last = max(-(-w.tokens // tokens) for w in wanted) + (c.below(3) if c.chance(30) else 0)
            positions = [tokens * i for i in range(first, last)]
            read = [any(at < w.tokens and at + tokens > w.skip for w in wanted) for at in positions]
        else:
            folded = wanted[0].tokens
            others = [folded + 1 + i for i in range(4)] + list(range(folded))
            positions = c.shuffled(others)[: c.below(4)] if c.chance(60) else []
            positions.insert(c.below(len(positions) + 1), folded)
            read = [at == folded for at in positions]
        shapes[name] = (positions, read)
    total = sum(len(positions) for positions, _ in shapes.values())
    longest = max(len(positions) for positions, _ in shapes.values())
    shared = side.tensors.startswith("pool")
    spare = 1 + c.below(3)
    side.num_blocks = (total if shared else longest) + spare

    def numbers() -> list[int]:
        return c.shuffled(range(side.num_blocks)) if c.chance(70) else list(range(side.num_blocks))

    free = numbers()
    lists = {}
    for name, (positions, read) in shapes.items():
        if not shared:
            free = numbers()
        ids = []
        for needed in read:
            absent = not needed and c.chance(50)
            ids.append(NULL if absent else free.pop(0))
        lists[name] = Blocks(tuple(ids), tuple(positions))
    return lists
