"""Every field of every request, spoilt in every way: an answer or a clear error, and the sidecar goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from kvxfer.core.errors import Reason
from kvxfer.core.layout import Rank
from kvxfer.pb import peer_pb2, transfer_pb2
from kvxfer.wire.layouts import rank_to_pb
from kvxfer.wire.requests import handshake_to_pb
from tests.support.engines import KEY, TOKEN, Member, SharedRegions, make_target, publication, registration
from tests.support.errors import told
from tests.support.loopback import Cluster, Reading, small_layout
from tests.support.spoil import is_path, spoilt

SECOND = Duration(seconds=1)


@pytest.fixture
async def quick(cluster: Cluster) -> Reading:
    """As ``reading``, with limits that what is spoilt may have to wait for, or meet."""
    settings = {"read_timeout": 10.0, "max_registrations": 3, "publish_wait": 0.01}
    settings["engine_grace"] = 600.0  # streams come and go, and the engines stay
    p = await cluster.engine("engine-p", [await cluster.node(**settings)])
    d = await cluster.engine("engine-d", [await cluster.node(**settings)])
    return Reading(cluster, p, d)


Make = Callable[[Reading], Message]


def registering(reading: Reading) -> Message:
    layout = small_layout(blocks=4)
    regions = SharedRegions.files(reading.cluster.directory, f"scratch-{id(reading)}", layout)
    request = registration("engine-x", Member(Rank(), layout, reading.cluster.labels, regions))
    request.ranks.add(address="127.0.0.1:1")
    request.held = True
    return request


def holding(reading: Reading) -> Message:
    incarnation = reading.d.members[0].registered.incarnation
    return transfer_pb2.HoldRegistrationRequest(engine_id="engine-d", incarnation=incarnation)


def handshaking(reading: Reading) -> Message:
    request = handshake_to_pb("engine-d", reading.ticket(), timeout=0.5)
    request.options.min_run_bytes = 1
    return request


def shaking_by_address(reading: Reading) -> Message:
    return handshake_to_pb("engine-d", make_target("engine-p", reading.p.members), timeout=0.5)


def preparing(reading: Reading) -> Message:
    return transfer_pb2.PrepareTransferRequest(spec=reading.request().spec)


def reading_blocks(reading: Reading) -> Message:
    request = reading.request()
    request.timeout.CopyFrom(SECOND)
    request.engine_id = "engine-d"
    # A range of a group's own.
    request.spec.local_blocks[0].skip_tokens = 4
    request.spec.local_blocks[0].num_tokens = reading.TOKENS
    request.spec.num_tokens = reading.TOKENS
    return request


def publishing(reading: Reading) -> Message:
    request = publication("engine-d", reading.ticket("request-x"))
    request.incarnation = reading.d.members[0].registered.incarnation
    request.readers = 2
    return request


def reader(reading: Reading) -> peer_pb2.Reader:
    return peer_pb2.Reader(engine_id="engine-x", rank=rank_to_pb(Rank()), incarnation="abc")


def exchanging(reading: Reading) -> Message:
    return peer_pb2.ExchangeRequest(
        protocol_version_min=1,
        protocol_version_max=1,
        engine_id="engine-p",
        rank=rank_to_pb(Rank()),
        reader=reader(reading),
        compatibility_key=KEY,
        expected_incarnation=reading.p.members[0].registered.incarnation,
    )


def open_or_close(reading: Reading) -> dict[str, Any]:
    return {
        "engine_id": "engine-p",
        "rank": rank_to_pb(Rank()),
        "incarnation": reading.p.members[0].registered.incarnation,
        "request_id": "request-1",
        "lease_token": TOKEN,
        "reader": reader(reading),
        "readers": 1,
        "transfer_id": "t",
    }


def opening(reading: Reading) -> Message:
    request = peer_pb2.OpenReadRequest(**open_or_close(reading), num_tokens=10, wanted=SECOND)
    request.blocks.add(group="attn", sha256=b"x" * 32)
    return request


def renewing(reading: Reading) -> Message:
    return peer_pb2.RenewReadRequest(**open_or_close(reading), wanted=SECOND)


def closing(reading: Reading) -> Message:
    read = open_or_close(reading)
    whose = {name: read.pop(name) for name in ("engine_id", "rank", "incarnation", "reader")}
    end = peer_pb2.ReadEnd(**read, outcome=peer_pb2.READ_OUTCOME_DONE)
    return peer_pb2.CloseReadsRequest(**whose, reads=[end])


class Case(NamedTuple):
    rpc: str
    make: Make
    peer: bool = False


CASES = {
    "RegisterCache": Case("RegisterCache", registering),
    "UnregisterCache": Case(
        "UnregisterCache",
        lambda _: transfer_pb2.UnregisterCacheRequest(engine_id="nobody", incarnation="abc", drain_timeout=SECOND),
    ),
    "HoldRegistration": Case("HoldRegistration", holding),
    "Handshake": Case("Handshake", handshaking),
    "Handshake by address": Case("Handshake", shaking_by_address),
    "PrepareTransfer": Case("PrepareTransfer", preparing),
    "ReadBlocks": Case("ReadBlocks", reading_blocks),
    "ReadBlocks by ID": Case(
        "ReadBlocks", lambda _: transfer_pb2.ReadBlocksRequest(engine_id="engine-d", transfer_id="none", wait=True)
    ),
    "GetTransfer": Case(
        "GetTransfer", lambda _: transfer_pb2.GetTransferRequest(engine_id="engine-d", transfer_id="none")
    ),
    "ListTransfers": Case(
        "ListTransfers",
        lambda _: transfer_pb2.ListTransfersRequest(
            engine_id="engine-d", states=[transfer_pb2.TRANSFER_STATE_PREPARED], page_size=5, page_token="3"
        ),
    ),
    "CancelTransfer": Case(
        "CancelTransfer",
        lambda _: transfer_pb2.CancelTransferRequest(engine_id="engine-d", transfer_id="none", timeout=SECOND),
    ),
    "WatchTransfers": Case(
        "WatchTransfers", lambda _: transfer_pb2.WatchTransfersRequest(engine_id="engine-d", include_current=True)
    ),
    "PublishBlocks": Case("PublishBlocks", publishing),
    "WithdrawBlocks": Case(
        "WithdrawBlocks",
        lambda _: transfer_pb2.WithdrawBlocksRequest(engine_id="engine-d", request_id="none", lease_token=TOKEN),
    ),
    "RenewLease": Case(
        "RenewLease",
        lambda _: transfer_pb2.RenewLeaseRequest(
            engine_id="engine-d", request_id="none", lease_token=TOKEN, ttl=SECOND
        ),
    ),
    "ListLeases": Case(
        "ListLeases",
        lambda _: transfer_pb2.ListLeasesRequest(
            engine_id="engine-d", states=[transfer_pb2.LEASE_STATE_HELD], page_size=5, page_token="3"
        ),
    ),
    "WatchLeases": Case(
        "WatchLeases", lambda _: transfer_pb2.WatchLeasesRequest(engine_id="engine-d", include_current=True)
    ),
    "GetStatus": Case("GetStatus", lambda _: transfer_pb2.GetStatusRequest(peers_page_size=1, peers_page_token="1")),
    "Exchange": Case("Exchange", exchanging, peer=True),
    "OpenRead": Case("OpenRead", opening, peer=True),
    "RenewRead": Case("RenewRead", renewing, peer=True),
    "CloseReads": Case("CloseReads", closing, peer=True),
}


def test_every_rpc_is_spoilt() -> None:
    services = (
        transfer_pb2.DESCRIPTOR.services_by_name["KvTransfer"],
        peer_pb2.DESCRIPTOR.services_by_name["KvPeer"],
    )
    assert {m.name for s in services for m in s.methods} == {case.rpc for case in CASES.values()}


async def ask(stub: Any, rpc: str, message: Message) -> Any:
    """The first answer, with a deadline that nothing may reach."""
    call = getattr(stub, rpc)(message, timeout=15)
    if not rpc.startswith(("Watch", "Hold")):
        return await call
    answer = await call.read()
    call.cancel()
    return answer


@pytest.mark.parametrize("name", CASES)
async def test_a_spoilt_field_is_refused_or_harmless(quick: Reading, name: str) -> None:
    case = CASES[name]
    node = quick.p.nodes[0] if case.peer else quick.d.nodes[0]
    stub = node.peer_stub if case.peer else node.stub
    message = case.make(quick)
    refusals = 0
    problems = []
    for path, change, spoilt_message in spoilt(message):
        what = f"{path} {change}"
        try:
            await ask(stub, case.rpc, spoilt_message)
        except grpc.aio.AioRpcError as failure:
            error = told(failure, internal=True)
            refusals += 1
            if error.reason is Reason.INTERNAL or (error.field and not is_path(type(message).DESCRIPTOR, error.field)):
                problems.append(f"{what}: {error}")
        await quick.good()
        if case.rpc == "RegisterCache":
            await clean(quick)
    assert refusals
    assert not problems, "\n".join(problems)


async def clean(reading: Reading) -> None:
    """Take away what a spoilt registration has registered."""
    node = reading.d.nodes[0]
    for known in tuple(node.sidecar.registrations):
        engine_id = known.identity.engine_id
        if engine_id != "engine-d":
            await node.stub.UnregisterCache(transfer_pb2.UnregisterCacheRequest(engine_id=engine_id))
