from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest
from hypothesis import given

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.resolve import MAX_TOKENS, BlockList
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.blocks import MAX_IDS, block_digest, block_lists_from_pb, block_lists_to_pb
from tests.wire.strategies import block_lists, lists_of_groups, same_blocks

MESSAGE_LIMIT = 16 * 1024 * 1024


def travel(lists: list[pb.BlockList]) -> pb.Ticket:
    return pb.Ticket.FromString(pb.Ticket(blocks=lists).SerializeToString())


@given(lists_of_groups(local=True))
def test_round_trip(lists: tuple[BlockList, ...]) -> None:
    again = block_lists_from_pb(travel(block_lists_to_pb(lists)).blocks, "blocks", local=True)
    assert all(same_blocks(a, b) for a, b in zip(lists, again, strict=True))
    for blocks in again:
        assert np.asarray(blocks.ids).dtype == np.int64
        assert blocks.positions is None or np.asarray(blocks.positions).dtype == np.int64


def test_position_beside_a_null_block_means_nothing() -> None:
    lists = [BlockList("g", [-1, 5], positions=[-7, 9])]
    (again,) = block_lists_from_pb(travel(block_lists_to_pb(lists)).blocks, "blocks")
    assert again.positions is not None
    assert np.asarray(again.positions).tolist() == [0, 9]


@pytest.mark.parametrize(
    "lists, field, reason",
    [
        ([], "b", Reason.FIELD_INVALID),
        ([pb.BlockList(group=f"g{i}") for i in range(1_025)], "b", Reason.FIELD_INVALID),
        ([pb.BlockList()], "b[0].group", Reason.FIELD_INVALID),
        ([pb.BlockList(group="a"), pb.BlockList(group="a")], "b[1].group", Reason.GROUP_MISMATCH),
        ([pb.BlockList(group="a", block_ids=[0, -2])], "b[0].block_ids", Reason.BLOCK_OUT_OF_RANGE),
        ([pb.BlockList(group="a", block_ids=[-(2**31)])], "b[0].block_ids", Reason.BLOCK_OUT_OF_RANGE),
        ([pb.BlockList(group="a", block_ids=[0] * (MAX_IDS + 1))], "b", Reason.FIELD_INVALID),
        ([pb.BlockList(group="a", first_position=MAX_TOKENS + 1)], "b[0].first_position", Reason.RANGE_INVALID),
        ([pb.BlockList(group="a", first_position=2**64 - 1)], "b[0].first_position", Reason.RANGE_INVALID),
        (
            [pb.BlockList(group="a", block_ids=[1], snapshot_positions=[2**64 - 1])],
            "b[0].snapshot_positions",
            Reason.RANGE_INVALID,
        ),
        (
            [pb.BlockList(group="a", block_ids=[1], snapshot_positions=[1, 2])],
            "b[0].snapshot_positions",
            Reason.STATE_POSITION_MISMATCH,
        ),
        ([pb.BlockList(group="a", skip_tokens=0)], "b[0].skip_tokens", Reason.FIELD_INVALID),
        ([pb.BlockList(group="a", num_tokens=0)], "b[0].num_tokens", Reason.FIELD_INVALID),
    ],
)
def test_refuses_and_names_the_field(lists: list[pb.BlockList], field: str, reason: Reason) -> None:
    with pytest.raises(KvxferError) as caught:
        block_lists_from_pb(lists, "b")
    assert (caught.value.field, caught.value.reason) == (field, reason)


@pytest.mark.parametrize("name", ["skip_tokens", "num_tokens"])
def test_range_of_a_group_is_bounded(name: str) -> None:
    message = pb.BlockList(group="a")
    setattr(message, name, 2**64 - 1)
    with pytest.raises(KvxferError) as caught:
        block_lists_from_pb([message], "b", local=True)
    assert (caught.value.field, caught.value.reason) == (f"b[0].{name}", Reason.RANGE_INVALID)


@pytest.mark.parametrize(
    "blocks, reason",
    [
        (BlockList("a", [2**31]), Reason.BLOCK_OUT_OF_RANGE),
        (BlockList("a", [-2]), Reason.BLOCK_OUT_OF_RANGE),
        (BlockList("a", [0.5]), Reason.FIELD_INVALID),
        (BlockList("a", [[1]]), Reason.FIELD_INVALID),
        (BlockList("a", [1], positions=[1, 2]), Reason.STATE_POSITION_MISMATCH),
        (BlockList("a", [1], positions=[-1]), Reason.RANGE_INVALID),
        (BlockList("a", [1], first_position=-1), Reason.RANGE_INVALID),
    ],
)
def test_what_cannot_travel_is_refused(blocks: BlockList, reason: Reason) -> None:
    with pytest.raises(KvxferError) as caught:
        block_lists_to_pb([blocks])
    assert caught.value.reason is reason


def test_200_000_ids_on_each_side_fit_and_are_fast() -> None:
    ids = np.random.default_rng(7).permutation(2_000_000)[:200_000]
    lists = block_lists_to_pb([BlockList("full", ids)])
    request = pb.ReadBlocksRequest(spec=pb.TransferSpec(ticket=pb.Ticket(blocks=lists), local_blocks=lists))
    raw = request.SerializeToString()
    assert len(raw) < MESSAGE_LIMIT / 10
    message = pb.ReadBlocksRequest.FromString(raw)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        (blocks,) = block_lists_from_pb(message.spec.local_blocks, "local_blocks", local=True)
        took.append(time.perf_counter() - began)
    assert (np.asarray(blocks.ids) == ids).all()
    # About 1 ms where NumPy reads protobuf's buffer, 15 ms where it has to ask for each element.
    assert min(took) < 0.1


@given(block_lists())
def test_digest_is_that_of_the_readme(blocks: BlockList) -> None:
    name = blocks.group.encode()
    ids = np.asarray(blocks.ids).tolist()
    positions = [] if blocks.positions is None else np.asarray(blocks.positions).tolist()
    raw = len(name).to_bytes(4, "little") + name + blocks.first_position.to_bytes(8, "little")
    raw += len(ids).to_bytes(8, "little") + b"".join(i.to_bytes(8, "little", signed=True) for i in ids)
    raw += len(positions).to_bytes(8, "little") + b"".join(p.to_bytes(8, "little") for p in positions)
    assert block_digest(blocks) == hashlib.sha256(raw).digest()


def test_digest_of_a_known_list() -> None:
    blocks = BlockList("mamba.0", [-1, 7], positions=[99, 4_175])
    assert block_digest(blocks).hex() == block_digest(BlockList("mamba.0", [-1, 7], positions=[0, 4_175])).hex()
    assert block_digest(blocks) != block_digest(BlockList("mamba.0", [-1, 8], positions=[0, 4_175]))
