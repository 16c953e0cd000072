"""Jamba: Mamba1 layers, and one of attention in every ``attn_layer_period``."""

from __future__ import annotations

from typing import Final

from kvxfer.models.fields import MAX_LAYERS, Fields, field_error
from kvxfer.models.registry import Family, register
from kvxfer.models.spec import LayerSpec, ModelSpec, kv_cache, mamba1


def read(fields: Fields) -> ModelSpec:
    """The caches of a Jamba model.

    Recurrent states are of the model's own type unless the engine says otherwise, as in vLLM (Transformers 5 keeps
    them in float32).
    """
    depth = fields.layers()
    period = fields.integer("attn_layer_period", high=MAX_LAYERS)
    offset = fields.integer("attn_layer_offset", low=0, high=MAX_LAYERS)
    if offset >= period:
        raise field_error("attn_layer_offset", offset, f"less than attn_layer_period ({period})")
    layers: list[LayerSpec] = []
    for i in range(depth):
        if i % period == offset:
            cache = kv_cache(fields.kv_heads(), fields.head_dim())
            layers.append(LayerSpec(i, f"model.layers.{i}.attn", "attention", cache))
            continue
        state = mamba1(
            channels=fields.integer("mamba_expand", high=1024) * fields.integer("hidden_size"),
            state=fields.integer("mamba_d_state"),
            kernel=fields.integer("mamba_d_conv", low=2, high=1024),
        )
        layers.append(LayerSpec(i, f"model.layers.{i}.mixer", "mamba1", state))
    return ModelSpec(tuple(layers), depth, fields.dtype(), fields.dtype())


FAMILY: Final = register(
    Family(
        name="Jamba",
        model_types=("jamba",),
        architectures=("JambaForCausalLM",),
        read=read,
        widths=("hidden_size", "head_dim"),
    )
)
