"""Whatever bytes arrive: a message is refused by protobuf or by us, and nothing else happens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.core.errors import KvxferError
from kvxfer.pb import layout_pb2, peer_pb2, transfer_pb2
from kvxfer.wire.blocks import block_lists_from_pb
from kvxfer.wire.handles import handle_from_pb, handle_to_pb
from kvxfer.wire.layouts import layout_from_pb, layout_to_pb, rank_from_pb
from kvxfer.wire.peer import (
    answer_from_pb,
    answer_to_pb,
    close_from_pb,
    close_to_pb,
    exchange_from_pb,
    exchange_to_pb,
    notice_from_bytes,
    open_from_pb,
    open_to_pb,
)
from kvxfer.wire.requests import handshake_from_pb, publish_from_pb, read_from_pb, register_from_pb, register_to_pb
from kvxfer.wire.tickets import ticket_from_pb, ticket_to_pb
from tests.wire.strategies import layouts, tickets
from tests.wire.test_handles import handles
from tests.wire.test_peer import ANSWER, CLOSE, OPEN, QUERY
from tests.wire.test_requests import PUBLISH, READ, REGISTER

CONVERTERS: dict[str, tuple[type[Message], Callable[[Any], object]]] = {
    "layout": (layout_pb2.Layout, layout_from_pb),
    "rank": (layout_pb2.Rank, lambda message: rank_from_pb(message, "rank")),
    "handle": (layout_pb2.MemoryHandle, lambda message: handle_from_pb(message, "memory[0]")),
    "ticket": (transfer_pb2.Ticket, ticket_from_pb),
    "blocks": (
        transfer_pb2.TransferSpec,
        lambda message: block_lists_from_pb(message.local_blocks, "local_blocks", local=True),
    ),
    "register": (transfer_pb2.RegisterCacheRequest, register_from_pb),
    "handshake": (transfer_pb2.HandshakeRequest, handshake_from_pb),
    "read": (transfer_pb2.ReadBlocksRequest, read_from_pb),
    "publish": (transfer_pb2.PublishBlocksRequest, publish_from_pb),
    "exchange": (peer_pb2.ExchangeRequest, exchange_from_pb),
    "answer": (peer_pb2.ExchangeResponse, answer_from_pb),
    "open": (peer_pb2.OpenReadRequest, open_from_pb),
    "close": (peer_pb2.CloseReadsRequest, close_from_pb),
}

sound = st.one_of(
    st.tuples(st.just("layout"), layouts.map(layout_to_pb)),
    st.tuples(st.just("handle"), handles.map(handle_to_pb)),
    st.tuples(st.just("ticket"), tickets().map(ticket_to_pb)),
    st.tuples(
        st.just("handshake"),
        tickets().map(lambda t: transfer_pb2.HandshakeRequest(engine_id="d", ticket=ticket_to_pb(t))),
    ),
    st.sampled_from(
        [
            ("register", register_to_pb(REGISTER)),
            ("read", READ),
            ("publish", PUBLISH),
            ("exchange", exchange_to_pb(QUERY)),
            ("answer", answer_to_pb(ANSWER)),
            ("open", open_to_pb(OPEN)),
            ("close", close_to_pb([CLOSE])),
        ]
    ),
    st.tuples(st.just("rank"), layouts.map(lambda _: layout_pb2.Rank(tp_size=2, pp_size=1, tp_rank=1))),
)


def convert(kind: str, raw: bytes) -> None:
    message, converter = CONVERTERS[kind]
    with contextlib.suppress(DecodeError, KvxferError):
        converter(message.FromString(raw))


@given(st.sampled_from(sorted(CONVERTERS)), st.binary(max_size=300))
def test_random_bytes(kind: str, raw: bytes) -> None:
    convert(kind, raw)


@given(st.binary(max_size=100))
def test_random_notifications(raw: bytes) -> None:
    with contextlib.suppress(KvxferError):
        notice_from_bytes(raw)


@given(sound, st.data())
def test_damaged_messages(pair: tuple[str, Message], data: st.DataObject) -> None:
    kind, message = pair
    raw = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        match data.draw(st.sampled_from(["cut", "flip", "set", "drop", "insert", "repeat"])):
            case "cut":
                del raw[at:]
            case "flip" if raw:
                raw[at] ^= 1 << data.draw(st.integers(0, 7))
            case "set" if raw:
                raw[at] = data.draw(st.integers(0, 255))
            case "drop" if raw:
                del raw[at]
            case "insert":
                raw[at:at] = data.draw(st.binary(min_size=1, max_size=4))
            case _:
                raw[at:at] = raw[at : at + 8]
    convert(kind, bytes(raw))


@given(sound)
def test_every_cut(pair: tuple[str, Message]) -> None:
    kind, message = pair
    raw = message.SerializeToString()
    for end in range(0, len(raw), max(1, len(raw) // 40)):
        convert(kind, raw[:end])
