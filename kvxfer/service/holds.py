"""Published requests: blocks that P keeps until their readers are done or a time has passed."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, GroupKind
from kvxfer.core.leases import Event, Lease, State
from kvxfer.core.resolve import BlockList, check_blocks
from kvxfer.service.settings import ServiceSettings
from kvxfer.wire.blocks import block_digest
from kvxfer.wire.requests import PublishBlocks


@dataclass
class _Hold:
    lease: Lease
    digest: bytes
    token: bytes


class Holds:
    """The published requests of one registration."""

    def __init__(self, layout: CacheLayout, settings: ServiceSettings) -> None:
        self._layout = layout
        self._settings = settings
        self._held: dict[str, _Hold] = {}

    def __len__(self) -> int:
        return len(self._held)

    def publish(self, publication: PublishBlocks) -> float:
        """Hold a request's blocks; the same content again extends the hold.

        :returns: seconds that are left.
        :raises KvxferError: REQUEST_ID_REUSED (other content), FIELD_INVALID (ttl), LIMIT_EXCEEDED, and what
            :func:`kvxfer.core.resolve.check_blocks` raises.
        """
        ttl = publication.ttl
        if not 0 < ttl <= self._settings.max_hold_ttl:
            raise KvxferError(
                Reason.FIELD_INVALID,
                f"ttl is {ttl} s; allowed are more than 0 and at most {self._settings.max_hold_ttl} s",
                field="ttl",
                value=ttl,
                maximum=self._settings.max_hold_ttl,
            )
        check_blocks(self._layout, publication.blocks)
        _check_complete(self._layout, publication)
        now = time.monotonic()
        self.tick(now)
        held = self._held.get(publication.request_id)
        digest = _digest(publication)
        if held is None:
            if len(self._held) >= self._settings.max_holds:
                raise KvxferError(
                    Reason.LIMIT_EXCEEDED,
                    f"{len(self._held)} requests are published; the limit is {self._settings.max_holds}",
                    limit=self._settings.max_holds,
                )
            held = self._held[publication.request_id] = _Hold(
                Lease(publication.request_id, now + ttl), digest, publication.lease_token
            )
        elif not hmac.compare_digest(held.digest, digest):
            raise KvxferError(
                Reason.REQUEST_ID_REUSED,
                f"request {publication.request_id} is published with other content; withdraw it first",
                field="request_id",
                request_id=publication.request_id,
            )
        held.lease.deadline = max(held.lease.deadline, now + ttl)
        return held.lease.left(now)

    def withdraw(self, request_id: str, token: bytes) -> None:
        """End a hold.

        :raises KvxferError: LEASE_UNKNOWN, LEASE_TOKEN_MISMATCH.
        """
        self.tick(time.monotonic())
        held = self._held.get(request_id)
        if held is None:
            raise KvxferError(
                Reason.LEASE_UNKNOWN,
                f"request {request_id} is not published here, or its time has passed",
                field="request_id",
                request_id=request_id,
            )
        if not hmac.compare_digest(held.token, token):
            raise KvxferError(
                Reason.LEASE_TOKEN_MISMATCH,
                f"the lease token is not the one that request {request_id} was published with",
                field="lease_token",
                request_id=request_id,
            )
        held.lease.apply(Event.WITHDRAW)
        del self._held[request_id]

    def tick(self, now: float) -> None:
        """Let time pass; ``now`` in monotonic seconds."""
        for request_id, held in list(self._held.items()):
            if held.lease.tick(now) is not State.HELD:
                del self._held[request_id]

    def close(self) -> None:
        """End every hold."""
        self._held.clear()


def _digest(publication: PublishBlocks) -> bytes:
    """Equal exactly for equal content; the ttl is no content."""
    facts = (publication.request_id, publication.num_tokens, publication.lease_token, publication.readers)
    state = hashlib.sha256(repr(facts).encode())
    for blocks in sorted(publication.blocks, key=lambda b: b.group):
        state.update(block_digest(blocks))
    return state.digest()


def _check_complete(layout: CacheLayout, publication: PublishBlocks) -> None:
    """What is published can be read: state groups name a snapshot of exactly ``num_tokens`` tokens."""
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


def _as_list(values: object) -> Sequence[int]:
    listed: list[int] = np.asarray(values, dtype=np.int64).tolist()
    return listed
