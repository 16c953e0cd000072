"""Bamba and Granite 4 hybrid: Mamba2 layers, and a few of attention.

Falcon-H1 describes its Mamba2 layers with the same keys.
"""

from __future__ import annotations

from typing import Final

from kvxfer.models.fields import Fields, field_error
from kvxfer.models.registry import Family, register
from kvxfer.models.spec import LayerSpec, ModelSpec, StateSpec, kv_cache, mamba2


def mamba_state(fields: Fields) -> StateSpec:
    """A Mamba2 layer of ``mamba_n_heads`` heads that have ``mamba_d_ssm`` (or ``mamba_expand * hidden_size``) channels.

    :raises KvxferError: FIELD_INVALID also where heads and channels do not fit.
    """
    heads = fields.integer("mamba_n_heads")
    if fields.get("mamba_d_ssm") is not None:
        channels = fields.integer("mamba_d_ssm")
    else:
        channels = fields.integer("mamba_expand", high=1024) * fields.integer("hidden_size")
    if channels % heads:
        raise field_error("mamba_n_heads", heads, f"a divisor of the layer's {channels} channels")
    head_dim = channels // heads
    if fields.get("mamba_d_head") not in ("auto", None) and fields.integer("mamba_d_head") != head_dim:
        allowed = f"{head_dim} ({channels} channels, {heads} heads), or auto"
        raise field_error("mamba_d_head", fields.get("mamba_d_head"), allowed)
    return mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=fields.integer("mamba_n_groups"),
        state=fields.integer("mamba_d_state"),
        kernel=fields.integer("mamba_d_conv", low=2, high=1024),
    )


def _layers(fields: Fields, attention: frozenset[int], names: str) -> ModelSpec:
    """The model whose layers in ``attention`` attend; ``names`` is what they are called."""
    depth, layers = fields.layers(), []
    for i in range(depth):
        if i in attention:
            cache = kv_cache(fields.kv_heads(), fields.head_dim())
            layers.append(LayerSpec(i, names.format(i), "attention", cache))
        else:
            layers.append(LayerSpec(i, f"model.layers.{i}.mixer", "mamba2", mamba_state(fields)))
    # vLLM keeps the state in the model's own type, unless it is told otherwise.
    return ModelSpec(tuple(layers), depth, fields.dtype(), fields.dtype())


def read_bamba(fields: Fields) -> ModelSpec:
    """The caches of a Bamba model: ``attn_layer_indices`` lists the layers with attention."""
    return _layers(fields, frozenset(fields.integers("attn_layer_indices")), "model.layers.{}.attn")


def read_granite(fields: Fields) -> ModelSpec:
    """The caches of a Granite 4 hybrid model: ``layer_types`` says what each layer is; without it all are Mamba2."""
    words = {"mamba": "mamba2", "linear_attention": "mamba2", "attention": "attention", "full_attention": "attention"}
    kinds = fields.kinds("layer_types", words)
    attention = frozenset(i for i, kind in enumerate(kinds) if kind == "attention")
    return _layers(fields, attention, "model.layers.{}.self_attn.attn")


# Their channels follow from the hidden size; it is shared out over heads whose number stays.
_WIDTHS: Final = ("hidden_size", "head_dim", "mamba_d_head", "mamba_d_state")

BAMBA: Final = register(
    Family(
        name="Bamba",
        model_types=("bamba",),
        architectures=("BambaForCausalLM",),
        read=read_bamba,
        widths=_WIDTHS,
    )
)

GRANITE: Final = register(
    Family(
        name="Granite 4 hybrid",
        model_types=("granitemoehybrid",),
        architectures=("GraniteMoeHybridForCausalLM",),
        read=read_granite,
        widths=_WIDTHS,
    )
)
