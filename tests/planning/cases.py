"""Engines for the tests of planning."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from kvxfer.core.layout import (
    Axis,
    AxisKind,
    CacheLayout,
    Component,
    Group,
    GroupKind,
    Region,
    UnitRange,
    View,
)
from kvxfer.models import EngineOptions, example, scale_down
from kvxfer.planning import Engine

NANO, SUPER = "nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b"
QWEN, JAMBA, LLAMA, DEEPSEEK = "qwen3-next-80b-a3b", "jamba-mini", "llama-3.1-70b", "deepseek-v3"


@lru_cache
def config(name: str, layers: int | None = None, shrink: int = 1) -> Any:
    return scale_down(example(name), max_layers=layers, shrink=shrink)


def engine(name: str, tp: int = 1, *, layers: int | None = None, shrink: int = 1, **options: Any) -> Engine:
    """An engine of an example, whole unless it is told otherwise."""
    return Engine.preset(name, config(name, layers, shrink), replace(EngineOptions(tp_size=tp), **options))


def dense_of(order: str, *, layers: int = 4, blocks: int = 4, padding: int = 0) -> CacheLayout:
    """Attention of 2 heads, blocks of 16 tokens of 512 bytes a head, in one region: 16,384 bytes a layer and block.

    :param order: what is outermost, and so on: ``layer-block``, ``block-layer``, ``block-token-layer``, or
        ``layer-k-block``, where K of all blocks of a layer comes before V.
    :param padding: bytes behind every block of a layer, or (``block-token-layer``) of all layers.
    """
    heads, tokens, data = 2, 16, 16_384
    page = data + padding
    stride = page if order.startswith("layer") else page * layers
    names, content, step, skip = ("kv",), 256, [page * blocks, page][order.startswith("block")], 0
    token = heads * 512
    if order == "layer-k-block":
        names, content, stride, token, skip = ("k", "v"), 128, page // 2, heads * 256, page // 2 * blocks
    elif order == "block-token-layer":
        stride, step, token = data * layers + padding, heads * 512, heads * 512 * layers
    axes = (Axis(AxisKind.TOKEN, tokens, token), Axis(AxisKind.UNIT, heads), Axis(AxisKind.INNER, content))
    components = tuple(
        Component(name, "bfloat16", 2, axes, UnitRange(0, heads, heads), offset=i * skip)
        for i, name in enumerate(names)
    )
    views = tuple(View(f"layers.{i}", 0, i * step, stride, blocks, components) for i in range(layers))
    size = blocks * max(page * layers, stride)
    return CacheLayout((Region(size),), (Group("attention", GroupKind.ATTENTION, views, tokens),))


def pair_of(name: str, p_tp: int, d_tp: int, **options: Any) -> tuple[Engine, Engine]:
    """Both sides alike but for their TP."""
    return engine(name, p_tp, **options), engine(name, d_tp, **options)
