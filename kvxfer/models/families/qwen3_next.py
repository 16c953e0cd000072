"""Qwen3-Next: three Gated DeltaNet layers, then one of full attention."""

from __future__ import annotations

from typing import Final

from kvxfer.models.fields import MAX_LAYERS, Fields, field_error
from kvxfer.models.registry import Family, register
from kvxfer.models.spec import LayerSpec, ModelSpec, gated_delta_net, kv_cache


def _types(fields: Fields) -> tuple[str, ...]:
    """``layer_types``, else every ``full_attention_interval``-th layer is full attention."""
    depth = fields.layers()
    listed = fields.texts("layer_types")
    for item in listed:
        if item not in ("linear_attention", "full_attention"):
            raise field_error("layer_types", item, "linear_attention, full_attention")
    if listed and len(listed) != depth:
        raise field_error("num_hidden_layers", depth, f"the length of layer_types, {len(listed)}")
    if listed:
        return listed
    interval = fields.integer("full_attention_interval", default=4, high=MAX_LAYERS)
    return tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(depth))


def read(fields: Fields) -> ModelSpec:
    """The caches of a Qwen3-Next model."""
    layers: list[LayerSpec] = []
    types = _types(fields)
    for i, what in enumerate(types):
        if what == "full_attention":
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


FAMILY: Final = register(
    Family(
        name="Qwen3-Next",
        model_types=("qwen3_next",),
        architectures=("Qwen3NextForCausalLM",),
        read=read,
        widths=("head_dim", "linear_key_head_dim", "linear_value_head_dim"),
    )
)
