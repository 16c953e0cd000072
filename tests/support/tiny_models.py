"""Models of Transformers with random weights, small enough for a test, in which every part of the cache matters."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

# Wide enough a range that a state, K or V that is missing changes the logits.
COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
BAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8}
GDN = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
}

#: By model type.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "qwen3": {"num_hidden_layers": 2, "head_dim": 16},
    "deepseek_v3": {"num_hidden_layers": 2, **MLA, **MOE, "q_lora_rank": None, "n_routed_experts": 4},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "moe"],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 32,
        **MOE,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
        **BAMBA,
    },
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1], **BAMBA},
    "falcon_h1": {"num_hidden_layers": 2, "mamba_d_ssm": 128, **BAMBA},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 16,
        "chunk_size": 8,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 16,
        "mamba_dt_rank": 4,
        "num_experts": 2,
    },
    "qwen3_next": {**GDN, **MOE, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": GDN,
    "kimi_linear": {
        "num_hidden_layers": 5,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "num_local_experts": 4,
        **MLA,
        **MOE,
    },
    # States only, convolutions only: of these kvxfer has no preset.
    "mamba2": {
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 16,
        "chunk_size": 8,
    },
    "falcon_mamba": {"num_hidden_layers": 2, "state_size": 16},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    # A window, which cannot be moved.
    "gemma2": {"num_hidden_layers": 2, "head_dim": 16},
}

#: Others whose preset is that of one above.
ALIKE: dict[str, dict[str, Any]] = {
    "mistral": {"num_hidden_layers": 2, "sliding_window": None},
    "mixtral": {"num_hidden_layers": 2, "num_local_experts": 4},
    "qwen2": {"num_hidden_layers": 2},
    "qwen2_moe": {"num_hidden_layers": 2, **MOE, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {"num_hidden_layers": 2, "head_dim": 16, **MOE, "num_experts": 4},
    "deepseek_v2": {"num_hidden_layers": 2, **MLA, **MOE, "q_lora_rank": None, "n_routed_experts": 4},
    "qwen3_5_moe_text": {**GDN, **MOE, "num_experts": 4, "shared_expert_intermediate_size": 32},
}


def config_of(model_type: str, **changes: object) -> Any:
    """A small config."""
    return AutoConfig.for_model(model_type, **{**COMMON, **{**CONFIGS, **ALIKE}[model_type], **changes})


def model_of(model_type: str, dtype: torch.dtype = torch.float32, **changes: object) -> PreTrainedModel:
    """The same weights each time.

    A fresh Mamba2 forgets so quickly that nobody would miss its state; here it remembers for some tokens.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(model_type, **changes), dtype=dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("dt_bias"):
                weight.copy_(torch.linspace(-4, -1, weight.numel()).reshape(weight.shape))
            elif name.endswith("A_log"):
                weight.zero_()
    return model


def prompt_of(tokens: int, seed: int = 1) -> torch.Tensor:
    """A prompt, ``(1, tokens)``."""
    return torch.randint(3, COMMON["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(seed))


def run(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Logits of the last token, ``(vocabulary,)``; the cache goes on."""
    names = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=True, **{name: cache}).logits[0, -1]
        return logits.clone()


def prefilled(model: PreTrainedModel, ids: torch.Tensor) -> DynamicCache:
    """The cache of some tokens."""
    cache = DynamicCache(config=model.config)
    run(model, ids, cache)
    return cache


def greedy(model: PreTrainedModel, last: torch.Tensor, cache: DynamicCache, steps: int = 3) -> torch.Tensor:
    """The logits of some steps, ``(steps, vocabulary)``, from the last token of a prompt on."""
    found = []
    for _ in range(steps):
        found.append(run(model, last, cache))
        last = found[-1].argmax().reshape(1, 1)
    return torch.stack(found)
