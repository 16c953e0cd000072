"""What the demo runs: the layouts and block IDs of two engines.  Pure: the same options give the same scenario.

Every process of a demo builds the scenario for itself from the same few options, so only these travel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, Group, GroupKind, Rank
from kvxfer.core.resolve import NULL_BLOCK, BlockList
from kvxfer.models import EngineOptions, build_all

Int64 = NDArray[np.int64]

#: Logical blocks beyond those in use, which must stay as they are.
SPARE: Final = 4


def invalid(field: str, message: str, **values: object) -> KvxferError:
    """A FIELD_INVALID error about an option."""
    return KvxferError(Reason.FIELD_INVALID, message, field=field, **values)


@dataclass(frozen=True, slots=True)
class Choices:
    """What the user chose.  Tokens and blocks are counts.

    :param tokens: tokens whose cache P holds; the snapshots are of exactly so many.
    :param skip: tokens that D is taken to have already.
    :param blocks: logical blocks of each engine; 0: what is needed and some more.
    """

    p_tp: int = 2
    d_tp: int = 4
    tokens: int = 5000
    skip: int = 0
    blocks: int = 0
    p_block_tokens: int = 16
    d_block_tokens: int = 16
    kv_dtype: str = "fp8"
    seed: int = 1


@dataclass(frozen=True)
class Side:
    """One engine: ``P`` or ``D``.

    :param blocks: its scheduler's block IDs for the request, the same on every rank.
    """

    name: str
    options: EngineOptions
    layouts: Mapping[Rank, CacheLayout]
    blocks: tuple[BlockList, ...]

    @property
    def engine_id(self) -> str:
        return f"demo-{self.name}"

    @cached_property
    def layout(self) -> CacheLayout:
        """Of the first rank; names and block sizes are the same on all."""
        return next(iter(self.layouts.values()))

    @cached_property
    def memory(self) -> int:
        """Bytes of all ranks."""
        return sum(r.size for layout in self.layouts.values() for r in layout.regions)


@dataclass(frozen=True)
class Scenario:
    """Both engines, and what D reads from P."""

    choices: Choices
    p: Side
    d: Side

    @classmethod
    def of(cls, config: Mapping[str, object], choices: Choices) -> Scenario:
        """The scenario of a model.

        :raises KvxferError: FIELD_INVALID where the model cannot be run so.
        """
        if not 0 <= choices.skip < choices.tokens:
            raise invalid(
                "skip", f"--skip is {choices.skip}; allowed are 0 to {choices.tokens - 1}, one less than --tokens"
            )
        p = _side("P", config, choices, choices.p_tp, choices.p_block_tokens)
        d = _side("D", config, choices, choices.d_tp, choices.d_block_tokens, other=p)
        granule = math.gcd(choices.p_block_tokens, choices.d_block_tokens)
        if choices.skip % granule and any(g.kind is GroupKind.ATTENTION for g in d.layout.groups):
            raise invalid(
                "skip", f"--skip is {choices.skip}; it must be a multiple of {granule}, where the blocks of both meet"
            )
        return cls(choices, p, d)

    @property
    def granule(self) -> int:
        """Tokens at which both sides' kernel blocks meet."""
        return math.gcd(self.choices.p_block_tokens, self.choices.d_block_tokens)

    @property
    def memory(self) -> int:
        """Bytes of both engines' caches."""
        return self.p.memory + self.d.memory


def _side(
    name: str,
    config: Mapping[str, object],
    choices: Choices,
    tp: int,
    block_tokens: int,
    other: Side | None = None,
) -> Side:
    def options(blocks: int) -> EngineOptions:
        return EngineOptions(tp_size=tp, block_tokens=block_tokens, num_blocks=blocks, kv_dtype=choices.kv_dtype)

    try:
        first = next(iter(build_all(config, options(1)).values()))
    except KvxferError as error:
        side = f"--{name.lower()}-"
        of = {"tp_size": f"{side}tp", "block_tokens": f"{side}block-tokens", "kv_dtype": "--kv-dtype"}
        flag = of.get(error.field, "--model")
        raise KvxferError(error.reason, f"{flag}: {error.message}", field=error.field, **error.metadata) from error
    counts = [_count(group, i, name, first, choices.tokens) for i, group in enumerate(first.groups)]
    pools: dict[int, int] = {}
    for pool, count in zip(first.pools, counts, strict=True):
        pools[pool] = pools.get(pool, 0) + count
    needed = max(pools.values())
    blocks = choices.blocks or needed + max(SPARE, needed // 4)
    if blocks < needed:
        raise invalid("blocks", f"--blocks is {blocks}; {choices.tokens} tokens need {needed} on {name}", needed=needed)
    chosen = options(blocks)
    rng = np.random.default_rng([choices.seed, ord(name)])
    lists = _draw(rng, first, counts, blocks, choices)
    for _ in range(100):
        if other is None or not _alike(lists, other.blocks):
            break
        lists = _draw(rng, first, counts, blocks, choices)
    return Side(name, chosen, build_all(config, chosen), lists)


def _count(group: Group, index: int, side: str, layout: CacheLayout, tokens: int) -> int:
    """Blocks that a group needs.  P keeps an older snapshot in its first state group, which must not be read."""
    if group.kind is GroupKind.ATTENTION:
        return -(-tokens // group.block_tokens)
    first = next(i for i, g in enumerate(layout.groups) if g.kind is GroupKind.STATE)
    return 2 if side == "P" and index == first and tokens > 1 else 1


def _draw(
    rng: np.random.Generator, layout: CacheLayout, counts: list[int], blocks: int, choices: Choices
) -> tuple[BlockList, ...]:
    """Block IDs in a scheduler's order, which is any; groups that share memory share no ID."""
    free = {pool: rng.permutation(blocks) for pool in set(layout.pools)}
    lists: list[BlockList] = []
    for group, pool, count in zip(layout.groups, layout.pools, counts, strict=True):
        ids, free[pool] = free[pool][:count].astype(np.int64), free[pool][count:]
        if group.kind is GroupKind.ATTENTION:
            lists.append(BlockList(group.name, ids))
            continue
        # A null block, perhaps an older snapshot, then the one that counts: told apart by position only.
        ids = np.concatenate([np.array([NULL_BLOCK], dtype=np.int64), ids])
        positions = choices.tokens - np.arange(len(ids), dtype=np.int64)[::-1]
        lists.append(BlockList(group.name, ids, positions=np.maximum(positions, 0)))
    return tuple(lists)


def _alike(mine: tuple[BlockList, ...], others: tuple[BlockList, ...]) -> bool:
    """Whether some group's last block has one number on both sides: that would hide a mix-up."""
    theirs = {blocks.group: real(blocks) for blocks in others}
    return any(b.group in theirs and real(b)[-1] == theirs[b.group][-1] for b in mine)


def real(blocks: BlockList) -> Int64:
    """The IDs of a list that stand for blocks."""
    ids: Int64 = np.asarray(blocks.ids, dtype=np.int64)
    found: Int64 = ids[ids != NULL_BLOCK]
    return found
