"""Layouts of the usual caches, from shapes, without a stride to work out.

A :class:`Block` says what lies inside one kernel block (attention) or one snapshot (state); :meth:`Block.view` puts a
layer's blocks into a region::

    heads = share(8, tp_rank, tp_size)
    kv = attention_block(heads, head_dim=128, tokens=16, dtype="bfloat16", packing="block")
    views = [kv.view(name, region=i, num_blocks=1024) for i, name in enumerate(layers)]
    layout = CacheLayout(
        tuple(Region(kv.size * 1024) for _ in layers), (Group("attention", GroupKind.ATTENTION, tuple(views), 16),)
    )

Components have the names that kvxfer's own presets give them, so that the two pair with one another.  Sizes, offsets
and strides are bytes.  Which units a rank holds is always said with a
:class:`~kvxfer_client.UnitRange`; :func:`share` makes the usual ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Axis, AxisKind, Component, UnitRange, View

#: (heads, tokens, content) or (tokens, heads, content), as the memory of one block runs.
KvOrder = Literal["HND", "NHD"]
#: K and V of a token and head beside one another; or all K of a block, then all its V.
KvPacking = Literal["packed", "block"]
#: Conv states as (channels, rows), or as (rows, channels).
ConvOrder = Literal["DS", "SD"]

#: Bytes of an element, by the type's name as torch and NumPy write it.
ELEMENT_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class Block:
    """What lies inside one kernel block or snapshot.

    :param components: with their offsets.
    :param size: bytes that they span, without padding.
    """

    components: tuple[Component, ...]
    size: int

    def view(
        self,
        layer: str,
        region: int,
        num_blocks: int,
        *,
        base: int = 0,
        block_stride: int = 0,
        kernel_blocks: int = 1,
        kernel_stride: int = 0,
    ) -> View:
        """A layer's blocks in a region.

        :param num_blocks: logical blocks.
        :param base: offset of block 0 in the region.
        :param block_stride: from one logical block to the next; 0: one behind the other.
        :param kernel_blocks: kernel blocks in a logical block; 1 in a state group.
        :param kernel_stride: from one kernel block to the next; 0: one behind the other.
        :raises KvxferError: LAYOUT_INVALID.
        """
        kernel_stride = kernel_stride or self.size
        return View(
            layer,
            region,
            base,
            block_stride or kernel_stride * kernel_blocks,
            num_blocks,
            self.components,
            kernel_blocks,
            kernel_stride,
        )


def element(dtype: object) -> tuple[str, int]:
    """A type's name, as layouts have it, and the bytes of an element.

    :param dtype: a name (``bfloat16``), or a torch or NumPy type.
    :raises KvxferError: LAYOUT_INVALID for a type that is not known here.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ELEMENT_BYTES:
        known = ", ".join(ELEMENT_BYTES)
        raise KvxferError(
            Reason.LAYOUT_INVALID,
            f"dtype is {str(dtype)[:80]!r}; known are {known}",
            field="dtype",
            value=str(dtype)[:80],
            allowed=known,
        )
    return name, ELEMENT_BYTES[name]


def share(total: int, tp_rank: int, tp_size: int) -> UnitRange:
    """The units that a rank holds where tensor parallelism deals them out evenly.

    With more ranks than units, neighbouring ranks hold the same one, as engines do with KV heads.

    :param total: units (heads, groups, channels) of the whole model.
    :raises KvxferError: LAYOUT_INVALID where units and ranks do not divide.
    """
    if not 0 <= tp_rank < tp_size or total < 1 or (total % tp_size and tp_size % total):
        raise KvxferError(
            Reason.LAYOUT_INVALID,
            f"{total} units do not divide over {tp_size} ranks, or there is no rank {tp_rank}",
            field="units",
            total=total,
            tp_rank=tp_rank,
            tp_size=tp_size,
        )
    held = max(1, total // tp_size)
    first = tp_rank * total // tp_size
    return UnitRange(first, first + held, total)


# -- attention ---------------------------------------------------------------------------------------------------------


def attention_block(
    heads: UnitRange,
    head_dim: int,
    tokens: int,
    dtype: object,
    *,
    v_dim: int | None = None,
    order: KvOrder = "HND",
    packing: KvPacking = "packed",
) -> Block:
    """K and V of one kernel block, in one piece.

    :param heads: the KV heads that this rank holds.
    :param head_dim: elements of a head's K, and of its V unless ``v_dim`` is given.
    :param tokens: tokens in a kernel block.
    :param packing: ``packed``: one component ``kv``; ``block``: ``k``, then ``v``.
    :raises KvxferError: LAYOUT_INVALID.
    """
    _check_choice("packing", packing, ("packed", "block"))
    second = head_dim if v_dim is None else v_dim
    if packing == "packed":
        packed = _per_token("kv", heads, tokens, head_dim + second, dtype, order)
        return Block((packed,), packed.data_bytes)
    k = _per_token("k", heads, tokens, head_dim, dtype, order)
    v = _per_token("v", heads, tokens, second, dtype, order, k.data_bytes)
    return Block((k, v), k.data_bytes + v.data_bytes)


def attention_apart(
    heads: UnitRange,
    head_dim: int,
    tokens: int,
    dtype: object,
    *,
    v_dim: int | None = None,
    order: KvOrder = "HND",
) -> tuple[Block, Block]:
    """K and V of one kernel block where they lie apart: in two regions, or in the two halves of one.

    Arguments as for :func:`attention_block`.  Each makes a view of its own; two views of one layer.  For the halves of
    a region see :func:`halves`.

    :raises KvxferError: LAYOUT_INVALID.
    """
    k = _per_token("k", heads, tokens, head_dim, dtype, order)
    v = _per_token("v", heads, tokens, head_dim if v_dim is None else v_dim, dtype, order)
    return Block((k,), k.data_bytes), Block((v,), v.data_bytes)


def halves(
    blocks: Sequence[Block], layer: str, region: int, num_blocks: int, *, base: int = 0, kernel_blocks: int = 1
) -> tuple[View, ...]:
    """Views of one layer, one behind the other in a region: all K blocks, then all V blocks (``(2, blocks, ...)``).

    :param blocks: of :func:`attention_apart`.
    :param num_blocks: logical blocks in each half; other arguments as for :meth:`Block.view`.
    :raises KvxferError: LAYOUT_INVALID.
    """
    views: list[View] = []
    for block in blocks:
        views.append(block.view(layer, region, num_blocks, base=base, kernel_blocks=kernel_blocks))
        base += block.size * kernel_blocks * num_blocks
    return tuple(views)


def latent_block(width: int, tokens: int, dtype: object) -> Block:
    """One compressed vector a token (MLA), the same on every rank.

    :param width: its elements (``kv_lora_rank + qk_rope_head_dim``).
    :param tokens: tokens in a kernel block.
    :raises KvxferError: LAYOUT_INVALID.
    """
    latent = _per_token("mla", UnitRange(0, 1, 1), tokens, width, dtype, "NHD")
    return Block((latent,), latent.data_bytes)


# -- states ------------------------------------------------------------------------------------------------------------


def mamba2_block(
    heads: UnitRange,
    head_dim: int,
    groups: UnitRange,
    state: int,
    kernel: int,
    *,
    conv_dtype: object = "bfloat16",
    ssm_dtype: object = "float32",
    order: ConvOrder = "DS",
    spec_tokens: int = 0,
) -> Block:
    """A Mamba2 snapshot: the conv state over ``[x | B | C]``, then the recurrent state ``(heads, head_dim, state)``.

    :param heads: the SSM heads that this rank holds.
    :param groups: the B and C groups that it holds.
    :param state: state size.
    :param kernel: width of the convolution; ``kernel - 1`` rows are kept, and one more for each of ``spec_tokens``.
    :raises KvxferError: LAYOUT_INVALID.
    """
    conv = (
        ("conv.x", _scaled(heads, head_dim)),
        ("conv.B", _scaled(groups, state)),
        ("conv.C", _scaled(groups, state)),
    )
    return state_block(conv, kernel - 1 + spec_tokens, ("ssm", heads), (head_dim, state), conv_dtype, ssm_dtype, order)


def mamba1_block(
    channels: UnitRange,
    state: int,
    kernel: int,
    *,
    conv_dtype: object = "bfloat16",
    ssm_dtype: object = "float32",
    order: ConvOrder = "DS",
    spec_tokens: int = 0,
) -> Block:
    """A Mamba1 snapshot: the conv state over ``x``, then the recurrent state ``(channels, state)``.

    :param channels: the channels that this rank holds; other arguments as for :func:`mamba2_block`.
    :raises KvxferError: LAYOUT_INVALID.
    """
    conv = (("conv.x", channels),)
    return state_block(conv, kernel - 1 + spec_tokens, ("ssm", channels), (state,), conv_dtype, ssm_dtype, order)


def gdn_block(
    key_heads: UnitRange,
    key_dim: int,
    value_heads: UnitRange,
    value_dim: int,
    kernel: int,
    *,
    conv_dtype: object = "bfloat16",
    ssm_dtype: object = "float32",
    order: ConvOrder = "DS",
    spec_tokens: int = 0,
) -> Block:
    """A Gated DeltaNet snapshot: conv over ``[q | k | v]``, then the state ``(value_heads, value_dim, key_dim)``.

    :param key_heads: the key heads that this rank holds, and ``value_heads`` likewise; other arguments as for
        :func:`mamba2_block`.
    :raises KvxferError: LAYOUT_INVALID.
    """
    keys = _scaled(key_heads, key_dim)
    conv = (("conv.q", keys), ("conv.k", keys), ("conv.v", _scaled(value_heads, value_dim)))
    inner = (value_dim, key_dim)
    return state_block(conv, kernel - 1 + spec_tokens, ("ssm", value_heads), inner, conv_dtype, ssm_dtype, order)


def state_block(
    conv: Sequence[tuple[str, UnitRange]],
    rows: int,
    ssm: tuple[str, UnitRange],
    ssm_inner: Sequence[int],
    conv_dtype: object,
    ssm_dtype: object,
    order: ConvOrder = "DS",
) -> Block:
    """A snapshot of any kind: the parts of a conv state in order, then a recurrent state, aligned to its element.

    :param conv: name and channels of each part, in memory order.
    :param rows: inputs kept for each channel.
    :param ssm: name and units of the recurrent state.
    :param ssm_inner: elements of one of its units, in memory order.
    :raises KvxferError: LAYOUT_INVALID.
    """
    _check_choice("order", order, ("DS", "SD"))
    name, size = element(conv_dtype)
    width = sum(len(units) for _, units in conv)
    components: list[Component] = []
    channel = 0
    for part, units in conv:
        if order == "DS":
            axes = (Axis(AxisKind.UNIT, len(units)), Axis(AxisKind.INNER, rows))
            offset = channel * rows * size
        else:
            axes = (Axis(AxisKind.INNER, rows, width * size), Axis(AxisKind.UNIT, len(units)))
            offset = channel * size
        components.append(Component(part, name, size, axes, units, offset))
        channel += len(units)
    dtype, itemsize = element(ssm_dtype)
    offset = -(-width * rows * size // itemsize) * itemsize
    inner = tuple(Axis(AxisKind.INNER, extent) for extent in ssm_inner)
    units = ssm[1]
    components.append(Component(ssm[0], dtype, itemsize, (Axis(AxisKind.UNIT, len(units)), *inner), units, offset))
    return Block(tuple(components), offset + itemsize * len(units) * math.prod(ssm_inner))


# -- parts -------------------------------------------------------------------------------------------------------------


def _per_token(
    name: str, heads: UnitRange, tokens: int, width: int, dtype: object, order: KvOrder, offset: int = 0
) -> Component:
    _check_choice("order", order, ("HND", "NHD"))
    kind, size = element(dtype)
    by_head, by_token = Axis(AxisKind.UNIT, len(heads)), Axis(AxisKind.TOKEN, tokens)
    outer = (by_head, by_token) if order == "HND" else (by_token, by_head)
    return Component(name, kind, size, (*outer, Axis(AxisKind.INNER, width)), heads, offset)


def _scaled(units: UnitRange, width: int) -> UnitRange:
    """The channels of some heads or groups of ``width`` channels each."""
    return UnitRange(units.begin * width, units.end * width, units.total * width)


def _check_choice(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        listed = ", ".join(allowed)
        raise KvxferError(
            Reason.LAYOUT_INVALID,
            f"{field} is {value!r}; allowed are {listed}",
            field=field,
            value=value,
            allowed=listed,
        )
