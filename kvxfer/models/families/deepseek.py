"""DeepSeek V2 and V3 (and Kimi K2): multi-head latent attention, one compressed vector per token on every rank."""

from __future__ import annotations

from typing import Final

from kvxfer.models.fields import Fields
from kvxfer.models.registry import Family, register
from kvxfer.models.spec import LatentSpec, LayerSpec, ModelSpec


def read(fields: Fields) -> ModelSpec:
    """The caches of an MLA model: ``kv_lora_rank + qk_rope_head_dim`` elements a token and layer.

    With an fp8 cache this is the plain layout, one byte an element; layouts with scales inside the row (656 bytes in
    vLLM's ``fp8_ds_mla``) are for the engine to report.
    """
    depth = fields.layers()
    cache = LatentSpec(fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim"))
    layers = tuple(LayerSpec(i, f"model.layers.{i}.self_attn.attn", "mla", cache) for i in range(depth))
    return ModelSpec(layers, depth, fields.dtype())


FAMILY: Final = register(
    Family(
        name="DeepSeek (MLA)",
        model_types=("deepseek_v2", "deepseek_v3", "kimi_k2"),
        architectures=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
        read=read,
        widths=("kv_lora_rank", "qk_rope_head_dim"),
    )
)
