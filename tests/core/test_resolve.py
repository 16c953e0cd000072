"""Descriptor numbers against the addresses that they stand for, where runs do not all step alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvxfer.core.errors import KvxferError
from kvxfer.core.layout import Axis, AxisKind, CacheLayout, Component, Group, GroupKind, Rank, Region, UnitRange, View
from kvxfer.core.pairing import Member, compile_plan
from kvxfer.core.plan import RowTable
from kvxfer.core.resolve import BlockList, Request, check_blocks, resolve

BLOCKS, KERNELS, TOKENS, TOKEN = 8, 4, 4, 32
PAGE = KERNELS * TOKENS * TOKEN

KV = Component(
    "kv",
    "bfloat16",
    2,
    (Axis(AxisKind.UNIT, 1), Axis(AxisKind.TOKEN, TOKENS), Axis(AxisKind.INNER, TOKEN // 2)),
    UnitRange(0, 1, 1),
)

Place = tuple[int, int, int]
"""Region, offset and length."""


def layout(paddings: Sequence[int]) -> CacheLayout:
    """A layer for each padding, which lies behind every logical block; kernel blocks of 4 tokens, four in a block."""
    views = tuple(
        View(f"layer{i}", i, 0, PAGE + padding, BLOCKS, (KV,), KERNELS, TOKENS * TOKEN)
        for i, padding in enumerate(paddings)
    )
    regions = tuple(Region(BLOCKS * (PAGE + padding)) for padding in paddings)
    return CacheLayout(regions, (Group("g", GroupKind.ATTENTION, views, KERNELS * TOKENS),))


def plain(blocks: int) -> CacheLayout:
    """One layer of so many blocks, which are their kernel blocks."""
    size = TOKENS * TOKEN
    view = View("layer0", 0, 0, size, blocks, (KV,))
    return CacheLayout((Region(blocks * size),), (Group("g", GroupKind.ATTENTION, (view,), TOKENS),))


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


@pytest.mark.parametrize("blocks", [70_000, 2**18 + 3], ids=["two digits", "more of the second"])
def test_blocks_are_read_in_the_order_of_the_reader_whatever_their_numbers(blocks: int) -> None:
    one = plain(blocks)
    plan = compile_plan(Member(Rank(), one), [Member(Rank(), one)])
    mine, theirs = (np.random.default_rng(seed).permutation(blocks)[:5_000] for seed in (1, 2))
    request = Request([BlockList("g", mine)], [BlockList("g", theirs)], 5_000 * TOKENS)
    read = resolve(plan, request)
    assert read.sources[0].local_indices.tolist() == sorted(mine.tolist()) == read.claims.tolist()
    assert dict(zip(mine.tolist(), theirs.tolist(), strict=True)) == dict(
        zip(read.sources[0].local_indices.tolist(), read.sources[0].remote_indices.tolist(), strict=True)
    )


@pytest.mark.parametrize("far", [0, 2**16, 3 * 2**16])
def test_a_block_that_is_named_twice_is_found_among_others_with_the_same_low_bits(far: int) -> None:
    one = plain(2**18)
    alike = [7 + far, 7 + 2**17, 7 + far, 8]
    with pytest.raises(KvxferError, match=f"block {7 + far} is named twice"):
        check_blocks(one, [BlockList("g", alike)])
    check_blocks(one, [BlockList("g", sorted(set(alike)))])
