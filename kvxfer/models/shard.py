"""From global sizes to one rank's arrays: which units it holds, and where they lie inside a block.

Blocks are described by :class:`Block`: the components of one kernel block (attention) or of one snapshot (state) with
their offsets, and the bytes that they span.  Where blocks lie in memory is not decided here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvxfer.core.layout import Axis, AxisKind, Component, UnitRange
from kvxfer.models.fields import field_error
from kvxfer.models.options import EngineOptions, resolve_dtype
from kvxfer.models.spec import KvSpec, LatentSpec, ModelSpec, ShardedArray, StateSpec


@dataclass(frozen=True, slots=True)
class Block:
    """Components of one kernel block or snapshot, and its bytes without padding."""

    components: tuple[Component, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Element:
    """A data type's name and size in bytes."""

    dtype: str
    size: int


@dataclass(frozen=True, slots=True)
class Elements:
    """The types of one engine's caches."""

    kv: Element
    conv: Element
    ssm: Element


def elements_of(model: ModelSpec, options: EngineOptions) -> Elements:
    """The engine's choice, else the model's."""
    own, _ = resolve_dtype("dtype", model.dtype, "bfloat16")
    return Elements(
        kv=Element(*resolve_dtype("kv_dtype", options.kv_dtype, own)),
        conv=Element(*resolve_dtype("conv_dtype", options.conv_dtype, own)),
        ssm=Element(*resolve_dtype("ssm_dtype", options.ssm_dtype, model.ssm_dtype)),
    )


def share(name: str, array: ShardedArray, tp_size: int, tp_rank: int) -> UnitRange:
    """The units of ``array`` that a rank holds: an equal run of parts, or one part together with its neighbours.

    :param name: the layer's name, for the error.
    :raises KvxferError: FIELD_INVALID where the parts do not divide over the ranks.
    """
    if array.groups % tp_size == 0:
        parts = array.groups // tp_size
        first = tp_rank * parts
    elif array.replicate and tp_size % array.groups == 0:
        parts = 1
        first = tp_rank // (tp_size // array.groups)
    else:
        also = " or a multiple" if array.replicate else ""
        raise field_error(
            "tp_size", tp_size, f"a divisor{also} of {array.groups}, the parts of {array.name} in layer {name}"
        )
    return UnitRange(first * array.width, (first + parts) * array.width, array.units)


def kernel_blocks(
    layer: str, spec: KvSpec | LatentSpec, elements: Elements, options: EngineOptions, tp_rank: int
) -> tuple[Block, ...]:
    """One kernel block of an attention layer: a single :class:`Block`, or K's and V's where they lie apart."""
    tokens, element = Axis(AxisKind.TOKEN, options.block_tokens), elements.kv
    by_head = isinstance(spec, KvSpec) and options.kv_layout == "HND"

    def component(name: str, units: UnitRange, inner: int, offset: int = 0) -> Component:
        heads, content = Axis(AxisKind.UNIT, len(units)), Axis(AxisKind.INNER, inner)
        axes = (heads, tokens, content) if by_head else (tokens, heads, content)
        return Component(name, element.dtype, element.size, axes, units, offset)

    if isinstance(spec, LatentSpec):
        latent = component("mla", UnitRange(0, 1, 1), spec.width)
        return (Block((latent,), latent.data_bytes),)
    units = share(layer, ShardedArray("the KV heads", spec.heads, replicate=True), options.tp_size, tp_rank)
    if options.kv_packing == "packed":
        packed = component("kv", units, spec.k_dim + spec.v_dim)
        return (Block((packed,), packed.data_bytes),)
    k, v = component("k", units, spec.k_dim), component("v", units, spec.v_dim)
    if options.kv_packing == "block":
        v = component("v", units, spec.v_dim, k.data_bytes)
        return (Block((k, v), k.data_bytes + v.data_bytes),)
    return Block((k,), k.data_bytes), Block((v,), v.data_bytes)


def snapshot(layer: str, spec: StateSpec, elements: Elements, options: EngineOptions, tp_rank: int) -> Block:
    """One state snapshot: the conv parts in order, then the recurrent state, aligned to its element."""
    conv, rows = elements.conv, spec.conv_rows + options.spec_tokens
    shares = [share(layer, part, options.tp_size, tp_rank) for part in spec.conv]
    width = sum(len(units) for units in shares)
    components: list[Component] = []
    channel = 0
    axes: tuple[Axis, ...]
    for part, units in zip(spec.conv, shares, strict=True):
        if options.conv_layout == "DS":
            axes = (Axis(AxisKind.UNIT, len(units)), Axis(AxisKind.INNER, rows))
            offset = channel * rows * conv.size
        else:
            axes = (Axis(AxisKind.INNER, rows, width * conv.size), Axis(AxisKind.UNIT, len(units)))
            offset = channel * conv.size
        components.append(Component(part.name, conv.dtype, conv.size, axes, units, offset))
        channel += len(units)
    size = width * rows * conv.size
    if spec.ssm is not None:
        offset = -(-size // elements.ssm.size) * elements.ssm.size
        units = share(layer, spec.ssm, options.tp_size, tp_rank)
        axes = (Axis(AxisKind.UNIT, len(units)), *(Axis(AxisKind.INNER, extent) for extent in spec.ssm_inner))
        components.append(Component(spec.ssm.name, elements.ssm.dtype, elements.ssm.size, axes, units, offset))
        size = offset + elements.ssm.size * len(units) * math.prod(spec.ssm_inner)
    return Block(tuple(components), size)
