"""Plain transformers whose every layer keeps K and V of one shape (Llama, Qwen2, Qwen3, Mistral, ...)."""

from __future__ import annotations

from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.models.fields import Fields
from kvxfer.models.registry import Family, register
from kvxfer.models.spec import LayerSpec, ModelSpec, kv_cache


def read(fields: Fields) -> ModelSpec:
    """The caches of a dense or MoE transformer with full attention throughout.

    :raises KvxferError: UNSUPPORTED where ``layer_types`` says that layers differ (sliding windows).
    """
    if others := set(fields.texts("layer_types")) - {"full_attention"}:
        raise KvxferError(
            Reason.UNSUPPORTED,
            f"layer_types has {sorted(others)}; this family covers full_attention only",
            field="layer_types",
            value=sorted(others),
        )
    depth, cache = fields.layers(), kv_cache(fields.kv_heads(), fields.head_dim())
    layers = tuple(LayerSpec(i, f"model.layers.{i}.self_attn.attn", "attention", cache) for i in range(depth))
    return ModelSpec(layers, depth, fields.dtype())


FAMILY: Final = register(
    Family(
        name="dense",
        model_types=("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        architectures=(
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "MixtralForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
        ),
        read=read,
        widths=("hidden_size", "head_dim"),
    )
)
