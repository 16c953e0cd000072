"""The cache layout, from where vLLM's tensors lie.  Knows numbers only: no tensor, no vLLM.

vLLM views a layer's cache as ``[blocks, heads, tokens, content]`` over one buffer that all layers and groups share, K
and V of a token and head beside one another in the content; what an attention backend makes of a block's bytes may be
something else.  A state layer's page is ``[blocks, bytes]``, its states
one behind the other, and padding after them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import (
    Axis,
    AxisKind,
    CacheLayout,
    Component,
    Group,
    GroupKind,
    MemoryKind,
    Rank,
    Region,
    UnitRange,
    View,
)
from kvxfer.engines.vllm.groups import CacheGroup
from kvxfer_client.layouts import ConvOrder, element, share


@dataclass(frozen=True)
class AttentionPages:
    """An attention layer's cache: ``[blocks, heads, tokens, content]`` of kernel blocks.

    :param offset: bytes from the buffer's start to block 0.
    :param strides: bytes from one block, head, token and element to the next.
    :param dtype: a type's name, torch's.
    :param latent: one compressed vector a token, which every rank holds (MLA).
    :param total_heads: of the whole model; 0: this rank's on every rank.
    :param arrangement: how a block's bytes are arranged where a token's are not in one cell; only caches of the same
        arrangement are read.  Empty: the shape says it.
    """

    layer: str
    offset: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    dtype: str
    latent: bool = False
    total_heads: int = 0
    arrangement: str = ""


@dataclass(frozen=True)
class StatePages:
    """A state layer's cache.

    :param offset: bytes from the buffer's start to page 0.
    :param stride: bytes from one page to the next.
    :param kind: ``mamba1``, ``mamba2``, ``gdn``, or another name, of which nothing is known.
    :param shapes: of each state, as this rank holds it: the conv state first, then the recurrent one.
    :param dtypes: of each state.
    :param order: of the conv state.
    :param replicated: every rank holds the same.
    :param groups: B and C groups of the whole model (Mamba2); 0: this rank's on every rank.
    """

    layer: str
    offset: int
    stride: int
    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    order: ConvOrder = "SD"
    replicated: bool = False
    groups: int = 0


Pages = AttentionPages | StatePages

#: Names of a conv state's parts, in memory order.
CONV_PARTS: Final = {
    "mamba1": ("conv.x",),
    "mamba2": ("conv.x", "conv.B", "conv.C"),
    "gdn": ("conv.q", "conv.k", "conv.v"),
}


def layout_of(
    groups: Sequence[tuple[CacheGroup, Sequence[Pages]]],
    num_blocks: int,
    size: int,
    rank: Rank,
    memory: MemoryKind = MemoryKind.DRAM,
    device: int = 0,
) -> CacheLayout:
    """The layout of a rank's cache.

    :param groups: each with its layers.
    :param num_blocks: blocks of the scheduler.
    :param size: bytes of the buffer that all layers lie in.
    :raises KvxferError: LAYOUT_INVALID, for what vLLM has and cannot be handed over, too.
    """
    found = tuple(
        Group(
            group.name,
            GroupKind.STATE if group.is_state else GroupKind.ATTENTION,
            tuple(_view(pages, num_blocks, rank) for pages in layers),
            group.block_tokens,
        )
        for group, layers in groups
    )
    return CacheLayout((Region(size, memory, device),), found)


def bytes_only(size: int) -> CacheLayout:
    """A layout that says nothing but how large it is, to have the memory before the tensors are known."""
    axes = (Axis(AxisKind.UNIT, 1), Axis(AxisKind.INNER, size))
    view = View("memory", 0, 0, size, 1, (Component("bytes", "uint8", 1, axes, UnitRange(0, 1, 1)),))
    return CacheLayout((Region(size),), (Group("memory", GroupKind.STATE, (view,)),))


def _view(pages: Pages, num_blocks: int, rank: Rank) -> View:
    if isinstance(pages, StatePages):
        return View(pages.layer, 0, pages.offset, pages.stride, num_blocks, tuple(_states(pages, rank)))
    blocks, stride = pages.shape[0], pages.strides[0]
    if blocks % num_blocks:
        raise _strange(pages.layer, f"has {blocks} kernel blocks, no multiple of {num_blocks} blocks")
    ratio = blocks // num_blocks
    return View(pages.layer, 0, pages.offset, stride * ratio, num_blocks, (_kv(pages, rank),), ratio, stride)


def _kv(pages: AttentionPages, rank: Rank) -> Component:
    _, heads, tokens, content = pages.shape
    _, by_head, by_token, by_element = pages.strides
    dtype, size = element(pages.dtype)
    if by_element != size:
        raise _strange(pages.layer, f"has elements of {size} bytes {by_element} bytes apart")
    held = UnitRange(0, heads, heads) if pages.latent else _units(heads, rank, pages.total_heads, pages.layer)
    axes = [Axis(AxisKind.UNIT, heads, by_head), Axis(AxisKind.TOKEN, tokens, by_token)]
    if by_token > by_head and heads > 1:
        axes.reverse()
    name = "mla" if pages.latent else "kv"
    # Components are matched by name, so that what does not fit is refused by both values.
    name = f"{name}.{pages.arrangement}" if pages.arrangement else name
    return Component(name, dtype, size, (*axes, Axis(AxisKind.INNER, content)), held)


def _units(held: int, rank: Rank, total: int, layer: str) -> UnitRange:
    """What this rank holds of ``total`` units, dealt out evenly; neighbours hold the same where there are too few."""
    units = share(total or held * rank.tp_size, rank.tp_rank, rank.tp_size)
    if len(units) != held:
        raise _strange(layer, f"holds {held} units; rank {rank} of {rank.tp_size} has {units}")
    return units


# -- states ----------------------------------------------------------------------------------------------------------


def _states(pages: StatePages, rank: Rank) -> Iterator[Component]:
    """The states of a page, one behind the other, as vLLM packs them."""
    offset = 0
    for i, (shape, dtype) in enumerate(zip(pages.shapes, pages.dtypes, strict=True)):
        name, size = element(dtype)
        if pages.kind not in CONV_PARTS or len(pages.shapes) != 2:
            yield _whole(f"state.{i}", shape, name, size, pages, rank, offset)
        elif i == 0:
            yield from _conv(pages, shape, name, size, rank, offset)
        else:
            held = _units(shape[0], _sharding(pages, rank), 0, pages.layer)
            inner = (Axis(AxisKind.INNER, extent) for extent in shape[1:])
            yield Component("ssm", name, size, (Axis(AxisKind.UNIT, shape[0]), *inner), held, offset)
        offset += size * math.prod(shape)


def _conv(
    pages: StatePages, shape: tuple[int, ...], name: str, size: int, rank: Rank, offset: int
) -> Iterator[Component]:
    channels, rows = shape if pages.order == "DS" else (shape[1], shape[0])
    begin = 0
    for part, units in zip(CONV_PARTS[pages.kind], _channels(pages, channels, rank), strict=True):
        by_channel, by_row = (rows * size, size) if pages.order == "DS" else (size, channels * size)
        axes = [Axis(AxisKind.UNIT, len(units), by_channel), Axis(AxisKind.INNER, rows, by_row)]
        if pages.order == "SD":
            axes.reverse()
        yield Component(part, name, size, tuple(axes), units, offset + begin * by_channel)
        begin += len(units)


def _channels(pages: StatePages, channels: int, rank: Rank) -> list[UnitRange]:
    """How a conv state's channels are dealt out, part by part.  The recurrent state tells what the first part is.

    Mamba2 convolves x (heads x head_dim), B and C (groups x state size), a gated delta net q and k (key heads x key
    dim) and v (value heads x value dim); the recurrent states are (heads, head_dim, state size) and (value heads,
    value dim, key dim).
    """
    sharding = _sharding(pages, rank)
    recurrent = pages.shapes[1]
    if pages.kind == "mamba1":
        return [_units(channels, sharding, 0, pages.layer)]
    known = recurrent[0] * recurrent[1]
    rest = (channels - known) // 2
    if rest < 1 or known + 2 * rest != channels or rest % recurrent[2]:
        raise _strange(pages.layer, f"has {channels} conv channels, which do not fit its state {recurrent}")
    wide = _units(recurrent[0], sharding, 0, pages.layer)
    few = _units(rest // recurrent[2], sharding, pages.groups, pages.layer)
    first, second = _scaled(wide, recurrent[1]), _scaled(few, recurrent[2])
    return [first, second, second] if pages.kind == "mamba2" else [second, second, first]


def _scaled(units: UnitRange, width: int) -> UnitRange:
    return UnitRange(units.begin * width, units.end * width, units.total * width)


def _whole(
    name: str, shape: tuple[int, ...], dtype: str, size: int, pages: StatePages, rank: Rank, offset: int
) -> Component:
    """A state of which nothing is known: each rank's is one unit, and only a like rank can read it."""
    sharding = _sharding(pages, rank)
    held = UnitRange(sharding.tp_rank, sharding.tp_rank + 1, sharding.tp_size)
    inner = tuple(Axis(AxisKind.INNER, extent) for extent in shape)
    return Component(name, dtype, size, (Axis(AxisKind.UNIT, 1), *inner), held, offset)


def _sharding(pages: StatePages, rank: Rank) -> Rank:
    return Rank() if pages.replicated else rank


def _strange(layer: str, message: str) -> KvxferError:
    return KvxferError(Reason.LAYOUT_INVALID, f"layer {layer} {message}", field="kv_caches", layer=layer)
