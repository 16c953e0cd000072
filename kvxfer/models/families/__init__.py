"""One module a family: a function from a config to a :class:`~kvxfer.models.spec.ModelSpec`, registered by name.

Importing this package makes all of them known.
"""

from kvxfer.models.families import (
    bamba,
    deepseek,
    dense,
    falcon_h1,
    jamba,
    kimi_linear,
    nemotron_h,
    qwen3_next,
    zamba2,
)

__all__ = [
    "bamba",
    "deepseek",
    "dense",
    "falcon_h1",
    "jamba",
    "kimi_linear",
    "nemotron_h",
    "qwen3_next",
    "zamba2",
]
