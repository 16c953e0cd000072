"""Block lists, as an engine's scheduler hands out block IDs.

A list says where it stands in the sequence; positions and ranges are tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, Group, GroupKind
from kvxfer.core.resolve import NULL_BLOCK, BlockList
from kvxfer_client import checks


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

    :raises KvxferError: GROUP_MISMATCH where there is not one list for each group; FIELD_INVALID
        where a list holds anything but whole numbers; RANGE_NOT_COVERED where an attention list has too few blocks for
        the tokens (an empty one says that nothing of its group is read); STATE_POSITION_MISMATCH where a state list is
        empty or ends with a null block.
    """
    checks.instance(layout, CacheLayout, "layout")
    end = checks.tokens(num_tokens, "num_tokens")
    lists = checks.each(ids, "ids", "one list of block IDs for each group")
    if len(lists) != len(layout.groups):
        names = ", ".join(group.name for group in layout.groups)
        raise KvxferError(
            Reason.GROUP_MISMATCH,
            f"{len(lists)} lists are given for {len(layout.groups)} groups ({names}); one for each is needed",
            field="ids",
            lists=len(lists),
            groups=names,
        )
    found = []
    for i, (group, given) in enumerate(zip(layout.groups, lists, strict=True)):
        listed = _numbers(given, group, f"ids[{i}]")
        if group.kind is GroupKind.ATTENTION:
            needed = -(-end // group.block_tokens)
            if 0 < len(listed) < needed:
                raise KvxferError(
                    Reason.RANGE_NOT_COVERED,
                    f"group {group.name}: {len(listed)} blocks of {group.block_tokens} tokens do not hold {end} "
                    f"tokens; {needed} are needed",
                    field=f"ids[{i}]",
                    group=group.name,
                    blocks=len(listed),
                    needed=needed,
                )
            found.append(attention_blocks(group.name, listed))
        elif len(listed) == 0 or listed[-1] == NULL_BLOCK:
            raise KvxferError(
                Reason.STATE_POSITION_MISMATCH,
                f"state group {group.name}: its list ends with no block to be the snapshot of {end} tokens",
                field=f"ids[{i}]",
                group=group.name,
                num_tokens=end,
            )
        else:
            found.append(snapshot(group.name, int(listed[-1]), end))
    return tuple(found)


def _numbers(given: object, group: Group, field: str) -> NDArray[np.int64]:
    """The IDs of one group; an empty list has no type of its own, and NumPy would make it one of floats."""
    try:
        array = np.asarray(given)
    except ValueError:  # lists of unlike lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        found = f"{array.dtype} in {array.ndim} dimensions"
        if array.ndim == 1 and isinstance(given, list | tuple):
            strange = next((x for x in given if not isinstance(x, int | np.integer)), None)
            found = f"a list with {strange!r:.40}"
        raise KvxferError(
            Reason.FIELD_INVALID,
            f"{field}, of group {group.name}, is {found}; a list of whole numbers is needed",
            field=field,
            group=group.name,
        )
    return array.astype(np.int64)
