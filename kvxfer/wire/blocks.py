"""Block lists as messages, and the digest over one.

Packed numbers go to NumPy arrays and back without a Python integer for each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import MAX_GROUPS
from kvxfer.core.resolve import MAX_TOKENS, NULL_BLOCK, BlockList
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.fields import at, refuse, text

#: Most block IDs in all lists of one message.
MAX_IDS: Final = 1_048_576
#: One past the largest block ID that travels.
_ID_LIMIT: Final = 2**31


class _Lists(Protocol):
    """A repeated field of block lists."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> pb.BlockList: ...


def block_lists_from_pb(lists: _Lists, field: str, *, local: bool = False) -> tuple[BlockList, ...]:
    """Check and convert the lists of one side.

    Whether groups and blocks exist is for whoever knows the layout.

    :param field: where the lists stand (``spec.ticket.blocks``).
    :param local: whether they say where a read shall go, and may narrow its range.
    :returns: lists whose ``ids`` and ``positions`` are int64.
    :raises KvxferError: FIELD_INVALID, GROUP_MISMATCH (a group twice), BLOCK_OUT_OF_RANGE, RANGE_INVALID,
        STATE_POSITION_MISMATCH (positions, but not one for each ID).
    """
    count = len(lists)
    if not 1 <= count <= MAX_GROUPS:
        raise refuse(field, f"are {count} lists; allowed are 1 to {MAX_GROUPS}", value=count, maximum=MAX_GROUPS)
    total = sum(len(lists[i].block_ids) for i in range(count))
    if total > MAX_IDS:
        raise refuse(field, f"hold {total} block IDs; allowed are {MAX_IDS}", value=total, maximum=MAX_IDS)
    seen: set[str] = set()
    found = []
    for i in range(count):
        blocks = _from_pb(lists[i], f"{field}[{i}]", local)
        if blocks.group in seen:
            raise refuse(
                f"{field}[{i}].group",
                f"is {blocks.group}, which is listed before",
                reason=Reason.GROUP_MISMATCH,
                group=blocks.group,
            )
        seen.add(blocks.group)
        found.append(blocks)
    return tuple(found)


def block_lists_to_pb(lists: Sequence[BlockList]) -> list[pb.BlockList]:
    """Lists as messages.

    :raises KvxferError: BLOCK_OUT_OF_RANGE for IDs, RANGE_INVALID for positions that do not fit the message.
    """
    return [_to_pb(blocks) for blocks in lists]


def block_digest(blocks: BlockList) -> bytes:
    """SHA-256 over one group's blocks: what ``BlockDigest`` carries.  README.md of the protos says over which bytes."""
    name = blocks.group.encode()
    ids = _int64(blocks.ids)
    positions = _meant(blocks, ids)
    state = hashlib.sha256()
    state.update(len(name).to_bytes(4, "little") + name)
    state.update(int(blocks.first_position).to_bytes(8, "little"))
    for array in (ids, positions):
        state.update(len(array).to_bytes(8, "little"))
        state.update(array.astype("<i8").tobytes())
    return state.digest()


def tokens(value: int, field: str, least: int = 0) -> int:
    """A number of tokens, or a position.  :raises KvxferError: RANGE_INVALID."""
    if not least <= value <= MAX_TOKENS:
        raise refuse(
            field, f"is {value}; allowed are {least} to {MAX_TOKENS}", reason=Reason.RANGE_INVALID, value=value
        )
    return value


def _from_pb(message: pb.BlockList, field: str, local: bool) -> BlockList:
    group = text(message.group, at(field, "group"))
    # NumPy reads the container's own buffer.  The dtype is the field's, so that nothing can wrap around.
    ids = np.array(message.block_ids, dtype=np.int32).astype(np.int64)
    if ids.size and int(ids.min()) < NULL_BLOCK:
        bad = int(ids.min())
        raise refuse(
            at(field, "block_ids"),
            f"hold {bad}; a block ID is 0 or more, and {NULL_BLOCK} is a null block",
            reason=Reason.BLOCK_OUT_OF_RANGE,
            group=group,
            block=bad,
        )
    ends: list[int | None] = []
    for name in ("skip_tokens", "num_tokens"):
        there = message.HasField("skip_tokens" if name == "skip_tokens" else "num_tokens")
        if there and not local:
            raise refuse(at(field, name), "belongs to local_blocks only", group=group)
        ends.append(tokens(int(getattr(message, name)), at(field, name)) if there else None)
    return BlockList(
        group,
        ids,
        tokens(message.first_position, at(field, "first_position")),
        _positions(message, group, len(ids), at(field, "snapshot_positions")),
        *ends,
    )


def _positions(message: pb.BlockList, group: str, ids: int, field: str) -> NDArray[np.int64] | None:
    if not message.snapshot_positions:
        return None
    count = len(message.snapshot_positions)
    if count != ids:
        raise refuse(
            field,
            f"are {count} for {ids} block IDs; a state group has one for each",
            reason=Reason.STATE_POSITION_MISMATCH,
            group=group,
            positions=count,
            blocks=ids,
        )
    positions = np.array(message.snapshot_positions, dtype=np.uint64)
    tokens(int(positions.max()), field)
    return positions.astype(np.int64)


def _to_pb(blocks: BlockList) -> pb.BlockList:
    ids = _int64(blocks.ids)
    if ids.size and not (int(ids.min()) >= NULL_BLOCK and int(ids.max()) < _ID_LIMIT):
        raise KvxferError(
            Reason.BLOCK_OUT_OF_RANGE,
            f"group {blocks.group}: block IDs are {NULL_BLOCK} to {_ID_LIMIT - 1}",
            field="block_ids",
            group=blocks.group,
        )
    message = pb.BlockList(
        group=blocks.group,
        block_ids=ids.tolist(),
        first_position=tokens(blocks.first_position, "first_position"),
        skip_tokens=blocks.skip_tokens,
        num_tokens=blocks.num_tokens,
    )
    positions = _meant(blocks, ids)
    for bound in (positions.min(initial=0), positions.max(initial=0)):
        tokens(int(bound), "snapshot_positions")
    message.snapshot_positions.extend(positions.tolist())
    return message


def _meant(blocks: BlockList, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The positions, empty where there are none.  What stands beside a null block means nothing: 0 here."""
    if blocks.positions is None:
        return np.zeros(0, np.int64)
    positions = _int64(blocks.positions)
    if len(positions) != len(ids):
        raise KvxferError(
            Reason.STATE_POSITION_MISMATCH,
            f"group {blocks.group}: {len(ids)} block IDs need as many snapshot positions, not {len(positions)}",
            field="snapshot_positions",
            group=blocks.group,
        )
    return np.where(ids == NULL_BLOCK, 0, positions)


def _int64(values: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise KvxferError(
            Reason.FIELD_INVALID, f"a list of integers is needed, not {array.dtype} in {array.ndim} dimensions"
        )
    return array.astype(np.int64)
