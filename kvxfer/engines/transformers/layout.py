"""Where the tensors of a cache of one sequence lie in one region, and copying them there and back.

A tensor lies as the cache has it, and nothing is turned over or cut: K and V in blocks of some tokens, one behind the
other, each ``(heads, tokens, width)``; a state in one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Axis, AxisKind, CacheLayout, Component, Group, GroupKind, Region, UnitRange, View
from kvxfer.core.resolve import BlockList
from kvxfer.engines.transformers.caches import Held
from kvxfer_client.blocks import grouped
from kvxfer_client.layouts import element

#: Where tensors begin: a cache line, and more than any element.
ALIGNMENT: Final = 64

#: Makes a tensor of a type and shape on a region's bytes from an offset on.
At = Callable[[torch.dtype, Sequence[int], int], torch.Tensor]


@dataclass(frozen=True)
class Part:
    """One tensor of a cache in the region.

    :param layer: the model's layer; ``name`` as in :class:`Held`.
    :param shape: of one block: ``(heads, block_tokens, width)``, or that of the state.
    :param blocks: blocks, ``stride`` bytes each.
    :param offset: of the first block, in bytes.
    """

    layer: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: int
    offset: int

    @property
    def per_token(self) -> bool:
        """Whether it grows with the sequence."""
        return self.name in ("k", "v")

    @property
    def stride(self) -> int:
        """Bytes of a block."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def view(self) -> View:
        """What a sidecar is told."""
        kinds = (AxisKind.UNIT, AxisKind.TOKEN if self.per_token else AxisKind.INNER, AxisKind.INNER)
        axes = tuple(Axis(kinds[min(i, 2)], extent) for i, extent in enumerate(self.shape))
        name, size = element(self.dtype)
        component = Component(self.name, name, size, axes, UnitRange(0, self.shape[0], self.shape[0]))
        return View(f"layers.{self.layer}", 0, self.offset, self.stride, self.blocks, (component,))


class SequenceLayout:
    """The places of all tensors of a cache, and the :class:`CacheLayout` that says so.

    :param template: what a cache of the model holds, of :func:`held`; the number of its tokens does not matter.
    :param max_tokens: tokens that there is room for.
    :param block_tokens: tokens in a block of K and V.  Whole blocks are moved: small ones move less, in more pieces.
    :raises KvxferError: FIELD_INVALID for sizes below 1 or an empty template.
    """

    def __init__(self, template: Sequence[Held], max_tokens: int, block_tokens: int = 16) -> None:
        for name, value in (("max_tokens", max_tokens), ("block_tokens", block_tokens)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise _bad(name, value, "an integer of at least 1")
        if not template:
            raise _bad("template", "empty", "a cache that holds something; has the model a cache?")
        self.max_tokens: Final = max_tokens
        self.block_tokens: Final = block_tokens
        self.parts: Final[tuple[Part, ...]] = tuple(self._place(template))
        last = self.parts[-1]
        #: Bytes of the region.
        self.size: Final = last.offset + last.stride * last.blocks
        groups = [
            Group(name, kind, tuple(p.view() for p in self.parts if p.per_token is paged), block_tokens if paged else 0)
            for name, kind, paged in (("attention", GroupKind.ATTENTION, True), ("state", GroupKind.STATE, False))
            if any(p.per_token is paged for p in self.parts)
        ]
        self.cache_layout: Final = CacheLayout((Region(self.size),), tuple(groups))

    def _place(self, template: Sequence[Held]) -> list[Part]:
        parts: list[Part] = []
        offset = 0
        for item in template:
            shape, blocks = tuple(item.tensor.shape), 1
            if item.per_token:
                shape, blocks = (shape[0], self.block_tokens, shape[2]), -(-self.max_tokens // self.block_tokens)
            part = Part(item.layer, item.name, item.tensor.dtype, shape, blocks, offset)
            parts.append(part)
            offset = -(-(offset + part.stride * blocks) // ALIGNMENT) * ALIGNMENT
        return parts

    def blocks(self, num_tokens: int) -> tuple[BlockList, ...]:
        """The block lists of a sequence: the first blocks of K and V, and the one snapshot.

        :raises KvxferError: FIELD_INVALID where there is no room for so many tokens.
        """
        self.check(num_tokens)
        needed = range(-(-num_tokens // self.block_tokens))
        kinds = [group.kind for group in self.cache_layout.groups]
        ids = [list(needed) if kind is GroupKind.ATTENTION else [0] for kind in kinds]
        return grouped(ids, self.cache_layout, num_tokens)

    def check(self, num_tokens: int) -> None:
        """Whether a sequence of so many tokens fits.

        :raises KvxferError: FIELD_INVALID.
        """
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 1 <= num_tokens <= self.max_tokens:
            raise _bad("num_tokens", num_tokens, f"1 to {self.max_tokens}, the max_tokens of this SequenceCache")

    def save(self, items: Sequence[Held], at: At, num_tokens: int) -> None:
        """Copy a cache into the region.

        :param at: makes tensors on the region (:meth:`SharedRegion.torch`).
        :raises KvxferError: FIELD_INVALID where it holds other tensors than the template did, or other tokens.
        """
        self.check(num_tokens)
        self._compare(items, num_tokens)
        for part, item in zip(self.parts, items, strict=True):
            target = at(part.dtype, (part.blocks, *part.shape), part.offset)
            if not part.per_token:
                target[0].copy_(item.tensor)
                continue
            heads, _, width = part.shape
            whole = num_tokens // self.block_tokens
            full, rest = item.tensor.split([whole * self.block_tokens, num_tokens % self.block_tokens], dim=1)
            target[:whole].copy_(full.reshape(heads, whole, self.block_tokens, width).transpose(0, 1))
            if rest.shape[1]:
                target[whole, :, : rest.shape[1]].copy_(rest)

    def load(self, at: At, num_tokens: int, device: torch.device) -> tuple[Held, ...]:
        """Copies of a sequence's tensors.

        :param at: as for :meth:`save`.
        :raises KvxferError: FIELD_INVALID where there is no room for so many tokens.
        """
        self.check(num_tokens)
        found = []
        for part in self.parts:
            source = at(part.dtype, (part.blocks, *part.shape), part.offset)
            if part.per_token:
                used = source[: -(-num_tokens // self.block_tokens)].transpose(0, 1)
                tensor = used.reshape(part.shape[0], -1, part.shape[2])[:, :num_tokens]
            else:
                tensor = source[0]
            found.append(Held(part.layer, part.name, tensor.to(device, copy=True)))
        return tuple(found)

    def _compare(self, items: Sequence[Held], num_tokens: int) -> None:
        def named(layer: int, name: str, dtype: torch.dtype, shape: Sequence[int]) -> str:
            return f"layer {layer}, {name}: {tuple(shape)} of {str(dtype).removeprefix('torch.')}"

        wanted = []
        for part in self.parts:
            shape = (part.shape[0], num_tokens, part.shape[2]) if part.per_token else part.shape
            wanted.append(named(part.layer, part.name, part.dtype, shape))
        given = [named(item.layer, item.name, item.tensor.dtype, item.tensor.shape) for item in items]
        for number in range(max(len(wanted), len(given))):
            want, got = (x[number] if number < len(x) else "nothing" for x in (wanted, given))
            if want != got:
                raise KvxferError(
                    Reason.FIELD_INVALID,
                    f"the cache holds {got}; expected was {want}",
                    field="cache",
                    value=got,
                    allowed=want,
                )


def _bad(field: str, value: object, allowed: str) -> KvxferError:
    shown = repr(value)[:80]
    return KvxferError(
        Reason.FIELD_INVALID, f"{field} is {shown}; allowed: {allowed}", field=field, value=shown, allowed=allowed
    )
