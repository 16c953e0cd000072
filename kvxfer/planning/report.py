"""The report on a pair: does it work, what does it cost, and what does a prompt move.

Sizes are bytes.  *Padded* is what a reader moves that knows whole pages only: every page of D that a prompt touches,
with its padding.  *Least* is what must move by definition, rounded up to the granule at which the blocks of both sides
meet; it is worked out from D's layout alone, and a plan's own bytes are compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvxfer.core.errors import KvxferError
from kvxfer.core.layout import CacheLayout, GroupKind, Rank
from kvxfer.core.pairing import PairingOptions
from kvxfer.core.plan import Plan, SourcePlan
from kvxfer.core.resolve import SourceRead
from kvxfer.planning.engine import Engine
from kvxfer.planning.pages import page_bytes
from kvxfer.planning.pair import Pair, Refused


class Verdict(str, Enum):
    """Whether a pair works."""

    WORKS = "works"
    COST = "works_with_cost"
    REFUSED = "refused"


class CostKind(str, Enum):
    """What makes a pair that works dear.

    ``SHORT_RUNS``: many small descriptors.  ``REPEATED_READS``: several D ranks read the same bytes of a P rank.
    """

    SHORT_RUNS = "short_runs"
    REPEATED_READS = "repeated_reads"


@dataclass(frozen=True, slots=True)
class Cost:
    """What the owner of a pair should know: of which kind, and a sentence."""

    kind: CostKind
    message: str


@dataclass(frozen=True, slots=True)
class GroupPages:
    """A cache group on one rank.

    :param layers: how many it has.
    :param block_tokens: tokens in a logical block, ``kernel_blocks`` kernel blocks; 0 for a snapshot.
    :param page: bytes of a block of the first layer with its padding; K and V apart count together, and of a stride
        that several layers share only what is this layer's.
    :param data: those of them that mean something; the rest is padding.
    """

    name: str
    kind: str
    layers: int
    block_tokens: int
    kernel_blocks: int
    page: int
    data: int


@dataclass(frozen=True, slots=True)
class GroupCosts:
    """What a group of D costs from one source.

    :param granule_tokens: the finest unit that can be read; 0 for a snapshot, which is the unit itself.
    :param granule_bytes: of all its layers; with ``granule_descriptors``.
    :param block_tokens: D's logical block; 0 for a snapshot.
    :param block_bytes: of a whole block, with ``block_descriptors`` where it lies on whole blocks of P.
    :param bytes: of the prompt; ``None`` where there is none.
    """

    group: str
    kind: str
    layers: int
    granule_tokens: int
    granule_bytes: int
    granule_descriptors: int
    block_tokens: int
    block_bytes: int
    block_descriptors: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What one D rank reads from one P rank.

    :param local_rows: rows of the prepared list on D, and ``remote_rows`` on P.
    :param descriptors: of the prompt, with its ``bytes``; ``None`` where there is none.
    """

    rank: str
    local_rows: int
    remote_rows: int
    descriptors: int | None
    bytes: int | None
    groups: tuple[GroupCosts, ...]


@dataclass(frozen=True, slots=True)
class PromptBytes:
    """A prompt, as one D rank reads it.

    :param bytes: what the read moves.
    :param least: what must move, by definition, ``rounding`` of it behind the last token, for the last granule.
    :param padded: whole pages.
    """

    descriptors: int
    bytes: int
    least: int
    rounding: int
    padded: int


@dataclass(frozen=True, slots=True)
class RankReport:
    """One D rank.  ``rank`` is for people (``tp3``)."""

    rank: str
    tp_rank: int
    pp_rank: int
    sources: tuple[SourceReport, ...]
    prompt: PromptBytes | None

    @property
    def read(self) -> PromptBytes:
        """The prompt's read.

        :raises ValueError: where the report is about no prompt.
        """
        if self.prompt is None:
            raise ValueError("the report is about no prompt")
        return self.prompt


@dataclass(frozen=True, slots=True)
class Report:
    """Everything about a pair.

    :param refusal: why it is refused, where it is.
    :param pages: of the first rank of P, and of D.
    :param ranks: of D; empty where the pair is refused.
    """

    verdict: Verdict
    refusal: Refused | None
    costs: tuple[Cost, ...]
    tokens: int | None
    p: Engine
    d: Engine
    p_pages: tuple[GroupPages, ...]
    d_pages: tuple[GroupPages, ...]
    ranks: tuple[RankReport, ...]
    pair: Pair | None


def report(p: Engine, d: Engine, tokens: int | None = None, options: PairingOptions | None = None) -> Report:
    """Compile the plans of all D ranks and tell what they come to.

    :param tokens: length of a prompt to be moved; ``None``: tell about units only.
    :raises KvxferError: FIELD_INVALID where ``tokens`` is no length that the engines have room for.
    """
    pages = pages_of(p), pages_of(d)
    try:
        pair = Pair.of(p, d, tokens, options)
        ranks = tuple(_rank(pair, rank, tokens) for rank in d.layouts)
    except Refused as refusal:
        return Report(Verdict.REFUSED, refusal, (), tokens, p, d, *pages, (), None)
    costs = tuple(_costs(pair))
    verdict = Verdict.COST if costs else Verdict.WORKS
    return Report(verdict, None, costs, tokens, p, d, *pages, ranks, pair)


def pages_of(engine: Engine) -> tuple[GroupPages, ...]:
    """The groups of an engine's first rank."""
    layout = engine.layouts[engine.first]
    pages = page_bytes(layout)
    return tuple(_pages(layout, index, pages[index]) for index in range(len(layout.groups)))


def padded_bytes(layout: CacheLayout, tokens: int) -> int:
    """Bytes of the pages that a prompt takes on one rank, with their padding."""
    total = 0
    for group, layers in zip(layout.groups, page_bytes(layout), strict=True):
        blocks = 1 if group.kind is GroupKind.STATE else -(-tokens // group.block_tokens)
        total += blocks * sum(layers.values())
    return total


def least_bytes(plan: Plan, tokens: int) -> tuple[int, int]:
    """What must move by definition, and how much of it lies behind the last token, in the last granule.

    Counts what a D rank holds: every component's units, all its inner elements, every token.  Only the granule, where
    the blocks of both sides meet, is the plan's.
    """
    least = exact = 0
    granules = {
        (layer, section.local_group): section.granule
        for source in plan.sources
        for section in source.sections
        for layer in section.layers
    }
    for index, group in enumerate(plan.layout.groups):
        for view, component in group.parts():
            granule = granules.get((view.layer, index))
            if granule is None:
                continue  # not read: its group was ignored
            inner = math.prod(axis.extent for axis in component.inner)
            size = len(component.units) * inner * component.element_bytes
            exact += size * (tokens if granule else 1)
            least += size * (-(-tokens // granule) * granule if granule else 1)
    return least, least - exact


# -- parts of the report ---------------------------------------------------------------------------------------------


def _pages(layout: CacheLayout, index: int, pages: Mapping[str, int]) -> GroupPages:
    group = layout.groups[index]
    first = group.views[0].layer
    views = [view for view in group.views if view.layer == first]
    return GroupPages(
        name=group.name,
        kind=group.kind.value,
        layers=len({view.layer for view in group.views}),
        block_tokens=group.block_tokens,
        kernel_blocks=views[0].kernel_blocks,
        page=pages[first],
        data=sum(component.data_bytes * view.kernel_blocks for view in views for component in view.components),
    )


def _rank(pair: Pair, rank: Rank, tokens: int | None) -> RankReport:
    plan = pair.plans[rank]
    if tokens is None:
        return RankReport(
            str(rank), rank.tp_rank, rank.pp_rank, tuple(_source(plan, s, None) for s in plan.sources), None
        )
    read = pair.read(rank, tokens)
    least, rounding = least_bytes(plan, tokens)
    prompt = PromptBytes(read.descriptors, read.bytes, least, rounding, padded_bytes(plan.layout, tokens))
    sources = tuple(_source(plan, s, r) for s, r in zip(plan.sources, read.sources, strict=True))
    return RankReport(str(rank), rank.tp_rank, rank.pp_rank, sources, prompt)


def _source(plan: Plan, source: SourcePlan, read: SourceRead | None) -> SourceReport:
    return SourceReport(
        rank=str(source.rank),
        local_rows=len(source.local),
        remote_rows=len(source.remote),
        descriptors=None if read is None else read.descriptors,
        bytes=None if read is None else read.bytes,
        groups=tuple(_group_costs(plan, source, read)),
    )


def _group_costs(plan: Plan, source: SourcePlan, read: SourceRead | None) -> Iterator[GroupCosts]:
    """One entry a group of D; sections of one group (uneven kernel blocks) are added up."""
    sections: dict[int, list[int]] = {}
    for i, section in enumerate(source.sections):
        sections.setdefault(section.local_group, []).append(i)
    for index, numbers in sections.items():
        group = plan.layout.groups[index]
        mine = [source.sections[i] for i in numbers]
        granule = math.lcm(*(s.granule for s in mine)) if group.block_tokens else 0
        fine = [(s.tiers[-1], granule // s.granule if granule else 1) for s in mine]
        whole = [next(t for t in s.tiers if not granule or group.block_tokens % t.tokens == 0) for s in mine]
        times = [group.block_tokens // t.tokens if granule else 1 for t in whole]
        yield GroupCosts(
            group=group.name,
            kind=group.kind.value,
            layers=len({layer for s in mine for layer in s.layers}),
            granule_tokens=granule,
            granule_bytes=sum(t.bytes * n for t, n in fine),
            granule_descriptors=sum(len(t.lengths) * n for t, n in fine),
            block_tokens=group.block_tokens,
            block_bytes=sum(t.bytes * n for t, n in zip(whole, times, strict=True)),
            block_descriptors=sum(len(t.lengths) * n for t, n in zip(whole, times, strict=True)),
            bytes=None if read is None else read.bytes_by_group.get(group.name, 0),
        )


# -- what it costs ---------------------------------------------------------------------------------------------------


def _costs(pair: Pair) -> Iterator[Cost]:
    """What works, but at a price."""
    told: dict[str, list[Rank]] = {}
    for rank, plan in pair.plans.items():
        for warning in plan.warnings:
            told.setdefault(warning, []).append(rank)
    for warning, ranks in told.items():
        yield Cost(CostKind.SHORT_RUNS, f"D {', '.join(map(str, ranks))}: {warning}")
    for group, times in _times_read(pair).items():
        often = f"each byte is read {times:.3g} times" if times >= 1.01 else "a few bytes are read more than once"
        yield Cost(CostKind.REPEATED_READS, f"group {group} of P: {often}, by D ranks that hold the same units")


def _times_read(pair: Pair) -> dict[str, float]:
    """Groups of P of which several D ranks read the same bytes of one rank: how often each byte is read, at most.

    Counted over one unit (a granule or a snapshot) of block 0.
    """
    runs: dict[tuple[str, Rank], list[tuple[int, int, int]]] = {}
    for plan in pair.plans.values():
        for source in plan.sources:
            for section in source.sections:
                first = section.tiers[-1].remote.start
                row = np.searchsorted(source.remote.start, first, side="right") - 1
                offset = source.remote.offset[row] + (first - source.remote.start[row]) * source.remote.stride[row]
                columns = (source.remote.region[row], offset, offset + source.remote.length[row])
                group = source.layout.groups[section.remote_group].name
                runs.setdefault((group, source.rank), []).extend(zip(*(c.tolist() for c in columns), strict=True))
    most: dict[str, float] = {}
    for (group, _), spans in runs.items():
        distinct, at = 0, (-1, 0)
        for region, begin, end in sorted(spans):
            reach = at[1] if at[0] == region else 0
            distinct += max(0, end - max(begin, reach))
            at = (region, max(end, reach))
        most[group] = max(most.get(group, 1), sum(end - begin for _, begin, end in spans) / distinct)
    return {group: times for group, times in most.items() if times > 1}


def refusal_of(error: KvxferError) -> dict[str, object]:
    """A refusal as plain data."""
    return {
        "reason": error.reason.value,
        "message": error.message,
        "field": error.field,
        "metadata": dict(error.metadata),
    }
