"""Layouts and ranks as messages."""

from __future__ import annotations

import functools
from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import (
    MAX_COMPONENTS,
    MAX_GROUPS,
    MAX_REGIONS,
    MAX_VIEWS,
    Axis,
    AxisKind,
    CacheLayout,
    Component,
    Group,
    GroupKind,
    MemoryKind,
    Rank,
    Region,
    TokenPartition,
    UnitRange,
    View,
)
from kvxfer.pb import layout_pb2 as pb
from kvxfer.wire.fields import at, choice, refuse, required, under

#: Most formats of a layout, as many as it may have views.
MAX_FORMATS: Final = MAX_VIEWS

MEMORY_KINDS: Final = {pb.MEMORY_KIND_DRAM: MemoryKind.DRAM, pb.MEMORY_KIND_VRAM: MemoryKind.VRAM}
GROUP_KINDS: Final = {pb.GROUP_KIND_ATTENTION: GroupKind.ATTENTION, pb.GROUP_KIND_STATE: GroupKind.STATE}
AXIS_KINDS: Final = {
    pb.AXIS_KIND_TOKEN: AxisKind.TOKEN,
    pb.AXIS_KIND_UNIT: AxisKind.UNIT,
    pb.AXIS_KIND_INNER: AxisKind.INNER,
}
MEMORY_KINDS_OUT: Final = {kind: number for number, kind in MEMORY_KINDS.items()}
GROUP_KINDS_OUT: Final = {kind: number for number, kind in GROUP_KINDS.items()}
AXIS_KINDS_OUT: Final = {kind: number for number, kind in AXIS_KINDS.items()}

#: A format as a view uses it: its components, kernel blocks and kernel stride.
_Format = tuple[tuple[Component, ...], int, int]


def rank_from_pb(message: pb.Rank, field: str) -> Rank:
    """:raises KvxferError: FIELD_INVALID."""
    with under(field):
        return _rank(message.tp_rank, message.tp_size, message.pp_rank, message.pp_size)


#: Every message of a read names ranks, the same few ones again and again.
_rank: Final = functools.lru_cache(maxsize=4096)(Rank)


def rank_to_pb(rank: Rank) -> pb.Rank:
    """A rank as a message."""
    return pb.Rank(tp_rank=rank.tp_rank, tp_size=rank.tp_size, pp_rank=rank.pp_rank, pp_size=rank.pp_size)


def layout_from_pb(message: pb.Layout, field: str = "layout") -> CacheLayout:
    """Check and build a layout.

    :param field: where the message stands in the request.
    :raises KvxferError: LAYOUT_INVALID; FIELD_INVALID for enums and messages that are not set.  Nothing large is built
        before its size was checked.
    """
    with under(field):
        _check_sizes(message)
        regions = tuple(_region(region, f"regions[{i}]") for i, region in enumerate(message.regions))
        formats = [_format(form, f"formats[{i}]") for i, form in enumerate(message.formats)]
        groups = tuple(_group(group, formats, f"groups[{i}]") for i, group in enumerate(message.groups))
        partition = TokenPartition()
        if message.HasField("partition"):
            with under("partition"):
                partition = TokenPartition(message.partition.size, message.partition.rank, message.partition.interleave)
        return CacheLayout(regions, groups, partition)


def layout_to_pb(layout: CacheLayout) -> pb.Layout:
    """A layout as a message; views with equal contents share a format."""
    numbers: dict[_Format, int] = {}
    groups = [
        pb.Group(
            name=group.name,
            kind=GROUP_KINDS_OUT[group.kind],
            block_tokens=group.block_tokens,
            views=[_view_to_pb(view, numbers) for view in group.views],
        )
        for group in layout.groups
    ]
    partition = layout.partition
    return pb.Layout(
        regions=[pb.Region(size=r.size, memory=MEMORY_KINDS_OUT[r.memory], device=r.device) for r in layout.regions],
        formats=[_format_to_pb(form) for form in numbers],
        groups=groups,
        partition=None
        if partition == TokenPartition()
        else pb.TokenPartition(size=partition.size, rank=partition.rank, interleave=partition.interleave),
    )


def _check_sizes(message: pb.Layout) -> None:
    views = sum(len(group.views) for group in message.groups)
    held = [len(form.components) for form in message.formats]
    for name, count, most in (
        ("regions", len(message.regions), MAX_REGIONS),
        ("formats", len(message.formats), MAX_FORMATS),
        ("groups", len(message.groups), MAX_GROUPS),
        ("views", views, MAX_VIEWS),
        ("components", sum(held), MAX_COMPONENTS),
    ):
        if count > most:
            where = {"views": "groups", "components": "formats"}.get(name, name)
            raise _invalid(where, f"hold {count} {name}; a layout has at most {most}", value=count, maximum=most)
    components = 0
    for g, group in enumerate(message.groups):
        for i, view in enumerate(group.views):
            if view.format >= len(held):
                allowed = f"allowed are 0 to {len(held) - 1}" if held else "there are no formats"
                raise _invalid(f"groups[{g}].views[{i}].format", f"is {view.format}; {allowed}", value=view.format)
            components += held[view.format]
    # A few large formats in many views are short to write and long to check.
    if components > MAX_COMPONENTS:
        raise _invalid("groups", f"have {components} components in all views; allowed are {MAX_COMPONENTS}")


def _invalid(field: str, message: str, **values: object) -> KvxferError:
    return refuse(field, message, reason=Reason.LAYOUT_INVALID, **values)


def _region(message: pb.Region, field: str) -> Region:
    memory = choice(message.memory, MEMORY_KINDS, at(field, "memory"))
    with under(field):
        return Region(message.size, memory, message.device)


def _format(message: pb.BlockFormat, field: str) -> _Format:
    if not message.components:
        raise _invalid(at(field, "components"), "must not be empty")
    components = tuple(_component(c, f"{field}.components[{i}]") for i, c in enumerate(message.components))
    return components, message.kernel_blocks or 1, message.kernel_stride


def _component(message: pb.Component, field: str) -> Component:
    required(message, "units", field)
    if len(message.axes) > 16:
        raise _invalid(at(field, "axes"), f"are {len(message.axes)}; allowed are 1 to 16", value=len(message.axes))
    axes = tuple(_axis(axis, f"{field}.axes[{i}]") for i, axis in enumerate(message.axes))
    with under(at(field, "units")):
        units = UnitRange(message.units.begin, message.units.end, message.units.total)
    with under(field):
        return Component(message.name, message.dtype, message.element_bytes, axes, units, message.offset)


def _axis(message: pb.Axis, field: str) -> Axis:
    kind = choice(message.kind, AXIS_KINDS, at(field, "kind"))
    with under(field):
        return Axis(kind, message.extent, message.stride)


def _group(message: pb.Group, formats: list[_Format], field: str) -> Group:
    kind = choice(message.kind, GROUP_KINDS, at(field, "kind"))
    views = tuple(_view(view, formats, f"{field}.views[{i}]") for i, view in enumerate(message.views))
    with under(field):
        return Group(message.name, kind, views, message.block_tokens)


def _view(message: pb.View, formats: list[_Format], field: str) -> View:
    components, kernel_blocks, kernel_stride = formats[message.format]
    try:
        return View(
            message.layer,
            message.region,
            message.base,
            message.block_stride,
            message.num_blocks,
            components,
            kernel_blocks,
            kernel_stride,
        )
    except KvxferError as error:
        # What the core calls a view's own stands in the format here.
        where = error.field
        if where.startswith(("components", "kernel_")):
            error = KvxferError(error.reason, error.message, field="format", **error.metadata)
        raise error.within(field) from None


def _view_to_pb(view: View, numbers: dict[_Format, int]) -> pb.View:
    form = (view.components, view.kernel_blocks, view.kernel_stride)
    return pb.View(
        layer=view.layer,
        region=view.region,
        base=view.base,
        block_stride=view.block_stride,
        num_blocks=view.num_blocks,
        format=numbers.setdefault(form, len(numbers)),
    )


def _format_to_pb(form: _Format) -> pb.BlockFormat:
    components, kernel_blocks, kernel_stride = form
    return pb.BlockFormat(
        components=[
            pb.Component(
                name=c.name,
                dtype=c.dtype,
                element_bytes=c.element_bytes,
                offset=c.offset,
                axes=[pb.Axis(kind=AXIS_KINDS_OUT[a.kind], extent=a.extent, stride=a.stride) for a in c.axes],
                units=pb.UnitRange(begin=c.units.begin, end=c.units.end, total=c.units.total),
            )
            for c in components
        ],
        kernel_blocks=kernel_blocks,
        kernel_stride=kernel_stride,
    )
