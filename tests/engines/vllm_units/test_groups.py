"""Block lists from what vLLM's scheduler hands out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvxfer.core.resolve import NULL_BLOCK
from kvxfer.engines.vllm.groups import CacheGroup, back_off, listed

FULL = CacheGroup("full", 16)
WINDOW = CacheGroup("window", 16, window=20)
CHUNK = CacheGroup("chunk", 16, chunk=32)
STATE = CacheGroup("state", 0)


@pytest.mark.parametrize(
    "groups, tokens", [([FULL], 0), ([FULL, STATE], 1), ([FULL, WINDOW], 1), ([CHUNK], 1), ([FULL, FULL], 0)]
)
def test_p_leaves_the_last_token_to_d_where_it_must(groups: Sequence[CacheGroup], tokens: int) -> None:
    assert back_off(groups) == tokens


@pytest.mark.parametrize("num_tokens", range(1, 100))
@pytest.mark.parametrize("window", [1, 2, 16, 20])
def test_a_window_begins_where_the_next_token_looks(window: int, num_tokens: int) -> None:
    """By definition: the token at position n attends to those p with n - window < p <= n."""
    seen = [p for p in range(num_tokens + 1) if num_tokens - window < p <= num_tokens]
    assert CacheGroup("w", 16, window=window).needed_from(num_tokens) == seen[0]


@pytest.mark.parametrize("num_tokens, first", [(1, 0), (31, 0), (32, 32), (70, 64)])
def test_a_chunk_begins_at_its_multiple(num_tokens: int, first: int) -> None:
    assert CHUNK.needed_from(num_tokens) == first
    assert FULL.needed_from(num_tokens) == 0


def test_attention_lists_hold_the_blocks_of_the_tokens() -> None:
    (found,) = listed([FULL], [[5, 3, 9, 4]], 33)
    assert (found.group, found.first_position, found.positions) == ("full", 0, None)
    assert np.asarray(found.ids).tolist() == [5, 3, 9]


def test_vllm_writes_block_0_where_there_is_none() -> None:
    (found,) = listed([WINDOW], [[0, 0, 7]], 48)
    assert np.asarray(found.ids).tolist() == [NULL_BLOCK, NULL_BLOCK, 7]


@pytest.mark.parametrize(
    "ids, scratch, block",
    [([4], 0, 4), ([0, 0, 4], 0, 4), ([0, 4, 8, 9], 2, 4), ([4], 2, 4), ([4, 5, 6], 2, 4)],
)
def test_a_state_list_ends_with_the_snapshot(ids: list[int], scratch: int, block: int) -> None:
    (found,) = listed([CacheGroup("state", 0, scratch=scratch)], [ids], 77)
    assert np.asarray(found.ids).tolist() == [block]
    assert np.asarray(found.positions).tolist() == [77]


@pytest.mark.parametrize(
    "groups, ids, told",
    [
        ([FULL], [[1], [2]], "2 block lists for 1 groups"),
        ([FULL], [[1, 2]], "group full has 2 blocks for 33 tokens; 3 are needed"),
        ([STATE], [[]], "state group state has no block"),
        ([STATE], [[3, 0]], "state group state has no block"),
    ],
)
def test_lists_that_cannot_be(groups: Sequence[CacheGroup], ids: list[list[int]], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        listed(groups, ids, 33)
