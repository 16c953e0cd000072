"""Kimi Linear: layers of Kimi Delta Attention (KDA), and some of multi-head latent attention (MLA)."""

from __future__ import annotations

from typing import Final

from kvxfer.models.fields import Fields, field_error
from kvxfer.models.registry import Family, register
from kvxfer.models.spec import LatentSpec, LayerSpec, ModelSpec, StateSpec, gated_delta_net


def _kda(fields: Fields) -> StateSpec:
    """A KDA layer: conv over ``[q | k | v]``, of as many heads and widths each, and a square state for every head.

    Kept as a Gated DeltaNet's is (vLLM: ``kda_state_shape``); it only forgets by channel instead of by head.
    """
    inner = fields.part("linear_attn_config")
    if inner is not None:
        heads, width = inner.integer("num_heads"), inner.integer("head_dim")
        kernel = inner.integer("short_conv_kernel_size", low=2, high=1024)
    else:
        heads, width = fields.integer("linear_num_heads"), fields.integer("linear_head_dim")
        kernel = fields.integer("linear_conv_kernel_dim", low=2, high=1024)
    return gated_delta_net(heads, width, heads, width, kernel)


def _latent(fields: Fields) -> frozenset[int]:
    """The layers with MLA: ``layer_types``, else the published config's list, which counts from 1."""
    words = {"linear_attention": "kda", "full_attention": "mla"}
    if kinds := fields.kinds("layer_types", words):
        return frozenset(i for i, kind in enumerate(kinds) if kind == "mla")
    inner = fields.part("linear_attn_config")
    if inner is None or inner.get("full_attn_layers") is None:
        raise field_error("layer_types", None, "a required list, or linear_attn_config with full_attn_layers")
    return frozenset(i - 1 for i in inner.integers("full_attn_layers", low=1))


def read(fields: Fields) -> ModelSpec:
    """The caches of a Kimi Linear model.

    Both kinds of layer have the name that they have in vLLM 0.32 on NVIDIA GPUs (``models/kimi_k3/nvidia``).
    """
    depth, mla, layers = fields.layers(), _latent(fields), []
    for i in range(depth):
        if i in mla:
            latent = LatentSpec(fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim"))
            layers.append(LayerSpec(i, f"model.layers.{i}.self_attn", "mla", latent))
        else:
            layers.append(LayerSpec(i, f"model.layers.{i}.self_attn", "kda", _kda(fields)))
    return ModelSpec(tuple(layers), depth, fields.dtype())


FAMILY: Final = register(
    Family(
        name="Kimi Linear",
        model_types=("kimi_linear",),
        architectures=("KimiLinearForCausalLM",),
        read=read,
        widths=("kv_lora_rank", "qk_rope_head_dim"),
    )
)
