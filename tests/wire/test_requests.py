from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Axis, AxisKind, CacheLayout, Component, Group, GroupKind, Rank, Region, UnitRange, View
from kvxfer.core.pairing import PairingOptions
from kvxfer.memory.handles import FileHandle, Owned
from kvxfer.pb import layout_pb2
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.addresses import RankAddress
from kvxfer.wire.requests import (
    PublishBlocks,
    RegisterCache,
    TransferSpec,
    handshake_from_pb,
    prepare_from_pb,
    publish_from_pb,
    publish_to_pb,
    read_from_pb,
    register_from_pb,
    register_to_pb,
)
from kvxfer.wire.tickets import Ticket, ticket_to_pb
from tests.wire.strategies import tickets
from tests.wire.test_tickets import TICKET

STATE = Component("ssm", "float32", 4, (Axis(AxisKind.UNIT, 8), Axis(AxisKind.INNER, 16)), UnitRange(0, 8, 16))
LAYOUT = CacheLayout(
    (Region(8_192), Region(8_192)),
    tuple(Group(f"mamba.{r}", GroupKind.STATE, (View(f"layers.{r}", r, 0, 1_024, 8, (STATE,)),)) for r in range(2)),
)
REGISTER = RegisterCache(
    "decode-0",
    Rank(1, 2),
    "nemotron-3-nano:fp8",
    LAYOUT,
    (Owned(8_192), FileHandle("/dev/shm/kvxfer/a", 64, 8_192)),
    dp_rank=1,
    dp_size=4,
    ranks=(RankAddress(Rank(0, 2), "a:1"), RankAddress(Rank(1, 2), "[::1]:2")),
    replace=True,
)
SPEC = pb.TransferSpec(
    engine_id="decode-0",
    transfer_id="t-1",
    ticket=ticket_to_pb(TICKET),
    local_blocks=[pb.BlockList(group="full", block_ids=[1, 2, 3], skip_tokens=16)],
    skip_tokens=32,
    num_tokens=4_000,
)
READ = pb.ReadBlocksRequest(spec=SPEC, wait=False, timeout=Duration(seconds=5))
PUBLISH = pb.PublishBlocksRequest(
    engine_id="prefill-0",
    incarnation="inc-0",
    request_id="cmpl-42",
    blocks=[pb.BlockList(group="mamba.0", block_ids=[-1, 3], snapshot_positions=[0, 4_175])],
    num_tokens=4_175,
    lease_token=bytes(16),
    ttl=Duration(seconds=30),
    readers=4,
)


def refused(call: Callable[[Any], object], message: object) -> KvxferError:
    with pytest.raises(KvxferError) as caught:
        call(message)
    return caught.value


def test_registration_round_trip() -> None:
    message = pb.RegisterCacheRequest.FromString(register_to_pb(REGISTER).SerializeToString())
    assert register_from_pb(message) == REGISTER


def test_registration_without_the_optional() -> None:
    message = register_to_pb(REGISTER)
    for name in ("dp_rank", "dp_size", "ranks", "replace"):
        message.ClearField(name)
    record = register_from_pb(message)
    assert (record.dp_rank, record.dp_size, record.ranks, record.replace) == (0, 1, (), False)


@pytest.mark.parametrize(
    "change, field, reason",
    [
        (lambda m: m.ClearField("engine_id"), "engine_id", Reason.FIELD_INVALID),
        (lambda m: m.ClearField("rank"), "rank", Reason.FIELD_INVALID),
        (lambda m: setattr(m.rank, "tp_rank", 2), "rank.tp_rank", Reason.FIELD_INVALID),
        (lambda m: setattr(m, "dp_rank", 4), "dp_rank", Reason.FIELD_INVALID),
        (lambda m: setattr(m, "dp_size", 2**32 - 1), "dp_size", Reason.FIELD_INVALID),
        (lambda m: m.ClearField("compatibility_key"), "compatibility_key", Reason.FIELD_INVALID),
        (lambda m: m.ranks.pop(), "ranks", Reason.FIELD_INVALID),
        (lambda m: setattr(m.ranks[1], "address", "unix:/x"), "ranks[1].address", Reason.FIELD_INVALID),
        (lambda m: m.ClearField("layout"), "layout", Reason.FIELD_INVALID),
        (lambda m: setattr(m.layout.groups[1].views[0], "region", 7), "layout.groups[1].views[0].region", None),
        (lambda m: m.memory.pop(), "memory", Reason.FIELD_INVALID),
        (lambda m: setattr(m.memory[1], "size", 4_096), "memory[1].size", Reason.MEMORY_HANDLE_INVALID),
        (lambda m: m.memory[0].ClearField("owned"), "memory[0].kind", Reason.FIELD_INVALID),
    ],
)
def test_registration_refuses(change: Callable[[Any], object], field: str, reason: Reason | None) -> None:
    message = register_to_pb(REGISTER)
    change(message)
    error = refused(register_from_pb, message)
    assert (error.field, error.reason) == (field, reason or Reason.LAYOUT_INVALID)


@given(tickets())
def test_handshake_by_ticket(ticket: Ticket) -> None:
    record = handshake_from_pb(pb.HandshakeRequest(engine_id="d", ticket=ticket_to_pb(ticket)))
    assert (record.engine_id, record.target.engine_id, record.target.ranks) == ("d", ticket.engine_id, ticket.ranks)
    assert (record.options, record.timeout) == (None, None)


def test_handshake_by_address() -> None:
    engine = pb.RemoteEngine(
        engine_id="p", tp_size=1, pp_size=1, ranks=[layout_pb2.RankAddress(address="10.0.0.1:7000")]
    )
    options = pb.HandshakeOptions(min_run_bytes=0, ignore_local_groups=["draft"], ignore_remote_groups=["a", "b"])
    message = pb.HandshakeRequest(engine_id="d", engine=engine, options=options, timeout=Duration(nanos=5))
    record = handshake_from_pb(message)
    assert [(r.incarnation, r.address) for r in record.target.ranks] == [("", "10.0.0.1:7000")]
    assert record.options == PairingOptions(0, frozenset({"draft"}), frozenset({"a", "b"}))
    assert record.timeout == 5e-9
    message.options.Clear()
    assert handshake_from_pb(message).options == PairingOptions()


@pytest.mark.parametrize(
    "change, field",
    [
        (lambda m: m.ClearField("engine_id"), "engine_id"),
        (lambda m: m.ClearField("engine"), "remote"),
        (lambda m: m.engine.ClearField("engine_id"), "engine.engine_id"),
        (lambda m: m.engine.ClearField("tp_size"), "engine.tp_size"),
        (lambda m: m.engine.ClearField("ranks"), "engine.ranks"),
        (lambda m: m.ticket.SetInParent(), "ticket.tp_size"),
        (lambda m: setattr(m.options, "min_run_bytes", 2**64 - 1), "options.min_run_bytes"),
        (lambda m: m.options.ignore_local_groups.append(""), "options.ignore_local_groups[0]"),
        (lambda m: m.options.ignore_remote_groups.extend(["x"] * 1_025), "options.ignore_remote_groups"),
        (lambda m: m.timeout.SetInParent(), "timeout"),
    ],
)
def test_handshake_refuses(change: Callable[[Any], object], field: str) -> None:
    engine = pb.RemoteEngine(engine_id="p", tp_size=1, pp_size=1, ranks=[layout_pb2.RankAddress(address="a:1")])
    message = pb.HandshakeRequest(engine_id="d", engine=engine)
    change(message)
    assert refused(handshake_from_pb, message).field == field


def test_read_takes_what_is_told() -> None:
    record = read_from_pb(pb.ReadBlocksRequest.FromString(READ.SerializeToString()))
    assert (record.engine_id, record.wait, record.timeout) == ("decode-0", False, 5.0)
    assert isinstance(record.source, TransferSpec)
    assert (record.source.skip_tokens, record.source.num_tokens) == (32, 4_000)
    assert record.source.local_blocks[0].skip_tokens == 16
    assert record.source.target.ranks == TICKET.ranks
    assert record.source.digest == prepare_from_pb(pb.PrepareTransferRequest(spec=SPEC)).digest
    prepared = read_from_pb(pb.ReadBlocksRequest(engine_id="decode-0", transfer_id="t-1"))
    assert (prepared.source, prepared.wait, prepared.timeout) == ("t-1", True, None)


def test_num_tokens_are_the_tickets_unless_told() -> None:
    spec = pb.TransferSpec()
    spec.CopyFrom(SPEC)
    spec.ClearField("num_tokens")
    assert prepare_from_pb(pb.PrepareTransferRequest(spec=spec)).num_tokens == TICKET.num_tokens


@pytest.mark.parametrize(
    "change, field, reason",
    [
        (lambda m: m.ClearField("spec"), "source", Reason.FIELD_INVALID),
        (lambda m: setattr(m, "engine_id", "other"), "engine_id", Reason.FIELD_INVALID),
        (lambda m: setattr(m, "transfer_id", ""), "transfer_id", Reason.FIELD_INVALID),
        (lambda m: setattr(m, "transfer_id", "t"), "engine_id", Reason.FIELD_INVALID),
        (lambda m: m.timeout.Clear(), "timeout", Reason.FIELD_INVALID),
        (lambda m: m.spec.ClearField("ticket"), "spec.ticket", Reason.FIELD_INVALID),
        (lambda m: m.spec.ClearField("engine_id"), "spec.engine_id", Reason.FIELD_INVALID),
        (lambda m: setattr(m.spec, "transfer_id", "\n"), "spec.transfer_id", Reason.FIELD_INVALID),
        (lambda m: m.spec.ClearField("local_blocks"), "spec.local_blocks", Reason.FIELD_INVALID),
        (lambda m: setattr(m.spec, "skip_tokens", 2**41), "spec.skip_tokens", Reason.RANGE_INVALID),
        (lambda m: setattr(m.spec, "num_tokens", 0), "spec.num_tokens", Reason.RANGE_INVALID),
        (
            lambda m: m.spec.local_blocks[0].block_ids.append(-7),
            "spec.local_blocks[0].block_ids",
            Reason.BLOCK_OUT_OF_RANGE,
        ),
        (lambda m: setattr(m.spec.ticket.blocks[0], "num_tokens", 1), "spec.ticket.blocks[0].num_tokens", None),
    ],
)
def test_read_refuses(change: Callable[[Any], object], field: str, reason: Reason | None) -> None:
    message = pb.ReadBlocksRequest()
    message.CopyFrom(READ)
    change(message)
    error = refused(read_from_pb, message)
    assert (error.field, error.reason) == (field, reason or Reason.FIELD_INVALID)


def test_prepare_needs_a_spec() -> None:
    assert refused(prepare_from_pb, pb.PrepareTransferRequest()).field == "spec"


def test_publication_takes_what_is_told() -> None:
    record = publish_from_pb(pb.PublishBlocksRequest.FromString(PUBLISH.SerializeToString()))
    assert isinstance(record, PublishBlocks)
    assert (record.engine_id, record.incarnation, record.request_id) == ("prefill-0", "inc-0", "cmpl-42")
    assert (record.num_tokens, record.ttl, record.readers) == (4_175, 30.0, 4)
    assert "lease_token" not in repr(record)


@pytest.mark.parametrize(
    "name, field",
    [("engine_id", 0), ("request_id", 0), ("blocks", 0), ("num_tokens", 0), ("lease_token", 0)],
)
def test_publication_refuses_what_is_missing(name: str, field: int) -> None:
    message = pb.PublishBlocksRequest()
    message.CopyFrom(PUBLISH)
    message.ClearField(name)
    assert refused(publish_from_pb, message).field == name


def test_publication_has_a_time_or_none() -> None:
    message = pb.PublishBlocksRequest()
    message.CopyFrom(PUBLISH)
    message.ttl.Clear()
    assert refused(publish_from_pb, message).field == "ttl"
    message.ClearField("ttl")
    record = publish_from_pb(message)
    assert record.ttl is None
    assert not publish_to_pb(record).HasField("ttl")


def test_publication_has_readers_or_none() -> None:
    message = pb.PublishBlocksRequest()
    message.CopyFrom(PUBLISH)
    message.readers = 0
    assert refused(publish_from_pb, message).field == "readers"
    message.ClearField("readers")
    assert publish_from_pb(message).readers is None
