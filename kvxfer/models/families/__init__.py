"""One module a family: a function from a config to a :class:`~kvxfer.models.spec.ModelSpec`, registered by name.

Importing this package makes all of them known.
"""

from kvxfer.models.families import deepseek, dense, jamba, nemotron_h, qwen3_next

__all__ = ["deepseek", "dense", "jamba", "nemotron_h", "qwen3_next"]
