"""A ``DynamicCache`` taken apart into its tensors, and put together again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from kvxfer.core.errors import KvxferError, Reason

#: Classes that are known, by themselves: a class derived from one of them may keep more, or something else.
_ATTENTION: Final = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
_STATES: Final = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
#: Why the others are refused, by a word of their name.
_REASONS: Final = {
    "SlidingWindow": "it keeps the last tokens of a window only, and here every layer has all tokens",
    "Static": "it has room for tokens that are not there yet; take a DynamicCache",
    "Quantized": "it keeps old tokens quantised and the newest as they are; take a DynamicCache",
    "Indexed": "it keeps an indexer's keys beside K and V",
}


@dataclass(frozen=True)
class Held:
    """One tensor of a cache.

    :param layer: the model's layer.
    :param name: ``k``, ``v``, ``conv.0`` or ``recurrent.0`` (a layer may have several states).
    :param tensor: without the batch: ``(heads, tokens, width)`` for ``k`` and ``v``, ``(channels, kernel)`` for a conv
        state, ``(heads or channels, ...)`` for a recurrent one.
    """

    layer: int
    name: str
    tensor: torch.Tensor

    @property
    def per_token(self) -> bool:
        """Whether it grows with the sequence; its tokens are then the axis before the last."""
        return self.name in ("k", "v")


def held(cache: Any) -> tuple[Held, ...]:
    """What a cache of one sequence holds, layer by layer.

    Layers that hold nothing are left out: those without attention, and those that use the cache of another layer.

    :raises KvxferError: UNSUPPORTED for a kind of cache or layer that cannot be moved, with the reason; FIELD_INVALID
        for a cache of several sequences, or layers of different lengths.
    """
    if type(cache) is not DynamicCache:
        raise _unsupported("cache", type(cache).__name__, _why(type(cache).__name__))
    if cache.offloading:
        raise _unsupported("cache", "DynamicCache with offloading", "its layers come and go between two devices")
    found = tuple(item for i, layer in enumerate(cache.layers) for item in _held(i, layer))
    tokens = {item.tensor.shape[-2] for item in found if item.per_token}
    if len(tokens) > 1:
        raise KvxferError(
            Reason.FIELD_INVALID,
            f"layers of this cache hold {' and '.join(str(n) for n in sorted(tokens))} tokens; all must hold the same",
            field="cache",
            tokens=sorted(tokens),
        )
    return found


def _held(number: int, layer: Any) -> Iterator[Held]:
    where, kind = f"cache.layers[{number}]", type(layer)
    if kind is DummyLayer:
        return
    if kind not in _ATTENTION and kind not in _STATES:
        raise _unsupported(where, kind.__name__, _why(kind.__name__))
    if kind in _ATTENTION and layer.is_initialized:
        yield Held(number, "k", _alone(where, layer.keys))
        yield Held(number, "v", _alone(where, layer.values))
    if kind in _STATES:
        if layer.record_past:
            raise _unsupported(where, kind.__name__, "it records past states, which have no fixed size")
        for name, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
            for i, state in states.items():
                if state is not None:
                    yield Held(number, f"{name}.{i}", _alone(where, state))


def _alone(where: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of the one sequence in the batch."""
    if tensor.shape[0] != 1:
        raise KvxferError(
            Reason.FIELD_INVALID,
            f"{where} holds {tensor.shape[0]} sequences; a SequenceCache is for one",
            field=where,
            batch=tensor.shape[0],
        )
    return tensor[0]


def rebuild(config: Any, items: Iterable[Held]) -> DynamicCache:
    """A cache as a model leaves it: of its own memory, on the tensors' device, ready to go on with.

    :param config: the model's.
    :param items: as of :func:`held`.
    """
    cache = DynamicCache(config=config)
    keys: dict[int, torch.Tensor] = {}
    for item in items:
        name, _, index = item.name.partition(".")
        tensor = item.tensor[None]
        if name == "k":
            keys[item.layer] = tensor
        elif name == "v":
            cache.update(keys.pop(item.layer), tensor, item.layer)
        elif name == "conv":
            cache.update_conv_state(tensor, item.layer, state_idx=int(index))
        else:
            cache.update_recurrent_state(tensor, item.layer, state_idx=int(index))
    return cache


def _why(name: str) -> str:
    return next((why for word, why in _REASONS.items() if word in name), "it is not known what it keeps")


def _unsupported(where: str, what: str, why: str) -> KvxferError:
    return KvxferError(
        Reason.UNSUPPORTED, f"{where} is of type {what}, which cannot be moved: {why}", field=where, type=what, why=why
    )
