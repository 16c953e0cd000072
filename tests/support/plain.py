"""Large caches for tests that kill: memory that is too large for the model of every byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvxfer.core.layout import Axis, AxisKind, CacheLayout, Component, Group, GroupKind, Rank, Region, UnitRange, View
from kvxfer.core.resolve import BlockList
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.tickets import Ticket
from tests.support.engines import Bytes, Member, SharedRegions, make_ticket, publication, read_request, registration
from tests.support.fleet import Worker
from tests.support.processes import until

#: Bytes of a block, which is one token.
BLOCK = 1 << 20


def large_layout(blocks: int) -> CacheLayout:
    """One attention layer whose tokens are blocks of a mebibyte."""
    axes = (Axis(AxisKind.TOKEN, 1), Axis(AxisKind.UNIT, 1), Axis(AxisKind.INNER, BLOCK))
    component = Component("mla", "uint8", 1, axes, UnitRange(0, 1, 1))
    group = Group("attn", GroupKind.ATTENTION, (View("0", 0, 0, BLOCK, blocks, (component,)),), 1)
    return CacheLayout((Region(BLOCK * blocks),), (group,))


class PlainMember(Member):
    """A rank without a model of its memory."""

    def __init__(self, layout: CacheLayout, regions: SharedRegions) -> None:
        self.rank, self.layout, self.regions = Rank(), layout, regions
        self.registered = pb.RegisterCacheResponse()


class PlainEngine:
    """An engine of one rank with ``blocks`` blocks, in files of its own or in ``regions``."""

    def __init__(self, engine_id: str, worker: Worker, blocks: int, regions: SharedRegions | None = None) -> None:
        self.engine_id, self.worker = engine_id, worker
        layout = large_layout(blocks)
        if regions is None:
            regions = SharedRegions.files(Path(worker.directory), engine_id, layout)
        self.member = PlainMember(layout, regions)
        self.blocks: Bytes = self.member.regions.arrays[0].reshape(blocks, BLOCK)

    def register(self, *, replace: bool = False) -> PlainEngine:
        request = registration(self.engine_id, self.member, replace=replace)
        self.member.registered = self.worker.stub.RegisterCache(request, timeout=30)
        return self

    def fill(self, seed: int) -> None:
        """Bytes that are never 0, different in every block."""
        noise = np.random.default_rng(seed).integers(1, 256, BLOCK, dtype=np.uint8)
        for i, block in enumerate(self.blocks):
            block[:] = np.roll(noise, i)

    def ticket(self, ids: Sequence[int]) -> Ticket:
        """For one read by one rank; its request is published."""
        ticket = make_ticket(self.engine_id, [self.member], (BlockList("attn", np.array(ids)),), len(ids))
        self.worker.stub.PublishBlocks(publication(self.engine_id, ticket), timeout=10)
        return ticket

    def request(
        self, ticket: Ticket, ids: Sequence[int], *, transfer_id: str = "", wait: bool = True
    ) -> pb.ReadBlocksRequest:
        local = (BlockList("attn", np.array(ids)),)
        return read_request(self.engine_id, ticket, local, transfer_id=transfer_id, wait=wait)

    def read(self, source: PlainEngine, ids: Sequence[int], timeout: float = 30) -> pb.Transfer:
        """Read blocks into those of the same numbers, and compare."""
        self.blocks[list(ids)] = 0
        request = self.request(source.ticket(ids), ids)
        transfer = self.worker.stub.ReadBlocks(request, timeout=timeout).transfer
        assert transfer.state == pb.TRANSFER_STATE_DONE
        assert (self.blocks[list(ids)] == source.blocks[list(ids)]).all()
        return transfer

    def get(self, transfer_id: str) -> pb.Transfer:
        request = pb.GetTransferRequest(engine_id=self.engine_id, transfer_id=transfer_id)
        return self.worker.stub.GetTransfer(request, timeout=10).transfer

    def rest(self) -> None:
        """Wait until nothing writes its blocks: a refused read may have been posted, and then keeps them busy."""
        request = pb.ListTransfersRequest(engine_id=self.engine_id)
        stub = self.worker.stub
        until(lambda: all(t.quiesced for t in stub.ListTransfers(request, timeout=10).transfers), 20, "quiescence")

    def close(self) -> None:
        del self.blocks
        self.member.regions.close()
