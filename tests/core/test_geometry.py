"""Strided boxes, against sets of bytes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.core.geometry import (
    ALL_STEPS,
    PAIR_STEPS,
    Box,
    Budget,
    Dim,
    PairedDim,
    Shape,
    TooIntricateError,
    block_meetings,
    common_runs,
    overlap,
)

dims = st.lists(st.builds(Dim, st.integers(1, 4), st.integers(1, 40)), max_size=3).map(tuple)
boxes = st.builds(Box, st.integers(0, 60), st.integers(1, 9), dims)


def bytes_of(box: Box) -> list[int]:
    """Every byte of a box, as often as it occurs."""
    steps = [[i * d.stride for i in range(d.extent)] for d in box.dims]
    return [box.offset + sum(at) + b for at in product(*steps) for b in range(box.length)]


@given(boxes, boxes)
def test_overlap_is_a_common_byte(a: Box, b: Box) -> None:
    assert overlap(a, b) == bool(set(bytes_of(a)) & set(bytes_of(b)))


@given(boxes)
def test_the_end_is_one_past_the_last_byte(box: Box) -> None:
    assert box.end == max(bytes_of(box)) + 1


@given(boxes)
def test_a_simplified_box_has_the_same_bytes(box: Box) -> None:
    if box.clashing_dim() is None:
        assert sorted(bytes_of(box.simplified())) == sorted(bytes_of(box))


@given(boxes)
def test_dimensions_that_nest_name_no_byte_twice(box: Box) -> None:
    if box.clashing_dim() is None:
        assert len(set(bytes_of(box))) == len(bytes_of(box))


@given(boxes, boxes, st.integers(1, 50), st.integers(1, 4), st.integers(1, 4))
def test_block_meetings(a: Box, b: Box, stride: int, blocks_a: int, blocks_b: int) -> None:
    def meet(i: int, j: int) -> bool:
        return bool(set(bytes_of(a.shifted(i * stride))) & set(bytes_of(b.shifted(j * stride))))

    pairs = {(i, j): meet(i, j) for i in range(blocks_a) for j in range(blocks_b)}
    same = any(m for (i, j), m in pairs.items() if i == j)
    other = any(m for (i, j), m in pairs.items() if i != j)
    found = block_meetings(a, b, stride, blocks_a, blocks_b)
    assert found[1] == other
    assert other or found[0] == same


#: Even bytes and odd ones.
INTRICATE = (
    Box(0, 1, (Dim(600, 1_000_004), Dim(600, 1010))),
    Box(1, 1, (Dim(600, 1_000_034), Dim(600, 1014))),
)


def test_boxes_too_intricate_to_compare_are_told_so() -> None:
    with pytest.raises(TooIntricateError):
        overlap(*INTRICATE)
    with pytest.raises(TooIntricateError):
        block_meetings(*INTRICATE, 2_000_000_000, 100, 100)


def test_a_budget_is_for_all_comparisons_together() -> None:
    a, b = (Shape(box) for box in INTRICATE)
    budget = Budget()
    for _ in range(ALL_STEPS // PAIR_STEPS):
        with pytest.raises(TooIntricateError):
            budget.meet(a, b)
    with pytest.raises(TooIntricateError):
        budget.meet(Shape(Box(0, 1)), Shape(Box(0, 1)))


def test_k_and_v_halves_of_many_blocks_take_few_steps() -> None:
    """A component that has all K blocks and then all V blocks, over pages of another group."""
    blocks, page = 1_000_000, 4096
    halves = Box(0, page, (Dim(2, blocks * page),))
    state = Box(1024, 512)
    assert block_meetings(halves, state, page, blocks, blocks, Budget(total=20)) == (True, False)


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(1, 3), st.integers(1, 30), st.integers(1, 30)), max_size=3))
def test_common_runs_pair_the_same_bytes(length: int, steps: list[tuple[int, int, int]]) -> None:
    paired = [PairedDim(*s) for s in steps]
    run, count, offsets = common_runs(length, paired)
    found = [(x + b, y + b) for x, y in offsets for b in range(run)]
    wanted = [
        (
            sum(i * d.local for i, d in zip(at, paired, strict=True)) + b,
            sum(i * d.remote for i, d in zip(at, paired, strict=True)) + b,
        )
        for at in product(*(range(d.extent) for d in paired))
        for b in range(length)
    ]
    assert sorted(found) == sorted(wanted)
    assert count * run == len(found)


def test_a_huge_box_is_counted_without_being_walked() -> None:
    run, count, _ = common_runs(2, [PairedDim(2**40, 2, 4), PairedDim(2**20, 2**50, 2**60)])
    assert (run, count) == (2, 2**60)
