"""Tickets inside the ``kv_transfer_params`` dictionary that vLLM's proxies pass from P's answer to D's request.

The proxies know a few keys and copy the rest; the whole ticket travels as a string under ``kvxfer_ticket`` and is what
counts.  The keys beside it are for the proxies and for people, and must agree with it: a dictionary whose parts belong
to different requests is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from kvxfer.core.errors import KvxferError
from kvxfer.wire.fields import refuse, split_address
from kvxfer.wire.tickets import Ticket, ticket_from_string, ticket_to_string

#: The key that holds the ticket's string.
TICKET_KEY: Final = "kvxfer_ticket"
#: The key that holds the number of tokens, as a string: JSON readers that know doubles only would round large integers.
TOKENS_KEY: Final = "kvxfer_num_tokens"


def prefill_params() -> dict[str, object]:
    """What the router puts into the request that it sends to P."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


def ticket_to_params(ticket: Ticket) -> dict[str, object]:
    """What P answers, and the router puts into the request that it sends to D; JSON types only.

    ``remote_host`` and ``remote_port`` are those of rank 0.

    :raises KvxferError: as :func:`kvxfer_client.ticket_to_string`.
    """
    string = ticket_to_string(ticket)
    host, port = split_address(min(ticket.ranks, key=lambda r: r.rank.number).address)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": ticket.engine_id,
        "remote_block_ids": _block_ids(ticket),
        "remote_host": host,
        "remote_port": port,
        "remote_request_id": ticket.request_id,
        "tp_size": ticket.tp_size,
        TOKENS_KEY: str(ticket.num_tokens),
        TICKET_KEY: string,
    }


def ticket_from_params(params: Mapping[str, object]) -> Ticket:
    """The ticket in a dictionary, checked against the keys beside it.

    Keys that are missing or ``None`` are not compared.  Integers may have become doubles or strings on the way.

    :raises KvxferError: FIELD_INVALID where there is no ticket, or a key contradicts it; or as
        :func:`kvxfer_client.ticket_from_string`.  The field is ``kv_transfer_params`` and the key.
    """
    value = params.get(TICKET_KEY)
    if not isinstance(value, str):
        raise _refuse(TICKET_KEY, "must be set to a ticket's string" if value is None else "must be a string")
    ticket = ticket_from_string(value, _path(TICKET_KEY))
    host, port = split_address(min(ticket.ranks, key=lambda r: r.rank.number).address)
    expected: tuple[tuple[str, str | int], ...] = (
        ("remote_engine_id", ticket.engine_id),
        ("remote_request_id", ticket.request_id),
        ("remote_host", host),
        ("remote_port", port),
        ("tp_size", ticket.tp_size),
        (TOKENS_KEY, ticket.num_tokens),
    )
    for key, right in expected:
        found = params.get(key)
        if found is not None and (_integer(found, key) if isinstance(right, int) else found) != right:
            raise _refuse(key, f"is {str(found)[:80]!r}; the ticket says {right!r}")
    blocks = params.get("remote_block_ids")
    if blocks is not None and _given_ids(blocks) != _block_ids(ticket):
        raise _refuse("remote_block_ids", "are not those of the ticket")
    return ticket


def _block_ids(ticket: Ticket) -> list[list[int]]:
    return [np.asarray(blocks.ids, dtype=np.int64).tolist() for blocks in ticket.blocks]


def _given_ids(value: object) -> list[list[int]]:
    key = "remote_block_ids"
    return [[_integer(block, key) for block in _list(group, key)] for group in _list(value, key)]


def _list(value: object, key: str) -> Sequence[object]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _refuse(key, "must be a list of lists, one for each group")
    return value


def _integer(value: object, key: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    if isinstance(value, str) and len(value) <= 20 and value.removeprefix("-").isdecimal() and value.isascii():
        return int(value)
    raise _refuse(key, f"holds {str(value)[:80]!r}, which is no integer")


def _refuse(key: str, message: str) -> KvxferError:
    return refuse(_path(key), message)


def _path(key: str) -> str:
    return f"kv_transfer_params.{key}"
