"""What a family says about a model's caches, in global sizes: before parallelism, before any engine's choices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvSpec:
    """K and V per token (MHA, GQA, MQA).

    :param heads: KV heads of the whole model; sharded by head, replicated when there are more ranks than heads.
    :param k_dim: elements of one head's K.
    :param v_dim: elements of one head's V.
    """

    heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """One compressed vector per token (MLA), the same on every rank.

    :param width: its elements.
    """

    width: int


@dataclass(frozen=True, slots=True)
class ShardedArray:
    """A state's array as parallelism sees it: ``groups`` equal parts of ``width`` units each.

    Ranks take whole parts; with ``replicate`` a part is held by several ranks when there are more ranks than parts.

    :param name: the component's name.
    :param groups: parts that may not be split (heads, B/C groups; for plain channels each channel is one).
    :param width: units in a part.
    """

    name: str
    groups: int
    width: int = 1
    replicate: bool = False

    @property
    def units(self) -> int:
        """Units of the whole model."""
        return self.groups * self.width


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One snapshot per sequence: a short convolution's last inputs and a recurrent state.

    :param conv: the parts of the conv state in memory order; a unit is a channel.
    :param conv_rows: inputs kept per channel without speculation: the kernel's width less one.
    :param ssm: the recurrent state; a unit is a head (a channel in Mamba1).  ``None`` where there is none.
    :param ssm_inner: elements of one unit, in memory order (``(head_dim, state_size)``).
    """

    conv: tuple[ShardedArray, ...]
    conv_rows: int
    ssm: ShardedArray | None
    ssm_inner: tuple[int, ...] = ()


CacheSpec = KvSpec | LatentSpec | StateSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer that has a cache.

    :param index: its place in the model, counting every layer; decides the pipeline stage.
    :param name: as the engine calls it; matched between the two sides of a transfer.
    :param kind: what it is, for the name of its group (``mamba2``, ``attention``).
    """

    index: int
    name: str
    kind: str
    cache: CacheSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's caches.

    :param layers: the layers that have a cache, in order.
    :param depth: all layers.
    :param dtype: the model's own data type.
    :param ssm_dtype: the data type of recurrent states where the engine does not choose one.
    :param attention_heads: heads that attention layers ask with, which engines share out over ranks as a whole number
        each; 0 where that is not known.
    """

    layers: tuple[LayerSpec, ...]
    depth: int
    dtype: str
    ssm_dtype: str = "float32"
    attention_heads: int = 0


def kv_cache(heads: int, head_dim: int) -> KvSpec:
    """K and V of one width."""
    return KvSpec(heads, head_dim, head_dim)


def mamba2(heads: int, head_dim: int, groups: int, state: int, kernel: int) -> StateSpec:
    """A Mamba2 layer: conv over ``[x | B | C]``, state ``(heads, head_dim, state)``.

    Per rank of TP: conv ``heads / TP * head_dim + 2 * groups / TP * state`` channels of ``kernel - 1`` rows.  With more
    ranks than groups, B and C of a group are held by several ranks.
    """
    return StateSpec(
        conv=(
            ShardedArray("conv.x", heads, head_dim),
            ShardedArray("conv.B", groups, state, replicate=True),
            ShardedArray("conv.C", groups, state, replicate=True),
        ),
        conv_rows=kernel - 1,
        ssm=ShardedArray("ssm", heads),
        ssm_inner=(head_dim, state),
    )


def mamba1(channels: int, state: int, kernel: int) -> StateSpec:
    """A Mamba1 layer: conv over x only, state ``(channels, state)``, both sharded by channel."""
    return StateSpec(
        conv=(ShardedArray("conv.x", channels),),
        conv_rows=kernel - 1,
        ssm=ShardedArray("ssm", channels),
        ssm_inner=(state,),
    )


def gated_delta_net(key_heads: int, key_dim: int, value_heads: int, value_dim: int, kernel: int) -> StateSpec:
    """A Gated DeltaNet layer: conv over ``[q | k | v]``, state ``(value_heads, value_dim, key_dim)``."""
    return StateSpec(
        conv=(
            ShardedArray("conv.q", key_heads, key_dim),
            ShardedArray("conv.k", key_heads, key_dim),
            ShardedArray("conv.v", value_heads, value_dim),
        ),
        conv_rows=kernel - 1,
        ssm=ShardedArray("ssm", value_heads),
        ssm_inner=(value_dim, key_dim),
    )
