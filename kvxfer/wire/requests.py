"""Requests of the engine's service as plain frozen data, checked.  Durations are seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvxfer.core.errors import Reason
from kvxfer.core.layout import MAX_BYTES, CacheLayout, Rank
from kvxfer.core.pairing import PairingOptions
from kvxfer.core.resolve import BlockList
from kvxfer.memory.handles import Handle
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.addresses import MAX_RANKS, RankAddress, addresses_from_pb, addresses_to_pb
from kvxfer.wire.blocks import block_lists_from_pb, block_lists_to_pb, tokens
from kvxfer.wire.fields import (
    MAX_INCARNATION,
    MAX_KEY,
    at,
    duration,
    integer,
    optional_seconds,
    optional_text,
    refuse,
    required,
    text,
    token,
    variant,
)
from kvxfer.wire.handles import handle_to_pb, handles_from_pb
from kvxfer.wire.layouts import layout_from_pb, layout_to_pb, rank_from_pb, rank_to_pb
from kvxfer.wire.tickets import Ticket, TicketRank, ticket_from_pb, ticket_to_pb

_MAX_IGNORED: Final = 1_024


@dataclass(frozen=True, slots=True)
class RegisterCache:
    """A registration: who, what lies where, and in which memory (a handle for each region).

    :param ranks: peer address of every rank of the engine, or empty.
    :param replace: an existing registration with other content gives way.
    :param held: whoever registers will hold it, with a stream.
    """

    engine_id: str
    rank: Rank
    compatibility_key: str
    layout: CacheLayout
    memory: tuple[Handle, ...]
    dp_rank: int = 0
    dp_size: int = 1
    ranks: tuple[RankAddress, ...] = ()
    replace: bool = False
    held: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """An engine to read from, with all its ranks; an empty incarnation takes whichever is there."""

    engine_id: str
    ranks: tuple[TicketRank, ...]


@dataclass(frozen=True, slots=True)
class Handshake:
    """Whom to get ready to read from.

    :param options: ``None`` where the caller gave none: what was agreed before holds.
    :param timeout: seconds, or ``None``.
    """

    engine_id: str
    target: Target
    options: PairingOptions | None
    timeout: float | None


@dataclass(frozen=True, slots=True, eq=False)
class TransferSpec:
    """What to read.

    :param transfer_id: empty where the caller gave none.
    :param digest: of a spec with a transfer ID: equal exactly for equal content.
    """

    engine_id: str
    transfer_id: str
    ticket: Ticket
    local_blocks: tuple[BlockList, ...]
    skip_tokens: int
    num_tokens: int
    digest: bytes

    @property
    def target(self) -> Target:
        """The engine of the ticket, in the ticket's incarnations."""
        return Target(self.ticket.engine_id, self.ticket.ranks)


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Read what was prepared (a transfer ID), or prepare and read."""

    engine_id: str
    source: str | TransferSpec
    wait: bool
    timeout: float | None


@dataclass(frozen=True, slots=True, eq=False)
class PublishBlocks:
    """Blocks to hold for ``ttl`` seconds (``None``: the sidecar's setting); ``readers`` is ``None`` where the caller
    does not know their number.
    """

    engine_id: str
    incarnation: str
    request_id: str
    blocks: tuple[BlockList, ...]
    num_tokens: int
    lease_token: bytes = field(repr=False)
    ttl: float | None
    readers: int | None


def register_from_pb(message: pb.RegisterCacheRequest) -> RegisterCache:
    """:raises KvxferError: FIELD_INVALID, LAYOUT_INVALID, MEMORY_HANDLE_INVALID."""
    engine_id = text(message.engine_id, "engine_id")
    required(message, "rank", "")
    rank = rank_from_pb(message.rank, "rank")
    dp_size = integer(message.dp_size or 1, "dp_size", 1, MAX_RANKS)
    dp_rank = integer(message.dp_rank, "dp_rank", 0, dp_size - 1)
    key = text(message.compatibility_key, "compatibility_key", MAX_KEY)
    ranks = addresses_from_pb(message.ranks, rank.tp_size, rank.pp_size) if message.ranks else ()
    required(message, "layout", "")
    layout = layout_from_pb(message.layout)
    memory = handles_from_pb(list(message.memory), layout.regions)
    return RegisterCache(engine_id, rank, key, layout, memory, dp_rank, dp_size, ranks, message.replace, message.held)


def register_to_pb(record: RegisterCache) -> pb.RegisterCacheRequest:
    """A registration as a request."""
    return pb.RegisterCacheRequest(
        engine_id=record.engine_id,
        rank=rank_to_pb(record.rank),
        dp_rank=record.dp_rank,
        dp_size=record.dp_size,
        compatibility_key=record.compatibility_key,
        ranks=addresses_to_pb(record.ranks),
        layout=layout_to_pb(record.layout),
        memory=[handle_to_pb(handle) for handle in record.memory],
        replace=record.replace,
        held=record.held,
    )


def handshake_from_pb(message: pb.HandshakeRequest) -> Handshake:
    """:raises KvxferError: FIELD_INVALID."""
    engine_id = text(message.engine_id, "engine_id")
    if variant(message, "remote", "") == "ticket":
        ticket = ticket_from_pb(message.ticket)
        target = Target(ticket.engine_id, ticket.ranks)
    else:
        remote = message.engine
        ranks = addresses_from_pb(remote.ranks, remote.tp_size, remote.pp_size, prefix="engine")
        target = Target(
            text(remote.engine_id, "engine.engine_id"), tuple(TicketRank(r.rank, "", r.address) for r in ranks)
        )
    options = _options(message.options) if message.HasField("options") else None
    return Handshake(engine_id, target, options, optional_seconds(message, "timeout", ""))


def handshake_to_pb(
    engine_id: str, remote: Ticket | Target, options: PairingOptions | None = None, timeout: float | None = None
) -> pb.HandshakeRequest:
    """A handshake as a request: with a ticket's engine, or with one by its addresses, whatever incarnations it names.

    :raises KvxferError: FIELD_INVALID.
    """
    message = pb.HandshakeRequest(engine_id=engine_id, timeout=None if timeout is None else duration(timeout))
    if isinstance(remote, Ticket):
        message.ticket.CopyFrom(ticket_to_pb(remote))
    else:
        first = remote.ranks[0].rank if remote.ranks else Rank()
        message.engine.CopyFrom(
            pb.RemoteEngine(
                engine_id=remote.engine_id,
                tp_size=first.tp_size,
                pp_size=first.pp_size,
                ranks=addresses_to_pb((r.rank, r.address) for r in remote.ranks),
            )
        )
    if options is not None:
        message.options.CopyFrom(
            pb.HandshakeOptions(
                min_run_bytes=integer(options.min_run_bytes, "options.min_run_bytes", 0, MAX_BYTES),
                ignore_local_groups=sorted(options.ignore_local_groups),
                ignore_remote_groups=sorted(options.ignore_remote_groups),
            )
        )
    return message


def _options(message: pb.HandshakeOptions) -> PairingOptions:
    least = PairingOptions().min_run_bytes
    if message.HasField("min_run_bytes"):
        least = integer(message.min_run_bytes, "options.min_run_bytes", 0, MAX_BYTES)
    return PairingOptions(
        least,
        _names(message.ignore_local_groups, "options.ignore_local_groups"),
        _names(message.ignore_remote_groups, "options.ignore_remote_groups"),
    )


def _names(names: Sequence[str], where: str) -> frozenset[str]:
    integer(len(names), where, 0, _MAX_IGNORED)
    return frozenset(text(name, f"{where}[{i}]") for i, name in enumerate(names))


def spec_from_pb(message: pb.TransferSpec, where: str = "spec") -> TransferSpec:
    """:raises KvxferError: FIELD_INVALID, GROUP_MISMATCH, BLOCK_OUT_OF_RANGE, RANGE_INVALID."""
    required(message, "ticket", where)
    ticket = ticket_from_pb(message.ticket, at(where, "ticket"))
    end = ticket.num_tokens
    if message.HasField("num_tokens"):
        end = tokens(message.num_tokens, at(where, "num_tokens"), 1)
    local: tuple[BlockList, ...] = ()
    # Reading nothing at all gives the ticket back; whoever has only forgotten the lists does not say so twice.
    if message.local_blocks or message.skip_tokens != end:
        local = block_lists_from_pb(message.local_blocks, at(where, "local_blocks"), local=True)
    ends = [("num_tokens", end)]
    ends += [(f"local_blocks[{i}].num_tokens", b.num_tokens) for i, b in enumerate(local) if b.num_tokens is not None]
    for name, value in ends:
        if value > ticket.num_tokens:
            # Beyond what the ticket promises the blocks hold whatever was there before.
            raise refuse(
                at(where, name),
                f"is {value}; the ticket's blocks hold {ticket.num_tokens} tokens",
                reason=Reason.RANGE_NOT_COVERED,
                value=value,
                maximum=ticket.num_tokens,
            )
    return TransferSpec(
        engine_id=text(message.engine_id, at(where, "engine_id")),
        transfer_id=optional_text(message.transfer_id, at(where, "transfer_id")),
        ticket=ticket,
        local_blocks=local,
        skip_tokens=tokens(message.skip_tokens, at(where, "skip_tokens")),
        num_tokens=end,
        digest=hashlib.sha256(message.SerializeToString(deterministic=True)).digest() if message.transfer_id else b"",
    )


def spec_to_pb(
    engine_id: str,
    ticket: Ticket,
    local_blocks: Sequence[BlockList],
    *,
    transfer_id: str = "",
    skip_tokens: int = 0,
    num_tokens: int | None = None,
) -> pb.TransferSpec:
    """What to read, as a message; ``num_tokens`` is the ticket's unless it is given.

    :raises KvxferError: FIELD_INVALID, BLOCK_OUT_OF_RANGE, RANGE_INVALID, STATE_POSITION_MISMATCH.
    """
    return pb.TransferSpec(
        engine_id=engine_id,
        transfer_id=transfer_id,
        ticket=ticket_to_pb(ticket),
        local_blocks=block_lists_to_pb(local_blocks),
        skip_tokens=tokens(skip_tokens, "spec.skip_tokens"),
        num_tokens=None if num_tokens is None else tokens(num_tokens, "spec.num_tokens", 1),
    )


def prepare_from_pb(message: pb.PrepareTransferRequest) -> TransferSpec:
    """:raises KvxferError: as :func:`spec_from_pb`."""
    required(message, "spec", "")
    return spec_from_pb(message.spec)


def read_from_pb(message: pb.ReadBlocksRequest) -> ReadBlocks:
    """:raises KvxferError: FIELD_INVALID, and as :func:`spec_from_pb`."""
    source: str | TransferSpec
    if variant(message, "source", "") == "spec":
        source = spec_from_pb(message.spec)
        engine_id = source.engine_id
        if message.engine_id not in ("", engine_id):
            raise refuse("engine_id", "is not that of spec", value=message.engine_id[:80], spec=engine_id)
    else:
        source = text(message.transfer_id, "transfer_id")
        engine_id = text(message.engine_id, "engine_id")
    wait = message.wait if message.HasField("wait") else True
    return ReadBlocks(engine_id, source, wait, optional_seconds(message, "timeout", ""))


def publish_from_pb(message: pb.PublishBlocksRequest) -> PublishBlocks:
    """:raises KvxferError: FIELD_INVALID, GROUP_MISMATCH, BLOCK_OUT_OF_RANGE, RANGE_INVALID."""
    readers = integer(message.readers, "readers", 1, MAX_RANKS) if message.HasField("readers") else None
    return PublishBlocks(
        engine_id=text(message.engine_id, "engine_id"),
        incarnation=optional_text(message.incarnation, "incarnation", MAX_INCARNATION),
        request_id=text(message.request_id, "request_id"),
        blocks=block_lists_from_pb(message.blocks, "blocks"),
        num_tokens=tokens(message.num_tokens, "num_tokens", 1),
        lease_token=token(message.lease_token, "lease_token"),
        ttl=optional_seconds(message, "ttl", ""),
        readers=readers,
    )


def publish_to_pb(record: PublishBlocks) -> pb.PublishBlocksRequest:
    """A publication as a request.

    :raises KvxferError: FIELD_INVALID, BLOCK_OUT_OF_RANGE, RANGE_INVALID, STATE_POSITION_MISMATCH.
    """
    return pb.PublishBlocksRequest(
        engine_id=record.engine_id,
        incarnation=record.incarnation,
        request_id=record.request_id,
        blocks=block_lists_to_pb(record.blocks),
        num_tokens=tokens(record.num_tokens, "num_tokens", 1),
        lease_token=token(record.lease_token, "lease_token"),
        ttl=None if record.ttl is None else duration(record.ttl),
        readers=None if record.readers is None else integer(record.readers, "readers", 1, MAX_RANKS),
    )
