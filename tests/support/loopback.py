"""Whole sidecars in the process of the test, joined by loopback transfer engines that follow a script, or by NIXL."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from kvxfer.config import Settings
from kvxfer.core.layout import (
    Axis,
    AxisKind,
    CacheLayout,
    Component,
    Group,
    GroupKind,
    Rank,
    Region,
    UnitRange,
    View,
)
from kvxfer.core.transfers import State
from kvxfer.pb import peer_pb2_grpc, transfer_pb2_grpc
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.sidecar import Sidecar
from kvxfer.wire.requests import handshake_to_pb
from kvxfer.wire.tickets import Ticket
from kvxfer.xfer.api import NotificationHandler, TransferEngine
from kvxfer.xfer.engine import EngineSettings
from kvxfer.xfer.loopback import Fabric, LoopbackEngine
from tests.support.engines import (
    Member,
    SharedRegions,
    block_lists,
    check_read,
    groups_of,
    make_ticket,
    published,
    read_request,
    registration,
)
from tests.truth import NULL, Blocks, Labels, Want

#: Bytes of a block of :func:`small_layout`, and its tokens.
STRIDE = 96
BLOCK = 4


def small_layout(tp_rank: int = 0, tp_size: int = 1, blocks: int = 24) -> CacheLayout:
    """One attention and one state group over the same memory: two heads of K, conv and SSM states."""

    def held(total: int) -> UnitRange:
        share = total // tp_size
        return UnitRange(share * tp_rank, share * (tp_rank + 1), total)

    def component(name: str, units: UnitRange, inner: int, offset: int, *tokens: Axis) -> Component:
        axes = (Axis(AxisKind.UNIT, len(units)), *tokens, Axis(AxisKind.INNER, inner))
        return Component(name, "uint8", 1, axes, units, offset)

    k = component("k", held(2), 8, 0, Axis(AxisKind.TOKEN, BLOCK))
    conv, ssm = component("conv.x", held(4), 3, 0), component("ssm", held(2), 32, 16)
    attention = Group("attn", GroupKind.ATTENTION, (View("0", 0, 0, STRIDE, blocks, (k,)),), BLOCK)
    state = Group("ssm", GroupKind.STATE, (View("1", 0, 0, STRIDE, blocks, (conv, ssm)),))
    return CacheLayout((Region(STRIDE * blocks),), (attention, state))


def small_lists(tokens: int, first: int) -> dict[str, Blocks]:
    """Consecutive blocks from ``first`` on: those of the attention group, then a snapshot."""
    count = -(-tokens // BLOCK)
    attention = Blocks(tuple(range(first, first + count)), tuple(range(0, tokens, BLOCK)))
    return {"attn": attention, "ssm": Blocks((NULL, first + count), (0, tokens))}


async def soon(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Poll a condition, with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.001)


class Node:
    """A sidecar and a client of it."""

    def __init__(self, sidecar: Sidecar, fabric: Fabric) -> None:
        self.sidecar, self.fabric = sidecar, fabric
        self.engines: list[LoopbackEngine] = []
        self._channels: list[grpc.aio.Channel] = []

    async def start(self) -> None:
        await self.sidecar.start()
        self.channel = self.connect(self.sidecar.engine_target)
        self.peer_channel = self.connect(self.sidecar.peer_address)
        # Typed for the blocking client; every call is awaited here.
        self.stub: Any = transfer_pb2_grpc.KvTransferStub(self.channel)
        self.peer_stub: Any = peer_pb2_grpc.KvPeerStub(self.peer_channel)

    def connect(self, target: str) -> grpc.aio.Channel:
        options = [
            ("grpc.max_receive_message_length", 1 << 28),
            ("grpc.max_send_message_length", 1 << 28),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ]
        channel = grpc.aio.insecure_channel(target, options=options)
        self._channels.append(channel)
        return channel

    async def stop(self) -> None:
        for channel in self._channels:
            await channel.close()
        await self.sidecar.stop()


class Cluster:
    """Sidecars on one fabric."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fabric = Fabric()
        self.labels = Labels()
        self.nodes: list[Node] = []
        self._numbers = itertools.count()
        self._engines: list[LoopEngine] = []

    async def node(self, *, real: bool = False, **settings: Any) -> Node:
        """One more sidecar; a ``real`` one is on NIXL, not on the fabric."""
        chosen: dict[str, Any] = {
            "engine_socket": self.directory / f"{len(self.nodes)}.sock",
            "memory_directories": (str(self.directory),),
            "handshake_timeout": 5.0,
            "drain_timeout": 5.0,
            **settings,
        }
        drain = EngineSettings(drain=chosen["drain_timeout"], warm_up=0.0)
        made: list[LoopbackEngine] = []

        def make(name: str, on_notification: NotificationHandler | None) -> TransferEngine:
            made.append(LoopbackEngine(name, self.fabric, on_notification, settings=drain))
            return made[-1]

        node = Node(Sidecar(Settings(**chosen), None if real else make), self.fabric)
        node.engines = made
        await node.start()
        self.nodes.append(node)
        return node

    async def engine(
        self, name: str, nodes: Sequence[Node], layouts: Sequence[CacheLayout] | None = None, *, register: bool = True
    ) -> LoopEngine:
        """An engine with a rank on each node."""
        size = len(nodes)
        chosen = layouts or [small_layout(i, size) for i in range(size)]
        members = []
        for i, layout in enumerate(chosen):
            regions = SharedRegions.files(self.directory, f"{name}.{i}.{next(self._numbers)}", layout)
            members.append(Member(Rank(i, size), layout, self.labels, regions))
        engine = LoopEngine(name, members, nodes)
        self._engines.append(engine)
        if register:
            await engine.register()
        return engine

    async def close(self) -> None:
        self.fabric.let_go()
        for node in reversed(self.nodes):  # readers come last, and have still to tell their sources
            for known in node.sidecar.registrations:
                for _, lease in known.leases:
                    lease._grants.clear()  # whoever was granted a read is a test that is over
            await node.stop()
        for engine in self._engines:
            for member in engine.members:
                member.regions.close()


class LoopEngine:
    """An engine whose ranks are registered with sidecars of a cluster, one each."""

    def __init__(self, engine_id: str, members: Sequence[Member], nodes: Sequence[Node]) -> None:
        self.engine_id, self.members, self.nodes = engine_id, list(members), list(nodes)
        self.groups = groups_of(m.layout for m in members)

    async def register(self, *, replace: bool = False) -> None:
        for member, node in zip(self.members, self.nodes, strict=True):
            request = registration(self.engine_id, member, replace=replace)
            member.registered = await node.stub.RegisterCache(request)
            member.write()

    def hold(self, lists: Mapping[str, Blocks]) -> None:
        for member in self.members:
            member.hold(lists)

    def ticket(self, lists: Mapping[str, Blocks], tokens: int, request_id: str = "", *, publish: bool = True) -> Ticket:
        """A ticket for one read by each rank of another engine; its request is published on every rank."""
        blocks = block_lists(self.groups, lists)
        ticket = make_ticket(self.engine_id, self.members, blocks, tokens, request_id=request_id)
        if publish:
            self.publish(ticket)
        return ticket

    def publish(self, ticket: Ticket, ttl: float = 60.0, readers: int | None = None) -> None:
        for member, node in zip(self.members, self.nodes, strict=True):
            leases = node.sidecar.registrations.get(self.engine_id).leases
            leases.publish(published(self.engine_id, ticket, ttl, of=member, readers=readers))

    def request(
        self, ticket: Ticket, lists: Mapping[str, Blocks], *, transfer_id: str = "", wait: bool = True
    ) -> pb.ReadBlocksRequest:
        """ReadBlocks of everything that the ticket promises."""
        return read_request(self.engine_id, ticket, block_lists(self.groups, lists), transfer_id=transfer_id, wait=wait)

    async def handshake(self, ticket: Ticket, number: int = 0) -> pb.Plan:
        request = handshake_to_pb(self.engine_id, ticket)
        plan: pb.Plan = (await self.nodes[number].stub.Handshake(request)).plan
        return plan

    async def get(self, transfer_id: str, number: int = 0) -> pb.Transfer:
        request = pb.GetTransferRequest(engine_id=self.engine_id, transfer_id=transfer_id)
        transfer: pb.Transfer = (await self.nodes[number].stub.GetTransfer(request)).transfer
        return transfer

    async def cancel(self, transfer_id: str, timeout: float | None = None, number: int = 0) -> pb.Transfer:
        request = pb.CancelTransferRequest(engine_id=self.engine_id, transfer_id=transfer_id)
        if timeout is not None:
            request.timeout.FromNanoseconds(round(timeout * 1e9))
        transfer: pb.Transfer = (await self.nodes[number].stub.CancelTransfer(request)).transfer
        return transfer


class Reading:
    """D reads from P: what most tests start from."""

    TOKENS = 10

    def __init__(self, cluster: Cluster, p: LoopEngine, d: LoopEngine) -> None:
        self.cluster, self.p, self.d = cluster, p, d
        self.fabric = cluster.fabric
        self.p_lists, self.d_lists = small_lists(self.TOKENS, 3), small_lists(self.TOKENS, 1)
        p.hold(self.p_lists)
        self.wants = {g.name: Want(0, self.TOKENS) for g in d.groups}
        self._tickets: dict[str, Ticket] = {}

    @property
    def stub(self) -> Any:
        """D's sidecar."""
        return self.d.nodes[0].stub

    def ticket(self, request_id: str = "") -> Ticket:
        return self.p.ticket(self.p_lists, self.TOKENS, request_id)

    def request(self, transfer_id: str = "", *, wait: bool = True, first: int = 1) -> pb.ReadBlocksRequest:
        """To read everything; of the same transfer always the same ticket."""
        ticket = self._tickets.get(transfer_id) or self.ticket()
        if transfer_id:
            self._tickets[transfer_id] = ticket
        return self.d.request(ticket, small_lists(self.TOKENS, first), transfer_id=transfer_id, wait=wait)

    async def quiet(self) -> None:
        """Whatever was posted has ended, also what was refused: its blocks are free for the next read."""
        for node in self.d.nodes:
            for registered in node.sidecar.registrations:
                for transfer in registered.transfers:
                    if transfer.state is not State.PREPARED:
                        await asyncio.wait_for(transfer.finished.wait(), 20)

    async def good(self) -> pb.Transfer:
        """A good transfer, compared byte by byte with memory that was noise before."""
        await self.quiet()
        ticket = self.ticket()
        for number, (member, node) in enumerate(zip(self.d.members, self.d.nodes, strict=True)):
            member.model.image = member.model.labels.noise(member.model.image.size)
            member.write()
            mine = block_lists(groups_of([member.layout]), self.d_lists)
            request = read_request(self.d.engine_id, ticket, mine)
            transfer: pb.Transfer = (await node.stub.ReadBlocks(request, timeout=10)).transfer
            check_read(member, self.p.members, transfer, self.d_lists, self.wants)
            assert number or transfer.sources
        return transfer


@contextlib.asynccontextmanager
async def new_cluster() -> AsyncIterator[Cluster]:
    """A cluster without sidecars yet."""
    directory = Path(tempfile.mkdtemp(prefix="kvxfer-test-"))
    cluster = Cluster(directory)
    try:
        yield cluster
    finally:
        try:
            await cluster.close()
        finally:
            shutil.rmtree(directory)
