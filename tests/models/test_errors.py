"""Bad configs and bad options: refused with the key, its value and what is allowed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.models import EXAMPLES, EngineOptions, build, build_all, example, load_config, model_spec

NANO = "nemotron-3-nano-30b-a3b"
MAMBA = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")


def refused(config: Any, options: EngineOptions | None = None, rank: Rank | None = None) -> KvxferError:
    with pytest.raises(KvxferError) as caught:
        build(config, options or EngineOptions(), rank)
    assert caught.value.reason in (Reason.FIELD_INVALID, Reason.LAYOUT_INVALID, Reason.UNSUPPORTED)
    assert len(str(caught.value)) < 2_000
    return caught.value


def without(name: str, *keys: str) -> dict[str, object]:
    return {k: v for k, v in example(name).items() if k not in keys}


@pytest.mark.parametrize(
    "name, key",
    [
        (NANO, "hybrid_override_pattern"),
        (NANO, "mamba_num_heads"),
        (NANO, "mamba_head_dim"),
        (NANO, "n_groups"),
        (NANO, "ssm_state_size"),
        (NANO, "conv_kernel"),
        ("qwen3-next-80b-a3b", "num_hidden_layers"),
        ("qwen3-next-80b-a3b", "linear_num_key_heads"),
        ("qwen3-next-80b-a3b", "linear_num_value_heads"),
        ("qwen3-next-80b-a3b", "linear_key_head_dim"),
        ("qwen3-next-80b-a3b", "linear_value_head_dim"),
        ("qwen3-next-80b-a3b", "linear_conv_kernel_dim"),
        ("jamba-mini", "attn_layer_period"),
        ("jamba-mini", "attn_layer_offset"),
        ("jamba-mini", "mamba_expand"),
        ("jamba-mini", "mamba_d_state"),
        ("jamba-mini", "mamba_d_conv"),
        ("jamba-mini", "hidden_size"),
        *(("bamba-9b", key) for key in ("num_hidden_layers", "hidden_size", "mamba_expand", *MAMBA)),
        *(("granite-4.0-h-small", key) for key in ("num_hidden_layers", *MAMBA)),
        *(("falcon-h1-7b", key) for key in ("num_hidden_layers", "mamba_n_heads", "mamba_d_conv")),
        ("kimi-linear-48b-a3b", "num_hidden_layers"),
        ("kimi-linear-48b-a3b", "kv_lora_rank"),
        ("kimi-linear-48b-a3b", "qk_rope_head_dim"),
        ("llama-3.1-70b", "num_hidden_layers"),
        ("llama-3.1-70b", "hidden_size"),
        ("deepseek-v3", "kv_lora_rank"),
        ("deepseek-v3", "qk_rope_head_dim"),
        ("deepseek-v3", "num_hidden_layers"),
    ],
)
def test_missing_and_bad_values(name: str, key: str) -> None:
    error = refused(without(name, key))
    assert error.reason is Reason.FIELD_INVALID
    assert error.field == key
    assert "required" in error.message
    for bad in (-1, 10**30, 1.5, True, [3], {"a": 1}, "x" * 10_000):
        error = refused({**example(name), key: bad})
        if key != "hybrid_override_pattern":
            assert error.field == key
            assert error.metadata["key"] == key
            assert "allowed" in error.message


def test_unknown_model_lists_known_ones() -> None:
    error = refused({"model_type": "gpt2"})
    assert error.field == "model_type"
    assert "'gpt2'" in error.message
    for known in ("nemotron_h", "qwen3_next", "jamba", "llama", "deepseek_v3"):
        assert known in error.message
    assert "docs/how-to/add-a-model.md" in error.message
    inside = refused({"model_type": "gpt2_vl", "text_config": {"model_type": "gpt2_text"}})
    assert "'gpt2_vl (inside: gpt2_text)'" in inside.message
    assert refused({}).field == "model_type"
    assert refused({"model_type": 7}).field == "model_type"
    assert refused({"architectures": "NemotronHForCausalLM"}).field == "architectures"


def test_architectures_and_nested_configs() -> None:
    wanted = build(example(NANO), EngineOptions())
    plain = {k: v for k, v in example(NANO).items() if k != "model_type"}
    assert build(plain, EngineOptions()) == wanted
    assert build({"model_type": "some_vl", "text_config": example(NANO)}, EngineOptions()) == wanted
    outside = {"text_config": without(NANO, "torch_dtype"), "torch_dtype": "float16"}
    assert model_spec(outside).dtype == "float16"
    assert model_spec({**outside, "text_config": {**example(NANO), "torch_dtype": "float32"}}).dtype == "float32"
    listed = without(NANO, "hybrid_override_pattern", "num_hidden_layers")
    words = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
    for word in ("mamba", "attention"), ("linear_attention", "full_attention"):
        words |= dict(zip("M*", word, strict=True))
        listed["layers_block_type"] = [words[c] for c in str(example(NANO)["hybrid_override_pattern"])]
        assert build(listed, EngineOptions()) == wanted


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"hybrid_override_pattern": "M" * 51 + "Z"}, "hybrid_override_pattern"),
        ({"hybrid_override_pattern": "M*"}, "num_hidden_layers"),
        ({"hybrid_override_pattern": "-" * 52}, "hybrid_override_pattern"),
        ({"layers_block_type": ["mamba", "what"]}, "layers_block_type"),
        ({"layers_block_type": "mamba"}, "layers_block_type"),
        ({"layers_block_type": [1]}, "layers_block_type"),
        ({"torch_dtype": "float11"}, "dtype"),
        ({"torch_dtype": 16}, "torch_dtype"),
        ({"conv_kernel": 1}, "conv_kernel"),
        ({"mamba_ssm_cache_dtype": "int3"}, "ssm_dtype"),
    ],
)
def test_bad_nemotron(changes: dict[str, object], field: str) -> None:
    assert refused({**example(NANO), **changes}).field == field


def test_bad_others() -> None:
    jamba, qwen = example("jamba-mini"), example("qwen3-next-80b-a3b")
    assert refused({**jamba, "attn_layer_offset": 8}).field == "attn_layer_offset"
    assert refused({**jamba, "num_attention_heads": 33}).field == "hidden_size"
    assert refused({**qwen, "layer_types": ["full_attention"]}).field == "num_hidden_layers"
    assert refused({**qwen, "layer_types": ["sliding_attention"] * 48}).field == "layer_types"
    windowed = {**example("llama-3.1-70b"), "layer_types": ["sliding_attention"] * 80}
    assert refused(windowed).reason is Reason.UNSUPPORTED


def test_bad_bamba_granite_and_falcon() -> None:
    bamba, granite, falcon = (example(name) for name in ("bamba-9b", "granite-4.0-h-small", "falcon-h1-7b"))
    for model, changes, field, told in (
        (bamba, {"attn_layer_indices": 9}, "attn_layer_indices", "list"),
        (bamba, {"attn_layer_indices": [9, -1]}, "attn_layer_indices", "0 to"),
        (bamba, {"mamba_d_head": 32}, "mamba_d_head", "64 .8192 channels, 128 heads., or auto"),
        (bamba, {"mamba_n_heads": 100}, "mamba_n_heads", "a divisor of the layer's 8192 channels"),
        (granite, {"layer_types": ["mamba"]}, "num_hidden_layers", "the length of layer_types, 1"),
        (granite, {"layer_types": ["moe"] * 40}, "layer_types", "mamba, linear_attention, attention, full_attention"),
        (falcon, {"mamba_d_ssm": 100}, "mamba_n_heads", "a divisor of the layer's 100 channels"),
        (falcon, {"mamba_d_ssm": None}, "mamba_expand", "required"),
    ):
        error = refused({**model, **changes})
        assert error.field == field
        assert re.search(told, error.message), error.message
    # Indices beyond the model are no layers of it.
    assert build({**bamba, "attn_layer_indices": [9, 18, 27, 99]}, EngineOptions()) == build(bamba, EngineOptions())
    auto = {**bamba, "mamba_d_head": "auto"}
    assert build(auto, EngineOptions()) == build(bamba, EngineOptions())


ZAMBA2: dict[str, object] = {
    "model_type": "zamba2",
    "num_hidden_layers": 3,
    "layers_block_type": ["mamba", "hybrid", "hybrid"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "n_mamba_heads": 8,
    "mamba_expand": 2,
    "mamba_ngroups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
}


@pytest.mark.parametrize("key", sorted(set(ZAMBA2) - {"model_type"}))
def test_bad_zamba2(key: str) -> None:
    wanted = build(ZAMBA2, EngineOptions())
    if key != "num_hidden_layers":  # which the list tells, too
        assert refused({k: v for k, v in ZAMBA2.items() if k != key}).field in (key, "num_key_value_heads")
    for bad in (-1, 1.5, True, {"a": 1}, ["hybrid", 3]):
        assert refused({**ZAMBA2, key: bad}).field == key
    listed = {k: v for k, v in ZAMBA2.items() if k != "layers_block_type"}
    assert build({**listed, "hybrid_layer_ids": [2, 1, 7]}, EngineOptions()) == wanted
    assert refused({**ZAMBA2, "n_mamba_heads": 5}).field == "n_mamba_heads"
    assert refused({**ZAMBA2, "num_attention_heads": 5}).field == "num_attention_heads"
    assert refused({**ZAMBA2, "layers_block_type": ["mamba", "attention", "hybrid"]}).field == "layers_block_type"


def test_bad_kimi() -> None:
    kimi = example("kimi-linear-48b-a3b")
    inner: Any = kimi["linear_attn_config"]
    for key in ("num_heads", "head_dim", "short_conv_kernel_size"):
        assert refused({**kimi, "linear_attn_config": {k: v for k, v in inner.items() if k != key}}).field == key
    without_list = {k: v for k, v in inner.items() if k != "full_attn_layers"}
    assert refused({**kimi, "linear_attn_config": without_list}).field == "layer_types"
    assert refused({**kimi, "linear_attn_config": {**inner, "full_attn_layers": [0]}}).field == "full_attn_layers"
    assert refused({**kimi, "linear_attn_config": 3}).field == "linear_attn_config"
    assert refused({**kimi, "layer_types": ["sliding_attention"] * 27}).field == "layer_types"
    plain = {k: v for k, v in kimi.items() if k != "linear_attn_config"}
    plain["layer_types"] = [
        "full_attention" if i in inner["full_attn_layers"] else "linear_attention" for i in range(1, 28)
    ]
    assert refused(plain).field == "linear_num_heads"
    plain |= {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
    assert build(plain, EngineOptions()) == build(kimi, EngineOptions())


@pytest.mark.parametrize(
    "name, tp, part",
    [
        (NANO, 3, "conv.x"),
        (NANO, 128, "conv.x"),
        ("qwen3-next-80b-a3b", 32, "conv.q"),
        ("jamba-mini", 3, "conv.x"),
        ("llama-3.1-70b", 3, "KV heads"),
        ("llama-3.1-70b", 12, "KV heads"),
    ],
)
def test_heads_that_do_not_divide(name: str, tp: int, part: str) -> None:
    error = refused(example(name), EngineOptions(tp_size=tp))
    assert error.field == "tp_size"
    assert error.metadata["value"] == str(tp)
    assert part in error.message
    assert "a divisor" in error.message


def test_query_heads_that_do_not_divide() -> None:
    """28 heads that ask, 4 that are kept: a cache for 8 ranks could be made, and no engine has one."""
    model = {**example("llama-3.1-70b"), "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128}
    error = refused(model, EngineOptions(tp_size=8))
    assert error.message == "tp_size is 8; allowed: a divisor of 28 (num_attention_heads)"
    for tp in (1, 2, 4, 28):
        build(model, EngineOptions(tp_size=tp))


@pytest.mark.parametrize(
    "bad",
    [
        {"tp_size": 0},
        {"tp_size": -2},
        {"tp_size": 10**12},
        {"tp_size": True},
        {"tp_size": "2"},
        {"pp_size": 0},
        {"tp_size": 65_536, "pp_size": 2},
        {"block_tokens": 0},
        {"num_blocks": 0},
        {"num_blocks": 2**31},
        {"spec_tokens": -1},
        {"kv_dtype": "int4"},
        {"kv_dtype": None},
        {"conv_dtype": ""},
        {"conv_layout": "XY"},
        {"kv_layout": "DHN"},
        {"kv_packing": ["packed"]},
        {"pooled": 1},
        {"memory": "vram"},
        {"logical_block_tokens": 24},
        {"state_align_tokens": -128},
    ],
)
def test_bad_options(bad: dict[str, Any]) -> None:
    with pytest.raises(KvxferError) as caught:
        EngineOptions(**bad)
    assert caught.value.reason is Reason.FIELD_INVALID
    assert caught.value.field in bad


def test_combinations() -> None:
    nano = example(NANO)
    for packing in ("halves", "regions"):
        error = refused(nano, EngineOptions(kv_packing=packing))
        assert error.field == "kv_packing"
        assert "pooled=False" in error.message
    assert refused(nano, EngineOptions(tp_size=2), Rank(0, 4)).field == "rank.tp_size"
    assert refused(nano, EngineOptions(pp_size=53)).field == "pp_size"
    assert refused(nano, EngineOptions(state_align_tokens=2**24 - 1)).field == "block_tokens"
    deep = {**nano, "num_hidden_layers": 8, "hybrid_override_pattern": "M" + "-" * 7}
    assert "stage 1" in refused(deep, EngineOptions(pp_size=2), Rank(0, 1, 1, 2)).message
    with pytest.raises(KvxferError):
        build_all(deep, EngineOptions(pp_size=2))


def test_huge_but_allowed_numbers_end_in_an_error() -> None:
    config = {**example("llama-3.1-70b"), "head_dim": 2**24, "num_key_value_heads": 2**24}
    error = refused(config, EngineOptions(block_tokens=2**24, num_blocks=2**31 - 1))
    assert error.reason is Reason.LAYOUT_INVALID
    crowded = {**example(NANO), "num_hidden_layers": 8_001, "hybrid_override_pattern": "M" * 8_000 + "*"}
    assert refused(crowded).reason is Reason.LAYOUT_INVALID


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(example(NANO)))
    wanted = build(example(NANO), EngineOptions())
    assert build(path, EngineOptions()) == build(str(tmp_path), EngineOptions()) == wanted
    for text in ("", "[]", "{", "[" * 100_000, "\udcff"):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        assert refused(path).field == "config"
    assert refused(tmp_path / "nothing.json").field == "config"
    path.write_text(" " * (16 * 2**20 + 1))
    assert "16777216" in refused(path).message


def test_examples_are_separate_and_named() -> None:
    first = example(EXAMPLES[0])
    first["num_hidden_layers"] = 1
    assert example(EXAMPLES[0])["num_hidden_layers"] == 52
    with pytest.raises(KvxferError) as caught:
        example("../secrets")
    assert EXAMPLES[0] in caught.value.message
    source: dict[str, object] = {"model_type": "llama"}
    assert load_config(source) == source
    assert load_config(source) is not source
