"""Nemotron-H (Nemotron-H 8B/47B/56B, Nemotron Nano 2, Nemotron 3): Mamba2, attention, MLP and MoE layers, one each.

The order of layers is a pattern string (``hybrid_override_pattern``; ``layers_block_type`` in newer configs).
"""

from __future__ import annotations

from typing import Final

from kvxfer.models.fields import Fields, field_error
from kvxfer.models.registry import Family, register
from kvxfer.models.spec import LayerSpec, ModelSpec, kv_cache, mamba2

_LETTERS: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_WORDS: Final = {
    **{word: word for word in _LETTERS.values()},
    "linear_attention": "mamba",
    "full_attention": "attention",
}


def _pattern(fields: Fields) -> tuple[str, ...]:
    """What each layer is: a value of ``_LETTERS``."""
    if listed := fields.kinds("layers_block_type", _WORDS):
        return listed
    pattern = fields.text("hybrid_override_pattern")
    for letter in pattern:
        if letter not in _LETTERS:
            raise field_error("hybrid_override_pattern", letter, "M (Mamba2), * (attention), - (MLP), E (MoE)")
    return tuple(_LETTERS[letter] for letter in pattern)


def read(fields: Fields) -> ModelSpec:
    """The caches of a Nemotron-H model."""
    pattern = _pattern(fields)
    depth = fields.integer("num_hidden_layers", default=max(1, len(pattern)))
    if depth != len(pattern):
        raise field_error("num_hidden_layers", depth, f"the length of the layer pattern, {len(pattern)}")
    layers: list[LayerSpec] = []
    for i, what in enumerate(pattern):
        name = f"backbone.layers.{i}.mixer"
        if what == "mamba":
            state = mamba2(
                heads=fields.integer("mamba_num_heads"),
                head_dim=fields.integer("mamba_head_dim"),
                groups=fields.integer("n_groups", "mamba_n_groups"),
                state=fields.integer("ssm_state_size"),
                kernel=fields.integer("conv_kernel", "mamba_d_conv", low=2, high=1024),
            )
            layers.append(LayerSpec(i, name, "mamba2", state))
        elif what == "attention":
            layers.append(LayerSpec(i, f"{name}.attn", "attention", kv_cache(fields.kv_heads(), fields.head_dim())))
    if not layers:
        raise field_error("hybrid_override_pattern", "".join(pattern), "at least one Mamba2 or attention layer")
    return ModelSpec(tuple(layers), depth, fields.dtype(), fields.text("mamba_ssm_cache_dtype", default="float32"))


FAMILY: Final = register(
    Family(
        name="Nemotron-H",
        model_types=("nemotron_h",),
        architectures=("NemotronHForCausalLM",),
        read=read,
        widths=("head_dim", "attention_head_dim", "mamba_head_dim", "ssm_state_size"),
    )
)
