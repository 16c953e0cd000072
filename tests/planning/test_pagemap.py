"""The map of a page: what its bytes are, and whose."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.core.layout import GroupKind
from kvxfer.planning import Engine, Lane, PageMap, PageView, Pair, page_map
from tests.planning.cases import DEEPSEEK, JAMBA, LLAMA, NANO, QWEN, SUPER, dense_of, engine, pair_of


def mapped(p: Engine, d: Engine) -> PageMap:
    return page_map(Pair.of(p, d))


def told(view: PageView) -> list[tuple[int, int, str]]:
    return [(s.begin, s.end, s.name) for s in view.spans]


def taken(view: PageView) -> dict[str, list[tuple[int, int]]]:
    return {f"{lane.d_rank} from {lane.p_rank}": list(lane.spans) for lane in view.lanes}


def test_nano_page_of_two_views() -> None:
    """P at TP 2: conv x 2,048 channels, B and C 512 each, of 3 rows in bf16; SSM 32 x 64 x 128 fp32; then padding."""
    found = mapped(*pair_of(NANO, 2, 4, kv_dtype="fp8"))
    attention, state = found.views
    assert found.shared
    assert (attention.kind, state.kind) == (GroupKind.ATTENTION, GroupKind.STATE)
    assert attention.size == state.size == 1_069_056
    assert told(attention) == [(0, 1_069_056, "kv")]
    assert (attention.kernel_blocks, attention.block_tokens, len(attention.edges)) == (261, 4_176, 260)
    assert state.groups == ("mamba2.0", "mamba2.1", "mamba2.2", "mamba2.3")
    assert told(state) == [
        (0, 12_288, "conv.x"),
        (12_288, 15_360, "conv.B"),
        (15_360, 18_432, "conv.C"),
        (18_432, 1_067_008, "ssm"),
        (1_067_008, 1_069_056, "padding"),
    ]
    # A P rank has one KV head, which both its D ranks need; of states each takes half of every part.
    whole = [(0, 1_069_056)]
    assert taken(attention) == dict.fromkeys(("tp0 from tp0", "tp1 from tp0", "tp2 from tp1", "tp3 from tp1"), whole)
    first = [(0, 6_144), (12_288, 13_824), (15_360, 16_896), (18_432, 542_720)]
    second = [(6_144, 12_288), (13_824, 15_360), (16_896, 18_432), (542_720, 1_067_008)]
    assert taken(state) == {
        "tp0 from tp0": first,
        "tp1 from tp0": second,
        "tp2 from tp1": first,
        "tp3 from tp1": second,
    }


def test_closer_looks_of_nano() -> None:
    attention, state = mapped(*pair_of(NANO, 2, 4, kv_dtype="fp8")).views
    assert attention.zoom == (0, 4_096)
    # A kernel block of one head: K and V of 16 tokens in turn.
    assert [(s.begin, s.end, s.name) for s in attention.fine] == [
        (i * 128, (i + 1) * 128, "kv"[i % 2]) for i in range(32)
    ]
    assert state.zoom == (0, 18_432)
    assert [s.name for s in state.fine] == ["conv.x", "conv.B", "conv.C"]
    assert state.lanes_in(0, 13_000)[0] == Lane("tp0", "tp0", 0, ((0, 6_144), (12_288, 13_000)))
    assert state.lanes_in(16_896, 18_432)[0].spans == ()


def test_super_bf16_is_half_padding() -> None:
    _, state = mapped(*pair_of(SUPER, 4, 4, logical_block_tokens=4_224)).views
    assert told(state)[-1] == (1_063_936, 2_162_688, "padding")
    # Equal TP: everything but the padding, in one piece.
    assert set(map(tuple, taken(state).values())) == {((0, 1_063_936),)}


def test_dense_is_one_view() -> None:
    """TP 2 to 4: four heads a P rank, two a D rank; heads outside, so each takes one piece of a page."""
    found = mapped(*pair_of(LLAMA, 2, 4))
    (view,) = found.views
    assert (view.size, view.kernel_blocks) == (4 * 16 * 512, 1)
    assert taken(view) == {
        "tp0 from tp0": [(0, 16_384)],
        "tp1 from tp0": [(16_384, 32_768)],
        "tp2 from tp1": [(0, 16_384)],
        "tp3 from tp1": [(16_384, 32_768)],
    }
    # Four tokens on either side of where one D rank ends and another begins.
    assert view.zoom == (16_384 - 4 * 512, 16_384 + 4 * 512)
    assert [lane.spans for lane in view.lanes_in(*view.zoom)[:2]] == [((14_336, 16_384),), ((16_384, 18_432),)]


def test_nhd_takes_a_piece_of_every_token() -> None:
    (view,) = mapped(*pair_of(LLAMA, 2, 4, kv_layout="NHD")).views
    assert taken(view)["tp1 from tp0"] == [(2_048 * t + 1_024, 2_048 * (t + 1)) for t in range(16)]


def test_several_sources_have_a_lane_each() -> None:
    (view,) = mapped(*pair_of(LLAMA, 4, 2)).views
    whole = [(0, 16_384)]
    assert taken(view) == dict.fromkeys(("tp0 from tp0", "tp0 from tp1", "tp1 from tp2", "tp1 from tp3"), whole)


def test_mla_is_whole_everywhere() -> None:
    (view,) = mapped(*pair_of(DEEPSEEK, 1, 2)).views
    assert told(view) == [(0, 16 * 1_152, "mla")]
    assert (view.zoom, view.fine) == (None, ())
    assert taken(view) == {"tp0 from tp0": [(0, 18_432)], "tp1 from tp0": [(0, 18_432)]}


def test_k_and_v_in_regions_of_their_own() -> None:
    found = mapped(*pair_of(LLAMA, 1, 2, kv_packing="regions"))
    assert not found.shared
    assert [[name for _, _, name in told(view)] for view in found.views] == [["k"], ["v"]]
    assert all(taken(view)["tp1 from tp0"] == [(16_384, 32_768)] for view in found.views)


def test_k_then_v_in_a_kernel_block() -> None:
    attention, _ = mapped(*pair_of(NANO, 2, 2, kv_packing="block", kv_dtype="fp8")).views
    assert told(attention)[:3] == [(0, 2_048, "k"), (2_048, 4_096, "v"), (4_096, 6_144, "k")]
    assert len(attention.spans) == 2 * 261


def test_sd_conv_parts_lie_row_by_row() -> None:
    """3 rows of [x | B | C], 1 D rank of 2 takes half of each."""
    _, state = mapped(*pair_of(NANO, 1, 2, conv_layout="SD")).views
    row = 2 * (4_096 + 1_024 + 1_024)
    assert [name for _, _, name in told(state)[:9]] == ["conv.x", "conv.B", "conv.C"] * 3
    assert taken(state)["tp0 from tp0"][:3] == [(0, 4_096), (8_192, 9_216), (10_240, 11_264)]
    assert taken(state)["tp0 from tp0"][3][0] == row


def test_not_pooled_pages_are_not_the_same_bytes() -> None:
    found = mapped(*pair_of(NANO, 2, 2, pooled=False))
    assert not found.shared
    assert {view.size for view in found.views} == {16 * 512, 1_067_008}


def test_only_ranks_that_read_this_layer_have_lanes() -> None:
    (view,) = mapped(engine(LLAMA, 1, layers=4), engine(LLAMA, 1, layers=4, pp_size=2)).views
    assert list(taken(view)) == ["pp0.tp0 from tp0"]


def test_block_major_pages_are_of_one_layer() -> None:
    """The page of a layer ends where the next layer's begins; nothing of it is padding."""
    given = Engine.given("block-major", [dense_of("block-layer")])
    (view,) = mapped(given, given).views
    assert (view.size, told(view)) == (16_384, [(0, 16_384, "kv")])
    assert taken(view) == {"tp0 from tp0": [(0, 16_384)]}


def test_interleaved_layers_are_others_not_padding() -> None:
    """16 tokens of 4 layers of 1,024 bytes each, and 512 bytes behind them."""
    given = Engine.given("token-major", [dense_of("block-token-layer", padding=512)])
    (view,) = mapped(given, given).views
    rows = [(0, 1_024, "kv"), *((i * 1_024, (i + 1) * 1_024, "others") for i in range(1, 4))]
    tokens = [(t * 4_096 + begin, t * 4_096 + end, name) for t in range(16) for begin, end, name in rows]
    assert told(view) == [*tokens, (65_536, 66_048, "padding")]
    assert taken(view) == {"tp0 from tp0": [(t * 4_096, t * 4_096 + 1_024) for t in range(16)]}
    assert {span.name for span in view.fine} == {"k", "v", "others"}


@pytest.mark.parametrize("name", [NANO, SUPER, QWEN, JAMBA, LLAMA, DEEPSEEK])
@pytest.mark.parametrize("p_tp, d_tp", [(1, 2), (2, 1), (4, 4)])
def test_spans_cover_the_page_and_lanes_cover_the_data(name: str, p_tp: int, d_tp: int) -> None:
    for view in mapped(*pair_of(name, p_tp, d_tp)).views:
        ends = [0, *(s.end for s in view.spans)]
        assert [s.begin for s in view.spans] == ends[:-1]
        assert ends[-1] == view.size
        data = np.zeros(view.size, dtype=bool)
        for span in view.spans:
            data[span.begin : span.end] = span.name != "padding"
        read = np.zeros(view.size, dtype=bool)
        for lane in view.lanes:
            if lane.p_rank == "tp0":
                for begin, end in lane.spans:
                    read[begin:end] = True
        assert np.array_equal(read, data)
