"""A report for people and for machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from kvxfer.cli.fitting import put
from kvxfer.cli.tables import console, new_table, say
from kvxfer.planning import Engine, GroupPages, RankReport, Report, Verdict
from kvxfer.planning.report import GroupCosts, refusal_of

#: Most costs that are told in full to people.
_COSTS: Final = 5
_VERDICTS: Final = {
    Verdict.WORKS: ("works", "bold green"),
    Verdict.COST: ("works, at a cost", "bold yellow"),
    Verdict.REFUSED: ("refused", "bold red"),
}
#: What a refusal's metadata says of both sides; told apart from the rest.
_SIDES: Final = {"local": "on D", "remote": "on P"}
#: Columns that a narrow terminal does without.
_SPARE: Final = ("rows on D", "rows on P", "rounding", "padding", "layers")


# -- for machines ----------------------------------------------------------------------------------------------------


def as_json(report: Report) -> str:
    """One JSON object; its keys are described in docs/how-to/plan-a-pair.md."""
    found: dict[str, Any] = {
        "verdict": report.verdict.value,
        "refusal": None if report.refusal is None else refusal_of(report.refusal),
        "costs": [{"kind": cost.kind.value, "message": cost.message} for cost in report.costs],
        "tokens": report.tokens,
        "p": engine_json(report.p, report.p_pages),
        "d": engine_json(report.d, report.d_pages),
        "ranks": [asdict(rank) for rank in report.ranks],
    }
    return json.dumps(found)


def engine_json(engine: Engine, pages: Sequence[GroupPages]) -> dict[str, Any]:
    """An engine: what it is, and the pages of its first rank."""
    options = None
    if engine.options is not None:
        options = {k: v for k, v in asdict(engine.options).items() if k not in ("num_blocks", "state_blocks", "memory")}
    return {
        "name": engine.name,
        "tp_size": engine.tp_size,
        "pp_size": engine.pp_size,
        "options": options,
        "groups": [asdict(page) for page in pages],
    }


# -- for people ------------------------------------------------------------------------------------------------------


def show(report: Report) -> None:
    """Print the verdict and the tables."""
    out = console()
    say(out, f"P: {describe(report.p)}")
    say(out, f"D: {describe(report.d)}")
    words, style = _VERDICTS[report.verdict]
    out.print()
    say(out, f"verdict: {words}", style)
    for text in _reasons(report):
        say(out, f"  {text}", "" if report.refusal else "yellow")
    tables = [_pages(out, report)]
    if report.ranks:
        tables += [_units(out, report.ranks), _ranks(out, report)]
    for table in tables:
        out.print()
        put(out, table, _SPARE)
    if report.tokens is not None and report.ranks:
        out.print()
        say(out, _summary(report))


def told_picture(path: str, drawn: bool) -> None:
    """Say where the picture is."""
    out = console()
    out.print()
    say(out, f"page map: {path}" if drawn else "page map: none is drawn of a pair that is refused")


def describe(engine: Engine) -> str:
    """An engine in a line."""
    parts = [engine.name, f"TP {engine.tp_size}"]
    if engine.pp_size > 1:
        parts.append(f"PP {engine.pp_size}")
    options = engine.options
    if options is None:
        return ", ".join([*parts, "layouts as given"])
    logical = {g.block_tokens for g in engine.layouts[engine.first].groups if g.block_tokens}
    parts.append(f"kernel blocks of {options.block_tokens} tokens" if logical else "no attention")
    if logical - {options.block_tokens}:
        parts.append(f"logical blocks of {' and '.join(f'{tokens:,}' for tokens in sorted(logical))}")
    parts.append("pooled" if options.pooled else "not pooled")
    types = {"KV": options.kv_dtype, "conv": options.conv_dtype, "state": options.ssm_dtype}
    parts += [f"{what} {dtype}" for what, dtype in types.items() if dtype != "auto"]
    parts += [layout for layout in (options.kv_layout, options.conv_layout) if layout not in ("HND", "DS")]
    parts += [f"K and V {options.kv_packing}"] if options.kv_packing != "packed" else []
    parts += [f"{options.spec_tokens} speculative tokens"] if options.spec_tokens else []
    return ", ".join(parts)


def _reasons(report: Report) -> list[str]:
    """Why it is refused, with both values; or what it costs."""
    refusal = report.refusal
    if refusal is None:
        more = len(report.costs) - _COSTS
        told = [cost.message for cost in report.costs[:_COSTS]]
        return [*told, *([f"... and {more} more like these (--json tells all)"] if more > 0 else [])]
    known = dict(refusal.metadata)
    rank = known.pop("d_rank")
    sides = [f"{words}: {known.pop(key)}" for key, words in _SIDES.items() if key in known]
    rest = [f"{key}: {value}" for key, value in known.items()]
    return [f"{refusal.reason.value}: {refusal.message}", f"D rank: {rank}", *sides, *rest]


def _pages(out: Console, report: Report) -> Table:
    titles = ("side", "groups", "kind", "layers", "block", "page", "data", "padding")
    table = new_table(out, "Pages (bytes of one block of one layer on one rank)", *titles, left=3)
    for side, pages in (("P", report.p_pages), ("D", report.d_pages)):
        for alike in _alike(pages, lambda g: (g.kind, g.block_tokens, g.kernel_blocks, g.page, g.data)):
            first = alike[0]
            table.add_row(
                side,
                _names([g.name for g in alike]),
                first.kind,
                _same([str(g.layers) for g in alike]),
                _block(first),
                f"{first.page:,}",
                f"{first.data:,}",
                f"{first.page - first.data:,} ({(first.page - first.data) / first.page:.1%})",
            )
    return table


def _units(out: Console, ranks: Sequence[RankReport]) -> Table:
    """What a granule, a block and a snapshot come to, all sources of a rank together."""
    titles = ("D ranks", "groups", "layers", "unit", "bytes a unit", "descriptors", "block", "bytes a block")
    table = new_table(out, "Units (all layers of a group, from all sources of a rank)", *titles, "descriptors", left=2)
    for alike in _alike(ranks, lambda rank: tuple(_group_rows(rank))):
        names = _names([rank.rank for rank in alike])
        for row in _group_rows(alike[0]):
            table.add_row(names, *row)
            names = ""
    return table


def _group_rows(rank: RankReport) -> list[tuple[str, ...]]:
    """For each run of alike groups: names, layers, and what a unit and a block cost."""
    by_group: dict[str, list[GroupCosts]] = {}
    for source in rank.sources:
        for group in source.groups:
            by_group.setdefault(group.group, []).append(group)
    rows: list[tuple[str, ...]] = []
    for alike in _alike(by_group.values(), lambda costs: _sums(costs)):
        first = alike[0][0]
        unit, descriptors, block, block_descriptors, layers = _sums(alike[0])
        state = not first.granule_tokens
        rows.append(
            (
                _names([costs[0].group for costs in alike]),
                f"{layers}",
                "snapshot" if state else f"{first.granule_tokens:,} tokens",
                f"{unit:,}",
                f"{descriptors:,}",
                "" if state else f"{first.block_tokens:,} tokens",
                "" if state else f"{block:,}",
                "" if state else f"{block_descriptors:,}",
            )
        )
    return rows


def _sums(costs: Sequence[GroupCosts]) -> tuple[int, int, int, int, int]:
    return (
        sum(c.granule_bytes for c in costs),
        sum(c.granule_descriptors for c in costs),
        sum(c.block_bytes for c in costs),
        sum(c.block_descriptors for c in costs),
        max(c.layers for c in costs),
    )


def _ranks(out: Console, report: Report) -> Table:
    titles = ["D rank", "reads from", "rows on D", "rows on P"]
    tokens = report.tokens
    title = "Sources"
    if tokens is not None:
        title = f"A prompt of {tokens:,} tokens (bytes)"
        titles += ["descriptors", "bytes", "least possible", "rounding", "whole padded pages", "saved"]
    table = new_table(out, title, *titles, left=2)
    for rank in report.ranks:
        cells = [
            rank.rank,
            ", ".join(f"P {source.rank}" for source in rank.sources),
            f"{sum(s.local_rows for s in rank.sources):,}",
            f"{sum(s.remote_rows for s in rank.sources):,}",
        ]
        if tokens is not None:
            read = rank.read
            numbers = (read.descriptors, read.bytes, read.least, read.rounding, read.padded, read.padded - read.bytes)
            cells += [f"{n:,}" for n in numbers]
        table.add_row(*cells)
    return table


def _summary(report: Report) -> str:
    moved = sum(rank.read.bytes for rank in report.ranks)
    padded = sum(rank.read.padded for rank in report.ranks)
    descriptors = sum(rank.read.descriptors for rank in report.ranks)
    least = sum(rank.read.least for rank in report.ranks)
    told = "the least possible" if moved == least else f"{moved - least:,} more than the least possible"
    pages = f"{padded - moved:,} bytes less than whole padded pages ({moved / padded:.1%} of them)"
    return (
        f"all D ranks: {moved:,} bytes in {descriptors:,} descriptors ({moved / max(1, descriptors):,.0f} bytes each), "
        f"{told}; {pages if padded > moved else 'as many as in whole pages, which have no padding'}"
    )


def _block(page: GroupPages) -> str:
    if not page.block_tokens:
        return "snapshot"
    ratio = page.kernel_blocks
    return f"{page.block_tokens:,} tokens" + (f" ({ratio} x {page.block_tokens // ratio})" if ratio > 1 else "")


def _alike(items: Iterable[Any], key: Any) -> list[list[Any]]:
    """Items with equal keys together, in the order of the first of each."""
    found: dict[Any, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def _names(names: Sequence[str]) -> str:
    """Names in a cell: the first and the last of many."""
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]} ({len(names)})"


def _same(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else ", ".join(values)
