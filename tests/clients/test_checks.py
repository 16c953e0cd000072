"""Arguments of the wrong type: an error of ours that names the field, what was found and what is needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer_client import (
    BlockList,
    Client,
    KvxferError,
    PosixShm,
    Rank,
    Reason,
    RemoteEngine,
    calls,
    grouped,
    make_ticket,
)
from tests.clients.stub import Awaiting, Blocking
from tests.clients.test_client_calls import BLOCKS, CALLS, TOKEN, ticket
from tests.clients.test_client_sidecars import layout

MEMORY = [PosixShm(f"/kvxfer-{i}", r.size) for i, r in enumerate(layout().regions)]
KEY = {"compatibility_key": "key"}
TICKET = ticket()

#: Method, arguments, options; the field and a part of the message.
BAD: list[tuple[str, tuple[Any, ...], dict[str, Any], str, str]] = [
    ("read", (TICKET, [[1, 2, 3]]), {}, "local_blocks[0]", "is a list; a BlockList (see grouped()) is needed"),
    ("read", (TICKET, BLOCKS[0]), {}, "local_blocks", "one for each group"),
    ("read", (TICKET, None), {}, "local_blocks", "is None"),
    ("read", (TICKET, [BlockList(7, [1])]), {}, "local_blocks[0].group", "type int; a string"),  # type: ignore[arg-type]
    ("read", (None, BLOCKS), {}, "ticket", "is None; a Ticket or its string is needed"),
    ("read", (TICKET, BLOCKS), {"skip_tokens": "0"}, "skip_tokens", "is a str; a whole number"),
    ("read", (TICKET, BLOCKS), {"skip_tokens": "x"}, "skip_tokens", "is a str"),
    ("read", (TICKET, BLOCKS), {"num_tokens": 1.5}, "num_tokens", "type float"),
    ("read", (TICKET, BLOCKS), {"wait": "no"}, "wait", "True or False"),
    ("read", (TICKET, BLOCKS), {"timeout": "1"}, "timeout", "is a str; a number of seconds"),
    ("read", (TICKET, BLOCKS), {"timeout": True}, "timeout", "type bool"),
    ("prepare", (b"ticket", BLOCKS), {}, "ticket", "is a bytes"),
    ("prepare", (TICKET, BLOCKS), {"transfer_id": 5}, "transfer_id", "type int; a string"),
    ("read_prepared", (None,), {}, "transfer_id", "is None"),
    ("get_transfer", (None,), {}, "transfer_id", "is None"),
    ("get_transfer", ("\ud800",), {}, "transfer_id", "surrogates"),
    ("cancel", (7,), {}, "transfer_id", "type int"),
    ("cancel", ("t",), {"timeout": []}, "timeout", "is a list"),
    ("publish", ("r", None, 20, TOKEN), {}, "blocks", "is None; a sequence of BlockLists"),
    ("publish", ("r", ["a"], 20, TOKEN), {}, "blocks[0]", "is a str"),
    ("publish", ("r", BLOCKS, None, TOKEN), {}, "num_tokens", "is None"),
    ("publish", ("r", BLOCKS, 20, "0123456789abcdef"), {}, "lease_token", "is a str; bytes"),
    ("publish", (None, BLOCKS, 20, TOKEN), {}, "request_id", "is None"),
    ("publish", ("r", BLOCKS, 20, TOKEN), {"readers": "2"}, "readers", "is a str"),
    ("publish", ("r", BLOCKS, 20, TOKEN), {"ttl": "5"}, "ttl", "is a str"),
    ("publish", ("r", BLOCKS, 20, TOKEN), {"incarnation": None}, "incarnation", "is None"),
    ("renew", ("r", "token"), {}, "lease_token", "is a str"),
    ("withdraw", ("r", None), {}, "lease_token", "is None"),
    ("withdraw", (1, TOKEN), {}, "request_id", "type int"),
    ("handshake", (None,), {}, "remote", "a Ticket, its string, or a RemoteEngine"),
    ("handshake", (TICKET,), {"options": {}}, "options", "is a dict; a PairingOptions"),
    ("handshake", (RemoteEngine("p", None),), {}, "remote.ranks", "is None"),  # type: ignore[arg-type]
    ("handshake", (RemoteEngine("p", ("h:1",)),), {}, "remote.ranks[0]", "is a str"),  # type: ignore[arg-type]
    ("unregister", (None,), {}, "incarnation", "is None"),
    ("unregister", (), {"drain_timeout": "1"}, "drain_timeout", "is a str"),
    ("wait_ready", ("1",), {}, "timeout", "is a str"),
    *(
        (method, *rest)
        for method in ("register", "session")
        for rest in (
            ((None, MEMORY), KEY, "layout", "is None; a CacheLayout"),
            ((layout(), None), KEY, "memory", "is None"),
            ((layout(), ["/dev/shm/a"]), KEY, "memory[0]", "is a str; a SharedRegion, a LocalRegion or a handle"),
            ((layout(), MEMORY), {"compatibility_key": None}, "compatibility_key", "is None"),
            ((layout(), MEMORY), {**KEY, "rank": 0}, "rank", "type int; a Rank"),
            ((layout(), MEMORY), {**KEY, "ranks": ["h:1"]}, "ranks[0]", "is a str"),
            ((layout(), MEMORY), {**KEY, "ranks": [(Rank(), None)]}, "ranks[0].address", "is None"),
            ((layout(), MEMORY), {**KEY, "dp_rank": "0"}, "dp_rank", "is a str"),
            ((layout(), MEMORY), {**KEY, "dp_size": -1}, "dp_size", "is -1"),
            ((layout(), MEMORY), {**KEY, "replace": "x"}, "replace", "True or False"),
        )
    ),
]


def is_told(error: KvxferError, field: str, part: str) -> None:
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, field)
    assert error.message.startswith(field)
    assert part in error.message


@pytest.mark.parametrize("caller", [Blocking, Awaiting])
@pytest.mark.parametrize("method, args, options, field, part", BAD)
def test_a_wrong_argument_is_named(
    caller: Callable[..., Any],
    method: str,
    args: tuple[Any, ...],
    options: dict[str, Any],
    field: str,
    part: str,
    tmp_path: Path,
) -> None:
    call = caller(f"unix:{tmp_path}/nobody", engine_id="e")
    try:
        with pytest.raises(KvxferError) as caught:
            call(method, *args, **options)
        is_told(caught.value, field, part)
        for method_, bad in (("list_transfers", "gone"), ("list_leases", 3)):
            with pytest.raises(KvxferError, match=re.escape(f"states[0] is {bad!r}")):
                call.list(method_, [bad])
    finally:
        call.close()


def test_every_call_has_a_wrong_argument() -> None:
    assert {method for method, *_ in BAD} >= set(CALLS) - {"status"}


@pytest.mark.parametrize(
    "options, field",
    [({"target": None}, "target"), ({"engine_id": 3}, "engine_id"), ({"timeout": None}, "timeout")],
)
def test_a_client_of_nothing(options: dict[str, Any], field: str) -> None:
    with pytest.raises(KvxferError) as caught:
        Client(**options)
    is_told(caught.value, field, "is needed")


@pytest.mark.parametrize(
    "field, value",
    [
        ("ranks", None),
        ("ranks[0]", ["r"]),
        ("blocks", None),
        ("ticket.num_tokens", "3"),
        ("ticket.lease_token", "x"),
        ("ticket.ttl", "1"),
    ],
)
def test_a_ticket_of_wrong_parts(field: str, value: object) -> None:
    parts: dict[str, Any] = {
        "engine_id": "e",
        "compatibility_key": "k",
        "ranks": TICKET.ranks,
        "request_id": "r",
        "blocks": BLOCKS,
        "num_tokens": 20,
        "lease_token": TOKEN,
        "ttl": 5.0,
    }
    with pytest.raises(KvxferError) as caught:
        make_ticket(**(parts | {field.removeprefix("ticket.").split("[")[0]: value}))
    is_told(caught.value, field, "is needed")


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    client = Client(f"unix:{tmp_path}/nobody", engine_id="e", timeout=np.float64(2))
    call = calls.read(client, TICKET, BLOCKS, skip_tokens=np.int64(16), timeout=np.float64(3), wait=np.True_)  # type: ignore[arg-type]
    request: Any = call.request
    assert (request.spec.skip_tokens, request.wait, call.deadline) == (16, True, 5.0)


@pytest.mark.parametrize(
    "ids, field, part",
    [
        ([["a", "b", "c"], [1]], "ids[0]", "group attn, is a list with 'a'"),
        ([[1.5, 2, 3], [1]], "ids[0]", "group attn, is a list with 1.5"),
        ([[1, 2, 3], [None]], "ids[1]", "group ssm, is a list with None"),
        ([[1, [2]], [1]], "ids[0]", "group attn"),
        ([7, [1]], "ids[0]", "group attn"),
        (None, "ids", "is None"),
    ],
)
def test_grouped_takes_numbers(ids: Any, field: str, part: str) -> None:
    with pytest.raises(KvxferError) as caught:
        grouped(ids, layout(), 40)
    is_told(caught.value, field, part)


def test_grouped_wants_blocks_for_all_tokens() -> None:
    with pytest.raises(KvxferError) as caught:
        grouped([[1, 2], [1]], layout(), 40)
    assert (caught.value.reason, caught.value.field) == (Reason.RANGE_NOT_COVERED, "ids[0]")
    assert "group attn: 2 blocks of 16 tokens do not hold 40 tokens; 3 are needed" in caught.value.message
