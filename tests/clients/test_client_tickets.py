"""Tickets as a scheduler makes them."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer_client import (
    KvxferError,
    Rank,
    Reason,
    Registered,
    Ticket,
    TicketRank,
    attention_blocks,
    make_ticket,
    new_lease_token,
    ticket_from_params,
    ticket_from_string,
    ticket_to_params,
    ticket_to_string,
)


def make(**changes: Any) -> Ticket:
    ranks = [TicketRank(Rank(tp, 2, pp, 2), f"i{tp}{pp}", f"host-{pp}:{9000 + tp}") for tp in (1, 0) for pp in (0, 1)]
    facts: dict[str, Any] = {
        "engine_id": "prefill",
        "compatibility_key": "key",
        "ranks": ranks,
        "request_id": "r",
        "blocks": [attention_blocks("attn", [1, 2])],
        "num_tokens": 20,
        "lease_token": bytes(range(16)),
        "ttl": 5.0,
    }
    return make_ticket(**(facts | changes))


def test_ranks_may_come_in_any_order() -> None:
    ticket = make()
    assert (ticket.tp_size, ticket.pp_size) == (2, 2)
    assert [r.incarnation for r in ticket.ranks] == ["i00", "i10", "i01", "i11"]


def test_it_survives_a_router() -> None:
    string = ticket_to_string(make())
    assert ticket_to_string(ticket_from_string(string)) == string
    assert ticket_to_string(ticket_from_params(ticket_to_params(make()))) == string


def test_a_registration_gives_its_rank() -> None:
    registered = Registered("e", Rank(), "i", "f", {}, "h:1")
    assert make(ranks=[registered.ticket_rank]).ranks[0].address == "h:1"


def test_lease_tokens_are_random() -> None:
    tokens = {new_lease_token() for _ in range(100)}
    assert len(tokens) == 100
    assert {len(token) for token in tokens} == {16}


@pytest.mark.parametrize(
    "field, changes",
    [
        ("ranks", {"ranks": []}),
        ("ticket.ranks", {"ranks": [TicketRank(Rank(0, 2), "i", "h:1")]}),
        ("ticket.ranks", {"ranks": [TicketRank(Rank(0, 2), "i", "h:1"), TicketRank(Rank(1, 4), "i", "h:2")]}),
        ("ticket.ranks[0].address", {"ranks": [TicketRank(Rank(), "i", "unix:/etc/socket")]}),
        ("ticket.lease_token", {"lease_token": b"short"}),
        ("ticket.ttl", {"ttl": 0.0}),
        ("ticket.ttl", {"ttl": 100_000.0}),
        ("ticket.request_id", {"request_id": ""}),
    ],
)
def test_bad_tickets_are_refused_where_they_are_made(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(KvxferError) as caught:
        make(**changes)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, field)


def test_num_tokens_that_cannot_be() -> None:
    for num_tokens in (0, -1, 2**41):
        with pytest.raises(KvxferError) as caught:
            make(num_tokens=num_tokens)
        assert caught.value.reason is Reason.RANGE_INVALID
