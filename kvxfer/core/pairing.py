"""The one rule: two layouts in, rows out.

    A rank's share of a component is a box: layers x tokens x units.  A read is the intersection of what D is missing
    with what a P rank holds, cut into runs that are contiguous on both sides.

Compiled once per D rank and P engine, at the handshake.  No request, no address, no model family is known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.geometry import PairedDim, common_runs
from kvxfer.core.layout import AxisKind, CacheLayout, Component, Group, GroupKind, Rank, View
from kvxfer.core.plan import MAX_DESCRIPTORS, Addressing, Plan, RowTable, Section, SourcePlan, Tier
from kvxfer.core.sources import fewest, preference

#: Most runs (rows before they are split by parts) that a plan may have, and most rows a side.
MAX_RUNS: Final = 1_000_000
MAX_ROWS: Final = 4_000_000
#: Below this many bytes an average run is worth a warning: the transport then pays per descriptor.
SHORT_RUN: Final = 4_096


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of an engine and what its memory holds."""

    rank: Rank
    layout: CacheLayout


@dataclass(frozen=True, slots=True)
class PairingOptions:
    """What the caller allows.

    :param min_run_bytes: where the two sides store a component in a different order, runs shorter than this are
        refused (each element would be a descriptor of its own).
    :param ignore_local_groups: groups of D that need not be found on P; they are not read.
    :param ignore_remote_groups: groups of P that D need not have.
    """

    min_run_bytes: int = 64
    ignore_local_groups: frozenset[str] = field(default_factory=frozenset)
    ignore_remote_groups: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class _Part:
    """A component of a layer on one side."""

    group: Group
    group_index: int
    view: View
    component: Component

    def __str__(self) -> str:
        return f"group {self.group.name}, layer {self.view.layer}, component {self.component.name}"

    @property
    def kernel_tokens(self) -> int:
        return self.component.tokens

    def stride(self, kind: AxisKind) -> int:
        axis = self.component.axis(kind)
        return axis.stride if axis else 0


@dataclass(frozen=True, slots=True)
class _Leg:
    """One side of a run: how its address follows from block, kernel block and part.  Steps of extent 1 are 0."""

    region: int
    num_blocks: int
    block_stride: int
    kernel_blocks: int
    kernel_stride: int
    parts: int
    part_stride: int


@dataclass(frozen=True, slots=True)
class _Run:
    local: _Leg
    remote: _Leg
    local_offset: int
    remote_offset: int
    length: int


def mismatch(message: str, **values: object) -> KvxferError:
    """A LAYOUT_MISMATCH error."""
    return KvxferError(Reason.LAYOUT_MISMATCH, message, field="", **values)


def compile_plan(local: Member, remotes: Sequence[Member], options: PairingOptions | None = None) -> Plan:
    """Pair one D rank with all ranks of a P engine.

    :param local: the reader.
    :param remotes: every rank of the engine to read from.
    :raises KvxferError: LAYOUT_MISMATCH, naming group, layer, component, field and both values;
        TOO_MANY_DESCRIPTORS where the plan would not fit int32 descriptor numbers.
    """
    options = options or PairingOptions()
    if not remotes:
        raise mismatch("the engine to read from has no ranks")
    _check_engine(local, remotes)
    wanted = _wanted(local.layout, options)
    if not wanted:
        raise mismatch("nothing is left to read: ignore_local_groups names every group of D")
    held = [_parts(m.layout) for m in remotes]
    _check_extras(local, remotes, held, options)
    demands: list[tuple[_Part, list[tuple[int, int, frozenset[int]]]]] = []
    for key, part in wanted.items():
        holders = {i: h[key] for i, h in enumerate(held) if key in h}
        for i, other in holders.items():
            _check_pair(part, other, remotes[i].rank)
        demands.append((part, _segments(part, holders, remotes)))
    order = preference(local.rank, [m.rank for m in remotes])
    chosen = fewest((s[2] for _, segments in demands for s in segments), order)
    favourites = [i for i in order if i in chosen]
    reads: dict[int, list[tuple[_Part, _Part, int, int]]] = {}
    for part, segments in demands:
        key = (part.view.layer, part.component.name)
        for i, begin, end in _assign(segments, favourites):
            reads.setdefault(i, []).append((part, held[i][key], begin, end))
    sources = tuple(
        _compile_source(remotes[i], reads[i], options) for i in sorted(reads, key=lambda i: remotes[i].rank)
    )
    names = frozenset(g.name for m in remotes for g in m.layout.groups)
    return Plan(local.rank, local.layout, sources, names, tuple(_warnings(local.layout, sources)))


# -- what is wanted, what is held ------------------------------------------------------------------------------------


def _check_engine(local: Member, remotes: Sequence[Member]) -> None:
    for who, member in (("D", local), *(("P", m) for m in remotes)):
        if member.layout.partition.size != 1:
            raise mismatch(
                f"{who} rank {member.rank} interleaves its tokens over {member.layout.partition.size} ranks; token "
                "partitions are not supported yet",
                attribute="partition.size",
                value=member.layout.partition.size,
            )
    sizes = {(m.rank.tp_size, m.rank.pp_size) for m in remotes}
    if len(sizes) != 1:
        raise mismatch(f"the P ranks do not agree on their tp and pp sizes: {sorted(sizes)}", sizes=sorted(sizes))
    numbers = [m.rank.number for m in remotes]
    if len(set(numbers)) != len(numbers):
        raise mismatch(f"a P rank is listed twice: {sorted(numbers)}", ranks=sorted(numbers))


def _parts(layout: CacheLayout) -> dict[tuple[str, str], _Part]:
    return {
        (view.layer, component.name): _Part(group, i, view, component)
        for i, group in enumerate(layout.groups)
        for view, component in group.parts()
    }


def _wanted(layout: CacheLayout, options: PairingOptions) -> dict[tuple[str, str], _Part]:
    """D's components, attention groups first (their rows come first), in the layout's order."""
    if unknown := options.ignore_local_groups - layout.index.keys():
        raise KvxferError(
            Reason.FIELD_INVALID,
            f"ignore_local_groups names {sorted(unknown)}, which the local layout does not have",
            field="ignore_local_groups",
            groups=sorted(unknown),
        )
    parts = {k: p for k, p in _parts(layout).items() if p.group.name not in options.ignore_local_groups}
    return dict(sorted(parts.items(), key=lambda item: item[1].group.kind is GroupKind.STATE))


def _check_extras(
    local: Member, remotes: Sequence[Member], held: Sequence[dict[tuple[str, str], _Part]], options: PairingOptions
) -> None:
    """Refuse what P holds and D does not, unless D's other pipeline stages may have it or the caller allows it."""
    mine = _parts(local.layout)
    layers = {layer for layer, _ in mine}
    for member, parts in zip(remotes, held, strict=True):
        for key, part in parts.items():
            elsewhere = local.rank.pp_size > 1 and key[0] not in layers
            if key in mine or elsewhere or part.group.name in options.ignore_remote_groups:
                continue
            raise mismatch(
                f"P rank {member.rank} holds {part}, which D does not have; name the group in ignore_remote_groups "
                "if it is not to be read",
                group=part.group.name,
                layer=key[0],
                component=key[1],
                side="remote",
            )


def _check_pair(mine: _Part, other: _Part, rank: Rank) -> None:
    """Everything about a component that must be equal on both sides."""
    a, b = mine.component, other.component
    speculative = mine.group.kind is GroupKind.STATE and a.name.partition(".")[0] == "conv"
    rows = math.prod(x.extent for x in a.inner), math.prod(x.extent for x in b.inner)
    for name, local, remote in (
        ("kind", mine.group.kind.value, other.group.kind.value),
        ("dtype", a.dtype, b.dtype),
        ("element_bytes", a.element_bytes, b.element_bytes),
        ("units.total", a.units.total, b.units.total),
        ("state_rows" if speculative else "inner", *rows),
    ):
        if local != remote:
            why = "; a different number of conv rows is kept for speculation, and which to read is not settled"
            raise mismatch(
                f"{mine}: {name} is {local} on D and {remote} on P rank {rank} (its group {other.group.name})"
                + (why if name == "state_rows" else ""),
                group=mine.group.name,
                layer=mine.view.layer,
                component=a.name,
                attribute=name,
                local=local,
                remote=remote,
                source=rank,
            )


def _segments(
    part: _Part, holders: dict[int, _Part], remotes: Sequence[Member]
) -> list[tuple[int, int, frozenset[int]]]:
    """Cut D's units where the set of P ranks that hold them changes: ``(begin, end, holders)``."""
    units = part.component.units
    ranges = {i: p.component.units for i, p in holders.items()}
    cuts = {units.begin, units.end}
    cuts.update(u for r in ranges.values() for u in (r.begin, r.end) if units.begin < u < units.end)
    edges = sorted(cuts)
    segments = []
    for begin, end in pairwise(edges):
        owners = frozenset(i for i, r in ranges.items() if r.begin <= begin and end <= r.end)
        if not owners:
            has = ", ".join(f"{remotes[i].rank}: {r}" for i, r in sorted(ranges.items())) or "nobody has the component"
            raise mismatch(
                f"{part}: D needs units [{begin}, {end}) of {units.total}, which no P rank holds ({has})",
                group=part.group.name,
                layer=part.view.layer,
                component=part.component.name,
                attribute="units",
                local=units,
                remote=has,
                side="local",
            )
        segments.append((begin, end, owners))
    return segments


def _assign(
    segments: Sequence[tuple[int, int, frozenset[int]]], favourites: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Give each segment to the most preferred source that holds it; neighbours of one source are joined."""
    joined: list[tuple[int, int, int]] = []
    for begin, end, owners in segments:
        source = next(i for i in favourites if i in owners)
        if joined and joined[-1][0] == source and joined[-1][2] == begin:
            joined[-1] = (source, joined[-1][1], end)
        else:
            joined.append((source, begin, end))
    return iter(joined)


# -- from boxes to runs ----------------------------------------------------------------------------------------------


def _compile_source(
    member: Member, reads: Sequence[tuple[_Part, _Part, int, int]], options: PairingOptions
) -> SourcePlan:
    grouped: dict[tuple[int, int, int, int], list[tuple[_Part, _Part, int, int]]] = {}
    for read in reads:
        mine, other = read[0], read[1]
        key = (mine.group_index, other.group_index, mine.kernel_tokens, other.kernel_tokens)
        grouped.setdefault(key, []).append(read)
    local, remote = _Rows("local"), _Rows("remote")
    sections = []
    budget = MAX_RUNS
    for (mine_index, other_index, _, _), members in grouped.items():
        mine, other = members[0][0], members[0][1]
        tiers = []
        for tokens, runs in _tiers(mine, other, members, options, budget):
            budget -= len(runs)
            tiers.append(
                Tier(
                    tokens=tokens,
                    local=local.add([(r.local, r.local_offset, r.length) for r in runs], _counts_in(mine, tokens)),
                    remote=remote.add([(r.remote, r.remote_offset, r.length) for r in runs], _counts_in(other, tokens)),
                    lengths=np.array([r.length for r in runs], dtype=np.int64),
                )
            )
        layers = tuple(dict.fromkeys(m[0].view.layer for m in members))
        sections.append(Section(mine_index, other_index, mine.group.kind, layers, tuple(tiers)))
    return SourcePlan(member.rank, member.layout, local.table(), remote.table(), tuple(sections))


def _counts_in(part: _Part, tokens: int) -> int:
    """Tokens of what a tier of ``tokens`` calls a kernel block: see :class:`Addressing`."""
    fits = tokens and part.kernel_tokens % tokens == 0
    return part.kernel_tokens if fits else part.group.block_tokens


def _tiers(
    mine: _Part,
    other: _Part,
    members: Sequence[tuple[_Part, _Part, int, int]],
    options: PairingOptions,
    budget: int,
) -> list[tuple[int, list[_Run]]]:
    """The sizes at which to read, coarsest first, each with its runs."""
    if mine.group.kind is GroupKind.STATE:
        return [(0, _merged(_section_runs(members, 0, options, budget)))]
    granule = math.gcd(mine.kernel_tokens, other.kernel_tokens)
    fine = _merged(_section_runs(members, granule, options, budget))
    common = math.gcd(mine.group.block_tokens, other.group.block_tokens)
    if common > granule and all(_reaches(a, b, common) for a, b, _, _ in members):
        coarse = _merged(_section_runs(members, common, options, budget))
        if len(coarse) * granule < len(fine) * common:
            return [(common, coarse), (granule, fine)]
    return [(granule, fine)]


def _even(part: _Part) -> bool:
    """Whether tokens are evenly spaced over a whole logical block, across its kernel blocks."""
    return part.view.kernel_blocks == 1 or part.view.kernel_stride == part.kernel_tokens * part.stride(AxisKind.TOKEN)


def _reaches(mine: _Part, other: _Part, tokens: int) -> bool:
    """Whether ``tokens`` tokens are a regular box on both sides: whole kernel blocks that nest in one another."""
    sizes = sorted(p.kernel_tokens for p in (mine, other) if not _even(p) and p.kernel_tokens % tokens)
    return all(big % small == 0 for small, big in pairwise([*sizes, tokens]))


def _token_dims(mine: _Part, other: _Part, tokens: int) -> list[PairedDim]:
    """``tokens`` consecutive tokens, split where either side's spacing changes."""

    def step(part: _Part, at: int) -> int:
        if _even(part) or at < part.kernel_tokens:
            return at * part.stride(AxisKind.TOKEN)
        return at // part.kernel_tokens * part.view.kernel_stride

    cuts = {p.kernel_tokens for p in (mine, other) if not _even(p) and p.kernel_tokens < tokens}
    edges = sorted({1, *cuts, tokens})
    return [PairedDim(high // low, step(mine, low), step(other, low)) for low, high in pairwise(edges)]


def _inner_dims(mine: _Part, other: _Part) -> list[PairedDim]:
    """The inner axes of both sides, innermost first, split to common extents."""
    a = [(x.extent, x.stride) for x in mine.component.inner]
    b = [(x.extent, x.stride) for x in other.component.inner]
    dims = []
    while a and b:
        (extent_a, stride_a), (extent_b, stride_b) = a.pop(), b.pop()
        common = math.gcd(extent_a, extent_b)
        if common != min(extent_a, extent_b):
            raise mismatch(
                f"{mine}: its inner axes are {[x.extent for x in mine.component.inner]} on D and "
                f"{[x.extent for x in other.component.inner]} on P, which do not divide one another",
                group=mine.group.name,
                layer=mine.view.layer,
                component=mine.component.name,
                attribute="inner",
                local=[x.extent for x in mine.component.inner],
                remote=[x.extent for x in other.component.inner],
            )
        dims.append(PairedDim(common, stride_a, stride_b))
        if extent_a > common:
            a.append((extent_a // common, stride_a * common))
        if extent_b > common:
            b.append((extent_b // common, stride_b * common))
    return dims


def _leg(part: _Part, tokens: int) -> _Leg:
    view = part.view
    kernel_blocks, parts, part_stride = 1, 1, 0
    if tokens and part.kernel_tokens % tokens == 0:
        kernel_blocks, parts = view.kernel_blocks, part.kernel_tokens // tokens
        part_stride = tokens * part.stride(AxisKind.TOKEN)
    elif tokens:
        parts = part.group.block_tokens // tokens
        even = _even(part)
        part_stride = (
            tokens * part.stride(AxisKind.TOKEN) if even else tokens // part.kernel_tokens * view.kernel_stride
        )
    return _Leg(
        region=view.region,
        num_blocks=view.num_blocks,
        block_stride=view.block_stride if view.num_blocks > 1 else 0,
        kernel_blocks=kernel_blocks,
        kernel_stride=view.kernel_stride if kernel_blocks > 1 else 0,
        parts=parts,
        part_stride=part_stride if parts > 1 else 0,
    )


def _section_runs(
    members: Sequence[tuple[_Part, _Part, int, int]], tokens: int, options: PairingOptions, budget: int
) -> list[_Run]:
    runs: list[_Run] = []
    for mine, other, begin, end in members:
        a, b = mine.component, other.component
        unit = PairedDim(end - begin, mine.stride(AxisKind.UNIT), other.stride(AxisKind.UNIT))
        dims = [unit, *_inner_dims(mine, other), *(_token_dims(mine, other, tokens) if tokens else ())]
        length, count, offsets = common_runs(a.element_bytes, dims)
        if length < options.min_run_bytes:
            own = min(
                common_runs(a.element_bytes, [PairedDim(d.extent, d.local, d.local) for d in dims])[0],
                common_runs(a.element_bytes, [PairedDim(d.extent, d.remote, d.remote) for d in dims])[0],
            )
            if own > length:
                orders = _order(a), _order(b)
                raise mismatch(
                    f"{mine} is stored as {orders[0]} on D and as {orders[1]} on P: only {length} bytes are contiguous "
                    f"on both sides; at least {options.min_run_bytes} are wanted",
                    group=mine.group.name,
                    layer=mine.view.layer,
                    component=a.name,
                    attribute="axes",
                    local=orders[0],
                    remote=orders[1],
                    run_bytes=length,
                    min_run_bytes=options.min_run_bytes,
                )
        budget -= count
        if budget < 0:
            raise KvxferError(
                Reason.TOO_MANY_DESCRIPTORS,
                f"the plan needs more than {MAX_RUNS} runs; the two layouts have too little in common",
                group=mine.group.name,
                limit=MAX_RUNS,
            )
        local_at = mine.view.base + a.offset + (begin - a.units.begin) * unit.local
        remote_at = other.view.base + b.offset + (begin - b.units.begin) * unit.remote
        legs = _leg(mine, tokens), _leg(other, tokens)
        runs.extend(_Run(*legs, local_at + x, remote_at + y, length) for x, y in offsets)
    return runs


def _order(component: Component) -> str:
    return "(" + ", ".join(a.kind.value for a in component.axes) + ")"


def _merged(runs: list[_Run]) -> list[_Run]:
    """Join runs that touch on both sides in every block and part; keep the order of first appearance otherwise."""
    alike: dict[tuple[_Leg, _Leg], list[_Run]] = {}
    for run in runs:
        alike.setdefault((run.local, run.remote), []).append(run)
    merged: list[_Run] = []
    for same in alike.values():
        same.sort(key=lambda r: r.local_offset)
        current = same[0]
        for run in same[1:]:
            reach = current.local_offset + current.length, current.remote_offset + current.length
            if reach == (run.local_offset, run.remote_offset):
                length = current.length + run.length
                current = _Run(run.local, run.remote, current.local_offset, current.remote_offset, length)
            else:
                merged.append(current)
                current = run
        merged.append(current)
    return merged


# -- from runs to rows -----------------------------------------------------------------------------------------------


class _Rows:
    """Collects one side's rows and numbers their descriptors."""

    def __init__(self, side: str) -> None:
        self._side = side
        self._columns: tuple[list[int], ...] = ([], [], [], [], [])
        self._descriptors = 0

    def add(self, runs: Sequence[tuple[_Leg, int, int]], kernel_tokens: int) -> Addressing:
        """Rows for ``(leg, offset, length)`` runs; where to find each afterwards."""
        found = [self._add(*run) for run in runs]
        start, block, kernel, part = (np.array(c, dtype=np.int64) for c in zip(*found, strict=True))
        return Addressing(start, block, kernel, part, kernel_tokens)

    def _add(self, leg: _Leg, offset: int, length: int) -> tuple[int, int, int, int]:
        """One run: ``(start, per_block, per_kernel, per_part)``.

        Steps that follow on from one another become one row; the others one row each.  The common cases: evenly
        spaced kernel blocks are one row of ``num_blocks * kernel_blocks``; whole blocks one row of ``num_blocks``.
        """
        n, kernels, parts = leg.num_blocks, leg.kernel_blocks, leg.parts
        start = self._descriptors
        smallest = leg.part_stride if parts > 1 else leg.kernel_stride
        inside = kernels * parts
        if kernels == 1 or parts == 1 or leg.kernel_stride == parts * leg.part_stride:
            if inside == 1:
                self._row(leg.region, offset, length, leg.block_stride, n)
                return start, 1, 0, 0
            if n == 1 or leg.block_stride == inside * smallest:
                self._row(leg.region, offset, length, smallest, n * inside)
                return start, inside, parts, 1
        elif n == 1 or leg.block_stride == kernels * leg.kernel_stride:
            for j in range(parts):
                self._row(leg.region, offset + j * leg.part_stride, length, leg.kernel_stride, n * kernels)
            return start, kernels, 1, n * kernels
        for k in range(kernels):
            for j in range(parts):
                at = offset + k * leg.kernel_stride + j * leg.part_stride
                self._row(leg.region, at, length, leg.block_stride, n)
        return start, 1, parts * n, n

    def _row(self, region: int, offset: int, length: int, stride: int, count: int) -> None:
        # A row of one descriptor has no step; its length is as good as any and never overlaps.
        for column, value in zip(self._columns, (region, offset, length, stride or length, count), strict=True):
            column.append(value)
        self._descriptors += count
        if self._descriptors > MAX_DESCRIPTORS or len(self._columns[0]) > MAX_ROWS:
            raise KvxferError(
                Reason.TOO_MANY_DESCRIPTORS,
                f"the {self._side} side needs more than {MAX_DESCRIPTORS} descriptors or {MAX_ROWS} rows",
                side=self._side,
                descriptors=self._descriptors,
                rows=len(self._columns[0]),
            )

    def table(self) -> RowTable:
        return RowTable(*(np.array(c, dtype=np.int64) for c in self._columns))


def _warnings(layout: CacheLayout, sources: Sequence[SourcePlan]) -> Iterator[str]:
    for source in sources:
        for section in source.sections:
            tier = section.tiers[0]
            mean = tier.bytes // max(1, len(tier.lengths))
            if len(tier.lengths) > len(section.layers) and mean < SHORT_RUN:
                what = f"{tier.tokens} tokens" if tier.tokens else "snapshot"
                name = layout.groups[section.local_group].name
                yield (
                    f"group {name} from {source.rank}: {len(tier.lengths):,} runs of {mean:,} bytes on average for "
                    f"each {what}; the layouts have little in common"
                )
