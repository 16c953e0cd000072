"""Which P ranks are read from."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.core import sources
from kvxfer.core.layout import Rank
from kvxfer.core.sources import fewest, preference


@given(st.lists(st.frozensets(st.integers(0, 6), min_size=1), max_size=6), st.permutations(range(7)))
def test_no_smaller_set_would_do(wanted: list[frozenset[int]], order: list[int]) -> None:
    chosen = fewest(wanted, order)
    assert all(w & chosen for w in wanted)
    for size in range(len(chosen)):
        assert not any(all(w & set(c) for w in wanted) for c in combinations(range(7), size))


@given(st.lists(st.frozensets(st.integers(0, 6), min_size=1), max_size=6))
def test_the_greedy_choice_also_covers_everything(wanted: list[frozenset[int]]) -> None:
    limit = sources.EXACT_LIMIT
    try:
        sources.EXACT_LIMIT = 0  # type: ignore[misc]
        assert all(w & fewest(wanted, range(7)) for w in wanted)
    finally:
        sources.EXACT_LIMIT = limit  # type: ignore[misc]


@pytest.mark.parametrize(
    "reader, p_size, first",
    [
        (Rank(0, 4), 2, 0),
        (Rank(1, 4), 2, 0),
        (Rank(2, 4), 2, 1),
        (Rank(3, 4), 2, 1),
        (Rank(1, 2), 4, 2),
        (Rank(1, 3), 2, 0),
    ],
)
def test_the_aligned_rank_comes_first(reader: Rank, p_size: int, first: int) -> None:
    holders = [Rank(i, p_size) for i in range(p_size)]
    assert preference(reader, holders)[0] == first


def test_readers_spread_over_the_holders() -> None:
    """Eight readers of something that all eight P ranks hold take one each."""
    holders = [Rank(i, 8) for i in range(8)]
    everyone = [frozenset(range(8))]
    taken = {next(iter(fewest(everyone, preference(Rank(r, 8), holders)))) for r in range(8)}
    assert taken == set(range(8))


def test_a_rank_that_is_needed_anyway_wins() -> None:
    assert fewest([frozenset({3}), frozenset({0, 1, 2, 3})], [0, 1, 2, 3]) == {3}
