"""Falcon-H1: every layer has attention and Mamba2 side by side, and so two caches."""

from __future__ import annotations

from typing import Final

from kvxfer.models.families.bamba import mamba_state
from kvxfer.models.fields import Fields
from kvxfer.models.registry import Family, register
from kvxfer.models.spec import LayerSpec, ModelSpec, kv_cache


def read(fields: Fields) -> ModelSpec:
    """The caches of a Falcon-H1 model.

    vLLM wants names with a number of their own and counts its Mamba2 parts on from the last layer
    (``model_executor/models/falcon_h1.py``): those of layer ``i`` of ``n`` are ``model.layers.<i>.attn`` and
    ``model.<n + i>.mixer``.
    """
    depth, layers = fields.layers(), []
    attention, state = kv_cache(fields.kv_heads(), fields.head_dim()), mamba_state(fields)
    for i in range(depth):
        layers.append(LayerSpec(i, f"model.layers.{i}.attn", "attention", attention))
        layers.append(LayerSpec(i, f"model.{depth + i}.mixer", "mamba2", state))
    return ModelSpec(tuple(layers), depth, fields.dtype(), fields.dtype())


FAMILY: Final = register(
    Family(
        name="Falcon-H1",
        model_types=("falcon_h1",),
        architectures=("FalconH1ForCausalLM",),
        read=read,
        widths=("hidden_size", "head_dim", "mamba_d_ssm", "mamba_d_head", "mamba_d_state"),
    )
)
