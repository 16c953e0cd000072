"""The presets give the layouts of the golden vectors: views, offsets, units and strides as vLLM laid them out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvxfer.core.layout import AxisKind, CacheLayout, Component, Group, Rank
from kvxfer.models import EngineOptions, build_all, example, layout_of
from kvxfer.models.spec import LatentSpec, LayerSpec, ModelSpec, gated_delta_net

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
#: Golden component names are short; ours say what they are.
NAMES = {name: f"conv.{name}" for name in ("x", "B", "C", "q", "k", "v")}


@dataclass(frozen=True)
class Case:
    """How a golden case is made from a preset; block counts, TP and kernel blocks come from the case itself."""

    config: dict[str, object]
    options: dict[str, Any] = field(default_factory=dict)
    names_differ: bool = False


NANO = example("nemotron-3-nano-30b-a3b")
BLOG = {**NANO, "mamba_num_heads": 96, "num_key_value_heads": 8}
DENSE = {"model_type": "llama", "num_hidden_layers": 3, "num_key_value_heads": 8, "head_dim": 64}
GQA = {**DENSE, "num_hidden_layers": 2, "num_key_value_heads": 2}
MLA = {"model_type": "deepseek_v3", "num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
GDN = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 6,
    "full_attention_interval": 3,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
GDN_K2 = {**GDN, "num_key_value_heads": 2, "linear_num_key_heads": 8}
MAMBA2 = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MM*MM*",
    "num_key_value_heads": 4,
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 4,
    "ssm_state_size": 16,
    "conv_kernel": 4,
}
MAMBA2_K2 = {**MAMBA2, "num_key_value_heads": 2, "n_groups": 8, "ssm_state_size": 32}
MAMBA1 = {
    "model_type": "jamba",
    "num_hidden_layers": 6,
    "attn_layer_period": 3,
    "attn_layer_offset": 2,
    "hidden_size": 64,
    "mamba_expand": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
FP8, FP32 = {"kv_dtype": "float8_e4m3fn"}, {"ssm_dtype": "float32"}

CASES: dict[str, Case] = {
    **{
        f"nemotron_nano30b_{pair}": Case(NANO, FP8)
        for pair in ("tp1_tp1", "tp1_tp2", "tp2_tp4_one_P_block_two_D_blocks", "tp4_tp1")
    },
    **{
        f"blog_nemotron_conv4096_{pair}": Case(BLOG, {"ssm_dtype": "bfloat16"})
        for pair in ("tp2_tp2", "tp2_tp4", "tp2_tp2_ppl25")
    },
    "qwen3next80b_gdn_tp1_tp2": Case(example("qwen3-next-80b-a3b")),
    **{
        f"dense_fa_{pair}": Case(DENSE) for pair in ("tp1_tp1", "tp1_tp4", "tp2_tp1", "tp4_tp2", "tp4_tp4", "ppl4_same")
    },
    "dense_fa_tp2_tp2_NHD_token_major": Case(DENSE, {"kv_layout": "NHD"}),
    **{f"gqa_k2_{pair}": Case(GQA) for pair in ("tp1_tp8", "tp2_tp4")},
    **{f"mla_{pair}": Case(MLA) for pair in ("tp1_tp1", "tp4_tp1")},
    **{f"hyb_gdn_k4_{pair}": Case(GDN) for pair in ("tp2_tp1", "tp2_tp2", "tp2_tp4", "tp4_tp1")},
    **{f"hyb_gdn_k2_replicated_{pair}": Case(GDN_K2) for pair in ("tp2_tp4", "tp2_tp8")},
    **{
        f"hyb_mamba2_k4_{pair}": Case(MAMBA2, names_differ=True)
        for pair in ("tp2_tp1", "tp2_tp2", "tp2_tp4", "tp4_tp1", "tp2_tp2_ppl_P5_D3")
    },
    **{f"hyb_mamba2_k2_replicated_{pair}": Case(MAMBA2_K2, names_differ=True) for pair in ("tp2_tp4", "tp2_tp8")},
    **{
        f"hyb_mamba1_k4_{pair}": Case(MAMBA1, FP32, names_differ=True)
        for pair in ("tp2_tp1", "tp2_tp2", "tp2_tp4", "tp4_tp1")
    },
}


def load(name: str) -> dict[str, Any]:
    found = sorted(GOLDEN.rglob(f"{name}.json"))
    if not found and not any(GOLDEN.rglob("*.json")):
        pytest.skip("the golden vectors are not here")
    parsed: dict[str, Any] = json.loads(found[0].read_text())
    return parsed


def check(golden: dict[str, Any], side: str, layouts: dict[Rank, CacheLayout], names_differ: bool = False) -> None:
    for rank, layout in layouts.items():
        assert len(layout.groups) == len(golden["groups"])
        for group, expected in zip(layout.groups, golden["groups"], strict=True):
            held = golden[side]["ranks"][rank.tp_rank][expected["name"]]
            check_views(group, golden[side], golden[side]["views"][expected["name"]], names_differ)
            for view in group.views:
                assert len(view.components) == len(expected["components"])
                for component, wanted in zip(view.components, expected["components"], strict=True):
                    check_component(component, wanted, held[wanted["name"]])


def check_views(group: Group, side: dict[str, Any], expected: list[dict[str, Any]], names_differ: bool) -> None:
    assert len(group.views) == len(expected)
    for view, wanted in zip(group.views, expected, strict=True):
        if not names_differ:
            assert view.layer == wanted["layer"]
        assert (view.region, view.base) == (wanted["region"], wanted["base"])
        assert view.num_blocks == side["logical_blocks"]
        # Golden attention views count kernel blocks.
        assert view.kernel_stride == wanted["block_stride"]
        assert view.num_blocks * view.kernel_blocks == wanted["blocks"]
        assert view.block_stride == view.kernel_stride * view.kernel_blocks
        if group.block_tokens:
            assert view.kernel_blocks == side["kernel_blocks_per_logical"]
            assert group.block_tokens == side["kernel_block_tokens"] * view.kernel_blocks


def check_component(component: Component, wanted: dict[str, Any], held: dict[str, Any]) -> None:
    assert component.name == NAMES.get(wanted["name"], wanted["name"])
    assert component.element_bytes == wanted["element_bytes"]
    assert component.offset == held["offset"]
    assert [component.units.begin, component.units.end] == held["units"]
    assert component.units.total == wanted["total_units"]
    kinds = [a.kind.value for a in component.axes]
    assert list(dict.fromkeys(kinds)) == wanted["axes"]
    inner = 1
    for axis in component.axes:
        inner *= axis.extent if axis.kind is AxisKind.INNER else 1
    assert inner == wanted["inner"]


def options_of(side: dict[str, Any], case: Case) -> EngineOptions:
    """The block size is computed, not told, wherever the golden case follows from it."""
    return EngineOptions(
        tp_size=side["tp"], block_tokens=side["kernel_block_tokens"], num_blocks=side["logical_blocks"], **case.options
    )


@pytest.mark.parametrize("side", ["P", "D"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_layouts_equal_golden(name: str, side: str) -> None:
    golden, case = load(name), CASES[name]
    options = options_of(golden[side], case)
    if "_ppl_" in name or "_ppl4_" in name:  # an engine that was given its block size
        ratio = golden[side]["kernel_blocks_per_logical"]
        options = EngineOptions(
            tp_size=options.tp_size,
            num_blocks=options.num_blocks,
            logical_block_tokens=options.block_tokens * ratio,
            **case.options,
        )
    check(golden, side, build_all(case.config, options), case.names_differ)


@pytest.mark.parametrize("side", ["P", "D"])
def test_mla_beside_gdn(side: str) -> None:
    """A model that is described directly, without a config."""
    golden = load("hyb_mla_gdn_tp2_tp2")
    state = gated_delta_net(4, 16, 4, 16, 4)
    layers = tuple(
        LayerSpec(i, f"model.layers.{i}.self_attn.attn", "mla", LatentSpec(64))
        if i % 3 == 2
        else LayerSpec(i, f"model.layers.{i}.linear_attn", "gdn", state)
        for i in range(6)
    )
    spec = ModelSpec(layers, 6, "bfloat16")
    blocks = golden[side]["logical_blocks"]
    options = EngineOptions(tp_size=2, num_blocks=blocks, logical_block_tokens=64)  # 32 would cover the state
    check(golden, side, {r: layout_of(spec, options, r) for r in (Rank(0, 2), Rank(1, 2))})
