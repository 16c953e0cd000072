"""What is published, and what a ticket promises of it.  Pure checks."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

import numpy as np

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, GroupKind
from kvxfer.core.leases import Lease
from kvxfer.core.resolve import BlockList, check_blocks
from kvxfer.wire.peer import OpenRead
from kvxfer.wire.requests import PublishBlocks


def check_publication(layout: CacheLayout, publication: PublishBlocks) -> None:
    """What is published exists and can be read: state groups name a snapshot of exactly ``num_tokens`` tokens.

    :raises KvxferError: GROUP_MISMATCH, STATE_POSITION_MISMATCH, and what
        :func:`kvxfer.core.resolve.check_blocks` raises.
    """
    check_blocks(layout, publication.blocks)
    given: dict[str, BlockList] = {b.group: b for b in publication.blocks}
    for group in layout.groups:
        blocks = given.get(group.name)
        if blocks is None:
            raise KvxferError(
                Reason.GROUP_MISMATCH,
                f"group {group.name} is missing; every group of the layout is published (its list may be empty)",
                field="blocks",
                group=group.name,
            )
        if group.kind is GroupKind.STATE and len(_as_list(blocks.ids)):
            _check_snapshot(group.name, blocks, publication.num_tokens)


def _check_snapshot(name: str, blocks: BlockList, num_tokens: int) -> None:
    positions = _as_list(blocks.positions if blocks.positions is not None else [])
    ids = _as_list(blocks.ids)
    if len(positions) != len(ids) or num_tokens not in [p for i, p in zip(ids, positions, strict=True) if i >= 0]:
        raise KvxferError(
            Reason.STATE_POSITION_MISMATCH,
            f"state group {name}: no listed block is a snapshot of {num_tokens} tokens (positions {positions[:8]})",
            field="blocks",
            group=name,
            num_tokens=num_tokens,
        )


def content_digest(publication: PublishBlocks, digests: Mapping[str, bytes]) -> bytes:
    """Equal exactly for equal content; the ttl is no content.

    :param digests: over the blocks of each group, by its name.
    """
    facts = (publication.request_id, publication.num_tokens, publication.lease_token, publication.readers)
    state = hashlib.sha256(repr(facts).encode())
    for group in sorted(digests):
        state.update(digests[group])
    return state.digest()


def check_promise(lease: Lease, record: OpenRead) -> None:
    """What is held is what the ticket promised.

    :raises KvxferError: LEASE_UNKNOWN.
    """
    if record.num_tokens not in (0, lease.num_tokens):
        raise _other(
            lease,
            f"{lease.num_tokens} tokens, its ticket promises {record.num_tokens}",
            field="num_tokens",
            published=lease.num_tokens,
            promised=record.num_tokens,
        )
    for group, digest in record.digests:
        held = lease.digests.get(group)
        if held is None or not hmac.compare_digest(held, digest):
            what = "no blocks" if held is None else "other blocks"
            raise _other(lease, f"{what} of group {group} than its ticket promises", field="blocks", group=group)


def _other(lease: Lease, what: str, *, field: str, **values: object) -> KvxferError:
    message = f"request {lease.request_id} is published with {what}"
    return KvxferError(Reason.LEASE_UNKNOWN, message, field=field, request_id=lease.request_id, **values)


def _as_list(values: object) -> Sequence[int]:
    listed: list[int] = np.asarray(values, dtype=np.int64).tolist()
    return listed
