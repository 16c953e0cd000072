"""Descriptor numbers against the addresses that they stand for, where runs do not all step alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvxfer.core.layout import Axis, AxisKind, CacheLayout, Component, Group, GroupKind, Rank, Region, UnitRange, View
from kvxfer.core.pairing import Member, compile_plan
from kvxfer.core.plan import RowTable
from kvxfer.core.resolve import BlockList, Request, resolve

BLOCKS, KERNELS, TOKENS, TOKEN = 8, 4, 4, 32
PAGE = KERNELS * TOKENS * TOKEN

Place = tuple[int, int, int]
"""Region, offset and length."""


def layout(paddings: Sequence[int]) -> CacheLayout:
    """A layer for each padding, which lies behind every logical block; kernel blocks of 4 tokens, four in a block."""
    axes = (Axis(AxisKind.UNIT, 1), Axis(AxisKind.TOKEN, TOKENS), Axis(AxisKind.INNER, TOKEN // 2))
    kv = Component("kv", "bfloat16", 2, axes, UnitRange(0, 1, 1))
    views = tuple(
        View(f"layer{i}", i, 0, PAGE + padding, BLOCKS, (kv,), KERNELS, TOKENS * TOKEN)
        for i, padding in enumerate(paddings)
    )
    regions = tuple(Region(BLOCKS * (PAGE + padding)) for padding in paddings)
    return CacheLayout(regions, (Group("g", GroupKind.ATTENTION, views, KERNELS * TOKENS),))


def places(table: RowTable, numbers: np.ndarray) -> list[Place]:
    """What descriptors stand for."""
    row = np.searchsorted(table.start, numbers, side="right") - 1
    offset = table.offset[row] + (numbers - table.start[row]) * table.stride[row]
    return list(zip(table.region[row].tolist(), offset.tolist(), table.length[row].tolist(), strict=True))


def tokens_of(found: Sequence[Place]) -> Iterator[tuple[int, int]]:
    """Region and address of every token in them."""
    for region, offset, length in found:
        assert length % TOKEN == 0
        yield from ((region, at) for at in range(offset, offset + length, TOKEN))


def test_runs_that_step_in_different_ways() -> None:
    # Without padding, all kernel blocks of a layer are one row; with it, each of a block's four is a row of its own.
    paddings = {"local": (0, 96, 0), "remote": (64, 0, 0)}
    local, remote = layout(paddings["local"]), layout(paddings["remote"])
    plan = compile_plan(Member(Rank(), local), [Member(Rank(), remote)])
    steps = [t.local.alike or t.remote.alike for s in plan.sources[0].sections for t in s.tiers]
    assert not all(steps)
    mine, theirs, count, skip = [5, 0, 3], [1, 7, 2], 40, 4
    read = resolve(plan, Request([BlockList("g", mine)], [BlockList("g", theirs)], count, skip)).sources[0]
    assert read.local_indices.dtype == read.remote_indices.dtype == np.int32
    source = plan.sources[0]
    here = tokens_of(places(source.local, read.local_indices))
    there = tokens_of(places(source.remote, read.remote_indices))
    per_block = KERNELS * TOKENS
    expected = {
        tuple(
            (layer, ids[token // per_block] * (PAGE + paddings[side][layer]) + token % per_block * TOKEN)
            for side, ids in (("local", mine), ("remote", theirs))
        )
        for token in range(skip, count)
        for layer in range(3)
    }
    pairs = list(zip(here, there, strict=True))
    assert len(pairs) == len(expected)
    assert set(pairs) == expected
    assert read.bytes == len(expected) * TOKEN


def test_claims_of_several_reads_are_told_once_and_in_order() -> None:
    mine = layout((0, 0))
    plan = compile_plan(Member(Rank(), mine), [Member(Rank(), mine)])
    ids = [6, 1, 4]
    read = resolve(plan, Request([BlockList("g", ids)], [BlockList("g", [0, 1, 2])], 40, 4))
    assert read.claims.tolist() == [1, 4, 6]
