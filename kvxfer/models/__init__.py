"""Presets: a Hugging Face config and an engine's options make a cache layout for each rank.

Pure: nothing is downloaded and nothing is allocated.  Presets serve the demo, planning and tests; a real engine reports
the layout that it really has.

    >>> from kvxfer.core.layout import Rank
    >>> from kvxfer.models import EngineOptions, build, example
    >>> layout = build(example("nemotron-3-nano-30b-a3b"), EngineOptions(tp_size=2, kv_dtype="fp8"), Rank(0, 2))
    >>> [group.name for group in layout.groups]
    ['mamba2.0', 'mamba2.1', 'mamba2.2', 'mamba2.3', 'attention']
"""

from kvxfer.models import families as _families  # noqa: F401  (registers them)
from kvxfer.models.build import build, build_all, layout_of, model_spec
from kvxfer.models.examples import EXAMPLES, example
from kvxfer.models.fields import load_config
from kvxfer.models.options import EngineOptions
from kvxfer.models.registry import Family, families, register
from kvxfer.models.scale import scale_down

__all__ = [
    "EXAMPLES",
    "EngineOptions",
    "Family",
    "build",
    "build_all",
    "example",
    "families",
    "layout_of",
    "load_config",
    "model_spec",
    "register",
    "scale_down",
]
