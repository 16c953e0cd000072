"""Sizes of well-known models, pinned."""

from __future__ import annotations

from math import prod

import pytest

from kvxfer.core.errors import KvxferError
from kvxfer.core.layout import CacheLayout, Component, Group, GroupKind, Rank
from kvxfer.models import EXAMPLES, EngineOptions, build, build_all, example

NANO, SUPER = "nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b"


def group_of(layout: CacheLayout, kind: GroupKind) -> Group:
    return next(g for g in layout.groups if g.kind is kind)


def components(layout: CacheLayout, kind: GroupKind) -> tuple[Component, ...]:
    return group_of(layout, kind).views[0].components


def conv_bytes(layout: CacheLayout) -> int:
    return sum(c.data_bytes for c in components(layout, GroupKind.STATE) if c.name.startswith("conv."))


def ssm_bytes(layout: CacheLayout) -> int:
    return sum(c.data_bytes for c in components(layout, GroupKind.STATE) if c.name == "ssm")


def preset(name: str, tp: int, **options: object) -> CacheLayout:
    return build(example(name), EngineOptions(tp_size=tp, **options), Rank(0, tp))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tp, conv, ssm, block, ratio, page",
    [
        (1, 36_864, 2_097_152, 4_176, 261, 2_138_112),
        (2, 18_432, 1_048_576, 4_176, 261, 1_069_056),
        (4, 9_216, 524_288, 2_096, 131, 536_576),
    ],
)
def test_nemotron_nano(tp: int, conv: int, ssm: int, block: int, ratio: int, page: int) -> None:
    layout = preset(NANO, tp, kv_dtype="fp8", num_blocks=8)
    assert (conv_bytes(layout), ssm_bytes(layout)) == (conv, ssm)
    attention = group_of(layout, GroupKind.ATTENTION)
    assert attention.block_tokens == block
    assert {v.kernel_blocks for v in attention.views} == {ratio}
    assert {v.block_stride for g in layout.groups for v in g.views} == {page}
    assert [len(g.views) for g in layout.groups] == [6, 6, 6, 5, 6]
    assert [r.size for r in layout.regions] == [8 * page] * 6
    assert len(set(layout.pools)) == 1


def test_nemotron_nano_per_token_and_order() -> None:
    layout = preset(NANO, 2, kv_dtype="fp8")
    (kv,) = components(layout, GroupKind.ATTENTION)
    assert (kv.name, kv.dtype, kv.data_bytes) == ("kv", "float8_e4m3fn", 16 * 256)
    assert [(c.name, c.offset, c.dtype) for c in components(layout, GroupKind.STATE)] == [
        ("conv.x", 0, "bfloat16"),
        ("conv.B", 12_288, "bfloat16"),
        ("conv.C", 15_360, "bfloat16"),
        ("ssm", 18_432, "float32"),
    ]
    names = [v.layer for v in layout.groups[0].views]
    assert names == [f"backbone.layers.{i}.mixer" for i in (0, 9, 18, 28, 37, 46)]
    assert group_of(layout, GroupKind.ATTENTION).views[0].layer == "backbone.layers.5.mixer.attn"


def test_nemotron_nano_fits_a_laptop() -> None:
    layouts = build_all(example(NANO), EngineOptions(tp_size=2, kv_dtype="fp8", num_blocks=8))
    assert [sum(r.size for r in layout.regions) for layout in layouts.values()] == [51_314_688] * 2


def test_nemotron_super_as_published() -> None:
    """TP=4: conv (2560, 3) bf16, SSM (32, 64, 128) fp32; with snapshots at chunk boundaries, blocks of 4,224 tokens."""
    layout = preset(SUPER, 4, kv_dtype="fp8", state_align_tokens=128)
    conv = [c for c in components(layout, GroupKind.STATE) if c.name.startswith("conv.")]
    assert sum(len(c.units) for c in conv) == 2_560
    assert conv_bytes(layout) == 15_360
    assert ssm_bytes(layout) == 1_048_576
    assert conv_bytes(layout) + ssm_bytes(layout) == 1_063_936
    attention = group_of(layout, GroupKind.ATTENTION)
    assert (attention.block_tokens, attention.views[0].block_stride) == (4_224, 1_081_344)
    assert [len(g.views) for g in layout.groups] == [8] * 6
    assert len(layout.regions) == 8


def test_nemotron_super_bf16_page() -> None:
    """The published bf16 page: 4,224 tokens of 512 bytes, given as the block size at TP=4, computed at TP=2."""
    given = preset(SUPER, 4, logical_block_tokens=4_224)
    computed = preset(SUPER, 2, state_align_tokens=128)
    for layout in (given, computed):
        attention = group_of(layout, GroupKind.ATTENTION)
        assert (attention.block_tokens, attention.views[0].block_stride) == (4_224, 2_162_688)
    assert 40 * (2_162_688 - conv_bytes(given) - ssm_bytes(given)) == 43_950_080


def test_nemotron_super_least_block() -> None:
    """Without that alignment the block is the smallest multiple of the kernel block that covers the state."""
    assert group_of(preset(SUPER, 4, kv_dtype="fp8"), GroupKind.ATTENTION).block_tokens == 4_160
    assert group_of(preset(SUPER, 4), GroupKind.ATTENTION).block_tokens == 2_080


def test_nemotron_super_pattern() -> None:
    pattern = str(example(SUPER)["hybrid_override_pattern"])
    assert (len(pattern), pattern.count("M"), pattern.count("*"), pattern.count("E")) == (88, 40, 8, 40)
    assert [pattern[:i].count("M") for i, c in enumerate(pattern) if c == "*"] == [4, 8, 12, 17, 22, 27, 32, 36]


def test_qwen3_next() -> None:
    layout = preset("qwen3-next-80b-a3b", 2)
    assert [(c.name, len(c.units), c.units.total) for c in components(layout, GroupKind.STATE)] == [
        ("conv.q", 1_024, 2_048),
        ("conv.k", 1_024, 2_048),
        ("conv.v", 2_048, 4_096),
        ("ssm", 16, 32),
    ]
    assert [len(g.views) for g in layout.groups] == [12] * 4
    assert group_of(layout, GroupKind.ATTENTION).block_tokens == 1_056
    assert layout.groups[0].views[0].block_stride == 1_081_344


def test_qwen3_5_has_its_text_model_inside() -> None:
    layout = preset("qwen3.5-9b", 2)
    assert [(c.name, len(c.units), c.units.total) for c in components(layout, GroupKind.STATE)] == [
        ("conv.q", 1_024, 2_048),
        ("conv.k", 1_024, 2_048),
        ("conv.v", 2_048, 4_096),
        ("ssm", 16, 32),
    ]
    assert [(g.name, len(g.views)) for g in layout.groups] == [
        ("gdn.0", 8),
        ("gdn.1", 8),
        ("gdn.2", 8),
        ("attention", 8),
    ]
    (kv,) = components(layout, GroupKind.ATTENTION)
    assert kv.data_bytes == 16 * 2 * 2 * 256 * 2


def test_kimi_linear() -> None:
    """KDA: 32 heads with a state of 128 x 128 each and a conv over three times 4,096 channels; MLA: 576 elements."""
    layout = preset("kimi-linear-48b-a3b", 1)
    assert [(c.name, len(c.units)) for c in components(layout, GroupKind.STATE)] == [
        ("conv.q", 4_096),
        ("conv.k", 4_096),
        ("conv.v", 4_096),
        ("ssm", 32),
    ]
    assert (conv_bytes(layout), ssm_bytes(layout)) == (3 * 4_096 * 3 * 2, 32 * 128 * 128 * 4)
    attention = group_of(layout, GroupKind.ATTENTION)
    assert [v.layer for v in attention.views] == [f"model.layers.{i}.self_attn" for i in (3, 7, 11, 15, 19, 23, 26)]
    assert components(layout, GroupKind.ATTENTION)[0].data_bytes == 16 * 576 * 2
    assert [(g.name, len(g.views)) for g in layout.groups] == [("kda.0", 7), ("kda.1", 7), ("kda.2", 6), ("mla", 7)]


@pytest.mark.parametrize("name, sizes", [("granite-4.0-h-small", [4] * 9), ("bamba-9b", [3] * 9 + [2])])
def test_granite_and_bamba(name: str, sizes: list[int]) -> None:
    """128 heads x 64, state 128, one group: conv (8448, 3), state (128, 64, 128), both bf16; 8 KV heads x 128."""
    layout = preset(name, 1)
    assert (conv_bytes(layout), ssm_bytes(layout)) == (8_448 * 3 * 2, 128 * 64 * 128 * 2)
    assert [len(g.views) for g in layout.groups if g.kind is GroupKind.STATE] == sizes
    assert components(layout, GroupKind.ATTENTION)[0].data_bytes == 16 * 2 * 8 * 128 * 2
    names = [v.layer for v in group_of(layout, GroupKind.ATTENTION).views]
    if name == "bamba-9b":
        assert names == [f"model.layers.{i}.attn" for i in (9, 18, 27)]
    else:
        assert names == [f"model.layers.{i}.self_attn.attn" for i in (5, 15, 25, 35)]


def test_falcon_h1_has_two_caches_in_every_layer() -> None:
    """24 heads x 128, state 256, one group: conv (3584, 3), state (24, 128, 256), both bf16; 2 KV heads x 128."""
    layout = preset("falcon-h1-7b", 1)
    assert (conv_bytes(layout), ssm_bytes(layout)) == (3_584 * 3 * 2, 24 * 128 * 256 * 2)
    assert [(g.name, len(g.views)) for g in layout.groups] == [("attention", 44), ("mamba2", 44)]
    assert len(layout.regions) == 44
    assert [g.views[1].layer for g in layout.groups] == ["model.layers.1.attn", "model.45.mixer"]
    assert [g.views[1].region for g in layout.groups] == [1, 1]


def test_zamba2_shares_weights_and_no_cache() -> None:
    """Two shared blocks in turn over five layers that attend: five caches, numbered as vLLM does, block by block."""
    model = {
        "model_type": "zamba2",
        "num_hidden_layers": 9,
        "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid", "hybrid", "hybrid", "mamba", "mamba"],
        "num_mem_blocks": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "mamba_expand": 2,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
    }
    layout = build(model, EngineOptions(pooled=False))
    by_name = {g.name: g for g in layout.groups}
    assert [v.layer for v in by_name["attention"].views] == [f"model.attn.{i}" for i in (0, 3, 1, 4, 2)]
    assert [v.layer for v in by_name["mamba2"].views] == [f"{5 + i}.mixer" for i in range(9)]
    # Heads of twice the hidden size: the embedding goes in, too.
    assert components(layout, GroupKind.ATTENTION)[0].data_bytes == 16 * 4 * 2 * 32 * 2
    assert conv_bytes(layout) == (128 + 2 * 2 * 16) * 3 * 2


def test_jamba() -> None:
    """Mamba1: 8,192 channels, conv of 3 rows, state of 16 values, both bf16; K and V are 8 heads x 128, bf16."""
    layout = preset("jamba-mini", 1)
    assert conv_bytes(layout) == 8_192 * 3 * 2
    assert ssm_bytes(layout) == 8_192 * 16 * 2
    assert [len(g.views) for g in layout.groups] == [4] * 8
    attention = group_of(layout, GroupKind.ATTENTION)
    assert [v.layer for v in attention.views] == [f"model.layers.{i}.attn" for i in (4, 12, 20, 28)]
    assert (attention.block_tokens, attention.views[0].block_stride) == (80, 327_680)  # 311,296 bytes of state
    fp32 = preset("jamba-mini", 1, ssm_dtype="float32")
    assert ssm_bytes(fp32) == 8_192 * 16 * 4


def test_dense_and_mla() -> None:
    dense = preset("llama-3.1-70b", 8)
    assert len(dense.regions) == 80
    assert len(dense.groups) == 1
    assert components(dense, GroupKind.ATTENTION)[0].data_bytes == 16 * 2 * 128 * 2
    for tp in (1, 8):
        mla = preset("deepseek-v3", tp, block_tokens=64)
        (latent,) = components(mla, GroupKind.ATTENTION)
        assert (latent.name, latent.data_bytes, latent.units.total) == ("mla", 64 * 576 * 2, 1)
        assert len(mla.regions) == 61


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("pooled", [True, False])
def test_every_example_builds(name: str, tp: int, pooled: bool) -> None:
    if name == "falcon-h1-7b" and tp == 8:
        with pytest.raises(KvxferError, match=r"12 \(num_attention_heads\)"):
            build_all(example(name), EngineOptions(tp_size=tp))
        return
    layouts = build_all(example(name), EngineOptions(tp_size=tp, num_blocks=4, pooled=pooled))
    assert [rank.tp_rank for rank in layouts] == list(range(tp))
    layers = {v.layer for g in layouts[Rank(0, tp)].groups for v in g.views}
    assert all({v.layer for g in layout.groups for v in g.views} == layers for layout in layouts.values())


def test_regions_hold_exactly_their_blocks() -> None:
    for name in EXAMPLES:
        for pooled in (True, False):
            layout = preset(name, 2, num_blocks=5, pooled=pooled)
            for group in layout.groups:
                for view in group.views:
                    assert layout.regions[view.region].size == view.block_stride * view.num_blocks
                    data = sum(c.data_bytes for c in view.components) * view.kernel_blocks
                    assert data <= view.block_stride
                    if group.kind is GroupKind.ATTENTION:
                        assert data == view.block_stride  # attention pages have no padding
                    assert prod(a.extent for a in view.components[0].axes) > 0
