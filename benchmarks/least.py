"""The least that a rank must read, from a model's config alone: no layout, no plan, nothing of kvxfer.

K and V (or the latent vector) of every token, and one snapshot of every layer with a state, each divided among the
ranks as the model's heads, groups and channels are; with more ranks than KV heads or groups, every rank has one.
Caches are of bfloat16 (2 bytes), recurrent states of float32 (4 bytes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Config = Mapping[str, Any]

_CACHE: Final = 2
_STATE: Final = 4


def least(config: Config, tp_size: int, tokens: int) -> int:
    """Bytes that one of ``tp_size`` ranks must read for a prompt of so many tokens."""
    return _BY_TYPE[config["model_type"]](config, tp_size, tokens)


def _share(parts: int, tp_size: int) -> int:
    return max(1, parts // tp_size)


def _kv(config: Config, tp_size: int) -> int:
    """One token of one layer."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * _share(config["num_key_value_heads"], tp_size) * width * _CACHE)


def _nemotron(config: Config, tp_size: int, tokens: int) -> int:
    pattern = config["hybrid_override_pattern"]
    heads, state = config["mamba_num_heads"] // tp_size * config["mamba_head_dim"], config["ssm_state_size"]
    channels = heads + 2 * _share(config["n_groups"], tp_size) * state
    snapshot = channels * (config["conv_kernel"] - 1) * _CACHE + heads * state * _STATE
    return int(pattern.count("*") * tokens * _kv(config, tp_size) + pattern.count("M") * snapshot)


def _qwen(config: Config, tp_size: int, tokens: int) -> int:
    layers = config["num_hidden_layers"]
    attention = layers // config["full_attention_interval"]
    keys = config["linear_num_key_heads"] // tp_size * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // tp_size * config["linear_value_head_dim"]
    conv = (2 * keys + values) * (config["linear_conv_kernel_dim"] - 1) * _CACHE
    snapshot = conv + values * config["linear_key_head_dim"] * _STATE
    return int(attention * tokens * _kv(config, tp_size) + (layers - attention) * snapshot)


def _dense(config: Config, tp_size: int, tokens: int) -> int:
    return int(config["num_hidden_layers"] * tokens * _kv(config, tp_size))


def _mla(config: Config, tp_size: int, tokens: int) -> int:
    return int(config["num_hidden_layers"] * tokens * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * _CACHE)


_BY_TYPE: Final = {"nemotron_h": _nemotron, "qwen3_next": _qwen, "llama": _dense, "deepseek_v3": _mla}
