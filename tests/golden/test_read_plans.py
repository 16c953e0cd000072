"""The byte ranges that vLLM's own connector reads, case by case: ours must be the same bytes from the same ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
from kvxfer.core.pairing import Member, compile_plan
from kvxfer.core.plan import RowTable
from kvxfer.core.resolve import BlockList, Request, resolve

VECTORS = sorted((Path(__file__).parent / "vectors").glob("*.json"))
Case = dict[str, Any]
Range = tuple[int, int, int, int, int]


def load(path: Path) -> Case:
    case: Case = json.loads(path.read_text())
    return case


def component(spec: Case, held: Case, kernel_tokens: int) -> Component:
    begin, end = held["units"]
    units = UnitRange(begin, end, spec["total_units"])
    extents = {"token": kernel_tokens, "unit": len(units), "inner": spec["inner"]}
    axes = tuple(Axis(AxisKind(kind), extents[kind]) for kind in spec["axes"])
    size = spec["element_bytes"]
    return Component(spec["name"], f"bytes{size}", size, axes, units, held["offset"])


def layouts(case: Case, side: str) -> list[CacheLayout]:
    """The layout of each rank of a side.  The vectors list attention views per kernel block."""
    engine = case[side]
    kernel_tokens, ratio = engine["kernel_block_tokens"], engine["kernel_blocks_per_logical"]
    found = []
    for rank in engine["ranks"]:
        sizes: dict[int, int] = {}
        groups = []
        for spec in case["groups"]:
            attention = spec["kind"] == "attention"
            per_block = ratio if attention else 1
            held = rank[spec["name"]]
            views = []
            for view in engine["views"][spec["name"]]:
                blocks, left = divmod(view["blocks"], per_block)
                assert (blocks, left) == (engine["logical_blocks"], 0)
                end = view["base"] + view["blocks"] * view["block_stride"]
                sizes[view["region"]] = max(sizes.get(view["region"], 0), end)
                views.append(
                    View(
                        layer=view["layer"],
                        region=view["region"],
                        base=view["base"],
                        block_stride=view["block_stride"] * per_block,
                        num_blocks=blocks,
                        components=tuple(component(c, held[c["name"]], kernel_tokens) for c in spec["components"]),
                        kernel_blocks=per_block,
                        kernel_stride=view["block_stride"],
                    )
                )
            block_tokens = kernel_tokens * ratio if attention else 0
            groups.append(Group(spec["name"], GroupKind(spec["kind"]), tuple(views), block_tokens))
        found.append(CacheLayout(tuple(Region(sizes[i]) for i in range(len(sizes))), tuple(groups)))
    return found


def request(case: Case) -> Request:
    """The case's read.  A sliding-window group reads fewer tokens than the others: its own ``num_tokens``."""
    # The read is of the longest group's tokens; a snapshot is of as many.
    num_tokens = max(case["tokens"].values())

    def lists(side: str) -> list[BlockList]:
        made = []
        for name, ids in case["logical_block_ids"][side].items():
            tokens = case["tokens"].get(name)
            if tokens is None:
                made.append(BlockList(name, ids, positions=[num_tokens] * len(ids)))
            else:
                made.append(BlockList(name, ids, num_tokens=tokens if side == "D" else None))
        return made

    return Request(local=lists("D"), remote=lists("P"), num_tokens=num_tokens)


def descriptors(rows: RowTable, indices: np.ndarray) -> Iterable[tuple[int, int, int]]:
    """``(region, offset, length)`` of each descriptor, from what a row is."""
    row_of = np.repeat(np.arange(len(rows.count)), rows.count)
    firsts = np.cumsum(rows.count) - rows.count
    for number in indices.tolist():
        row = int(row_of[number])
        at = int(rows.offset[row]) + (number - int(firsts[row])) * int(rows.stride[row])
        yield int(rows.region[row]), at, int(rows.length[row])


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Sorted, with neighbours joined that touch on both sides."""
    found: list[Range] = []
    for region, at, remote_region, remote_at, length in sorted(ranges):
        if found:
            r, a, rr, ra, n = found[-1]
            if (r, rr) == (region, remote_region) and a + n == at and ra + n == remote_at:
                found[-1] = (r, a, rr, ra, n + length)
                continue
        found.append((region, at, remote_region, remote_at, length))
    return found


def ours(case: Case) -> dict[tuple[int, int], list[Range]]:
    """For each D rank and P rank that it reads from: the ranges."""
    p, d = ([Rank(i, case[s]["tp"]) for i in range(case[s]["tp"])] for s in "PD")
    remotes = [Member(rank, layout) for rank, layout in zip(p, layouts(case, "P"), strict=True)]
    found: dict[tuple[int, int], list[Range]] = {}
    for rank, layout in zip(d, layouts(case, "D"), strict=True):
        plan = compile_plan(Member(rank, layout), remotes)
        read = resolve(plan, request(case))
        for source, pairs in zip(plan.sources, read.sources, strict=True):
            assert source.rank == pairs.rank
            here = descriptors(source.local, pairs.local_indices)
            there = descriptors(source.remote, pairs.remote_indices)
            ranges: list[Range] = []
            for (region, at, length), (remote_region, remote_at, remote_length) in zip(here, there, strict=True):
                assert length == remote_length
                ranges.append((region, at, remote_region, remote_at, length))
            found[rank.tp_rank, source.rank.tp_rank] = merged(ranges)
            assert pairs.bytes == sum(r[4] for r in ranges)
    return found


def test_all_cases_are_here() -> None:
    assert len(VECTORS) == 42


@pytest.mark.parametrize("path", VECTORS, ids=lambda p: p.stem)
def test_the_ranges_are_those_of_the_connector(path: Path) -> None:
    case = load(path)
    theirs = {
        (read["d_rank"], read["p_rank"]): merged(tuple(r) for r in read["ranges"])
        for read in case["reads"]
        if read["ranges"]
    }
    for read in case["reads"]:
        assert read["bytes"] == sum(r[4] for r in read["ranges"])
    assert ours(case) == theirs


def test_a_whole_block_at_equal_tp_is_one_run_a_layer() -> None:
    """Nemotron Nano, one logical block of 261 kernel blocks: a run for each of its 29 layers, not for each of those."""
    case = load(Path(__file__).parent / "vectors" / "nemotron_nano30b_tp1_tp1.json")
    engine = case["P"]
    whole = engine["kernel_block_tokens"] * engine["kernel_blocks_per_logical"]
    case["tokens"] = dict.fromkeys(case["tokens"], whole)
    case["logical_block_ids"] = {s: {g: ids[:1] for g, ids in case["logical_block_ids"][s].items()} for s in "PD"}
    (p,), (d,) = layouts(case, "P"), layouts(case, "D")
    read = resolve(compile_plan(Member(Rank(), d), [Member(Rank(), p)]), request(case))
    assert read.descriptors == sum(len(g["layers"]) for g in case["groups"]) == 29
