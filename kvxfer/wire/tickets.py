"""Tickets: what a router carries, unopened, from P to D.  As data, as a message and as a string.

The string is base64url without padding over ``version byte | message | CRC-32 (big endian) of all before``.  The
message is serialised deterministically, ranks by number, so that equal tickets are equal strings.  The checksum finds
damage on the way; it is no protection: whoever has a ticket may read the blocks.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass, field
from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.core.resolve import BlockList
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.addresses import all_ranks
from kvxfer.wire.blocks import block_lists_from_pb, block_lists_to_pb, tokens
from kvxfer.wire.fields import (
    MAX_INCARNATION,
    MAX_KEY,
    address,
    at,
    duration,
    parse,
    refuse,
    seconds,
    text,
    token,
)

#: First byte of a ticket's string form.
STRING_VERSION: Final = 1
#: Longest ticket that is looked at: as a message, and as a string.
MAX_TICKET_BYTES: Final = 15 * 1024 * 1024
MAX_TICKET_CHARS: Final = (MAX_TICKET_BYTES + 5) * 4 // 3 + 4

_CRC_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class TicketRank:
    """One rank that a ticket leads to; ``incarnation`` as RegisterCache answered, ``address`` as ``host:port``."""

    rank: Rank
    incarnation: str
    address: str


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """What D needs to know about a request's blocks on P.

    Compare tickets by their strings; two objects are never equal (block lists hold arrays).

    :param ranks: all ranks of the engine, by number.
    :param blocks: the blocks on P, one list for each group.
    :param num_tokens: tokens whose cache they hold.
    :param lease_token: 16 random bytes; a secret.
    :param ttl: how long the blocks are held from the making of the ticket, seconds.
    """

    engine_id: str
    compatibility_key: str
    tp_size: int
    pp_size: int
    ranks: tuple[TicketRank, ...]
    request_id: str
    blocks: tuple[BlockList, ...]
    num_tokens: int
    lease_token: bytes = field(repr=False)
    ttl: float


def ticket_from_pb(message: pb.Ticket, field: str = "ticket") -> Ticket:
    """Check and convert a ticket.

    :param field: where the message stands in the request.
    :raises KvxferError: FIELD_INVALID, RANGE_INVALID, or as :func:`kvxfer.wire.blocks.block_lists_from_pb`.
    """
    ranks = tuple(
        TicketRank(
            rank,
            text(place.incarnation, at(where, "incarnation"), MAX_INCARNATION),
            address(place.address, at(where, "address")),
        )
        for where, rank, place in all_ranks(message.ranks, message.tp_size, message.pp_size, "ranks", field)
    )
    return Ticket(
        engine_id=text(message.engine_id, at(field, "engine_id")),
        compatibility_key=text(message.compatibility_key, at(field, "compatibility_key"), MAX_KEY),
        tp_size=message.tp_size,
        pp_size=message.pp_size,
        ranks=ranks,
        request_id=text(message.request_id, at(field, "request_id")),
        blocks=block_lists_from_pb(message.blocks, at(field, "blocks")),
        num_tokens=tokens(message.num_tokens, at(field, "num_tokens"), 1),
        lease_token=token(message.lease_token, at(field, "lease_token")),
        ttl=seconds(message, "ttl", field),
    )


def ticket_to_pb(ticket: Ticket) -> pb.Ticket:
    """A ticket as a message, checked as one that comes in.

    :raises KvxferError: as :func:`ticket_from_pb`.
    """
    ranks = [
        pb.TicketRank(tp_rank=r.rank.tp_rank, pp_rank=r.rank.pp_rank, incarnation=r.incarnation, address=r.address)
        for r in sorted(ticket.ranks, key=lambda r: r.rank.number)
    ]
    sizes = (ticket.tp_size, ticket.pp_size)
    if strange := [r.rank for r in ticket.ranks if (r.rank.tp_size, r.rank.pp_size) != sizes]:
        raise refuse(
            "ticket.ranks",
            f"hold a rank of {strange[0].tp_size} x {strange[0].pp_size}, not of {sizes[0]} x {sizes[1]}",
        )
    message = pb.Ticket(
        engine_id=ticket.engine_id,
        compatibility_key=ticket.compatibility_key,
        tp_size=ticket.tp_size,
        pp_size=ticket.pp_size,
        ranks=ranks,
        request_id=ticket.request_id,
        blocks=block_lists_to_pb(ticket.blocks),
        num_tokens=ticket.num_tokens,
        lease_token=ticket.lease_token,
        ttl=duration(ticket.ttl),
    )
    ticket_from_pb(message)
    return message


def ticket_to_string(ticket: Ticket) -> str:
    """The ticket's canonical string.

    :raises KvxferError: FIELD_INVALID, RANGE_INVALID, GROUP_MISMATCH, BLOCK_OUT_OF_RANGE, STATE_POSITION_MISMATCH.
    """
    body = bytes([STRING_VERSION]) + ticket_to_pb(ticket).SerializeToString(deterministic=True)
    framed = body + zlib.crc32(body).to_bytes(_CRC_BYTES, "big")
    return base64.urlsafe_b64encode(framed).rstrip(b"=").decode()


def ticket_from_string(value: str, field: str = "ticket") -> Ticket:
    """Read a ticket's string.

    :param field: what to call it in errors.
    :raises KvxferError: FIELD_INVALID where it is damaged, cut short or of another version; that, GROUP_MISMATCH,
        BLOCK_OUT_OF_RANGE, RANGE_INVALID or STATE_POSITION_MISMATCH for what it holds.
    """
    if len(value) > MAX_TICKET_CHARS:
        raise refuse(field, f"has {len(value)} characters; allowed are {MAX_TICKET_CHARS}", value=len(value))
    try:
        raw = value.encode("ascii")
        framed = base64.b64decode(raw + b"=" * (-len(raw) % 4), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise _damaged(field, "is not base64url") from None
    # One string per ticket: no padding, no characters of the other alphabet, no stray bits at the end.
    if base64.urlsafe_b64encode(framed).rstrip(b"=") != raw:
        raise _damaged(field, "is not base64url without padding")
    body, checksum = framed[:-_CRC_BYTES], framed[-_CRC_BYTES:]
    if not body or zlib.crc32(body).to_bytes(_CRC_BYTES, "big") != checksum:
        raise _damaged(field, "is damaged or cut short: its checksum is wrong")
    if body[0] != STRING_VERSION:
        raise refuse(
            field,
            f"is a ticket of version {body[0]}; this side reads version {STRING_VERSION}",
            version=body[0],
            supported=STRING_VERSION,
        )
    return ticket_from_pb(parse(pb.Ticket, body[1:], field, MAX_TICKET_BYTES), field)


def _damaged(field: str, message: str) -> KvxferError:
    return KvxferError(Reason.FIELD_INVALID, f"{field} {message}", field=field)
