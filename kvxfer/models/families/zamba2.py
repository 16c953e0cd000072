"""Zamba2: Mamba2 in every layer, and in some an attention block as well, whose weights a few layers share.

They share weights, not caches: every layer that attends keeps K and V of its own.
"""

from __future__ import annotations

from typing import Final

from kvxfer.models.fields import Fields, field_error
from kvxfer.models.registry import Family, register
from kvxfer.models.spec import LayerSpec, ModelSpec, StateSpec, kv_cache, mamba2

_WORDS: Final = {"mamba": "mamba2", "linear_attention": "mamba2", "hybrid": "hybrid"}


def _hybrid(fields: Fields) -> tuple[int, ...]:
    """The layers that attend: ``layers_block_type``, else ``hybrid_layer_ids``."""
    if kinds := fields.kinds("layers_block_type", _WORDS):
        return tuple(i for i, kind in enumerate(kinds) if kind == "hybrid")
    found = fields.integers("hybrid_layer_ids")
    if not found:
        raise field_error("layers_block_type", None, "a required list of mamba and hybrid, or hybrid_layer_ids")
    return tuple(sorted({i for i in found if i < fields.layers()}))


def _state(fields: Fields) -> StateSpec:
    heads = fields.integer("n_mamba_heads")
    channels = fields.integer("mamba_expand", high=1024) * fields.integer("hidden_size")
    if channels % heads:
        raise field_error("n_mamba_heads", heads, f"a divisor of mamba_expand * hidden_size ({channels})")
    return mamba2(
        heads=heads,
        head_dim=channels // heads,
        groups=fields.integer("mamba_ngroups"),
        state=fields.integer("mamba_d_state"),
        kernel=fields.integer("mamba_d_conv", low=2, high=1024),
    )


def _head_dim(fields: Fields) -> int:
    """Attention sees the hidden state beside the embedding, and is twice as wide as the model."""
    if fields.get("attention_head_dim") is not None:
        return fields.integer("attention_head_dim")
    width, heads = 2 * fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if width % heads:
        raise field_error("num_attention_heads", heads, f"a divisor of 2 * hidden_size ({width})")
    return width // heads


def read(fields: Fields) -> ModelSpec:
    """The caches of a Zamba2 model.

    Names are those of vLLM (``model_executor/models/zamba2.py``): Mamba2 layers count on from the number of layers that
    attend, and an attention cache is called after the shared block that it belongs to.
    """
    depth, hybrid, shared = fields.layers(), _hybrid(fields), fields.integer("num_mem_blocks", default=1)
    layers = []
    for i in range(depth):
        if i in hybrid:
            turn = hybrid.index(i)
            number = turn % shared * (len(hybrid) + shared - 1) // shared + turn // shared
            cache = kv_cache(fields.kv_heads(), _head_dim(fields))
            layers.append(LayerSpec(i, f"model.attn.{number}", "attention", cache))
        layers.append(LayerSpec(i, f"{len(hybrid) + i}.mixer", "mamba2", _state(fields)))
    return ModelSpec(tuple(layers), depth, fields.dtype(), fields.dtype())


FAMILY: Final = register(
    Family(
        name="Zamba2",
        model_types=("zamba2",),
        architectures=("Zamba2ForCausalLM",),
        read=read,
        widths=("hidden_size", "attention_head_dim", "mamba_d_state"),
    )
)
