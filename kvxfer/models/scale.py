"""Smaller versions of a model with the same pattern, for demos and tests.

Two rules.  *Depth*: the first ``max_layers`` layers, so every layer that is left is what it was in the model.  *Width*:
head sizes and state sizes are divided by ``shrink``; numbers of heads and groups, the convolution's kernel and the
order of layers stay, so that everything shards, replicates and is grouped as in the real model.  Bytes of
attention and of Mamba1 states fall with ``shrink``, those of Mamba2 and DeltaNet states with its square.
"""

from __future__ import annotations

from pathlib import Path

from kvxfer.models.fields import MAX_LAYERS, MAX_WIDTH, Config, Fields, check_int, field_error, load_config
from kvxfer.models.registry import family_of

#: Keys with one entry a layer, cut together with ``num_hidden_layers``.
_PER_LAYER = ("hybrid_override_pattern", "layers_block_type", "layer_types")


def scale_down(config: Config | str | Path, *, max_layers: int | None = None, shrink: int = 1) -> dict[str, object]:
    """A copy of ``config`` with fewer layers, or narrower ones.

    :param config: a config of a known family; of a multi-modal one, the language model's part is returned.
    :param max_layers: layers to keep, counted from the first and with those that have no cache; ``None`` for all.
    :param shrink: what widths are divided by; must divide each.
    :raises KvxferError: FIELD_INVALID where a kind of layer would be lost, or a width is not divisible.
    """
    check_int("shrink", shrink, 1, MAX_WIDTH)
    family, fields = family_of(Fields(load_config(config)))
    scaled = fields.copy()
    for key in family.widths:
        if fields.get(key) not in (None, "auto"):  # such a width follows from others
            width = fields.integer(key)
            if width % shrink:
                raise field_error("shrink", shrink, f"a divisor of {key} ({width})")
            scaled[key] = width // shrink
    whole = family.read(fields)
    if max_layers is not None and check_int("max_layers", max_layers, 1, MAX_LAYERS) < whole.depth:
        firsts = {layer.kind: layer.index for layer in reversed(whole.layers)}
        if max_layers <= max(firsts.values()):
            raise field_error(
                "max_layers", max_layers, f"at least {max(firsts.values()) + 1}, to keep a layer of {', '.join(firsts)}"
            )
        scaled["num_hidden_layers"] = max_layers
        for key in _PER_LAYER:
            entries = fields.get(key)
            if isinstance(entries, (str, list, tuple)):
                scaled[key] = entries[:max_layers]
    return scaled
