"""What lies where in one rank's cache memory: regions, groups, views, components.

Everything is validated when it is built; a :class:`CacheLayout` that exists is sound: every byte that it names lies
inside its region, no byte is two things within one group, and groups that share bytes share their block numbers.

Offsets, strides and lengths are bytes; positions and block sizes are tokens; ranges are half open.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property
from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.geometry import Box, Budget, Dim, Shape, TooIntricateError

#: Addresses, sizes and offsets must be below this (they travel as signed 64-bit integers).
MAX_BYTES: Final = 2**63 - 1
#: Block IDs must be below this (descriptor numbers are int32).
MAX_BLOCKS: Final = 2**31 - 1
#: Most regions, groups, views and components that one layout may have.
MAX_REGIONS: Final = 65_536
MAX_GROUPS: Final = 1_024
MAX_VIEWS: Final = 65_536
MAX_COMPONENTS: Final = 262_144
MAX_NAME: Final = 256
#: Most pairs of components of one region whose spans interleave (they are compared one by one).
MAX_SHARING_PAIRS: Final = 250_000
_NAME: Final = re.compile(r"[!-~]([ -~]*[!-~])?")


class MemoryKind(str, Enum):
    """Where a region lies."""

    DRAM = "dram"
    VRAM = "vram"


class GroupKind(str, Enum):
    """What a block of a group is: ``block_tokens`` tokens of a sequence, or one state snapshot."""

    ATTENTION = "attention"
    STATE = "state"


class AxisKind(str, Enum):
    """What an axis counts.

    ``TOKEN``: positions inside a kernel block.  ``UNIT``: what tensor parallelism shards (KV heads, channels, SSM
    heads).  ``INNER``: everything else; never split.
    """

    TOKEN = "token"
    UNIT = "unit"
    INNER = "inner"


def invalid(field_path: str, message: str, **values: object) -> KvxferError:
    """A LAYOUT_INVALID error for ``field_path``."""
    return KvxferError(Reason.LAYOUT_INVALID, message, field=field_path, **values)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(name, f"{name} must be an integer, not {type(value).__name__}", value=value)
    if not low <= value <= high:
        raise invalid(name, f"{name} is {value}; allowed are {low} to {high}", value=value, minimum=low, maximum=high)


def _check_name(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > MAX_NAME or not _NAME.fullmatch(value):
        shown = repr(value)[:80]
        raise invalid(name, f"{name} is {shown}; allowed are 1 to {MAX_NAME} printable ASCII characters", value=shown)


@dataclass(frozen=True, slots=True)
class Region:
    """One registered memory range.  Which memory it is (handle, address) is bound elsewhere."""

    size: int
    memory: MemoryKind = MemoryKind.DRAM
    device: int = 0

    def __post_init__(self) -> None:
        _check_int("size", self.size, 1, MAX_BYTES)
        _check_int("device", self.device, 0, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class Axis:
    """``extent`` steps; ``stride`` bytes a step, 0 meaning dense: the next inner axis's stride times its extent."""

    kind: AxisKind
    extent: int
    stride: int = 0

    def __post_init__(self) -> None:
        _check_int("extent", self.extent, 1, MAX_BYTES)
        _check_int("stride", self.stride, 0, MAX_BYTES)


@dataclass(frozen=True, slots=True)
class UnitRange:
    """The units ``[begin, end)`` out of ``total`` that a rank holds of a component."""

    begin: int
    end: int
    total: int

    def __post_init__(self) -> None:
        _check_int("total", self.total, 1, MAX_BYTES)
        _check_int("end", self.end, 1, self.total)
        _check_int("begin", self.begin, 0, self.end - 1)

    def __len__(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return f"[{self.begin}, {self.end}) of {self.total}"


@dataclass(frozen=True, slots=True)
class Component:
    """A named array inside every kernel block of a view.

    :param name: what it is (``kv``, ``conv.x``, ``ssm``, ...); matched between the two sides.
    :param offset: bytes from the start of the kernel block.  It may exceed the block's stride: a region that holds all
        K blocks and then all V blocks is a component ``v`` whose offset is the size of the K half.
    :param dtype: element type, torch's name in lower case (``bfloat16``, ``float8_e4m3fn``); compared, never converted.
    :param element_bytes: size of an element.
    :param axes: in memory order, outermost first; strides are filled in.  Exactly one ``UNIT`` axis, whose extent is
        ``len(units)``; exactly one ``TOKEN`` axis in an attention group, none in a state group; any ``INNER`` axes.
    :param units: which units these are.  Ownership comes from here and from nowhere else.
    :raises KvxferError: LAYOUT_INVALID.
    """

    name: str
    dtype: str
    element_bytes: int
    axes: tuple[Axis, ...]
    units: UnitRange
    offset: int = 0

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        _check_name("dtype", self.dtype)
        _check_int("element_bytes", self.element_bytes, 1, 64)
        _check_int("offset", self.offset, 0, MAX_BYTES)
        if not 1 <= len(self.axes) <= 16:
            raise invalid("axes", f"component {self.name} has {len(self.axes)} axes; allowed are 1 to 16")
        dense = self.element_bytes
        filled: list[Axis] = []
        for axis in reversed(self.axes):
            stride = axis.stride or dense
            filled.append(Axis(axis.kind, axis.extent, stride))
            dense = stride * axis.extent
            if dense > MAX_BYTES:
                raise invalid("axes", f"component {self.name} spans more than {MAX_BYTES} bytes")
        object.__setattr__(self, "axes", tuple(reversed(filled)))
        for kind, most in ((AxisKind.UNIT, 1), (AxisKind.TOKEN, 1)):
            if sum(a.kind is kind for a in self.axes) > most:
                raise invalid("axes", f"component {self.name} has more than one {kind.value} axis")
        unit = self.axis(AxisKind.UNIT)
        if unit is None or unit.extent != len(self.units):
            held = "none" if unit is None else f"one of extent {unit.extent}"
            raise invalid(
                "axes",
                f"component {self.name} holds {len(self.units)} units {self.units} and needs a unit axis of that "
                f"extent; it has {held}",
                component=self.name,
                units=self.units,
            )
        if clash := self.box.clashing_dim():
            raise invalid(
                "axes",
                f"component {self.name}: an axis of extent {clash.extent} steps by {clash.stride} bytes, less than "
                "what lies inside it",
                component=self.name,
                stride=clash.stride,
            )

    def axis(self, kind: AxisKind) -> Axis | None:
        """The token or unit axis, if there is one."""
        return next((a for a in self.axes if a.kind is kind), None)

    @property
    def tokens(self) -> int:
        """Tokens in a kernel block; 0 in a state group."""
        axis = self.axis(AxisKind.TOKEN)
        return axis.extent if axis else 0

    @property
    def inner(self) -> tuple[Axis, ...]:
        """The inner axes in memory order, with dense neighbours merged, so that (64, 128) equals (8192,)."""
        merged: list[Axis] = []
        for axis in (a for a in self.axes if a.kind is AxisKind.INNER and a.extent > 1):
            if merged and merged[-1].stride == axis.stride * axis.extent:
                merged[-1] = Axis(AxisKind.INNER, merged[-1].extent * axis.extent, axis.stride)
            else:
                merged.append(axis)
        return tuple(merged)

    @property
    def box(self) -> Box:
        """The bytes of this component within one kernel block, from the block's start."""
        return Box(self.offset, self.element_bytes, tuple(Dim(a.extent, a.stride) for a in self.axes))

    @property
    def data_bytes(self) -> int:
        """Bytes of data in a kernel block, without gaps."""
        return self.element_bytes * math.prod(a.extent for a in self.axes)


@dataclass(frozen=True, slots=True)
class View:
    """One layer of a group on this rank: where its blocks lie in a region.

    Kernel block ``k`` of logical block ``b`` starts at ``base + b * block_stride + k * kernel_stride``.

    :param layer: the layer's name; matched between the two sides.
    :param region: index into the layout's regions.
    :param base: offset of block 0 in the region.
    :param block_stride: bytes from one logical block to the next.
    :param num_blocks: logical blocks.
    :param components: what lies inside a kernel block.  K and V in two regions are two views of the same layer.
    :param kernel_blocks: kernel blocks in a logical block (the *ratio*); 1 in a state group.
    :param kernel_stride: bytes from one kernel block to the next; 0 means ``block_stride / kernel_blocks``.
    :raises KvxferError: LAYOUT_INVALID.
    """

    layer: str
    region: int
    base: int
    block_stride: int
    num_blocks: int
    components: tuple[Component, ...]
    kernel_blocks: int = 1
    kernel_stride: int = 0

    def __post_init__(self) -> None:
        _check_name("layer", self.layer)
        _check_int("region", self.region, 0, MAX_REGIONS - 1)
        _check_int("base", self.base, 0, MAX_BYTES)
        _check_int("block_stride", self.block_stride, 1, MAX_BYTES)
        _check_int("num_blocks", self.num_blocks, 1, MAX_BLOCKS)
        _check_int("kernel_blocks", self.kernel_blocks, 1, MAX_BLOCKS)
        _check_int("kernel_stride", self.kernel_stride, 0, MAX_BYTES)
        if not self.components:
            raise invalid("components", f"the view of layer {self.layer} has no components")
        if self.kernel_stride == 0:
            if self.block_stride % self.kernel_blocks:
                raise invalid(
                    "kernel_stride",
                    f"kernel_stride is needed for layer {self.layer}: its block_stride {self.block_stride} is no "
                    f"multiple of its {self.kernel_blocks} kernel blocks",
                )
            object.__setattr__(self, "kernel_stride", self.block_stride // self.kernel_blocks)
        for i, component in enumerate(self.components):
            box = self.component_box(component)
            if box.end > MAX_BYTES:
                raise invalid(f"components[{i}]", f"layer {self.layer}, component {component.name} ends past 2^63 - 1")
            if clash := box.clashing_dim():
                raise invalid(
                    f"components[{i}]",
                    f"layer {self.layer}, component {component.name}: blocks overlap one another (a step of "
                    f"{clash.stride} bytes is shorter than what lies inside it)",
                    layer=self.layer,
                    component=component.name,
                    stride=clash.stride,
                )

    def component_box(self, component: Component) -> Box:
        """Every byte of ``component`` in all blocks of this view, from the region's start."""
        kernel = component.box
        blocks = (Dim(self.num_blocks, self.block_stride), Dim(self.kernel_blocks, self.kernel_stride))
        return Box(self.base + kernel.offset, kernel.length, blocks + kernel.dims)

    def block_box(self, component: Component) -> Box:
        """The bytes of ``component`` in logical block 0, from the region's start."""
        kernel = component.box
        dims = (Dim(self.kernel_blocks, self.kernel_stride), *kernel.dims)
        return Box(self.base + kernel.offset, kernel.length, dims)


@dataclass(frozen=True)
class Group:
    """A cache group of the scheduler, with block IDs of its own.

    :param name: unique in the layout; used in requests and in errors.
    :param kind: attention (paged by token) or state (one snapshot a block).
    :param views: one or more per layer; a (layer, component) pair occurs once in the whole layout.
    :param block_tokens: tokens in a logical block, the same for every layer; 0 in a state group.
    :raises KvxferError: LAYOUT_INVALID.
    """

    name: str
    kind: GroupKind
    views: tuple[View, ...]
    block_tokens: int = 0

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        _check_int("block_tokens", self.block_tokens, 0, MAX_BLOCKS)
        if not self.views:
            raise invalid("views", f"group {self.name} has no views")
        attention = self.kind is GroupKind.ATTENTION
        if attention != (self.block_tokens > 0):
            raise invalid(
                "block_tokens",
                f"group {self.name} is of kind {self.kind.value} and has block_tokens {self.block_tokens}; attention "
                "needs at least 1, state takes 0",
            )
        for i, view in enumerate(self.views):
            where = f"views[{i}]"
            if not attention and view.kernel_blocks != 1:
                raise invalid(where, f"state group {self.name}, layer {view.layer}: kernel_blocks must be 1")
            for component in view.components:
                if attention and component.tokens * view.kernel_blocks != self.block_tokens:
                    raise invalid(
                        where,
                        f"group {self.name}, layer {view.layer}, component {component.name}: {view.kernel_blocks} "
                        f"kernel blocks of {component.tokens} tokens do not make a block of {self.block_tokens}",
                        group=self.name,
                        layer=view.layer,
                        component=component.name,
                    )
                if not attention and component.tokens:
                    raise invalid(
                        where, f"state group {self.name}, component {component.name} may not have a token axis"
                    )

    @cached_property
    def num_blocks(self) -> int:
        """Block IDs below this exist in every view."""
        return min(v.num_blocks for v in self.views)

    def parts(self) -> Iterator[tuple[View, Component]]:
        """Every (view, component)."""
        for view in self.views:
            for component in view.components:
                yield view, component


@dataclass(frozen=True, slots=True)
class TokenPartition:
    """Tokens interleaved over ranks (decode context parallel): this rank holds every ``size``-th run of tokens."""

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        _check_int("size", self.size, 1, 65_536)
        _check_int("rank", self.rank, 0, self.size - 1)
        _check_int("interleave", self.interleave, 1, MAX_BLOCKS)


@dataclass(frozen=True)
class CacheLayout:
    """One rank's whole cache.

    :raises KvxferError: LAYOUT_INVALID, naming the field, the group, the layer and the component.
    """

    regions: tuple[Region, ...]
    groups: tuple[Group, ...]
    partition: TokenPartition = field(default_factory=TokenPartition)

    def __post_init__(self) -> None:
        for name, items, most in (("regions", self.regions, MAX_REGIONS), ("groups", self.groups, MAX_GROUPS)):
            if not 1 <= len(items) <= most:
                raise invalid(name, f"a layout has 1 to {most} {name}, this one {len(items)}")
        views = sum(len(g.views) for g in self.groups)
        components = sum(len(v.components) for g in self.groups for v in g.views)
        for name, count, most in (("views", views, MAX_VIEWS), ("components", components, MAX_COMPONENTS)):
            if count > most:
                raise invalid("groups", f"a layout has at most {most} {name}, this one {count}")
        self._check_names()
        self._check_bounds()
        self._check_sharing()

    def _check_names(self) -> None:
        names: dict[str, int] = {}
        held: dict[tuple[str, str], str] = {}
        for g, group in enumerate(self.groups):
            if group.name in names:
                raise invalid(f"groups[{g}].name", f"two groups are called {group.name}", group=group.name)
            names[group.name] = g
            for view, component in group.parts():
                key = (view.layer, component.name)
                if key in held:
                    raise invalid(
                        f"groups[{g}].views",
                        f"layer {view.layer}, component {component.name} is in group {held[key]} and again in group "
                        f"{group.name}; a cache that layers share is listed once",
                        layer=view.layer,
                        component=component.name,
                    )
                held[key] = group.name

    def _check_bounds(self) -> None:
        for g, group in enumerate(self.groups):
            for i, view in enumerate(group.views):
                where = f"groups[{g}].views[{i}]"
                if view.region >= len(self.regions):
                    raise invalid(
                        f"{where}.region",
                        f"group {group.name}, layer {view.layer}: region is {view.region}; allowed are 0 to "
                        f"{len(self.regions) - 1}",
                        region=view.region,
                    )
                size = self.regions[view.region].size
                for component in view.components:
                    end = view.component_box(component).end
                    if end > size:
                        raise invalid(
                            where,
                            f"group {group.name}, layer {view.layer}, component {component.name} ends at byte {end} of "
                            f"region {view.region}, which has {size}",
                            group=group.name,
                            layer=view.layer,
                            component=component.name,
                            end=end,
                            size=size,
                        )

    def _check_sharing(self) -> None:
        """Within a group no byte twice; between groups a byte may be shared, but only by blocks of one number."""
        pools = list(range(len(self.groups)))
        by_region: dict[int, list[_Part]] = {}
        for g, group in enumerate(self.groups):
            for view, component in group.parts():
                by_region.setdefault(view.region, []).append(_Part(g, view, component))
        pairs = 0
        budget = Budget()
        for region, parts in by_region.items():
            parts.sort(key=lambda p: p.box.offset)
            live: list[_Part] = []
            for part in parts:
                live = [other for other in live if other.end > part.box.offset]
                pairs += len(live)
                if pairs > MAX_SHARING_PAIRS:
                    raise invalid("groups", f"more than {MAX_SHARING_PAIRS} pairs of components lie interleaved")
                for other in live:
                    if self._shares(region, other, part, budget):
                        a, b = _root(pools, other.group), _root(pools, part.group)
                        pools[max(a, b)] = min(a, b)
                live.append(part)
        object.__setattr__(self, "_pools", tuple(_root(pools, g) for g in range(len(self.groups))))

    def _shares(self, region: int, a: _Part, b: _Part, budget: Budget) -> bool:
        """Whether two components of different groups lie over the same bytes, block by block.

        :raises KvxferError: LAYOUT_INVALID where they overlap in any other way, or where that is too hard to tell.
        """
        (ga, va, ca), (gb, vb, cb) = (a.group, a.view, a.component), (b.group, b.view, b.component)
        try:
            if ga != gb and va.block_stride == vb.block_stride:
                same, other = budget.meet(a.blocks, b.blocks)
            else:
                same, other = False, budget.meet(a.whole, b.whole)[1]
        except TooIntricateError:
            raise invalid(
                f"groups[{gb}].views",
                f"the layout is too intricate: whether group {self.groups[ga].name}, layer {va.layer}, component "
                f"{ca.name} and group {self.groups[gb].name}, layer {vb.layer}, component {cb.name} overlap in region "
                f"{region} takes too many steps to tell",
                region=region,
                group=self.groups[ga].name,
                layer=va.layer,
                component=ca.name,
                other_group=self.groups[gb].name,
                other_layer=vb.layer,
                other_component=cb.name,
            ) from None
        if not other:
            return same
        first, second = self.groups[ga].name, self.groups[gb].name
        what = (
            f"group {first}, layer {va.layer}, component {ca.name} and group {second}, layer {vb.layer}, component "
            f"{cb.name} overlap in region {region}"
        )
        if ga != gb:
            what += "; groups may share memory only where both number it alike (a pooled allocator's pages)"
        raise invalid(
            f"groups[{gb}].views",
            what,
            region=region,
            group=first,
            layer=va.layer,
            component=ca.name,
            other_group=second,
            other_layer=vb.layer,
            other_component=cb.name,
        )

    @property
    def pools(self) -> tuple[int, ...]:
        """For each group the index of the first group that shares memory with it, directly or through others.

        Groups of one pool share their block numbers: block ``b`` of one lies over block ``b`` of the other.
        """
        pools: tuple[int, ...] = object.__getattribute__(self, "_pools")
        return pools

    @cached_property
    def index(self) -> dict[str, int]:
        """Group name to group index."""
        return {g.name: i for i, g in enumerate(self.groups)}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the whole layout, hexadecimal: equal exactly where two layouts are."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), default=lambda e: e.value)
        return hashlib.sha256(text.encode()).hexdigest()


class _Part:
    """A component of a view, with what its comparison with others needs."""

    def __init__(self, group: int, view: View, component: Component) -> None:
        self.group, self.view, self.component = group, view, component
        self.box = view.component_box(component)
        self.end = self.box.end

    @cached_property
    def whole(self) -> Shape:
        """Every byte, whichever block it is of."""
        return Shape(self.box)

    @cached_property
    def blocks(self) -> Shape:
        """Every byte, block by block."""
        return Shape(self.view.block_box(self.component), Dim(self.view.num_blocks, self.view.block_stride))


def _root(parents: Sequence[int], i: int) -> int:
    while parents[i] != i:
        i = parents[i]
    return i


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """Where a worker stands in its engine."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        for axis, rank, size in (("tp", self.tp_rank, self.tp_size), ("pp", self.pp_rank, self.pp_size)):
            self._check(f"{axis}_size", size, 1, 65_536)
            self._check(f"{axis}_rank", rank, 0, size - 1)

    @staticmethod
    def _check(name: str, value: object, low: int, high: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            allowed = f"{low} to {high}"
            message = f"{name} is {value!r}; allowed are {allowed}"
            raise KvxferError(Reason.FIELD_INVALID, message, field=name, value=value, allowed=allowed)

    @property
    def number(self) -> int:
        """A number for the rank, unique in its engine: pipeline stage first."""
        return self.pp_rank * self.tp_size + self.tp_rank

    def __str__(self) -> str:
        return f"tp{self.tp_rank}" if self.pp_size == 1 else f"pp{self.pp_rank}.tp{self.tp_rank}"
