"""The two sides of a pair, and which blocks a prompt takes."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.core.resolve import check_blocks
from kvxfer.models import EngineOptions, build_all, example
from kvxfer.planning import Engine
from kvxfer.planning.engine import MAX_PROMPT
from tests.planning.cases import DEEPSEEK, JAMBA, LLAMA, NANO, engine


def ids(found: Engine, tokens: int, rank: Rank | None = None) -> dict[str, list[int]]:
    return {b.group: np.asarray(b.ids).tolist() for b in found.blocks(tokens, tokens, rank)}


def test_blocks_of_a_pool_share_their_numbers() -> None:
    """Nano at TP 2: blocks of 4,176 tokens; four state groups and one of attention over the same memory."""
    found = engine(NANO, 2, kv_dtype="fp8")
    expected = {"mamba2.0": [0], "mamba2.1": [1], "mamba2.2": [2], "mamba2.3": [3], "attention": [4, 5]}
    assert ids(found, 4_177) == expected
    assert [b.positions for b in found.blocks(4_177, 4_176)] == [[4_176]] * 4 + [None]


def test_blocks_that_share_nothing_start_at_0() -> None:
    assert ids(engine(NANO, 2, pooled=False), 17) == {"mamba2": [0], "attention": [0, 1]}


def test_stages_share_the_numbers_of_their_groups() -> None:
    """Group names are the engine's: what one stage has numbered the other stage must not number again."""
    found = engine(NANO, 1, pp_size=2, kv_dtype="fp8").holding(5_000)
    assert len(found.layouts) == 2
    lists = found.blocks(5_000, 5_000)
    for layout in found.layouts.values():
        check_blocks(layout, [b for b in lists if b.group in layout.index])
    numbers = [number for b in lists for number in np.asarray(b.ids).tolist()]
    assert sorted(numbers) == list(range(len(numbers)))


@pytest.mark.parametrize("name, tokens, blocks", [(LLAMA, 1_000, 63), (DEEPSEEK, 16, 2), (JAMBA, 81, 9), (NANO, 1, 5)])
def test_a_preset_grows_with_the_prompt(name: str, tokens: int, blocks: int) -> None:
    """Jamba at TP 1: seven state groups and two blocks of 80 tokens; nothing has fewer than two blocks."""
    found = engine(name).holding(tokens)
    assert {g.num_blocks for g in found.layouts[found.first].groups} == {max(blocks, 2)}


def test_a_preset_has_room_for_what_blocks_names() -> None:
    for tokens in (1, 79, 80, 81, 1_000):
        found = engine(JAMBA).holding(tokens)
        check_blocks(found.layouts[found.first], found.blocks(tokens, tokens))


def test_given_layouts_keep_their_blocks() -> None:
    layouts = list(build_all(example(LLAMA), EngineOptions(tp_size=2, num_blocks=4)).values())
    found = Engine.given("mine", layouts)
    assert list(found.layouts) == [Rank(0, 2), Rank(1, 2)]
    assert found.holding(64) is found
    with pytest.raises(KvxferError, match="65 tokens take 5 blocks up to the end of group attention; rank tp0 of mine"):
        found.holding(65)


def test_stages_of_given_layouts() -> None:
    layouts = list(build_all(example(LLAMA), EngineOptions(tp_size=2, pp_size=2, num_blocks=4)).values())
    found = Engine.given("mine", layouts, pp_size=2)
    assert list(found.layouts) == [Rank(0, 2, 0, 2), Rank(1, 2, 0, 2), Rank(0, 2, 1, 2), Rank(1, 2, 1, 2)]
    assert (found.tp_size, found.pp_size) == (2, 2)
    with pytest.raises(KvxferError, match="4 layouts do not divide over 3 pipeline stages"):
        Engine.given("mine", layouts, pp_size=3)
    with pytest.raises(KvxferError, match="0 layouts"):
        Engine.given("mine", [])


@pytest.mark.parametrize("tokens", [0, -1, MAX_PROMPT + 1])
def test_no_such_prompt(tokens: int) -> None:
    with pytest.raises(KvxferError, match=f"tokens is {tokens}; allowed are 1 to {MAX_PROMPT}") as caught:
        engine(DEEPSEEK).holding(tokens)
    assert caught.value.reason is Reason.FIELD_INVALID
