"""What a model's cache holds, against what kvxfer's preset of the model says.

The preset is kvxfer's reading of a ``config.json``, the cache is the model's own; where the two differ, one of them is
not what the other side of a transfer expects.  Data types are not compared: they are the engine's to choose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.engines.transformers.caches import Held
from kvxfer.models import families, model_spec
from kvxfer.models.spec import KvSpec, LatentSpec, ModelSpec, StateSpec

#: Layer and what kind of cache it is, to its sizes.
Sizes = dict[tuple[int, str], tuple[int, ...]]


def preset_of(config: Any) -> ModelSpec | None:
    """The preset of a model, if there is one.

    :param config: the model's, of Transformers.
    :raises KvxferError: FIELD_INVALID where the preset cannot read the config of a model that it is for.
    """
    text: Mapping[str, object] = config.get_text_config().to_dict()
    if not any(text.get("model_type") in family.model_types for family in families()):
        return None
    try:
        return model_spec(text)
    except KvxferError as error:
        if error.reason is Reason.UNSUPPORTED:  # a variant that the preset leaves out
            return None
        raise


def compare(items: Sequence[Held], config: Any) -> bool:
    """Compare a cache with the preset of its model; false where there is none.

    :param items: what the cache holds, of :func:`held`.
    :raises KvxferError: LAYOUT_MISMATCH, naming the layer and both sizes.
    """
    spec = preset_of(config)
    if spec is None:
        return False
    cache, preset = of_cache(items), of_preset(spec)
    for key in sorted(cache.keys() | preset.keys()):
        if cache.get(key) != preset.get(key):
            layer, kind = key
            mine, other = cache.get(key, "nothing"), preset.get(key, "nothing")
            raise KvxferError(
                Reason.LAYOUT_MISMATCH,
                f"layer {layer}, {kind}: the model's cache has {mine}, kvxfer's preset of {config.model_type} says "
                f"{other}; one of them is not what it was taken for (check_preset=False goes on with the model's own)",
                field="model",
                layer=layer,
                component=kind,
                cache=mine,
                preset=other,
            )
    return True


def of_cache(items: Sequence[Held]) -> Sizes:
    """Sizes of a cache, in words that a preset has as well.

    ``attention``: heads, and elements a token.  ``conv``: channels, and columns kept.  ``recurrent``: elements.
    """
    found: Sizes = {}
    for item in items:
        shape = tuple(item.tensor.shape)
        if item.per_token:
            _, before = found.get((item.layer, "attention"), (0, 0))
            found[item.layer, "attention"] = (shape[0], before + shape[0] * shape[2])
        elif item.name.startswith("conv"):
            found[item.layer, item.name] = (shape[0], shape[1])
        else:
            found[item.layer, item.name] = (math.prod(shape),)
    return found


def of_preset(spec: ModelSpec) -> Sizes:
    """The same of a preset.  Transformers keeps as many columns as the kernel is wide, one more than are needed."""
    found: Sizes = {}
    for layer in spec.layers:
        cache = layer.cache
        if isinstance(cache, KvSpec):
            found[layer.index, "attention"] = (cache.heads, cache.heads * (cache.k_dim + cache.v_dim))
        elif isinstance(cache, LatentSpec):
            found[layer.index, "attention"] = (1, cache.width)
        elif isinstance(cache, StateSpec):
            found[layer.index, "conv.0"] = (sum(part.units for part in cache.conv), cache.conv_rows + 1)
            if cache.ssm is not None:
                found[layer.index, "recurrent.0"] = (cache.ssm.units * math.prod(cache.ssm_inner),)
    return found
