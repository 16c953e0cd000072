"""The scheduler's cache groups, as far as block lists depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.core.resolve import NULL_BLOCK, BlockList
from kvxfer_client.blocks import attention_blocks, snapshot

#: The block that vLLM writes into a list where there is none; the pool never hands it out.
VLLM_NULL_BLOCK = 0


@dataclass(frozen=True)
class CacheGroup:
    """One group of layers with a block list of its own.

    :param name: in layouts and block lists.
    :param block_tokens: tokens in a block; 0: a state group.
    :param window: a token attends to so many tokens, itself included; 0: to all.
    :param chunk: a token attends to those of its own chunk of so many tokens; 0: to all.
    :param scratch: state: blocks at a list's end that are no state.
    """

    name: str
    block_tokens: int
    window: int = 0
    chunk: int = 0
    scratch: int = 0

    @property
    def is_state(self) -> bool:
        """Whether a block is a snapshot."""
        return self.block_tokens == 0

    def needed_from(self, num_tokens: int) -> int:
        """The first token whose cache is needed to compute the token at ``num_tokens``."""
        if self.window:
            return max(0, num_tokens - self.window + 1)
        return num_tokens // self.chunk * self.chunk if self.chunk else 0


def back_off(groups: Sequence[CacheGroup]) -> int:
    """Tokens at the end of a prompt that P leaves to D.

    D computes the last one anyway, to get its first new token.  A state cannot be taken back by one, and P's sliding
    window may have let go of the token that D's last one still needs; full attention alone is just written again.
    """
    return int(any(g.is_state or g.window or g.chunk for g in groups))


def listed(groups: Sequence[CacheGroup], ids: Sequence[Sequence[int]], num_tokens: int) -> tuple[BlockList, ...]:
    """A request's blocks, as the scheduler lists them from token 0 on, as block lists for ``num_tokens`` tokens.

    A state list's last block is the snapshot, but for scratch blocks after it.

    :param ids: one list for each group.
    :raises ValueError: where there is not one list for each group, or one is too short.
    """
    if len(ids) != len(groups):
        raise ValueError(f"{len(ids)} block lists for {len(groups)} groups")
    return tuple(_listed(group, list(each), num_tokens) for group, each in zip(groups, ids, strict=True))


def _listed(group: CacheGroup, ids: list[int], num_tokens: int) -> BlockList:
    if group.is_state:
        kept = ids[: len(ids) - group.scratch] if group.scratch < len(ids) else ids[:1]
        if not kept or kept[-1] == VLLM_NULL_BLOCK:
            raise ValueError(f"state group {group.name} has no block for the snapshot of {num_tokens} tokens: {ids}")
        return snapshot(group.name, kept[-1], num_tokens)
    needed = -(-num_tokens // group.block_tokens)
    if len(ids) < needed:
        raise ValueError(f"group {group.name} has {len(ids)} blocks for {num_tokens} tokens; {needed} are needed")
    return attention_blocks(group.name, [NULL_BLOCK if b == VLLM_NULL_BLOCK else b for b in ids[:needed]])
