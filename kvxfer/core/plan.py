"""The immutable results of pairing: rows, tiers, sections, plans; their sizes and explanations.

Vocabulary, from the inside out:

* a **run** is a stretch of bytes that is contiguous on both sides, in every granule (or block) of a section;
* a **row** describes one run on one side over many blocks: ``(region, offset, length, stride, count)``.  Descriptor
  ``i`` of a row is ``length`` bytes at ``offset + i * stride``.  Rows of one side are numbered through:
  ``row_start[r] + i`` is the descriptor number that NIXL is given;
* a **tier** is one size at which a section may be read: a granule of tokens, or a larger common part of both logical
  blocks;
* a **section** is what one D group takes from one P group at one pair of kernel block sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.core.layout import CacheLayout, GroupKind, Rank

Int64 = NDArray[np.int64]

#: Descriptor numbers are int32 in NIXL's index arrays.
MAX_DESCRIPTORS: Final = 2**31 - 1


@dataclass(frozen=True)
class RowTable:
    """All rows of one side of one source; every array has one int64 per row.

    ``region`` indexes the layout's regions, ``offset``, ``length`` and ``stride`` are bytes, ``count`` blocks,
    ``start`` the number of the row's first descriptor.
    """

    region: Int64
    offset: Int64
    length: Int64
    stride: Int64
    count: Int64

    @cached_property
    def start(self) -> Int64:
        """Number of each row's first descriptor."""
        return np.concatenate(([0], np.cumsum(self.count)[:-1])).astype(np.int64)

    @cached_property
    def descriptors(self) -> int:
        """Descriptors in all rows."""
        return int(self.count.sum())

    def __len__(self) -> int:
        return len(self.region)

    def bind(self, addresses: Sequence[int], devices: Sequence[int]) -> NDArray[np.uint64]:
        """The rows as NIXL takes them: N x 5 ``(address, length, device, stride, count)``.

        :param addresses: address of each region, in the layout's order.
        :param devices: device of each region.
        """
        base = np.asarray(addresses, dtype=np.uint64)[self.region]
        device = np.asarray(devices, dtype=np.uint64)[self.region]
        columns = (base + self.offset.astype(np.uint64), self.length, device, self.stride, self.count)
        return np.stack([c.astype(np.uint64) for c in columns], axis=1)


@dataclass(frozen=True)
class Addressing:
    """Where a tier's runs are among a side's descriptors; arrays of one int64 per run.

    Descriptor of part ``j`` of kernel block ``k`` of logical block ``b``:
    ``start + b * per_block + k * per_kernel + j * per_part``.  With one row per layer and nothing cut this is
    ``region * num_blocks + block``, the formula of a plain transformer.

    :param kernel_tokens: tokens that ``k`` counts in; a whole logical block where the tier does not tell kernel
        blocks apart; 0 in a state section.
    """

    start: Int64
    per_block: Int64
    per_kernel: Int64
    per_part: Int64
    kernel_tokens: int

    @cached_property
    def alike(self) -> bool:
        """Whether all runs step in the same way, so that only their starts tell them apart."""
        return all(bool((steps == steps[:1]).all()) for steps in (self.per_block, self.per_kernel, self.per_part))


@dataclass(frozen=True)
class Tier:
    """One size at which a section may be read.

    :param tokens: tokens in a unit of this tier; 0 in a state section (a unit is a snapshot).
    :param lengths: bytes of each run.
    """

    tokens: int
    local: Addressing
    remote: Addressing
    lengths: Int64

    @cached_property
    def bytes(self) -> int:
        """Bytes of one unit."""
        return int(self.lengths.sum())


@dataclass(frozen=True)
class Section:
    """What one D group takes from one P group of one source, at one pair of kernel block sizes.

    :param local_group: index into the D layout's groups; ``remote_group`` into the P layout's.
    :param layers: names of the layers, in D's order.
    :param tiers: coarsest first; the last one is the granule (or the snapshot).
    """

    local_group: int
    remote_group: int
    kind: GroupKind
    layers: tuple[str, ...]
    tiers: tuple[Tier, ...]

    @property
    def granule(self) -> int:
        """The finest unit that can be read, in tokens; 0 in a state section."""
        return self.tiers[-1].tokens


@dataclass(frozen=True)
class SourcePlan:
    """Everything that a D rank reads from one P rank."""

    rank: Rank
    layout: CacheLayout
    local: RowTable
    remote: RowTable
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class GroupCost:
    """What a D group costs from one source: for one granule of tokens, or one snapshot."""

    source: Rank
    group: str
    kind: GroupKind
    layers: int
    granule_tokens: int
    granule_bytes: int
    granule_runs: int
    block_tokens: int
    block_bytes: int
    block_runs: int


@dataclass(frozen=True)
class Plan:
    """A D rank's compiled plan: pure, request-independent, address-free.

    :param remote_groups: the names of all groups of all P ranks, also of those that nothing is read from.
    :param warnings: what works, at a cost that its owner should know.
    """

    rank: Rank
    layout: CacheLayout
    sources: tuple[SourcePlan, ...]
    remote_groups: frozenset[str]
    warnings: tuple[str, ...] = ()

    @cached_property
    def granules(self) -> dict[str, int]:
        """For each attention group of D that is read: the multiple that ``skip_tokens`` must be of."""
        found: dict[str, int] = {}
        for source in self.sources:
            for section in source.sections:
                if section.kind is GroupKind.ATTENTION:
                    name = self.layout.groups[section.local_group].name
                    found[name] = int(np.lcm(found.get(name, 1), section.granule))
        return found

    @cached_property
    def most_per_block(self) -> int:
        """A bound on the descriptors that one local block can come to."""
        most = 1
        for source in self.sources:
            for section in source.sections:
                size = self.layout.groups[section.local_group].block_tokens
                units = size // section.granule if section.granule else 1
                most = max(most, units * len(section.tiers[-1].lengths))
        return most * max(1, len(self.sources))

    def costs(self) -> tuple[GroupCost, ...]:
        """Bytes and runs per granule and per coarsest unit, for each source and group."""
        costs = []
        for source in self.sources:
            for section in source.sections:
                coarse, fine = section.tiers[0], section.tiers[-1]
                costs.append(
                    GroupCost(
                        source=source.rank,
                        group=self.layout.groups[section.local_group].name,
                        kind=section.kind,
                        layers=len(section.layers),
                        granule_tokens=fine.tokens,
                        granule_bytes=fine.bytes,
                        granule_runs=len(fine.lengths),
                        block_tokens=coarse.tokens,
                        block_bytes=coarse.bytes,
                        block_runs=len(coarse.lengths),
                    )
                )
        return tuple(costs)

    def explain(self) -> str:
        """The plan as a table that a person can read."""
        header = ("source", "group", "kind", "layers", "unit", "bytes a unit", "runs a unit")
        body: list[tuple[str, ...]] = []
        for cost in self.costs():
            name = (str(cost.source), cost.group, cost.kind.value, str(cost.layers))
            if cost.kind is GroupKind.STATE:
                body.append((*name, "snapshot", f"{cost.granule_bytes:,}", f"{cost.granule_runs:,}"))
                continue
            body.append((*name, f"{cost.granule_tokens} tokens", f"{cost.granule_bytes:,}", f"{cost.granule_runs:,}"))
            if cost.block_tokens != cost.granule_tokens:
                unit = f"{cost.block_tokens} tokens"
                body.append(("", "", "", "", unit, f"{cost.block_bytes:,}", f"{cost.block_runs:,}"))
        widths = [max(len(row[i]) for row in (header, *body)) for i in range(len(header))]
        lines = [f"plan of D rank {self.rank}: {len(self.sources)} source rank(s)"]
        for row in (header, *body):
            cells = [c.ljust(w) if i < 5 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  " + "  ".join(cells).rstrip())
        for source in self.sources:
            lines.append(
                f"  {source.rank}: rows {len(source.local):,} local, {len(source.remote):,} remote; "
                f"descriptors {source.local.descriptors:,} local, {source.remote.descriptors:,} remote"
            )
        lines.extend(f"  warning: {w}" for w in self.warnings)
        return "\n".join(lines)
