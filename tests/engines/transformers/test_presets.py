"""kvxfer's presets against the caches of the real classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.engines.transformers import compare, held
from kvxfer.engines.transformers.presets import of_cache, of_preset, preset_of
from kvxfer.models import families, model_spec
from tests.support.tiny_models import ALIKE, CONFIGS, config_of, model_of, prefilled, prompt_of

KNOWN = {model_type for family in families() for model_type in family.model_types}
COVERED = [name for name in {**CONFIGS, **ALIKE} if name in KNOWN]


def test_every_preset_is_compared_with_the_real_class() -> None:
    """But for Kimi K2, whose class is that of DeepSeek V3 (its configs say so in ``architectures``)."""
    assert {*COVERED, "kimi_k2"} == KNOWN


@pytest.mark.parametrize("name", COVERED)
def test_a_preset_has_the_sizes_of_the_models_cache(name: str) -> None:
    model = model_of(name)
    assert compare(held(prefilled(model, prompt_of(5))), model.config)


@pytest.mark.parametrize("name", COVERED)
def test_a_config_says_the_same_before_and_after_transformers_has_written_it(name: str, tmp_path: Any) -> None:
    """Words in it change; and the published ones are the older."""
    config = config_of(name)
    config.save_pretrained(tmp_path)
    assert of_preset(model_spec(tmp_path)) == of_preset(model_spec({"model_type": name, **config.to_dict()}))
    given = {**config.to_dict(), **CONFIGS.get(name, {})}
    assert of_preset(model_spec(given)) == of_preset(model_spec(tmp_path))


def test_the_published_form_of_kimis_config() -> None:
    """``linear_attn_config``, which counts layers from 1; Transformers reads it into keys of its own."""
    inner = {
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [2, 5],
        "kda_layers": [1, 3, 4],
    }
    changes = {"layer_types": None, "linear_attn_config": inner}
    model = model_of("kimi_linear", **changes)
    items = held(prefilled(model, prompt_of(5)))
    published = {"model_type": "kimi_linear", **CONFIGS["kimi_linear"], "linear_attn_config": inner}
    spec = model_spec(
        {key: value for key, value in published.items() if not key.startswith("linear_") or key == "linear_attn_config"}
    )
    assert of_preset(spec) == of_cache(items)
    assert [layer.kind for layer in spec.layers] == ["kda", "mla", "kda", "kda", "mla"]


@pytest.mark.parametrize(
    "name, changes, part",
    [
        ("llama", {"num_key_value_heads": 4}, "attention"),
        ("falcon_h1", {"mamba_d_state": 32}, "conv.0"),
        ("qwen3_next", {"linear_value_head_dim": 16}, "conv.0"),
        ("nemotron_h", {"conv_kernel": 3}, "conv.0"),
        ("deepseek_v3", {"kv_lora_rank": 64}, "attention"),
        ("kimi_linear", {"linear_num_heads": 8}, "conv.0"),
    ],
)
def test_another_models_sizes_are_noticed(name: str, changes: dict[str, Any], part: str) -> None:
    items = held(prefilled(model_of(name), prompt_of(5)))
    with pytest.raises(KvxferError) as caught:
        compare(items, config_of(name, **changes))
    assert caught.value.reason is Reason.LAYOUT_MISMATCH
    assert caught.value.metadata["component"] == part


def test_a_layer_too_few_or_too_many_is_noticed() -> None:
    items = held(prefilled(model_of("falcon_h1"), prompt_of(5)))
    for changed in (items[:-1], items[4:], (*items, replace(items[0], layer=2))):
        with pytest.raises(KvxferError, match="nothing"):
            compare(changed, config_of("falcon_h1"))


def test_models_without_a_preset() -> None:
    for name in ("mamba2", "lfm2"):
        assert preset_of(config_of(name)) is None
    # A variant that the preset leaves out.
    assert preset_of(config_of("qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=0)) is None
