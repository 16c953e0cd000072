from __future__ import annotations

import base64
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.core.resolve import BlockList
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.tickets import (
    MAX_TICKET_CHARS,
    Ticket,
    TicketRank,
    ticket_from_pb,
    ticket_from_string,
    ticket_to_pb,
    ticket_to_string,
)
from tests.wire.strategies import same_blocks, tickets

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"

TICKET = Ticket(
    engine_id="prefill-0",
    compatibility_key="nemotron-3-nano:fp8",
    tp_size=2,
    pp_size=1,
    ranks=tuple(TicketRank(Rank(t, 2), f"inc-{t}", f"10.0.0.{t + 1}:7000") for t in range(2)),
    request_id="cmpl-42",
    blocks=(BlockList("full", [4, 9, 2]), BlockList("mamba.0", [-1, 3], positions=[0, 4_175])),
    num_tokens=4_175,
    lease_token=bytes(range(16)),
    ttl=30.0,
)
#: The string of the ticket above.  If this changes, tickets of the version before can no longer be read.
STRING = (
    "AQoJcHJlZmlsbC0wEhNuZW1vdHJvbi0zLW5hbm86ZnA4GAIgASoWGgVpbmMtMCINMTAuMC4wLjE6NzAwMCoYCAEaBWluYy0xIg0xMC4wLjAuMjo3"
    "MDAwMgdjbXBsLTQyOgsKBGZ1bGwSAwgSBDoSCgdtYW1iYS4wEgIBBiIDAM8gQM8gShAAAQIDBAUGBwgJCgsMDQ4PUgIIHiXI7y8"
)


def frame(body: bytes) -> str:
    return base64.urlsafe_b64encode(body + zlib.crc32(body).to_bytes(4, "big")).rstrip(b"=").decode()


def same(a: Ticket, b: Ticket) -> bool:
    def plain(ticket: Ticket) -> tuple[object, ...]:
        return (
            *(ticket.engine_id, ticket.compatibility_key, ticket.tp_size, ticket.pp_size, ticket.ranks),
            *(ticket.request_id, ticket.num_tokens, ticket.lease_token, ticket.ttl),
        )

    return plain(a) == plain(b) and all(same_blocks(x, y) for x, y in zip(a.blocks, b.blocks, strict=True))


@given(tickets())
def test_round_trips(ticket: Ticket) -> None:
    message = pb.Ticket.FromString(ticket_to_pb(ticket).SerializeToString())
    assert same(ticket_from_pb(message), ticket)
    string = ticket_to_string(ticket)
    assert set(string) <= set(ALPHABET)
    assert same(ticket_from_string(string), ticket)
    assert ticket_to_string(ticket_from_string(string)) == string


def test_string_form_is_pinned() -> None:
    assert ticket_to_string(TICKET) == STRING
    assert same(ticket_from_string(STRING), TICKET)


def test_order_of_ranks_does_not_matter() -> None:
    assert ticket_to_string(replace(TICKET, ranks=TICKET.ranks[::-1])) == STRING


def test_token_is_not_shown() -> None:
    assert "\\x0e" not in repr(TICKET)
    assert "lease_token" not in repr(TICKET)


def refused(string: str) -> KvxferError:
    with pytest.raises(KvxferError) as caught:
        ticket_from_string(string)
    assert caught.value.field.startswith("ticket")
    return caught.value


def test_every_changed_character_is_refused() -> None:
    for i, old in enumerate(STRING):
        for new in (ALPHABET[(ALPHABET.index(old) + 1) % 64], ALPHABET[ALPHABET.index(old) ^ 32]):
            refused(STRING[:i] + new + STRING[i + 1 :])


def test_every_cut_is_refused() -> None:
    for i in range(len(STRING)):
        refused(STRING[:i])
        refused(STRING[i + 1 :])


@given(st.text(ALPHABET, max_size=200))
def test_random_strings_are_refused(string: str) -> None:
    refused(string)


@pytest.mark.parametrize(
    "string",
    [
        "",
        "=",
        STRING + "=",
        STRING + "==",
        STRING + "A",
        STRING + "\n",
        " " + STRING,
        STRING.replace("A", "\u0410", 1),
        "+/" + STRING,
        "A" * (MAX_TICKET_CHARS + 1),
        frame(b""),
        frame(b"\x01"),
        frame(b"\x01\xff\xff\xff"),
    ],
)
def test_damaged_strings_are_refused(string: str) -> None:
    assert refused(string).reason is Reason.FIELD_INVALID


def test_version_that_is_not_known_is_named() -> None:
    error = refused(frame(b"\x02" + ticket_to_pb(TICKET).SerializeToString()))
    assert dict(error.metadata) == {"version": "2", "supported": "1"}


@pytest.mark.parametrize(
    "name, value, field",
    [
        ("engine_id", "", "engine_id"),
        ("compatibility_key", "", "compatibility_key"),
        ("compatibility_key", "x" * 1_025, "compatibility_key"),
        ("tp_size", 0, "tp_size"),
        ("tp_size", 3, "ranks"),
        ("pp_size", 2, "ranks"),
        ("request_id", "a\tb", "request_id"),
        ("num_tokens", 0, "num_tokens"),
        ("num_tokens", 2**40 + 1, "num_tokens"),
        ("lease_token", bytes(15), "lease_token"),
        ("lease_token", b"", "lease_token"),
    ],
)
def test_refuses_and_names_the_field(name: str, value: object, field: str) -> None:
    message = ticket_to_pb(TICKET)
    setattr(message, name, value)
    with pytest.raises(KvxferError) as caught:
        ticket_from_pb(message, "spec.ticket")
    assert caught.value.field == f"spec.ticket.{field}"


@pytest.mark.parametrize("name, field", [("ttl", "ttl"), ("blocks", "blocks"), ("ranks", "ranks")])
def test_refuses_what_is_missing(name: str, field: str) -> None:
    message = ticket_to_pb(TICKET)
    message.ClearField(name)
    with pytest.raises(KvxferError) as caught:
        ticket_from_pb(message)
    assert caught.value.field == f"ticket.{field}"


@pytest.mark.parametrize("name, value", [("incarnation", ""), ("incarnation", "x" * 65), ("address", "host")])
def test_refuses_ranks(name: str, value: str) -> None:
    message = ticket_to_pb(TICKET)
    setattr(message.ranks[1], name, value)
    with pytest.raises(KvxferError) as caught:
        ticket_from_pb(message)
    assert caught.value.field == f"ticket.ranks[1].{name}"


@pytest.mark.parametrize(
    "change",
    [
        {"lease_token": b"short"},
        {"ttl": 0.0},
        {"ttl": 86_401.0},
        {"num_tokens": 0},
        {"ranks": ()},
        {"ranks": (TICKET.ranks[0], TicketRank(Rank(1, 4), "i", "h:1"))},
        {"blocks": (BlockList("a", [1]), BlockList("a", [2]))},
    ],
)
def test_bad_ticket_is_not_written(change: dict[str, object]) -> None:
    with pytest.raises(KvxferError):
        ticket_to_string(replace(TICKET, **change))  # type: ignore[arg-type]


def test_200_000_ids_fit() -> None:
    ticket = replace(TICKET, blocks=(BlockList("full", range(200_000)),))
    string = ticket_to_string(ticket)
    assert len(string) < 1_000_000
    assert same(ticket_from_string(string), ticket)
