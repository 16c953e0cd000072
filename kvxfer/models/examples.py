"""Configs of well-known models, shipped with the package: only the keys that the presets read.

``configs/README.md`` says where the values come from.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Final

from kvxfer.models.fields import field_error

#: Names that :func:`example` knows.
EXAMPLES: Final = (
    "nemotron-3-nano-30b-a3b",
    "nemotron-3-super-120b-a12b",
    "qwen3-next-80b-a3b",
    "qwen3.5-9b",
    "kimi-linear-48b-a3b",
    "falcon-h1-7b",
    "granite-4.0-h-small",
    "bamba-9b",
    "jamba-mini",
    "llama-3.1-70b",
    "deepseek-v3",
)


def example(name: str) -> dict[str, object]:
    """The config of a well-known model; a new dictionary each time.

    :raises KvxferError: FIELD_INVALID for an unknown name.
    """
    if name not in EXAMPLES:
        raise field_error("model", name, ", ".join(EXAMPLES))
    text = resources.files("kvxfer.models").joinpath("configs").joinpath(f"{name}.json").read_text(encoding="utf-8")
    parsed: dict[str, object] = json.loads(text)
    return parsed
