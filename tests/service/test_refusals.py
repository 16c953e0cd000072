"""What is refused and how: code, reason, field and the values in the metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvxfer.core.errors import Reason
from kvxfer.core.layout import CacheLayout, Rank
from kvxfer.core.resolve import BlockList
from kvxfer.pb import layout_pb2
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.requests import handshake_to_pb
from kvxfer.wire.tickets import ticket_from_pb
from tests.support.engines import (
    Member,
    SharedRegions,
    block_lists,
    make_target,
    publication,
    read_request,
    registration,
)
from tests.support.errors import refusal
from tests.support.loopback import BLOCK, STRIDE, Cluster, LoopEngine, Reading, small_layout

Change = Callable[[Any], object]


class Bad(NamedTuple):
    """A change to a good request, and what must be answered."""

    change: Change
    reason: Reason
    field: str = ""
    metadata: dict[str, str] = {}  # noqa: RUF012  nobody changes it


def lists(spec: Any, number: int = 0) -> Any:
    return spec.local_blocks[number]


def theirs(spec: Any, number: int = 0) -> Any:
    return spec.ticket.blocks[number]


def put(values: Any, index: int, value: int) -> None:
    values[index] = value


SPECS = {
    "unknown engine": Bad(
        lambda s: setattr(s, "engine_id", "nobody"), Reason.NOT_REGISTERED, "spec.engine_id", {"engine_id": "nobody"}
    ),
    "an ID of a null block and less": Bad(
        lambda s: put(lists(s).block_ids, 0, -2),
        Reason.BLOCK_OUT_OF_RANGE,
        "spec.local_blocks[0].block_ids",
        {"group": "attn", "block": "-2"},
    ),
    "an ID past the end": Bad(
        lambda s: put(lists(s).block_ids, 1, 24),
        Reason.BLOCK_OUT_OF_RANGE,
        "spec.local_blocks[0].block_ids",
        {"side": "local", "group": "attn", "block": "24"},
    ),
    "a huge ID": Bad(
        lambda s: put(theirs(s).block_ids, 1, 2**31 - 1),
        Reason.BLOCK_OUT_OF_RANGE,
        "spec.ticket.blocks[0].block_ids",
        {"side": "remote", "block": str(2**31 - 1)},
    ),
    "a block twice in a group": Bad(
        lambda s: put(lists(s).block_ids, 1, 1),
        Reason.DUPLICATE_BLOCK,
        "spec.local_blocks[0].block_ids",
        {"group": "attn", "block": "1"},
    ),
    "a block twice in groups that share memory": Bad(
        lambda s: put(lists(s, 1).block_ids, 1, 1), Reason.DUPLICATE_BLOCK, "", {"block": "1"}
    ),
    "a block twice at the other side": Bad(
        lambda s: put(theirs(s).block_ids, 1, 3),
        Reason.DUPLICATE_BLOCK,
        "spec.ticket.blocks[0].block_ids",
        {"side": "remote", "block": "3"},
    ),
    "a null block where something is read": Bad(
        lambda s: put(lists(s).block_ids, 1, -1),
        Reason.NULL_BLOCK,
        "spec.local_blocks[0].block_ids",
        {"side": "local", "group": "attn"},
    ),
    "a null block at the other side": Bad(
        lambda s: put(theirs(s).block_ids, 1, -1), Reason.NULL_BLOCK, "spec.ticket.blocks[0].block_ids"
    ),
    "one group too few": Bad(
        lambda s: s.local_blocks.pop(), Reason.GROUP_MISMATCH, "spec.local_blocks", {"group": "ssm"}
    ),
    "one group too many": Bad(
        lambda s: s.local_blocks.add(group="other", block_ids=[9]),
        Reason.GROUP_MISMATCH,
        "spec.local_blocks[2].group",
        {"group": "other"},
    ),
    "a group twice": Bad(
        lambda s: s.local_blocks.append(lists(s)),
        Reason.GROUP_MISMATCH,
        "spec.local_blocks[2].group",
        {"group": "attn"},
    ),
    "an unknown group of the other side": Bad(
        lambda s: setattr(theirs(s), "group", "other"),
        Reason.GROUP_MISMATCH,
        "spec.ticket.blocks[0].group",
        {"group": "other"},
    ),
    "one block too few": Bad(
        lambda s: lists(s).block_ids.pop(),
        Reason.RANGE_NOT_COVERED,
        "spec.local_blocks[0].block_ids",
        {"side": "local", "group": "attn"},
    ),
    "one block too few at the other side": Bad(
        lambda s: theirs(s).block_ids.pop(), Reason.RANGE_NOT_COVERED, "spec.ticket.blocks[0].block_ids"
    ),
    "blocks that begin too late": Bad(
        lambda s: setattr(lists(s), "first_position", BLOCK),
        Reason.RANGE_NOT_COVERED,
        "spec.local_blocks[0].block_ids",
    ),
    "a first position inside a block": Bad(
        lambda s: setattr(lists(s), "first_position", 3), Reason.RANGE_INVALID, "spec.local_blocks[0].first_position"
    ),
    "a first position past all tokens": Bad(
        lambda s: setattr(lists(s), "first_position", 2**40 + 1),
        Reason.RANGE_INVALID,
        "spec.local_blocks[0].first_position",
        {"value": str(2**40 + 1)},
    ),
    "skipping inside a granule": Bad(
        lambda s: setattr(s, "skip_tokens", 3), Reason.RANGE_INVALID, "spec.skip_tokens", {"group": "attn"}
    ),
    "skipping more than there is": Bad(
        lambda s: setattr(s, "skip_tokens", 12), Reason.RANGE_INVALID, "spec.skip_tokens", {"value": "12"}
    ),
    "a huge number of tokens": Bad(
        lambda s: setattr(s, "num_tokens", 2**64 - 1),
        Reason.RANGE_INVALID,
        "spec.num_tokens",
        {"value": str(2**64 - 1)},
    ),
    "no tokens": Bad(lambda s: setattr(s, "num_tokens", 0), Reason.RANGE_INVALID, "spec.num_tokens", {"value": "0"}),
    "a snapshot of fewer tokens": Bad(
        lambda s: put(lists(s, 1).snapshot_positions, 1, 9),
        Reason.STATE_POSITION_MISMATCH,
        "spec.local_blocks[1].snapshot_positions",
        {"group": "ssm"},
    ),
    "a snapshot of fewer tokens at the other side": Bad(
        lambda s: put(theirs(s, 1).snapshot_positions, 1, 9),
        Reason.STATE_POSITION_MISMATCH,
        "spec.ticket.blocks[1].snapshot_positions",
    ),
    "two snapshots": Bad(
        lambda s: (theirs(s, 1).block_ids.append(20), theirs(s, 1).snapshot_positions.append(10)),
        Reason.STATE_POSITION_MISMATCH,
        "spec.ticket.blocks[1].snapshot_positions",
        {"group": "ssm"},
    ),
    "a position too few": Bad(
        lambda s: lists(s, 1).snapshot_positions.pop(),
        Reason.STATE_POSITION_MISMATCH,
        "spec.local_blocks[1].snapshot_positions",
        {"positions": "1", "blocks": "2"},
    ),
    "another model": Bad(
        lambda s: setattr(s.ticket, "compatibility_key", "another"),
        Reason.INCOMPATIBLE_PEER,
        "spec.ticket.compatibility_key",
        {"local": "model@rev/fp8", "remote": "another"},
    ),
    "a ticket of an earlier incarnation": Bad(
        lambda s: setattr(s.ticket.ranks[0], "incarnation", "earlier"),
        Reason.STALE_INCARNATION,
        "",
        {"expected": "earlier"},
    ),
    "an engine that is not there": Bad(
        lambda s: setattr(s.ticket, "engine_id", "other"), Reason.NOT_REGISTERED, "", {"engine_id": "other"}
    ),
    "a rank too few": Bad(
        lambda s: setattr(s.ticket, "tp_size", 2), Reason.FIELD_INVALID, "spec.ticket.ranks", {"needed": "2"}
    ),
    "a short token": Bad(
        lambda s: setattr(s.ticket, "lease_token", b"x" * 15),
        Reason.FIELD_INVALID,
        "spec.ticket.lease_token",
        {"bytes": "15"},
    ),
    "an address that is a socket": Bad(
        lambda s: setattr(s.ticket.ranks[0], "address", "unix:/run/x"),
        Reason.FIELD_INVALID,
        "spec.ticket.ranks[0].address",
    ),
    "nobody at the address": Bad(
        lambda s: setattr(s.ticket.ranks[0], "address", "127.0.0.1:1"),
        Reason.PEER_UNREACHABLE,
        "",
        {"address": "127.0.0.1:1"},
    ),
}


def check(error: Any, bad: Bad) -> None:
    assert error.reason is bad.reason, error
    if bad.field:
        assert error.field == bad.field
    assert bad.metadata.items() <= dict(error.metadata).items(), dict(error.metadata)


@pytest.mark.parametrize("name", SPECS)
async def test_a_bad_spec(reading: Reading, name: str) -> None:
    """The same answer from PrepareTransfer and ReadBlocks, with and without a handshake before."""
    bad = SPECS[name]
    for handshaken in (False, True):
        if handshaken:
            await reading.good()
        for rpc in ("PrepareTransfer", "ReadBlocks"):
            spec = reading.request().spec
            bad.change(spec)
            request = getattr(pb, f"{rpc}Request")(spec=spec)
            check(await refusal(getattr(reading.stub, rpc)(request, timeout=10)), bad)
    await reading.good()
    status = await reading.stub.GetStatus(pb.GetStatusRequest())
    assert (status.counts.prepared, status.counts.posted, status.counts.bytes_in_flight) == (0, 0, 0)


def view(request: Any, group: int = 0) -> Any:
    return request.layout.groups[group].views[0]


REGISTRATIONS = {
    "no engine": Bad(lambda r: setattr(r, "engine_id", ""), Reason.FIELD_INVALID, "engine_id"),
    "a rank outside its engine": Bad(lambda r: setattr(r.rank, "tp_rank", 1), Reason.FIELD_INVALID, "rank.tp_rank"),
    "no layout": Bad(lambda r: r.ClearField("layout"), Reason.FIELD_INVALID, "layout"),
    "a block past its region": Bad(
        lambda r: setattr(view(r), "num_blocks", 25), Reason.LAYOUT_INVALID, "layout.groups[0].views[0]"
    ),
    "a huge number of blocks": Bad(
        lambda r: setattr(view(r), "num_blocks", 2**32 - 1),
        Reason.LAYOUT_INVALID,
        "layout.groups[0].views[0].num_blocks",
    ),
    "a region that does not exist": Bad(
        lambda r: setattr(view(r), "region", 1), Reason.LAYOUT_INVALID, "layout.groups[0].views[0].region"
    ),
    "views of one group that overlap": Bad(
        lambda r: (
            r.layout.groups[1]
            .views.add(layer="2")
            .MergeFrom(layout_pb2.View(block_stride=STRIDE, num_blocks=24, format=1))
        ),
        Reason.LAYOUT_INVALID,
    ),
    "groups that share memory and number it differently": Bad(
        lambda r: view(r, 1).MergeFrom(layout_pb2.View(num_blocks=12, block_stride=2 * STRIDE)),
        Reason.LAYOUT_INVALID,
    ),
    "no memory": Bad(lambda r: r.memory.pop(), Reason.FIELD_INVALID, "memory", {"regions": "1", "value": "0"}),
    "memory of another size": Bad(
        lambda r: setattr(r.memory[0], "size", 100), Reason.MEMORY_HANDLE_INVALID, "memory[0].size", {"value": "100"}
    ),
    "memory that does not exist": Bad(
        lambda r: setattr(r.memory[0].file, "path", r.memory[0].file.path + "x"),
        Reason.MEMORY_HANDLE_INVALID,
        "memory[0].file.path",
    ),
    "memory outside the allowed directories": Bad(
        lambda r: setattr(r.memory[0].file, "path", "/etc/passwd"), Reason.MEMORY_NOT_ALLOWED, "memory[0].file.path"
    ),
    "a path with two dots": Bad(
        lambda r: setattr(r.memory[0].file, "path", "/tmp/../etc/passwd"),
        Reason.MEMORY_HANDLE_INVALID,
        "memory[0].file.path",
    ),
    "an offset past the end": Bad(
        lambda r: setattr(r.memory[0].file, "offset", 1), Reason.REGION_TOO_SMALL, "memory[0].size"
    ),
    "a plain address": Bad(
        lambda r: r.memory[0].address.CopyFrom(layout_pb2.AddressMemory(address=4096)),
        Reason.MEMORY_NOT_ALLOWED,
        "memory[0].address.address",
    ),
    "shared memory of somebody else": Bad(
        lambda r: r.memory[0].posix_shm.CopyFrom(layout_pb2.PosixShmMemory(name="/somebody-elses")),
        Reason.MEMORY_NOT_ALLOWED,
        "memory[0].posix_shm.name",
    ),
    "a memfd of no process": Bad(
        lambda r: r.memory[0].memfd.CopyFrom(layout_pb2.MemfdMemory(pid=2**31 - 1, fd=3)),
        Reason.MEMORY_HANDLE_INVALID,
    ),
    "device memory": Bad(
        lambda r: setattr(r.layout.regions[0], "memory", layout_pb2.MEMORY_KIND_VRAM), Reason.MEMORY_HANDLE_INVALID
    ),
}


@pytest.mark.parametrize("name", REGISTRATIONS)
async def test_a_bad_registration(reading: Reading, name: str) -> None:
    engine = await new_engine(reading.cluster, reading.d.nodes[0], "engine-x")
    request = registration("engine-x", engine.members[0])
    REGISTRATIONS[name].change(request)
    check(await refusal(reading.stub.RegisterCache(request)), REGISTRATIONS[name])
    await reading.good()
    # Nothing is left of it, and the good one is taken.
    assert [r.engine_id for r in (await reading.stub.GetStatus(pb.GetStatusRequest())).registrations] == ["engine-d"]
    await engine.register()


async def new_engine(cluster: Cluster, node: Any, name: str, layout: CacheLayout | None = None) -> LoopEngine:
    return await cluster.engine(name, [node], [layout or small_layout()], register=False)


async def test_the_same_memory_twice_in_one_registration(reading: Reading) -> None:
    layout = small_layout()
    double = CacheLayout((*layout.regions, *layout.regions), layout.groups)
    regions = SharedRegions.files(reading.cluster.directory, "double", layout)
    regions.handles *= 2
    regions.arrays *= 2
    request = registration("engine-x", Member(Rank(), double, reading.cluster.labels, regions))
    error = await refusal(reading.stub.RegisterCache(request))
    assert (error.reason, error.field) == (Reason.MEMORY_HANDLE_INVALID, "memory[1]")
    assert error.metadata["other"] == "0"
    # Overlapping parts of one file are the same memory, too.
    request.memory[1].size = request.layout.regions[1].size = request.memory[1].size - 1
    request.memory[1].file.offset = 1
    error = await refusal(reading.stub.RegisterCache(request))
    assert (error.reason, error.field) == (Reason.MEMORY_HANDLE_INVALID, "memory[1]")
    await reading.good()
    regions.close()


async def test_an_engine_that_is_not_registered_is_told_everywhere(reading: Reading) -> None:
    stub = reading.stub
    ticket = reading.ticket()
    calls = [
        stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id="nobody")),
        stub.Handshake(handshake_to_pb("nobody", ticket)),
        stub.ReadBlocks(pb.ReadBlocksRequest(engine_id="nobody", transfer_id="t")),
        stub.GetTransfer(pb.GetTransferRequest(engine_id="nobody", transfer_id="t")),
        stub.ListTransfers(pb.ListTransfersRequest(engine_id="nobody")),
        stub.CancelTransfer(pb.CancelTransferRequest(engine_id="nobody", transfer_id="t")),
        stub.WithdrawBlocks(pb.WithdrawBlocksRequest(engine_id="nobody", request_id="r", lease_token=b"x" * 16)),
        stub.WatchTransfers(pb.WatchTransfersRequest(engine_id="nobody")).read(),
    ]
    for call in calls:
        error = await refusal(call)
        assert (error.reason, error.field) == (Reason.NOT_REGISTERED, "engine_id")
        assert error.metadata["engine_id"] == "nobody"
    await reading.good()


async def test_handshakes_with_the_wrong_one(reading: Reading) -> None:
    target = make_target("engine-p", reading.p.members)
    request = handshake_to_pb("engine-d", target)
    request.options.ignore_local_groups.append("nothing")
    error = await refusal(reading.stub.Handshake(request))
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "options.ignore_local_groups")
    # The address of another engine.
    request = handshake_to_pb("engine-d", target)
    request.engine.ranks[0].address = reading.d.nodes[0].sidecar.peer_address
    error = await refusal(reading.stub.Handshake(request))
    assert (error.reason, error.field) == (Reason.NOT_REGISTERED, "")
    await reading.good()


async def test_a_rank_of_another_engine_size(reading: Reading) -> None:
    spec = reading.request().spec
    spec.ticket.tp_size = 2
    spec.ticket.ranks.add(tp_rank=1, incarnation="i", address=spec.ticket.ranks[0].address)
    error = await refusal(reading.stub.PrepareTransfer(pb.PrepareTransferRequest(spec=spec)))
    assert error.reason is Reason.NOT_REGISTERED
    assert error.metadata["registered"] == "tp0"
    await reading.good()


@pytest.mark.parametrize("count", [15_000, 200_000])
async def test_many_block_ids_in_one_call(cluster: Cluster, count: int) -> None:
    """A long list is taken; one bad ID in it is found and named."""
    layout = small_layout(blocks=count + 2)
    p = await cluster.engine("engine-p", [await cluster.node()], [layout])
    d = await cluster.engine("engine-d", [await cluster.node()], [layout])
    reading = Reading(cluster, p, d)
    request = read_request("engine-d", p.ticket(reading.p_lists, reading.TOKENS, publish=False), d_lists(reading))
    tokens = count * BLOCK
    rng = np.random.default_rng(5)
    for blocks in (request.spec.local_blocks, request.spec.ticket.blocks):
        ids = rng.permutation(count + 2)
        blocks[0].block_ids[:] = ids[:count].tolist()
        blocks[1].block_ids[1] = int(ids[count])
        blocks[1].snapshot_positions[1] = tokens
    request.spec.ticket.num_tokens = tokens
    p.publish(ticket_from_pb(request.spec.ticket))
    transfer = (await reading.stub.ReadBlocks(request, timeout=60)).transfer
    assert transfer.bytes == transfer.sources[0].reported_bytes == count * 64 + 76
    here, there = (e.members[0].regions.arrays[0].reshape(-1, STRIDE) for e in (d, p))
    local, remote = (list(b[0].block_ids) for b in (request.spec.local_blocks, request.spec.ticket.blocks))
    assert (here[local, :64] == there[remote, :64]).all()
    request.spec.local_blocks[0].block_ids[count - 1] = count + 2
    error = await refusal(reading.stub.ReadBlocks(request, timeout=60))
    assert (error.reason, error.metadata["block"]) == (Reason.BLOCK_OUT_OF_RANGE, str(count + 2))
    # More than a message may hold is refused as well.
    request.spec.local_blocks[0].block_ids.extend([-1] * 1_048_577)
    error = await refusal(reading.stub.ReadBlocks(request, timeout=60))
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "spec.local_blocks")
    assert error.metadata["maximum"] == "1048576"
    await reading.good()


async def test_ranks_of_one_engine_with_1000_and_998_blocks(cluster: Cluster) -> None:
    """Each rank's own number counts: block 999 can be read from one and not from the other."""
    layouts = [small_layout(0, 2, 1000), small_layout(1, 2, 998)]
    p = await cluster.engine("engine-p", [await cluster.node(), await cluster.node()], layouts)
    d = await cluster.engine("engine-d", [await cluster.node()], [small_layout(0, 1, 16)])
    reading = Reading(cluster, p, d)
    await reading.good()
    ticket = p.ticket(reading.p_lists, reading.TOKENS, publish=False)
    spec = read_request("engine-d", ticket, d_lists(reading)).spec
    spec.ticket.blocks[0].block_ids[0] = 997
    p.publish(ticket_from_pb(spec.ticket))
    await reading.stub.ReadBlocks(pb.ReadBlocksRequest(spec=spec))
    for block in (998, 999):
        spec.ticket.blocks[0].block_ids[0] = block
        error = await refusal(reading.stub.ReadBlocks(pb.ReadBlocksRequest(spec=spec)))
        assert (error.reason, error.metadata["block"]) == (Reason.BLOCK_OUT_OF_RANGE, str(block))
    await reading.good()


def d_lists(reading: Reading) -> Sequence[BlockList]:
    return block_lists(reading.d.groups, reading.d_lists)


async def test_publishing(reading: Reading) -> None:
    stub = reading.p.nodes[0].stub
    ticket = reading.p.ticket(reading.p_lists, reading.TOKENS, publish=False)
    good = publication("engine-p", ticket, ttl=30)
    answer = await stub.PublishBlocks(good)
    assert 20 < answer.expires_in.seconds + answer.expires_in.nanos / 1e9 <= 30
    # The same again, with another time: no new lease.
    good.ttl.FromSeconds(60)
    assert (await stub.PublishBlocks(good)).expires_in.seconds >= 50
    assert (await stub.GetStatus(pb.GetStatusRequest())).counts.published == 1
    bad: dict[str, tuple[Change, Reason, str]] = {
        "other content": (lambda r: put(r.blocks[0].block_ids, 0, 9), Reason.REQUEST_ID_REUSED, "request_id"),
        "another token": (lambda r: setattr(r, "lease_token", b"y" * 16), Reason.REQUEST_ID_REUSED, "request_id"),
        "another incarnation": (lambda r: setattr(r, "incarnation", "x"), Reason.STALE_INCARNATION, "incarnation"),
        "too long": (lambda r: r.ttl.FromSeconds(3601), Reason.FIELD_INVALID, "ttl"),
        "no time": (lambda r: r.ttl.FromSeconds(0), Reason.FIELD_INVALID, "ttl"),
        "past the end": (lambda r: put(r.blocks[0].block_ids, 0, 24), Reason.BLOCK_OUT_OF_RANGE, "blocks[0].block_ids"),
        "twice": (lambda r: put(r.blocks[0].block_ids, 0, 4), Reason.DUPLICATE_BLOCK, "blocks[0].block_ids"),
        "unknown group": (lambda r: setattr(r.blocks[0], "group", "x"), Reason.GROUP_MISMATCH, "blocks[0].group"),
        "missing group": (lambda r: r.blocks.pop(), Reason.GROUP_MISMATCH, "blocks"),
        "no readers": (lambda r: setattr(r, "readers", 0), Reason.FIELD_INVALID, "readers"),
    }
    for name, (change, reason, field) in bad.items():
        request = publication("engine-p", ticket, ttl=30)
        change(request)
        error = await refusal(stub.PublishBlocks(request))
        assert (error.reason, error.field) == (reason, field), name
    await reading.good()
