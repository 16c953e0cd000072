"""Engines for the tests of planning."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

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


def pair_of(name: str, p_tp: int, d_tp: int, **options: Any) -> tuple[Engine, Engine]:
    """Both sides alike but for their TP."""
    return engine(name, p_tp, **options), engine(name, d_tp, **options)
