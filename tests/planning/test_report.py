"""What a report says, against numbers worked out by hand and against the truth model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import GroupKind
from kvxfer.planning import CostKind, Engine, Report, Verdict, report
from kvxfer.planning.pages import page_bytes
from kvxfer.planning.report import least_bytes, padded_bytes, refusal_of
from tests.planning.cases import DEEPSEEK, JAMBA, LLAMA, NANO, QWEN, dense_of, engine, pair_of
from tests.truth import Blocks, Labels, RankMemory, Want, granules


def kinds(found: Report) -> list[CostKind]:
    return [cost.kind for cost in found.costs]


def test_nano_2_to_4() -> None:
    """By hand: a D rank has 4,096 bytes a kernel block and layer of attention, and snapshots of 533,504 bytes."""
    found = report(*pair_of(NANO, 2, 4, kv_dtype="fp8"), tokens=2_096)
    rank = found.ranks[3]
    assert (rank.rank, rank.tp_rank, rank.pp_rank) == ("tp3", 3, 0)
    (source,) = rank.sources
    assert source.rank == "tp1"
    attention, *states = source.groups
    assert (attention.group, attention.layers, attention.granule_tokens) == ("attention", 6, 16)
    assert (attention.granule_bytes, attention.granule_descriptors) == (6 * 4_096, 6)
    assert (attention.block_tokens, attention.block_bytes) == (2_096, 131 * 6 * 4_096)
    assert attention.block_descriptors == 131 * 6
    assert [(g.group, g.layers) for g in states] == [(f"mamba2.{i}", n) for i, n in enumerate((6, 6, 6, 5))]
    # x, B, C and SSM of a layer are four runs where only half of each is taken.
    assert [g.granule_descriptors for g in states] == [24, 24, 24, 20]
    assert [g.granule_bytes for g in states] == [n * 533_504 for n in (6, 6, 6, 5)]
    assert {(g.granule_tokens, g.block_tokens) for g in states} == {(0, 0)}
    # 6 rows of kernel blocks, and 92 of snapshots.
    assert (source.local_rows, source.remote_rows) == (98, 98)
    assert (rank.read.descriptors, rank.read.bytes) == (131 * 6 + 92, 15_490_048)
    assert (rank.read.least, rank.read.rounding) == (15_490_048, 0)
    assert rank.read.padded == 29 * 536_576
    assert sum(g.bytes or 0 for g in source.groups) == rank.read.bytes


def test_pages_of_nano() -> None:
    found = report(*pair_of(NANO, 2, 4, kv_dtype="fp8"))
    assert [(g.name, g.kind, g.layers, g.block_tokens, g.kernel_blocks, g.page, g.data) for g in found.p_pages] == [
        *((f"mamba2.{i}", "state", n, 0, 1, 1_069_056, 1_067_008) for i, n in enumerate((6, 6, 6, 5))),
        ("attention", "attention", 6, 4_176, 261, 1_069_056, 1_069_056),
    ]
    assert {(g.page, g.data) for g in found.d_pages} == {(536_576, 533_504), (536_576, 536_576)}


def test_k_and_v_apart_are_one_page() -> None:
    found = report(*pair_of(LLAMA, 2, 2, layers=3, kv_packing="regions"))
    assert [(g.layers, g.page, g.data) for g in found.d_pages] == [(3, 4 * 16 * 512, 4 * 16 * 512)]


@pytest.mark.parametrize("order", ["layer-block", "block-layer", "block-token-layer", "layer-k-block"])
def test_pages_are_the_same_however_layers_lie(order: str) -> None:
    """By hand: 4 layers, 4 blocks of 16,384 bytes each for 64 tokens; no padding, so nothing is saved."""
    given = Engine.given(order, [dense_of(order)])
    found = report(given, given, tokens=64)
    assert [(g.layers, g.page, g.data) for g in found.d_pages] == [(4, 16_384, 16_384)]
    read = found.ranks[0].read
    assert read.padded == read.bytes == 4 * 4 * 16_384


@pytest.mark.parametrize("order, pages", [("block-layer", 4), ("block-token-layer", 1)])
def test_padding_of_a_shared_stride_counts_once(order: str, pages: int) -> None:
    layout = dense_of(order, padding=1_024)
    assert padded_bytes(layout, 16) == 4 * 16_384 + pages * 1_024


def test_groups_with_block_numbers_of_their_own_share_a_stride_out() -> None:
    """Layers 0 and 2 in one group, 1 and 3 in another, side by side in block-major tensors."""
    whole = dense_of("block-layer")
    views = whole.groups[0].views
    halves = tuple(replace(whole.groups[0], name=f"g{i}", views=views[i::2]) for i in range(2))
    layout = replace(whole, groups=halves)
    assert layout.pools == (0, 1)
    assert page_bytes(layout) == ({"layers.0": 16_384, "layers.2": 16_384}, {"layers.1": 16_384, "layers.3": 16_384})


def test_groups_that_share_blocks_own_the_whole_stride_each() -> None:
    """Block-major pages that two groups of one pool lie over."""
    whole = dense_of("block-layer")
    (group,) = whole.groups
    others = tuple(replace(view, layer=f"other.{i}") for i, view in enumerate(group.views))
    layout = replace(whole, groups=(group, replace(group, name="other", views=others)))
    assert layout.pools == (0, 0)
    assert [sum(layers.values()) for layers in page_bytes(layout)] == [4 * 16_384] * 2


def test_no_prompt_no_bytes() -> None:
    found = report(*pair_of(LLAMA, 2, 2, layers=3))
    assert (found.tokens, found.ranks[0].prompt, found.ranks[0].sources[0].bytes) == (None, None, None)
    with pytest.raises(ValueError, match="no prompt"):
        _ = found.ranks[0].read


def test_rounding_is_what_lies_behind_the_last_token() -> None:
    """Dense, TP 8: 1 head x 256 x 2 bytes a token and layer; 1,000 tokens end half-way in a block of 16."""
    found = report(*pair_of(LLAMA, 8, 8), tokens=1_000)
    assert {(r.read.bytes, r.read.rounding) for r in found.ranks} == {(80 * 1_008 * 512, 80 * 8 * 512)}


# -- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, tp", [(NANO, 2), (LLAMA, 8), (DEEPSEEK, 4), (QWEN, 2), (JAMBA, 4)])
def test_equal_engines_work_at_no_cost(name: str, tp: int) -> None:
    found = report(*pair_of(name, tp, tp))
    assert (found.verdict, found.costs, found.refusal) == (Verdict.WORKS, (), None)
    assert [[s.rank for s in r.sources] for r in found.ranks] == [[f"tp{i}"] for i in range(tp)]


def test_bytes_that_several_ranks_read_are_a_cost() -> None:
    found = report(*pair_of(DEEPSEEK, 1, 4))
    assert (found.verdict, kinds(found)) == (Verdict.COST, [CostKind.REPEATED_READS])
    assert found.costs[0].message.startswith("group mla of P: each byte is read 4 times")


def test_a_small_part_that_several_ranks_read_is_called_small() -> None:
    """Granite has one B/C group, which every rank holds: 1,536 of 1,074,688 bytes a snapshot at TP 2."""
    found = report(*pair_of("granite-4.0-h-small", 2, 4))
    assert {cost.message.partition(": ")[2] for cost in found.costs} == {
        "a few bytes are read more than once, by D ranks that hold the same units"
    }


def test_only_the_groups_that_are_read_more_than_once_are_named() -> None:
    """Nano has 2 KV heads, so four D ranks share them; of states each rank has its own quarter."""
    found = report(*pair_of(NANO, 2, 4))
    assert [cost.message.split(":")[0] for cost in found.costs] == ["group attention of P"]
    # Two P ranks hold a head each, two times over: nobody reads what another reads.
    assert report(*pair_of(NANO, 4, 4)).costs == ()


def test_bytes_read_by_some() -> None:
    """Three D ranks, of which two hold the same half of the heads: a byte is read 1.5 times on average."""
    p = engine(LLAMA, 1, layers=1)
    two = engine(LLAMA, 2, layers=1)
    halves = list(two.layouts.values())
    found = report(p, Engine.given("three", [halves[0], halves[1], halves[1]]))
    assert [cost.message.split(",")[0] for cost in found.costs] == ["group attention of P: each byte is read 1.5 times"]


def test_short_runs_are_a_cost() -> None:
    found = report(engine(LLAMA, 4, layers=2), engine(LLAMA, 4, layers=2, kv_layout="NHD"))
    assert (found.verdict, set(kinds(found))) == (Verdict.COST, {CostKind.SHORT_RUNS})
    assert "64 runs of 512 bytes" in found.costs[0].message


def test_refused() -> None:
    found = report(engine(NANO, 2), engine(NANO, 2, conv_layout="SD", spec_tokens=1), tokens=100)
    assert (found.verdict, found.ranks, found.pair) == (Verdict.REFUSED, (), None)
    assert found.refusal is not None and found.refusal.reason is Reason.LAYOUT_MISMATCH
    told: dict[str, Any] = refusal_of(found.refusal)
    assert told["metadata"]["attribute"] == "state_rows"
    assert (told["metadata"]["local"], told["metadata"]["remote"]) == ("4", "3")
    assert found.p_pages and found.d_pages


def test_a_prompt_that_no_engine_has_room_for_is_a_mistake_of_the_caller() -> None:
    given = Engine.given("mine", list(engine(LLAMA, 1, layers=1, num_blocks=2).layouts.values()))
    with pytest.raises(KvxferError) as caught:
        report(given, given, tokens=33)
    assert caught.value.reason is Reason.FIELD_INVALID


# -- against the truth -----------------------------------------------------------------------------------------------

SMALL: dict[str, tuple[Engine, Engine]] = {
    "nano 2 to 4": pair_of(NANO, 2, 4, layers=9, shrink=8),
    "nano 4 to 1, fp8": pair_of(NANO, 4, 1, layers=9, shrink=8, kv_dtype="fp8"),
    "nano, 48 and 32": (
        engine(NANO, 1, layers=9, shrink=8, block_tokens=48),
        engine(NANO, 2, layers=9, shrink=8, block_tokens=32),
    ),
    "nano, stages": (engine(NANO, 1, layers=9, shrink=8, pp_size=2), engine(NANO, 2, layers=9, shrink=8)),
    "nano, SD, pooled to not": (
        engine(NANO, 2, layers=9, shrink=8, conv_layout="SD"),
        engine(NANO, 4, layers=9, shrink=8, conv_layout="SD", pooled=False),
    ),
    "jamba 2 to 4": pair_of(JAMBA, 2, 4, layers=8, shrink=64),
    "qwen 2 to 1": pair_of(QWEN, 2, 1, layers=4, shrink=8),
    "mla 2 to 4": pair_of(DEEPSEEK, 2, 4, layers=3, shrink=16),
    "dense, halves": pair_of(LLAMA, 2, 4, layers=2, shrink=16, kv_packing="halves"),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("tokens", [1, 47, 96, 333])
def test_bytes_are_the_least_of_the_truth_model(name: str, tokens: int) -> None:
    found = report(*SMALL[name], tokens=tokens)
    assert found.pair is not None
    labels = Labels()
    remotes = [RankMemory(layout, labels) for layout in found.pair.p.layouts.values()]
    for told, (rank, layout) in zip(found.ranks, found.pair.d.layouts.items(), strict=True):
        memory = RankMemory(layout, labels)
        lists, wants = {}, {}
        for blocks in found.pair.d.blocks(tokens, tokens, rank):
            group = layout.groups[layout.index[blocks.group]]
            size = group.block_tokens
            at = (tokens,) if group.kind is GroupKind.STATE else tuple(range(0, tokens, size))
            lists[blocks.group] = Blocks(tuple(int(i) for i in blocks.ids), at)  # type: ignore[union-attr]
            wants[blocks.group] = Want(0, tokens)
        image, unspecified, least = memory.expect(lists, wants, granules(memory, remotes))
        assert told.read.bytes == told.read.least == sum(least.values())
        assert told.read.rounding == int(unspecified.sum())
        assert told.read.bytes - told.read.rounding == int((image != memory.image).sum())
        by_group = {g.group: g.bytes for s in told.sources for g in s.groups if len(told.sources) == 1}
        assert all(least[group] == moved for group, moved in by_group.items())


def test_the_least_is_worked_out_apart_from_the_plan() -> None:
    found = report(*pair_of(NANO, 2, 4, kv_dtype="fp8"), tokens=100)
    assert found.pair is not None
    plan = next(iter(found.pair.plans.values()))
    states = 23 * 533_504
    assert least_bytes(plan, 100) == (states + 6 * 112 * 256, 6 * 12 * 256)
    assert padded_bytes(plan.layout, 2_097) == (23 + 2 * 6) * 536_576
    assert math.isclose(plan.sources[0].sections[0].granule, 16)
