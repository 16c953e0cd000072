"""Qwen3-Next and Qwen3.5: three Gated DeltaNet layers, then one of full attention."""

from __future__ import annotations

from typing import Final

from kvxfer.models.fields import MAX_LAYERS, Fields
from kvxfer.models.registry import Family, register
from kvxfer.models.spec import LayerSpec, ModelSpec, gated_delta_net, kv_cache


def _types(fields: Fields) -> tuple[str, ...]:
    """``layer_types``, else every ``full_attention_interval``-th layer is full attention."""
    depth = fields.layers()
    if listed := fields.kinds("layer_types", {"linear_attention": "gdn", "full_attention": "attention"}):
        return listed
    interval = fields.integer("full_attention_interval", default=4, high=MAX_LAYERS)
    return tuple("gdn" if (i + 1) % interval else "attention" for i in range(depth))


def read(fields: Fields) -> ModelSpec:
    """The caches of a Qwen3-Next or Qwen3.5 model.

    Layers are called as in vLLM's text models; its models with vision put ``language_model.`` before that.
    """
    layers: list[LayerSpec] = []
    types = _types(fields)
    for i, what in enumerate(types):
        if what == "attention":
            cache = kv_cache(fields.kv_heads(), fields.head_dim())
            layers.append(LayerSpec(i, f"model.layers.{i}.self_attn.attn", "attention", cache))
            continue
        state = gated_delta_net(
            key_heads=fields.integer("linear_num_key_heads"),
            key_dim=fields.integer("linear_key_head_dim"),
            value_heads=fields.integer("linear_num_value_heads"),
            value_dim=fields.integer("linear_value_head_dim"),
            kernel=fields.integer("linear_conv_kernel_dim", low=2, high=1024),
        )
        layers.append(LayerSpec(i, f"model.layers.{i}.linear_attn", "gdn", state))
    return ModelSpec(tuple(layers), len(types), fields.dtype(), fields.text("mamba_ssm_dtype", default="float32"))


_WIDTHS: Final = ("head_dim", "linear_key_head_dim", "linear_value_head_dim")

FAMILY: Final = register(
    Family(
        name="Qwen3-Next",
        model_types=("qwen3_next",),
        architectures=("Qwen3NextForCausalLM",),
        read=read,
        widths=_WIDTHS,
    )
)

#: A config with vision has the keys in its ``text_config``, which has a model type of its own.
QWEN3_5: Final = register(
    Family(
        name="Qwen3.5",
        model_types=("qwen3_5_text", "qwen3_5_moe_text"),
        architectures=("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        read=read,
        widths=_WIDTHS,
    )
)
