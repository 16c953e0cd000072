"""Layout options one by one, pipeline stages, grouping and scaling down."""

from __future__ import annotations

import pytest

from kvxfer.core.errors import KvxferError
from kvxfer.core.layout import AxisKind, Group, GroupKind, MemoryKind, Rank
from kvxfer.models import EngineOptions, Family, build, build_all, example, families, register, scale_down
from kvxfer.models.build import stage_layers
from kvxfer.models.families import dense
from kvxfer.models.pool import deal, group_size

NANO = example("nemotron-3-nano-30b-a3b")
LLAMA = {**example("llama-3.1-70b"), "num_hidden_layers": 2}


def attention(config: dict[str, object], options: EngineOptions) -> Group:
    return next(g for g in build(config, options).groups if g.kind is GroupKind.ATTENTION)


def test_conv_sd() -> None:
    layout = build(NANO, EngineOptions(tp_size=2, conv_layout="SD"))
    x, b, c, ssm = layout.groups[0].views[0].components
    width = 3_072
    assert [(p.offset, p.axes[0].kind, p.axes[0].stride, p.axes[1].stride) for p in (x, b, c)] == [
        (0, AxisKind.INNER, width * 2, 2),
        (2_048 * 2, AxisKind.INNER, width * 2, 2),
        (2_560 * 2, AxisKind.INNER, width * 2, 2),
    ]
    assert ssm.offset == 18_432


def test_spec_tokens_add_conv_rows() -> None:
    rows = [
        build(NANO, EngineOptions(spec_tokens=n)).groups[0].views[0].components[0].inner[0].extent for n in (0, 1, 5)
    ]
    assert rows == [3, 4, 8]


def test_kv_layouts() -> None:
    for layout, kinds in (("HND", ["unit", "token", "inner"]), ("NHD", ["token", "unit", "inner"])):
        view = attention(LLAMA, EngineOptions(kv_layout=layout)).views[0]  # type: ignore[arg-type]
        assert [a.kind.value for a in view.components[0].axes] == kinds


def test_kv_packings() -> None:
    half = 8 * 16 * 128 * 2
    options = {"num_blocks": 4, "logical_block_tokens": 32, "pooled": False}
    (packed, *_), _ = (attention(LLAMA, EngineOptions(**options)).views, None)  # type: ignore[arg-type]
    assert [c.name for c in packed.components] == ["kv"]
    block = attention(LLAMA, EngineOptions(kv_packing="block", **options)).views[0]  # type: ignore[arg-type]
    assert [(c.name, c.offset) for c in block.components] == [("k", 0), ("v", half)]
    assert (block.kernel_blocks, block.block_stride) == (2, 4 * half)
    halves = build(LLAMA, EngineOptions(kv_packing="halves", **options))  # type: ignore[arg-type]
    assert [(v.layer[-16:], v.region, v.base, v.block_stride) for v in halves.groups[0].views] == [
        ("0.self_attn.attn", 0, 0, 2 * half),
        ("0.self_attn.attn", 0, 8 * half, 2 * half),
        ("1.self_attn.attn", 1, 0, 2 * half),
        ("1.self_attn.attn", 1, 8 * half, 2 * half),
    ]
    regions = build(LLAMA, EngineOptions(kv_packing="regions", **options))  # type: ignore[arg-type]
    assert [(v.region, v.base) for v in regions.groups[0].views] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert sum(r.size for r in halves.regions) == sum(r.size for r in regions.regions) == 4 * 2 * 2 * half * 2


def test_packing_apart_in_a_pool_of_one_group() -> None:
    layout = build(LLAMA, EngineOptions(kv_packing="halves"))
    assert len(layout.regions) == 2
    assert len(layout.groups[0].views) == 4


def test_unpooled() -> None:
    layout = build(NANO, EngineOptions(tp_size=2, pooled=False, num_blocks=10, state_blocks=3))
    assert [(g.name, len(g.views), g.num_blocks) for g in layout.groups] == [("mamba2", 23, 3), ("attention", 6, 10)]
    assert len(layout.regions) == 29
    assert layout.groups[0].views[0].block_stride == 18_432 + 1_048_576
    assert layout.groups[1].block_tokens == 16


def test_memory_kind() -> None:
    layout = build(NANO, EngineOptions(memory=MemoryKind.VRAM))
    assert {r.memory for r in layout.regions} == {MemoryKind.VRAM}


def test_replicated_heads_and_groups() -> None:
    layouts = build_all(NANO, EngineOptions(tp_size=16))
    b = [lay.groups[0].views[0].components[1].units for lay in layouts.values()]
    assert [u.begin // 128 for u in b] == [r // 2 for r in range(16)]
    kv = [lay.groups[-1].views[0].components[0].units for lay in layouts.values()]
    assert [u.begin for u in kv] == [r // 8 for r in range(16)]


@pytest.mark.parametrize(
    "depth, sizes", [(52, [52]), (52, [26, 26]), (53, [27, 26]), (10, [2, 3, 3, 2]), (11, [3, 3, 3, 2])]
)
def test_stages(depth: int, sizes: list[int]) -> None:
    stages = [stage_layers(depth, rank, len(sizes)) for rank in range(len(sizes))]
    assert [len(s) for s in stages] == sizes
    assert [i for s in stages for i in s] == list(range(depth))


def test_pipeline_stages_cover_the_model() -> None:
    one = build(NANO, EngineOptions())
    for pp in (2, 4):
        layouts = build_all(NANO, EngineOptions(pp_size=pp))
        assert [r.pp_rank for r in layouts] == list(range(pp))
        for group in one.groups:
            staged = [v.layer for lay in layouts.values() for g in lay.groups if g.name == group.name for v in g.views]
            assert staged == [v.layer for v in group.views]
        for layout in layouts.values():
            assert len(layout.regions) == max(len(g.views) for g in layout.groups)
            assert {v.block_stride for g in layout.groups for v in g.views} == {one.groups[0].views[0].block_stride}


@pytest.mark.parametrize(
    "counts, size", [([23, 6], 6), ([40, 8], 8), ([12, 13], 13), ([24, 12], 12), ([12, 18], 12), ([12, 17], 17)]
)
def test_group_size(counts: list[int], size: int) -> None:
    assert group_size(counts) == size


def test_deal_by_stride() -> None:
    assert deal(range(7), 3) == [(0, 3, 6), (1, 4), (2, 5)]


def test_scale_down_depth() -> None:
    small = scale_down(NANO, max_layers=13)
    assert (small["num_hidden_layers"], small["hybrid_override_pattern"]) == (13, "MEMEM*EMEMEM*")
    whole, part = build(NANO, EngineOptions(tp_size=2)), build(small, EngineOptions(tp_size=2))
    assert part.groups[-1].views[0] == whole.groups[-1].views[0]
    assert {v.layer for g in part.groups for v in g.views} < {v.layer for g in whole.groups for v in g.views}
    assert scale_down(NANO, max_layers=1_000) == NANO
    with pytest.raises(KvxferError) as caught:
        scale_down(NANO, max_layers=5)
    assert caught.value.field == "max_layers"
    assert "at least 6" in caught.value.message


@pytest.mark.parametrize(
    "name",
    [
        "nemotron-3-nano-30b-a3b",
        "nemotron-3-super-120b-a12b",
        "qwen3-next-80b-a3b",
        "qwen3.5-9b",
        "granite-4.0-h-small",
        "falcon-h1-7b",
        "jamba-mini",
        "deepseek-v3",
    ],
)
def test_scale_down_width(name: str) -> None:
    config = example(name)
    whole = build_all(config, EngineOptions(tp_size=4))
    small = build_all(scale_down(config, shrink=8), EngineOptions(tp_size=4))
    for rank, layout in whole.items():
        other = small[rank]
        assert [(g.name, [v.layer for v in g.views]) for g in layout.groups] == [
            (g.name, [v.layer for v in g.views]) for g in other.groups
        ]
        assert sum(r.size for r in other.regions) <= sum(r.size for r in layout.regions) // 7
        for (_, a), (_, b) in zip(
            (p for g in layout.groups for p in g.parts()), (p for g in other.groups for p in g.parts()), strict=True
        ):
            assert a.name == b.name
            assert a.units.begin * b.units.total == b.units.begin * a.units.total
            assert a.units.end * b.units.total == b.units.end * a.units.total


@pytest.mark.parametrize("name, layers", [("bamba-9b", 10), ("granite-4.0-h-small", 6), ("kimi-linear-48b-a3b", 4)])
def test_scale_down_depth_of_lists(name: str, layers: int) -> None:
    """Whatever says which layers attend, it goes on saying it."""
    small = build(scale_down(example(name), max_layers=layers), EngineOptions())
    whole = build(example(name), EngineOptions())
    assert [v.layer for v in small.groups[-1].views] == [v.layer for v in whole.groups[-1].views][:1]
    assert sum(len(g.views) for g in small.groups) == layers


def test_scale_down_widths_that_follow_from_others() -> None:
    bamba = example("bamba-9b")
    scaled = scale_down({**bamba, "mamba_d_head": "auto"}, shrink=8)
    assert (scaled["mamba_d_head"], scaled["hidden_size"]) == ("auto", 512)
    assert build(scaled, EngineOptions()) == build(scale_down(bamba, shrink=8), EngineOptions())


def test_scale_down_refuses() -> None:
    for bad in (0, -1, 3, True, 10**30):
        with pytest.raises(KvxferError) as caught:
            scale_down(NANO, shrink=bad)
        assert caught.value.field == "shrink"


def test_registry() -> None:
    names = [family.name for family in families()]
    assert len(names) == len(set(names)) >= 5
    with pytest.raises(ValueError, match="llama"):
        register(Family("again", ("llama",), (), dense.read))


def test_first_rank_by_default() -> None:
    options = EngineOptions(tp_size=2)
    assert build(NANO, options) == build(NANO, options, Rank(0, 2))
