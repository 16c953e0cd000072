"""Tickets: made by whoever schedules on P, without a call."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.resolve import BlockList
from kvxfer.wire.fields import TOKEN_BYTES
from kvxfer.wire.tickets import Ticket, TicketRank, ticket_to_pb
from kvxfer_client import checks


def new_lease_token() -> bytes:
    """A fresh lease token: 16 random bytes.  A secret; the same one goes to every rank and into the ticket."""
    return secrets.token_bytes(TOKEN_BYTES)


def make_ticket(
    *,
    engine_id: str,
    compatibility_key: str,
    ranks: Iterable[TicketRank],
    request_id: str,
    blocks: Sequence[BlockList],
    num_tokens: int,
    lease_token: bytes,
    ttl: float,
) -> Ticket:
    """What D needs to read a request's blocks from P.

    The scheduler collects ``ranks`` once, after all workers have registered (:attr:`Registered.ticket_rank`).  The
    workers publish the same request ID, blocks, number of tokens and token.

    :param ranks: every rank of the engine, in any order.
    :param blocks: the blocks on P, one list for each group.
    :param num_tokens: tokens whose cache they hold.  An engine with state groups computes N - 1 of N prompt tokens.
    :param lease_token: of :func:`new_lease_token`.
    :param ttl: how long the blocks are held from now on, seconds; at most a day.
    :raises KvxferError: FIELD_INVALID, GROUP_MISMATCH, BLOCK_OUT_OF_RANGE, RANGE_INVALID, STATE_POSITION_MISMATCH.
    """
    places = [
        checks.instance(place, TicketRank, f"ranks[{i}]")
        for i, place in enumerate(checks.each(ranks, "ranks", "a sequence of TicketRanks"))
    ]
    by_number = tuple(sorted(places, key=lambda r: r.rank.number))
    if not by_number:
        raise KvxferError(Reason.FIELD_INVALID, "ranks are empty; a ticket names every rank", field="ranks")
    first = by_number[0].rank
    ticket = Ticket(
        engine_id=checks.text(engine_id, "engine_id"),
        compatibility_key=checks.text(compatibility_key, "compatibility_key"),
        tp_size=first.tp_size,
        pp_size=first.pp_size,
        ranks=by_number,
        request_id=checks.text(request_id, "request_id"),
        blocks=checks.blocks(blocks, "blocks"),
        num_tokens=checks.tokens(num_tokens, "ticket.num_tokens", 1),
        lease_token=checks.token(lease_token, "ticket.lease_token"),
        ttl=checks.seconds(ttl, "ticket.ttl"),
    )
    # Whoever makes a bad ticket shall hear of it here, not D.
    ticket_to_pb(ticket)
    return ticket
