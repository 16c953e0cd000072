"""Random models and engines: the ranks' units cover every component exactly, and sizes add up."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.core.layout import AxisKind, Component, GroupKind
from kvxfer.models import EngineOptions, build_all, model_spec
from kvxfer.models.pool import deal, group_size
from kvxfer.models.spec import KvSpec, LatentSpec, StateSpec

WIDTHS = st.sampled_from([1, 2, 4, 8, 12])
TP = st.sampled_from([1, 2, 3, 4, 6, 8])
DTYPES = st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"])


def fitting(draw: st.DrawFn, tp: int, replicate: bool) -> int:
    """A number of heads that ``tp`` ranks can share."""
    wanted = [tp, 2 * tp, 3 * tp]
    if replicate:
        wanted += [n for n in range(1, tp) if tp % n == 0]
    return draw(st.sampled_from(wanted))


@st.composite
def nemotron(draw: st.DrawFn, tp: int) -> dict[str, object]:
    pattern = draw(st.text("M*-E", min_size=1, max_size=16).filter(lambda p: "M" in p or "*" in p))
    return {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": pattern,
        "num_key_value_heads": fitting(draw, tp, True),
        "head_dim": draw(WIDTHS),
        "mamba_num_heads": fitting(draw, tp, False),
        "mamba_head_dim": draw(WIDTHS),
        "n_groups": fitting(draw, tp, True),
        "ssm_state_size": draw(WIDTHS),
        "conv_kernel": draw(st.integers(2, 5)),
    }


@st.composite
def qwen(draw: st.DrawFn, tp: int) -> dict[str, object]:
    return {
        "model_type": "qwen3_next",
        "num_hidden_layers": draw(st.integers(1, 12)),
        "full_attention_interval": draw(st.integers(1, 5)),
        "num_key_value_heads": fitting(draw, tp, True),
        "head_dim": draw(WIDTHS),
        "linear_num_key_heads": fitting(draw, tp, False),
        "linear_key_head_dim": draw(WIDTHS),
        "linear_num_value_heads": fitting(draw, tp, False),
        "linear_value_head_dim": draw(WIDTHS),
        "linear_conv_kernel_dim": draw(st.integers(2, 5)),
    }


@st.composite
def jamba(draw: st.DrawFn, tp: int) -> dict[str, object]:
    period = draw(st.integers(1, 8))
    return {
        "model_type": "jamba",
        "num_hidden_layers": draw(st.integers(1, 16)),
        "attn_layer_period": period,
        "attn_layer_offset": draw(st.integers(0, period - 1)),
        "num_key_value_heads": fitting(draw, tp, True),
        "head_dim": draw(WIDTHS),
        "hidden_size": tp * draw(WIDTHS),
        "mamba_expand": draw(st.integers(1, 3)),
        "mamba_d_state": draw(WIDTHS),
        "mamba_d_conv": draw(st.integers(2, 5)),
    }


def bamba_state(draw: st.DrawFn, tp: int) -> dict[str, object]:
    heads, width = fitting(draw, tp, False), draw(WIDTHS)
    return {
        "hidden_size": heads * width,
        "mamba_expand": 1,
        "mamba_n_heads": heads,
        "mamba_d_head": draw(st.sampled_from([width, "auto"])),
        "mamba_n_groups": fitting(draw, tp, True),
        "mamba_d_state": draw(WIDTHS),
        "mamba_d_conv": draw(st.integers(2, 5)),
        "num_key_value_heads": fitting(draw, tp, True),
        "head_dim": draw(WIDTHS),
    }


@st.composite
def bamba(draw: st.DrawFn, tp: int) -> dict[str, object]:
    """Bamba and Granite, which say otherwise which layers attend."""
    which = draw(st.lists(st.booleans(), min_size=1, max_size=12))
    model = {"num_hidden_layers": len(which), **bamba_state(draw, tp)}
    if draw(st.booleans()):
        return {**model, "model_type": "bamba", "attn_layer_indices": [i for i, attends in enumerate(which) if attends]}
    words = draw(st.sampled_from([("mamba", "attention"), ("linear_attention", "full_attention")]))
    return {**model, "model_type": "granitemoehybrid", "layer_types": [words[attends] for attends in which]}


@st.composite
def falcon_h1(draw: st.DrawFn, tp: int) -> dict[str, object]:
    state = bamba_state(draw, tp)
    own = {"mamba_d_ssm": state["hidden_size"], "hidden_size": 3} if draw(st.booleans()) else {}
    return {"model_type": "falcon_h1", "num_hidden_layers": draw(st.integers(1, 6)), **state, **own}


@st.composite
def zamba2(draw: st.DrawFn, tp: int) -> dict[str, object]:
    heads = fitting(draw, tp, False)
    hybrid = draw(st.lists(st.booleans(), min_size=1, max_size=12).filter(any))
    return {
        "model_type": "zamba2",
        "num_hidden_layers": len(hybrid),
        "layers_block_type": ["hybrid" if attends else "mamba" for attends in hybrid],
        "num_mem_blocks": draw(st.integers(1, 3)),
        "hidden_size": heads * draw(WIDTHS),
        "mamba_expand": draw(st.integers(1, 3)),
        "n_mamba_heads": heads,
        "mamba_ngroups": fitting(draw, tp, True),
        "mamba_d_state": draw(WIDTHS),
        "mamba_d_conv": draw(st.integers(2, 5)),
        "num_key_value_heads": fitting(draw, tp, True),
        "attention_head_dim": draw(WIDTHS),
    }


@st.composite
def kimi(draw: st.DrawFn, tp: int) -> dict[str, object]:
    latent = draw(st.lists(st.booleans(), min_size=1, max_size=12))
    return {
        "model_type": "kimi_linear",
        "num_hidden_layers": len(latent),
        "kv_lora_rank": draw(WIDTHS),
        "qk_rope_head_dim": draw(WIDTHS),
        "linear_attn_config": {
            "full_attn_layers": [i + 1 for i, mla in enumerate(latent) if mla],
            "num_heads": fitting(draw, tp, False),
            "head_dim": draw(WIDTHS),
            "short_conv_kernel_size": draw(st.integers(2, 5)),
        },
    }


@st.composite
def engines(draw: st.DrawFn) -> tuple[dict[str, object], EngineOptions]:
    tp = draw(TP)
    families = (nemotron, qwen, jamba, bamba, falcon_h1, zamba2, kimi)
    config = draw(st.one_of(*(family(tp) for family in families)))
    pooled = draw(st.booleans())
    block = draw(st.sampled_from([1, 3, 4, 16]))
    options: dict[str, Any] = {
        "tp_size": tp,
        "block_tokens": block,
        "num_blocks": draw(st.integers(1, 5)),
        "kv_dtype": draw(DTYPES),
        "conv_dtype": draw(DTYPES),
        "ssm_dtype": draw(DTYPES),
        "conv_layout": draw(st.sampled_from(["DS", "SD"])),
        "kv_layout": draw(st.sampled_from(["HND", "NHD"])),
        "kv_packing": draw(
            st.sampled_from(["packed", "block"] if pooled else ["packed", "block", "halves", "regions"])
        ),
        "pooled": pooled,
        "spec_tokens": draw(st.integers(0, 3)),
        "logical_block_tokens": block * draw(st.integers(0, 3)),
        "state_align_tokens": draw(st.sampled_from([0, 2, 8])),
        "state_blocks": draw(st.integers(0, 4)),
    }
    return config, EngineOptions(**options)


def whole(cache: KvSpec | LatentSpec | StateSpec, rows: int) -> dict[str, tuple[int, int]]:
    """Component name to (units, elements of a unit; per token in an attention layer) of the whole model."""
    if isinstance(cache, LatentSpec):
        return {"mla": (1, cache.width)}
    if isinstance(cache, KvSpec):
        return {
            "kv": (cache.heads, cache.k_dim + cache.v_dim),
            "k": (cache.heads, cache.k_dim),
            "v": (cache.heads, cache.v_dim),
        }
    parts = {part.name: (part.units, cache.conv_rows + rows) for part in cache.conv}
    if cache.ssm is not None:
        parts[cache.ssm.name] = (cache.ssm.units, prod(cache.ssm_inner))
    return parts


@settings(deadline=None)
@given(engines())
def test_ranks_cover_every_component_exactly(engine: tuple[dict[str, object], EngineOptions]) -> None:
    config, options = engine
    layouts = build_all(config, options)
    spec = model_spec(config)
    holders: dict[tuple[str, str], Counter[int]] = {}
    for layout in layouts.values():
        seen: set[tuple[str, str]] = set()
        for group in layout.groups:
            for view, component in group.parts():
                key = (view.layer, component.name)
                assert key not in seen
                seen.add(key)
                holders.setdefault(key, Counter()).update(range(component.units.begin, component.units.end))
    for layer in spec.layers:
        parts = whole(layer.cache, options.spec_tokens)
        names = {name for held, name in holders if held == layer.name}
        if isinstance(layer.cache, KvSpec):
            assert names == ({"kv"} if options.kv_packing == "packed" else {"k", "v"})
        else:
            assert names == set(parts)
        for name in names:
            units, inner = parts[name]
            counts = holders[layer.name, name]
            assert sorted(counts) == list(range(units))
            assert len(set(counts.values())) == 1, "every unit is held by equally many ranks"
            # Bytes over all ranks are the model's, times how often each unit is held.
            copies, total = counts[0], 0
            for layout in layouts.values():
                for group in layout.groups:
                    for view, component in group.parts():
                        if (view.layer, component.name) == (layer.name, name):
                            total += component.data_bytes // component.element_bytes
            tokens = options.block_tokens if not isinstance(layer.cache, StateSpec) else 1
            assert total == copies * units * inner * tokens


@settings(deadline=None)
@given(engines())
def test_placing(engine: tuple[dict[str, object], EngineOptions]) -> None:
    config, options = engine
    layouts = list(build_all(config, options).values())
    for layout in layouts:
        assert [(g.name, g.block_tokens, len(g.views)) for g in layout.groups] == [
            (g.name, g.block_tokens, len(g.views)) for g in layouts[0].groups
        ]
        used = {view.region for group in layout.groups for view in group.views}
        assert used == set(range(len(layout.regions)))
        if options.pooled:
            strides = {view.block_stride for group in layout.groups for view in group.views}
            assert len(strides) == 1
            assert len(set(layout.pools)) == 1
            for group in layout.groups:
                assert [view.region for view in group.views] == list(range(len(group.views)))
            least_block(layout.groups, options)
        else:
            assert set(layout.pools) == set(range(len(layout.groups)))
        for group in layout.groups:
            if group.kind is GroupKind.ATTENTION:
                assert group.block_tokens % options.block_tokens == 0
            else:
                for view in group.views:
                    tight(view.components)


def least_block(groups: Any, options: EngineOptions) -> None:
    """One alignment step less and the page would not cover the largest state."""
    attention = [g for g in groups if g.kind is GroupKind.ATTENTION]
    states = [v for g in groups if g.kind is GroupKind.STATE for v in g.views]
    if not attention or not states:
        return
    need = max(max(c.box.end for c in v.components) for v in states)
    page, tokens = attention[0].views[0].block_stride, attention[0].block_tokens
    step = options.block_tokens
    while step % (options.logical_block_tokens or 1) or step % (options.state_align_tokens or 1):
        step += options.block_tokens
    assert page >= need
    assert tokens == step or (tokens - step) * page // tokens < need


def tight(components: tuple[Component, ...]) -> None:
    """A snapshot's parts lie one after the other, with no more than an element's alignment between."""
    conv = [c for c in components if c.name.startswith("conv.")]
    conv_end = max((c.box.end for c in conv), default=0)
    assert conv_end == sum(c.data_bytes for c in conv)
    for component in components:
        if component.name == "ssm":
            assert conv_end <= component.offset < conv_end + component.element_bytes
            assert component.offset % component.element_bytes == 0
            unit = component.axis(AxisKind.UNIT)
            assert unit is not None
            assert unit.extent == len(component.units)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_dealing(counts: list[int]) -> None:
    size = group_size(counts)
    assert min(counts) <= size <= max(counts)
    for count in counts:
        groups = deal(range(count), size)
        assert sorted(i for group in groups for i in group) == list(range(count))
        lengths = [len(group) for group in groups]
        assert max(lengths) <= size
        assert max(lengths) - min(lengths) <= 1
        assert all(list(group) == sorted(group) for group in groups)
