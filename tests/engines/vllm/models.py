"""Tiny models with random weights, made here: one of each kind of cache that vLLM can run on the CPU.

The weights are drawn so that greedy decoding wanders through the vocabulary and every part of the cache matters: with
the usual initialisation a Mamba2 state forgets so fast that nobody would miss it (``dt_bias`` and ``A_log`` say how
fast), and with vLLM's ``--load-format dummy`` every token is the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 512
#: Of the longest prompt and its answer.
MAX_TOKENS: Final = 1024
SEED: Final = 7

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Model:
    """One tiny model.

    :param dtype: of weights, computation and attention cache.
    :param components: what its cache is made of; each must be missed when it is zeroed.
    :param settings: of the model's configuration, beside the common ones.
    :param prefix_caching: whether vLLM can keep its prefixes.
    """

    name: str
    config: str
    dtype: str
    components: tuple[str, ...]
    settings: dict[str, Any]
    prefix_caching: bool = False

    @property
    def has_state(self) -> bool:
        return "ssm" in self.components


_HYBRID: Final = ("attention", "conv", "ssm")
_MODELS: Final = (
    Model(
        "qwen3",
        "Qwen3Config",
        "float32",
        ("attention",),
        {"num_hidden_layers": 3, "head_dim": 32},
        prefix_caching=True,
    ),
    Model(
        "nemotron_h",
        "NemotronHConfig",
        "float32",
        _HYBRID,
        # Three Mamba2 layers and two of attention: one group of state layers is shorter than the others.
        {
            "layers_block_type": ["mamba", "attention", "mamba", "mlp", "mamba", "attention"],
            "head_dim": 32,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 64,
        },
    ),
    Model(
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        "float32",
        _HYBRID,
        {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "shared_intermediate_size": 256,
            "num_local_experts": 0,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 64,
        },
    ),
    Model(
        "qwen3_next",
        "Qwen3NextConfig",
        "bfloat16",
        _HYBRID,
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 128,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            # vLLM wants one layer with experts.
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0, 1],
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
)
MODELS: Final = {model.name: model for model in _MODELS}


def make_models(directory: Path, models: tuple[Model, ...] = _MODELS) -> None:
    """Write configurations and weights, each in a directory of its name.  Needs transformers."""
    import torch
    import transformers

    for model in models:
        settings = _COMMON | model.settings
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            config = getattr(transformers, model.config)(**settings)
            # What is not a matrix (norms, biases, D) stays as the model's own class makes it.
            network = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for name, weight in network.named_parameters():
                    weight.copy_(_drawn(torch, name, weight))
        tokenizer().save_pretrained(directory / model.name)
        network.config.dtype = model.dtype
        network.to(getattr(torch, model.dtype)).save_pretrained(directory / model.name)


def _drawn(torch: Any, name: str, weight: Any) -> Any:
    if name.endswith("dt_bias"):
        return torch.linspace(-4, -1, weight.numel())
    if name.endswith("A_log"):
        return torch.zeros_like(weight)
    if weight.ndim < 2:
        return weight
    scale = 0.5 if "embed" in name or "lm_head" in name else (2 / weight.shape[-1]) ** 0.5
    return torch.randn(weight.shape) * scale


def tokenizer() -> Any:
    """Words that are called after their tokens: t0, t1, ...  Servers cannot do without one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"t{number}": number for number in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def prompt(number: int, chunks: int, *, of: int = 128) -> list[int]:
    """A prompt of ``chunks`` times ``of`` tokens and one more, a different one for each number.

    A monolithic run that takes ``of`` tokens a step then computes the last token in a step of its own, exactly where P
    hands over to D.
    """
    draw = random.Random(f"{SEED}/{number}")
    return [draw.randrange(VOCABULARY) for _ in range(chunks * of + 1)]
