from __future__ import annotations

import json

import pytest
from hypothesis import given

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.wire.params import TICKET_KEY, prefill_params, ticket_from_params, ticket_to_params
from kvxfer.wire.tickets import Ticket, ticket_to_string
from tests.wire.strategies import tickets
from tests.wire.test_tickets import STRING, TICKET


def doubles(value: object) -> object:
    """What a JSON reader that knows doubles only makes of it."""
    if isinstance(value, bool) or not isinstance(value, int | list | dict):
        return value
    if isinstance(value, int):
        return float(value)
    if isinstance(value, list):
        return [doubles(item) for item in value]
    return {key: doubles(item) for key, item in value.items()}


@given(tickets())
def test_survives_json_and_doubles(ticket: Ticket) -> None:
    params = ticket_to_params(ticket)
    string = ticket_to_string(ticket)
    assert ticket_to_string(ticket_from_params(params)) == string
    hop = json.loads(json.dumps(params))
    assert hop == params
    assert ticket_to_string(ticket_from_params(hop)) == string
    lossy = json.loads(json.dumps(doubles(hop)))
    assert ticket_to_string(ticket_from_params(lossy)) == string


def test_is_what_proxies_know() -> None:
    assert ticket_to_params(TICKET) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill-0",
        "remote_block_ids": [[4, 9, 2], [-1, 3]],
        "remote_host": "10.0.0.1",
        "remote_port": 7000,
        "remote_request_id": "cmpl-42",
        "tp_size": 2,
        "kvxfer_num_tokens": "4175",
        "kvxfer_ticket": STRING,
    }


def test_prefill_request_asks_for_a_remote_decode() -> None:
    params = prefill_params()
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    with pytest.raises(KvxferError):
        ticket_from_params(params)


def test_missing_keys_are_not_compared() -> None:
    assert ticket_to_string(ticket_from_params({TICKET_KEY: STRING})) == STRING
    nothing = dict.fromkeys(ticket_to_params(TICKET)) | {TICKET_KEY: STRING, "other": object()}
    assert ticket_to_string(ticket_from_params(nothing)) == STRING


@pytest.mark.parametrize(
    "key, value",
    [
        ("kvxfer_ticket", None),
        ("kvxfer_ticket", 7),
        ("kvxfer_ticket", "AAAA"),
        ("remote_engine_id", "prefill-1"),
        ("remote_engine_id", 5),
        ("remote_request_id", "cmpl-43"),
        ("remote_host", "10.0.0.9"),
        ("remote_port", 7001),
        ("remote_port", 7000.5),
        ("remote_port", "seven"),
        ("remote_port", True),
        ("remote_port", [7000]),
        ("remote_port", float("nan")),
        ("remote_port", float("inf")),
        ("tp_size", 4),
        ("kvxfer_num_tokens", "4176"),
        ("kvxfer_num_tokens", "4 175"),
        ("kvxfer_num_tokens", "٤١٧٥"),
        ("kvxfer_num_tokens", "1" * 5_000),
        ("remote_block_ids", [[4, 9, 2]]),
        ("remote_block_ids", [[4, 9, 2], [3]]),
        ("remote_block_ids", [4, 9, 2]),
        ("remote_block_ids", "4"),
        ("remote_block_ids", ["49"]),
        ("remote_block_ids", {}),
        ("remote_block_ids", [[4, 9, None], [-1, 3]]),
    ],
)
def test_contradiction_is_refused(key: str, value: object) -> None:
    params = ticket_to_params(TICKET) | {key: value}
    with pytest.raises(KvxferError) as caught:
        ticket_from_params(params)
    assert caught.value.reason is Reason.FIELD_INVALID
    assert caught.value.field.startswith(f"kv_transfer_params.{key}")
