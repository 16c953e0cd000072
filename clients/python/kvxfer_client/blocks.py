"""Block lists, as an engine's scheduler hands out block IDs.

A list says where it stands in the sequence; positions and ranges are tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, GroupKind
from kvxfer.core.resolve import NULL_BLOCK, BlockList


def attention_blocks(
    group: str,
    ids: ArrayLike,
    first_position: int = 0,
    skip_tokens: int | None = None,
    num_tokens: int | None = None,
) -> BlockList:
    """The blocks of an attention group, in sequence order.

    :param ids: integers; -1 where there is no block (it may stand wherever nothing is read).
    :param first_position: the token at which the first listed block starts; a multiple of the group's block size.
    :param skip_tokens: on the reader's side: where this group's read begins, instead of the request's (a sliding window
        needs its last tokens only).
    :param num_tokens: likewise where it ends.
    """
    return BlockList(group, ids, first_position, None, skip_tokens, num_tokens)


def state_blocks(group: str, ids: ArrayLike, positions: ArrayLike) -> BlockList:
    """The snapshots of a state group.

    :param positions: for each ID the number of tokens folded into that snapshot; anything for a null block.
    """
    return BlockList(group, ids, positions=positions)


def snapshot(group: str, block_id: int, num_tokens: int) -> BlockList:
    """The one block of a state group that holds the snapshot of exactly ``num_tokens`` tokens."""
    return state_blocks(group, [block_id], [num_tokens])


def grouped(ids: Sequence[Sequence[int]], layout: CacheLayout, num_tokens: int) -> tuple[BlockList, ...]:
    """The scheduler's bare lists as block lists, for the simple case.

    One list of IDs for each group, in the layout's order.  Every attention list starts at token 0, and the last block
    of every state list is the snapshot of ``num_tokens`` tokens; the blocks before it are left out, since nobody says
    what they hold.  Where that is not so, build the lists with :func:`attention_blocks` and :func:`state_blocks`.

    :raises KvxferError: GROUP_MISMATCH where there is not one list for each group; STATE_POSITION_MISMATCH where a
        state list is empty or ends with a null block.
    """
    if len(ids) != len(layout.groups):
        names = ", ".join(group.name for group in layout.groups)
        raise KvxferError(
            Reason.GROUP_MISMATCH,
            f"{len(ids)} lists are given for {len(layout.groups)} groups ({names}); one for each is needed",
            field="ids",
            lists=len(ids),
            groups=names,
        )
    found = []
    for i, (group, listed) in enumerate(zip(layout.groups, ids, strict=True)):
        if group.kind is GroupKind.ATTENTION:
            # An empty list has no type of its own; NumPy would make it one of floats.
            found.append(attention_blocks(group.name, np.asarray(listed, dtype=None if len(listed) else np.int64)))
        elif len(listed) == 0 or listed[-1] == NULL_BLOCK:
            raise KvxferError(
                Reason.STATE_POSITION_MISMATCH,
                f"state group {group.name}: its list ends with no block to be the snapshot of {num_tokens} tokens",
                field=f"ids[{i}]",
                group=group.name,
                num_tokens=num_tokens,
            )
        else:
            found.append(snapshot(group.name, listed[-1], num_tokens))
    return tuple(found)
