"""Engines on real sidecar processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from kvxfer.core.layout import CacheLayout, Rank
from kvxfer.core.pairing import PairingOptions
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.pb import transfer_pb2_grpc
from kvxfer.wire.requests import handshake_to_pb
from kvxfer.wire.tickets import Ticket
from tests.support.engines import (
    ANY_ORDER,
    Member,
    OwnedRegions,
    Regions,
    SharedRegions,
    block_lists,
    check_read,
    groups_of,
    make_ticket,
    publication,
    read_request,
    registration,
)
from tests.truth import Blocks, Labels, Want

_numbers = itertools.count()

MakeRegions = Callable[[Path, str, CacheLayout], Regions]


class Worker(Protocol):
    """A sidecar as its engine sees it."""

    @property
    def directory(self) -> Path: ...
    @property
    def stub(self) -> transfer_pb2_grpc.KvTransferStub: ...


class Engine:
    """An engine whose ranks are registered with sidecars, one each; a context manager that takes it away again."""

    def __init__(
        self,
        letter: str,
        members: Sequence[tuple[Rank, CacheLayout]],
        processes: Sequence[Worker],
        labels: Labels,
        make_regions: MakeRegions = SharedRegions.files,
    ) -> None:
        self.engine_id = f"{letter}-{next(_numbers)}"
        self.processes = list(processes)
        self.members = []
        for i, (rank, layout) in enumerate(members):
            regions = make_regions(processes[i].directory, f"{self.engine_id}.{i}", layout)
            self.members.append(Member(rank, layout, labels, regions))
        self.groups = groups_of(layout for _, layout in members)

    def register(self, *, replace: bool = False) -> Engine:
        for member, process in zip(self.members, self.processes, strict=False):
            request = registration(self.engine_id, member, replace=replace)
            member.registered = process.stub.RegisterCache(request, timeout=30)
            if isinstance(member.regions, OwnedRegions):
                member.regions.map(member.registered)
            member.write()
        return self

    def unregister(self) -> None:
        for _, process in zip(self.members, self.processes, strict=False):
            process.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id=self.engine_id), timeout=60)

    def close(self) -> None:
        for member in self.members:
            member.regions.close()

    def __enter__(self) -> Engine:
        return self.register()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.unregister()
        finally:
            self.close()

    def hold(self, lists: Mapping[str, Blocks]) -> None:
        for member in self.members:
            member.hold(lists)

    def ticket(self, lists: Mapping[str, Blocks], num_tokens: int, request_id: str = "", ttl: float = 60.0) -> Ticket:
        """A ticket for one read by each rank of another engine; its request is published on every rank."""
        blocks = block_lists(self.groups, lists)
        ticket = make_ticket(self.engine_id, self.members, blocks, num_tokens, request_id=request_id)
        for member, process in zip(self.members, self.processes, strict=False):
            process.stub.PublishBlocks(publication(self.engine_id, ticket, ttl, of=member), timeout=10)
        return ticket

    def handshake(
        self, number: int, ticket: Ticket, options: PairingOptions | None = ANY_ORDER, timeout: float = 30
    ) -> pb.Plan:
        request = handshake_to_pb(self.engine_id, ticket, options)
        return self.processes[number].stub.Handshake(request, timeout=timeout).plan

    def read(
        self,
        number: int,
        source: Engine,
        ticket: Ticket,
        lists: Mapping[str, Blocks],
        wants: Mapping[str, Want],
        *,
        skip_tokens: int = 0,
        timeout: float = 60,
    ) -> pb.Transfer:
        """Read on rank ``number`` and compare everything."""
        member = self.members[number]
        mine = groups_of([member.layout])
        plain = Want(skip_tokens, ticket.num_tokens)
        own = {name: want for name, want in wants.items() if want != plain}
        request = read_request(self.engine_id, ticket, block_lists(mine, lists, own), skip_tokens=skip_tokens)
        transfer = self.processes[number].stub.ReadBlocks(request, timeout=timeout).transfer
        check_read(member, source.members, transfer, lists, wants)
        return transfer
