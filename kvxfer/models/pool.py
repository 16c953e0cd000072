"""The arithmetic of a hybrid allocator: which layers form a group, and how large a block and its page are.

The rules are those of vLLM's hybrid cache manager (``v1/core/kv_cache_utils.py`` for the groups; the block size is
aligned in ``platforms/interface.py``, before that in ``model_executor/models/config.py``), put in our own words:

- Groups hold about as many layers as the rarest kind has; a commoner kind is dealt over several groups by stride, so
  that every pipeline stage gets some of each.  The i-th layer of every group lies over the i-th tensor.
- The attention block grows, by kernel blocks, until its page is at least as large as a state snapshot; a state row is
  then padded to that page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.models.fields import field_error
from kvxfer.models.options import MAX_TOKENS, EngineOptions

#: Where no kind has this many times the layers of the rarest, groups are as large as the commonest kind
#: (12 sliding-window and 13 full layers make two groups, not three).
NEARLY_EVEN: Final = (3, 2)

T = TypeVar("T")


def group_size(counts: Sequence[int]) -> int:
    """Layers in a group, from the number of layers of each kind."""
    fewest, most = min(counts), max(counts)
    return most if most * NEARLY_EVEN[1] < fewest * NEARLY_EVEN[0] else fewest


def deal(layers: Sequence[T], size: int) -> list[tuple[T, ...]]:
    """Layers of one kind dealt over ``ceil(len / size)`` groups: every n-th layer, starting one later each time."""
    groups = -(-len(layers) // size)
    return [tuple(layers[first::groups]) for first in range(groups)]


@dataclass(frozen=True, slots=True)
class Pages:
    """What one block of every group takes.

    :param page: bytes from one logical block to the next, the same for every group.
    :param kernel_blocks: for each attention kind, kernel blocks in a logical block (the ratio).
    """

    page: int
    kernel_blocks: Mapping[str, int]


def logical_tokens(options: EngineOptions, kernel_bytes: int, state_bytes: int) -> int:
    """Tokens of a pooled logical block.

    The smallest multiple of the alignment whose page is no smaller than ``state_bytes``.  The alignment is the kernel
    block, the block size that the engine was given, and, where it keeps snapshots at block boundaries, the scan chunk.

    :param kernel_bytes: bytes of one kernel block, all components.
    :param state_bytes: bytes of the largest snapshot, 0 where there is none.
    :raises KvxferError: FIELD_INVALID where no block of at most 2^24 tokens will do.
    """
    align = math.lcm(options.block_tokens, options.logical_block_tokens or 1, options.state_align_tokens or 1)
    unit = align // options.block_tokens * kernel_bytes
    tokens = align * max(1, -(-state_bytes // unit))
    if tokens > MAX_TOKENS:
        allowed = f"what gives logical blocks of at most {MAX_TOKENS} tokens, not of {tokens}"
        raise field_error("block_tokens", options.block_tokens, allowed)
    return tokens


def pooled_pages(options: EngineOptions, kernels: Mapping[str, int], states: Sequence[int]) -> Pages:
    """One page size for all groups of a pool.

    :param kernels: bytes of a kernel block by attention kind.
    :param states: bytes of a snapshot, for each kind of state.
    :raises KvxferError: UNSUPPORTED where two attention kinds cannot have pages of one size without a rest.
    """
    largest_state = max(states, default=0)
    if not kernels:
        return Pages(largest_state, {})
    largest = max(kernels.values())
    page = logical_tokens(options, largest, largest_state) // options.block_tokens * largest
    for kind, size in kernels.items():
        if page % size:
            raise KvxferError(
                Reason.UNSUPPORTED,
                f"a pool's page of {page} bytes is no multiple of a kernel block of {kind} ({size} bytes); such layers "
                "can only be laid out unpooled",
                field="pooled",
                kind=kind,
                page=page,
                kernel_bytes=size,
            )
    return Pages(page, {kind: page // size for kind, size in kernels.items()})
