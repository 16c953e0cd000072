from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import MAX_BYTES, MemoryKind, Rank
from kvxfer.pb import peer_pb2 as pb
from kvxfer.wire.fields import duration
from kvxfer.wire.peer import (
    MAX_ENDS,
    MAX_METADATA,
    MAX_NOTICE,
    CloseRead,
    ExchangeAnswer,
    ExchangeQuery,
    OpenRead,
    Outcome,
    PeerMemory,
    Reader,
    ReadNotice,
    ReadRef,
    RegionSpan,
    answer_from_pb,
    answer_to_pb,
    close_from_pb,
    close_to_pb,
    exchange_from_pb,
    exchange_to_pb,
    granted_from_pb,
    notice_from_bytes,
    notice_to_bytes,
    open_from_pb,
    open_to_pb,
    renew_from_pb,
    renew_to_pb,
    renewed_from_pb,
)
from tests.wire.test_requests import LAYOUT

READER = Reader("decode-0", Rank(3, 4), "inc-d")
QUERY = ExchangeQuery((1, 3), "prefill-0", Rank(1, 2), READER, "key", "inc-p", "inc-p")
MEMORY = PeerMemory(
    LAYOUT,
    (RegionSpan(4_096, 8_192, MemoryKind.DRAM, 0), RegionSpan(65_536, 8_192, MemoryKind.DRAM, 0)),
    "kvxfer-inc-p",
    b"metadata of an agent",
)
ANSWER = ExchangeAnswer(1, "prefill-0", Rank(1, 2), 0, 1, "inc-p", "key", 30.0, MEMORY, "a-host", 122_880)
REF = ReadRef("prefill-0", Rank(1, 2), "inc-p", "cmpl-42", bytes(range(16)), READER, 4, "t-1")
OPEN = OpenRead(REF, 4_175, (("full", bytes(32)), ("mamba.0", b"\1" * 32)), 12.5)
CLOSE = CloseRead(REF, Outcome.FAILED, will_retry=True)
NOTICE = ReadNotice("prefill-0", "inc-p", "cmpl-42", bytes(range(16)), READER, "t-1")


def refused(call: Callable[[Any], object], message: object) -> KvxferError:
    with pytest.raises(KvxferError) as caught:
        call(message)
    return caught.value


@pytest.mark.parametrize("query", [QUERY, replace(QUERY, expected_incarnation="", known_incarnation="", goodbye=True)])
def test_exchange_round_trip(query: ExchangeQuery) -> None:
    assert exchange_from_pb(pb.ExchangeRequest.FromString(exchange_to_pb(query).SerializeToString())) == query


@pytest.mark.parametrize("answer", [ANSWER, replace(ANSWER, memory=None)])
def test_answer_round_trip(answer: ExchangeAnswer) -> None:
    assert answer_from_pb(pb.ExchangeResponse.FromString(answer_to_pb(answer).SerializeToString())) == answer


@pytest.mark.parametrize("record", [OPEN, OpenRead(REF)])
def test_open_round_trip(record: OpenRead) -> None:
    assert open_from_pb(pb.OpenReadRequest.FromString(open_to_pb(record).SerializeToString())) == record


def test_a_grant() -> None:
    assert granted_from_pb(pb.OpenReadResponse(granted=duration(0.001))) == 0.001


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.ClearField("granted"),
        lambda m: m.granted.Clear(),
        lambda m: setattr(m.granted, "seconds", -1),
        lambda m: setattr(m.granted, "seconds", 86_401),
    ],
)
def test_an_unsound_grant_is_the_peers_fault(change: Callable[[Any], object]) -> None:
    message = pb.OpenReadResponse(granted=duration(15.0))
    change(message)
    assert refused(granted_from_pb, message).reason is Reason.PEER_METADATA_INVALID


def test_an_unsound_renewal_is_the_peers_fault() -> None:
    assert renewed_from_pb(pb.RenewReadResponse(granted=duration(1.5))) == 1.5
    for seconds in (0, -1, 2**62):
        message = pb.RenewReadResponse()
        message.granted.seconds = seconds
        assert refused(renewed_from_pb, message).reason is Reason.PEER_METADATA_INVALID
    assert refused(renewed_from_pb, pb.RenewReadResponse()).reason is Reason.PEER_METADATA_INVALID


def test_renew_round_trip() -> None:
    message = pb.RenewReadRequest.FromString(renew_to_pb(REF, 2.5).SerializeToString())
    assert renew_from_pb(message) == (REF, 2.5)
    message.ClearField("wanted")
    assert renew_from_pb(message) == (REF, None)


@pytest.mark.parametrize("outcome", Outcome)
def test_close_round_trip(outcome: Outcome) -> None:
    other = replace(REF, request_id="cmpl-43", lease_token=bytes(16), readers=1, transfer_id="t-2")
    records = (CloseRead(REF, outcome), CLOSE, CloseRead(other, outcome))
    assert close_from_pb(pb.CloseReadsRequest.FromString(close_to_pb(records).SerializeToString())) == records


def test_notice_round_trip() -> None:
    assert notice_from_bytes(notice_to_bytes(NOTICE)) == NOTICE


def test_longest_notice_fits() -> None:
    reader = Reader("e" * 256, Rank(65_535, 65_536, 65_535, 65_536), "i" * 64)
    notice = ReadNotice("e" * 256, "i" * 64, "r" * 256, bytes(16), reader, "t" * 256)
    assert len(notice_to_bytes(notice)) < MAX_NOTICE / 2
    assert notice_from_bytes(notice_to_bytes(notice)) == notice


def test_secrets_are_not_shown() -> None:
    for record in (ANSWER, OPEN, CLOSE, NOTICE):
        assert "metadata of an agent" not in repr(record)
        assert "\\x0e" not in repr(record)


@pytest.mark.parametrize(
    "change, field",
    [
        (lambda m: m.ClearField("protocol_version_min"), "protocol_version_min"),
        (lambda m: setattr(m, "protocol_version_max", 0), "protocol_version_max"),
        (lambda m: m.ClearField("engine_id"), "engine_id"),
        (lambda m: m.ClearField("rank"), "rank"),
        (lambda m: m.ClearField("reader"), "reader"),
        (lambda m: m.reader.ClearField("rank"), "reader.rank"),
        (lambda m: m.reader.ClearField("engine_id"), "reader.engine_id"),
        (lambda m: setattr(m.reader, "incarnation", "x" * 65), "reader.incarnation"),
        (lambda m: setattr(m.reader.rank, "tp_rank", 9), "reader.rank.tp_rank"),
        (lambda m: m.ClearField("compatibility_key"), "compatibility_key"),
        (lambda m: setattr(m, "expected_incarnation", " "), "expected_incarnation"),
        (lambda m: setattr(m, "known_incarnation", " "), "known_incarnation"),
    ],
)
def test_exchange_refuses(change: Callable[[Any], object], field: str) -> None:
    message = exchange_to_pb(QUERY)
    change(message)
    assert refused(exchange_from_pb, message).field == field


@pytest.mark.parametrize(
    "change, field",
    [
        (lambda m: m.ClearField("protocol_version"), "protocol_version"),
        (lambda m: m.ClearField("rank"), "rank"),
        (lambda m: m.ClearField("dp_size"), "dp_size"),
        (lambda m: setattr(m, "dp_rank", 1), "dp_rank"),
        (lambda m: m.ClearField("incarnation"), "incarnation"),
        (lambda m: m.ClearField("idle_timeout"), "idle_timeout"),
        (lambda m: setattr(m.idle_timeout, "nanos", -1), "idle_timeout"),
        (lambda m: m.ClearField("agent_metadata"), "agent_metadata"),
        (lambda m: setattr(m, "agent_metadata", bytes(MAX_METADATA + 1)), "agent_metadata"),
        (lambda m: setattr(m, "agent_metadata", b"Metadata of an agent"), "metadata_sha256"),
        (lambda m: m.ClearField("metadata_sha256"), "metadata_sha256"),
        (lambda m: setattr(m, "layout_fingerprint", "0" * 64), "layout_fingerprint"),
        (lambda m: setattr(m.layout.regions[0], "size", 1), "layout.groups[0].views[0]"),
        (lambda m: m.spans.pop(), "spans"),
        (lambda m: setattr(m.spans[1], "size", 8_193), "spans[1]"),
        (lambda m: setattr(m.spans[1], "size", 2**64 - 1), "spans[1]"),
        (lambda m: setattr(m.spans[1], "address", 0), "spans[1].address"),
        (lambda m: setattr(m.spans[1], "address", MAX_BYTES - 8_191), "spans[1].address"),
        (lambda m: setattr(m.spans[1], "address", 2**64 - 1), "spans[1].address"),
        (lambda m: setattr(m.spans[1], "memory", 0), "spans[1].memory"),
        (lambda m: setattr(m.spans[1], "memory", 2), "spans[1]"),
        (lambda m: setattr(m.spans[1], "device", 1), "spans[1]"),
        (lambda m: m.ClearField("agent_name"), "agent_name"),
        (lambda m: setattr(m, "tcp_segment", 2**40 + 1), "tcp_segment"),
    ],
)
def test_unsound_answer_is_the_peers_fault(change: Callable[[Any], object], field: str) -> None:
    message = answer_to_pb(ANSWER)
    change(message)
    error = refused(answer_from_pb, message)
    assert (error.field, error.reason) == (field, Reason.PEER_METADATA_INVALID)


@pytest.mark.parametrize(
    "change, field",
    [
        (lambda m: m.ClearField("engine_id"), "engine_id"),
        (lambda m: m.ClearField("rank"), "rank"),
        (lambda m: m.ClearField("incarnation"), "incarnation"),
        (lambda m: m.ClearField("request_id"), "request_id"),
        (lambda m: setattr(m, "lease_token", b"x"), "lease_token"),
        (lambda m: m.ClearField("reader"), "reader"),
        (lambda m: setattr(m, "readers", 0), "readers"),
        (lambda m: setattr(m, "readers", 65_537), "readers"),
        (lambda m: m.ClearField("transfer_id"), "transfer_id"),
    ],
)
def test_open_renew_and_close_refuse(change: Callable[[Any], object], field: str) -> None:
    assert refused(open_from_pb, changed(open_to_pb(OPEN), change)).field == field
    assert refused(renew_from_pb, changed(renew_to_pb(REF, 1.0), change)).field == field
    closing = close_to_pb([CLOSE, CLOSE])
    if field in ("engine_id", "rank", "incarnation", "reader"):
        change(closing)
    else:
        change(closing.reads[1])
        field = f"reads[1].{field}"
    assert refused(close_from_pb, closing).field == field


def test_close_refuses_none_and_too_many() -> None:
    assert len(close_from_pb(close_to_pb([CLOSE] * MAX_ENDS))) == MAX_ENDS
    for count in (0, MAX_ENDS + 1):
        message = close_to_pb([CLOSE])
        message.reads.extend([message.reads[0]] * count)
        del message.reads[0]
        assert refused(close_from_pb, message).field == "reads"


def changed(message: Any, change: Callable[[Any], object]) -> Any:
    change(message)
    return message


@pytest.mark.parametrize(
    "change, field",
    [
        (lambda m: m.blocks.extend([m.blocks[0]]), "blocks"),
        (lambda m: setattr(m.blocks[1], "sha256", b""), "blocks[1].sha256"),
        (lambda m: setattr(m.blocks[1], "group", ""), "blocks[1].group"),
        (lambda m: m.blocks.extend([m.blocks[0]] * 1_024), "blocks"),
        (lambda m: setattr(m, "num_tokens", 2**41), "num_tokens"),
        (lambda m: m.wanted.Clear(), "wanted"),
    ],
)
def test_open_refuses(change: Callable[[Any], object], field: str) -> None:
    message = open_to_pb(OPEN)
    change(message)
    assert refused(open_from_pb, message).field == field


@pytest.mark.parametrize("outcome", [0, 9])
def test_close_refuses_outcomes_that_are_not_known(outcome: int) -> None:
    message = close_to_pb([CLOSE])
    message.reads[0].outcome = outcome  # type: ignore[assignment]
    assert refused(close_from_pb, message).field == "reads[0].outcome"


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.NOT_NEEDED])
def test_close_refuses_to_retry_what_is_done(outcome: Outcome) -> None:
    message = close_to_pb([CloseRead(REF, outcome, will_retry=True)])
    assert refused(close_from_pb, message).field == "reads[0].will_retry"


@pytest.mark.parametrize("raw", [b"", b"\xff", bytes(MAX_NOTICE + 1), b"0123456789"])
def test_notice_refuses(raw: bytes) -> None:
    assert refused(notice_from_bytes, raw).reason is Reason.FIELD_INVALID
