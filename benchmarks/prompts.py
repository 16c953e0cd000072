"""Layouts and requests for measuring Resolve: no memory stands behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvxfer.core.layout import CacheLayout, GroupKind, Rank
from kvxfer.core.resolve import BlockList
from kvxfer.models import EngineOptions, example
from kvxfer.planning import Engine

#: Tokens of the prompts.
PROMPTS: Final = (1_024, 8_192, 32_768, 131_072, 524_288, 1_048_576)
#: The one that is promised about.
TOLD: Final = 131_072
#: So many times as many blocks as the prompt takes: a cache is larger than one request.
_SPARE: Final = 2


@dataclass(frozen=True)
class Shape:
    """A model as an engine lays its cache out."""

    name: str
    model: str
    options: EngineOptions


#: vLLM 0.32 makes one region a layer where K and V lie side by side in a block, and two where they lie apart.
SHAPES: Final = (
    Shape("dense 70B, TP 8", "llama-3.1-70b", EngineOptions(tp_size=8)),
    Shape("dense 70B, TP 8, K and V apart", "llama-3.1-70b", EngineOptions(tp_size=8, kv_packing="regions")),
    Shape("Nemotron 3 Nano", "nemotron-3-nano-30b-a3b", EngineOptions()),
)


@dataclass(frozen=True)
class Prompt:
    """A request of one rank."""

    tokens: int
    rank: Rank
    layout: CacheLayout

    @classmethod
    def of(cls, shape: Shape, tokens: int) -> Prompt:
        """One in the middle of a cache."""
        engine = Engine.preset(shape.name, example(shape.model), shape.options).holding(tokens * _SPARE)
        return cls(tokens, engine.first, engine.layouts[engine.first])

    def lists(self, side: str) -> list[BlockList]:
        """The blocks of a side."""
        return lists_of(self.layout, self.tokens, ord(side))


def lists_of(layout: CacheLayout, tokens: int, seed: int) -> list[BlockList]:
    """The blocks of a prompt, any in any order, as a scheduler has them: lists of integers, no number twice."""
    free = iter(np.random.default_rng(seed).permutation(layout.groups[0].num_blocks).tolist())
    lists = []
    for group in layout.groups:
        state = group.kind is GroupKind.STATE
        count = 1 if state else -(-tokens // group.block_tokens)
        ids = [next(free) for _ in range(count)]
        lists.append(BlockList(group.name, ids, positions=[tokens] if state else None))
    return lists


def thousands(tokens: int) -> str:
    """Tokens as people write them."""
    return f"{tokens // 1024 // 1024}M" if tokens >= 2**20 else f"{tokens // 1024}k"
