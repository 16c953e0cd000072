"""Engines for tests with sidecars: memory filled after the truth model, tickets, reads, and the comparison.

Every byte of the model has a label; real memory holds a hash of it.  Two images are then equal where every byte came
from where it had to come from, but for one chance in 256 a byte.
"""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvxfer.core.layout import CacheLayout, GroupKind, Rank
from kvxfer.core.pairing import PairingOptions
from kvxfer.core.resolve import BlockList
from kvxfer.memory.handles import Address, Handle, Owned, OwnedBacking
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.handles import handle_from_pb
from kvxfer.wire.requests import PublishBlocks, RegisterCache, Target, publish_to_pb, register_to_pb, spec_to_pb
from kvxfer.wire.tickets import Ticket, TicketRank
from kvxfer_client.memory import SharedRegion
from tests.truth import NULL, Blocks, Ints, Labels, RankMemory, Want, granules

Bytes = npt.NDArray[np.uint8]

#: Any order on either side, whatever it costs.
ANY_ORDER = PairingOptions(min_run_bytes=1)
KEY = "model@rev/fp8"
TOKEN = bytes(range(16))

_requests = itertools.count(1)


def as_bytes(labels: Ints) -> Bytes:
    """What memory holds where the model has these labels."""
    x = labels.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(31)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    found: Bytes = (x >> np.uint64(56)).astype(np.uint8)
    return found


class Regions(Protocol):
    """The memory of a rank: a flat array for each region, and what a sidecar calls it."""

    @property
    def arrays(self) -> Sequence[Bytes]: ...
    @property
    def handles(self) -> tuple[Handle, ...]: ...
    def close(self) -> None: ...


class SharedRegions:
    """Shared memory of the client library."""

    def __init__(self, made: Iterable[SharedRegion]) -> None:
        self._made = list(made)
        self.arrays: list[Bytes] = [r.numpy(np.uint8, (r.size,)) for r in self._made]
        self.handles: tuple[Handle, ...] = tuple(r.handle for r in self._made)

    @classmethod
    def files(cls, directory: Path, name: str, layout: CacheLayout) -> SharedRegions:
        return cls(SharedRegion.create_file(directory / f"{name}.{i}", r.size) for i, r in enumerate(layout.regions))

    @classmethod
    def memfds(cls, _directory: Path, _name: str, layout: CacheLayout) -> SharedRegions:
        return cls(SharedRegion.create_memfd(r.size) for r in layout.regions)

    @classmethod
    def posix_shm(cls, _directory: Path, _name: str, layout: CacheLayout) -> SharedRegions:
        return cls(SharedRegion.create_shm(r.size) for r in layout.regions)

    def close(self) -> None:
        self.arrays.clear()
        for region in self._made:
            region.close()
            region.unlink()


class OwnedRegions:
    """Memory that the sidecar makes; mapped here once it has said where it is."""

    def __init__(self, layout: CacheLayout, backing: OwnedBacking) -> None:
        self.handles: tuple[Handle, ...] = tuple(Owned(r.size, backing) for r in layout.regions)
        self.arrays: list[Bytes] = []
        self.mapped: list[Handle] = []
        self._regions: list[SharedRegion] = []

    def map(self, registered: pb.RegisterCacheResponse) -> None:
        """Map what RegisterCache has answered."""
        assert [e.region for e in registered.exported] == list(range(len(self.handles)))
        self.mapped = [handle_from_pb(e.handle, "handle") for e in registered.exported]
        self._regions = [SharedRegion.map(handle) for handle in self.mapped]
        self.arrays = [r.numpy(np.uint8, (r.size,)) for r in self._regions]

    def close(self) -> None:
        self.arrays.clear()
        for region in self._regions:
            region.close()


class ArrayRegions:
    """Plain arrays of this process, for an embedded sidecar."""

    def __init__(self, layout: CacheLayout) -> None:
        self.arrays: list[Bytes] = [np.zeros(r.size, np.uint8) for r in layout.regions]
        self.handles: tuple[Handle, ...] = tuple(Address(a.ctypes.data, a.nbytes) for a in self.arrays)

    def close(self) -> None:
        """The arrays stay until nobody uses them."""


class Member:
    """One rank: its layout, the model of its memory, and the memory itself."""

    def __init__(self, rank: Rank, layout: CacheLayout, labels: Labels, regions: Regions) -> None:
        self.rank, self.layout, self.regions = rank, layout, regions
        self.model = RankMemory(layout, labels)
        self.registered = pb.RegisterCacheResponse()

    def hold(self, lists: Mapping[str, Blocks]) -> None:
        """Fill blocks with what a prefill would have written."""
        self.model.hold(lists)
        self.write()

    def write(self) -> None:
        """Bring the memory to what the model says."""
        data = as_bytes(self.model.image)
        starts = self.model.region_starts.tolist()
        for array, begin, end in zip(self.regions.arrays, starts, starts[1:], strict=False):
            array[:] = data[begin:end]

    def image(self) -> Bytes:
        """What is in memory."""
        return np.concatenate([np.asarray(a) for a in self.regions.arrays])

    def differences(self, image: Ints, unspecified: npt.NDArray[np.bool_] | None = None) -> str:
        """Where memory is not what the model's ``image`` says, in words."""
        wrong = self.image() != as_bytes(image)
        if unspecified is not None:
            wrong &= ~unspecified
        places = np.flatnonzero(wrong)
        if not places.size:
            return ""
        region = int(np.searchsorted(self.model.region_starts, places[0], side="right")) - 1
        return f"{places.size} wrong bytes of rank {self.rank}, first in region {region} at {places[0]}"


def registration(engine_id: str, member: Member, *, replace: bool = False, key: str = KEY) -> pb.RegisterCacheRequest:
    """The request that registers a rank."""
    return register_to_pb(
        RegisterCache(engine_id, member.rank, key, member.layout, member.regions.handles, replace=replace)
    )


@dataclass
class Group:
    """What a list needs to know of a group."""

    name: str
    kind: GroupKind
    block_tokens: int


def groups_of(layouts: Iterable[CacheLayout]) -> list[Group]:
    """All groups of an engine's ranks."""
    found = {g.name: Group(g.name, g.kind, g.block_tokens) for layout in layouts for g in layout.groups}
    return list(found.values())


def block_lists(
    groups: Iterable[Group], lists: Mapping[str, Blocks], wants: Mapping[str, Want] | None = None
) -> tuple[BlockList, ...]:
    """The model's lists as those of a request; a range of a group's own where ``wants`` says so."""
    found = []
    for group in groups:
        blocks = lists[group.name]
        ids = np.array(blocks.ids, dtype=np.int64)
        if group.kind is GroupKind.STATE:
            found.append(BlockList(group.name, ids, positions=np.array(blocks.positions, dtype=np.int64)))
            continue
        want = (wants or {}).get(group.name)
        first = blocks.positions[0] if blocks.positions else 0
        own = (want.skip, want.tokens) if want else (None, None)
        found.append(BlockList(group.name, ids, first, skip_tokens=own[0], num_tokens=own[1]))
    return tuple(found)


def make_lists(
    groups: Iterable[Group], num_tokens: int, seed: int, *, first: int = 0, blocks: int | None = None
) -> tuple[dict[str, Blocks], int]:
    """Blocks of one request for every group, no number twice, in no order; and how many blocks that takes.

    A state group has a null block first, as a scheduler that keeps snapshots at block boundaries gives it.
    """
    groups = list(groups)
    needed = sum(-(-num_tokens // g.block_tokens) if g.kind is GroupKind.ATTENTION else 1 for g in groups)
    free = list(range(first, first + (needed if blocks is None else blocks)))
    random.Random(seed).shuffle(free)
    lists = {}
    for group in groups:
        if group.kind is GroupKind.STATE:
            lists[group.name] = Blocks((NULL, free.pop()), (0, num_tokens))
        else:
            starts = tuple(range(0, num_tokens, group.block_tokens))
            lists[group.name] = Blocks(tuple(free.pop() for _ in starts), starts)
    return lists, needed


def make_ticket(
    engine_id: str,
    members: Sequence[Member],
    blocks: tuple[BlockList, ...],
    num_tokens: int,
    *,
    request_id: str = "",
    key: str = KEY,
    token: bytes = b"",
) -> Ticket:
    """What the router would carry; of a request of its own unless one is named."""
    request_id = request_id or f"request-{next(_requests)}"
    token = token or secrets.token_bytes(16)
    ranks = tuple(TicketRank(m.rank, m.registered.incarnation, m.registered.peer_address) for m in members)
    first = members[0].rank
    return Ticket(engine_id, key, first.tp_size, first.pp_size, ranks, request_id, blocks, num_tokens, token, 60.0)


def make_target(engine_id: str, members: Sequence[Member]) -> Target:
    """The engine by its addresses."""
    return Target(engine_id, tuple(TicketRank(m.rank, "", m.registered.peer_address) for m in members))


def publication(
    engine_id: str, ticket: Ticket, ttl: float | None = 60.0, *, of: Member | None = None, readers: int | None = None
) -> pb.PublishBlocksRequest:
    """Publish what a ticket names, or of it what one rank has."""
    return publish_to_pb(published(engine_id, ticket, ttl, of=of, readers=readers))


def published(
    engine_id: str, ticket: Ticket, ttl: float | None = 60.0, *, of: Member | None = None, readers: int | None = None
) -> PublishBlocks:
    """The same, as a record."""
    names = {b.group for b in ticket.blocks} if of is None else {g.name for g in of.layout.groups}
    blocks = tuple(b for b in ticket.blocks if b.group in names)
    return PublishBlocks(engine_id, "", ticket.request_id, blocks, ticket.num_tokens, ticket.lease_token, ttl, readers)


def read_request(
    engine_id: str,
    ticket: Ticket,
    local: Sequence[BlockList],
    *,
    transfer_id: str = "",
    skip_tokens: int = 0,
    num_tokens: int | None = None,
    wait: bool = True,
) -> pb.ReadBlocksRequest:
    """Prepare and read in one call."""
    spec = spec_to_pb(engine_id, ticket, local, transfer_id=transfer_id, skip_tokens=skip_tokens, num_tokens=num_tokens)
    return pb.ReadBlocksRequest(spec=spec, wait=wait)


def check_read(
    reader: Member,
    sources: Sequence[Member],
    transfer: pb.Transfer,
    lists: Mapping[str, Blocks],
    wants: Mapping[str, Want],
) -> None:
    """All of the reader's memory is what it must be, and no byte too many has moved.

    The model then takes over what arrived, so that the next read can be checked as well.
    """
    mine = {g.name for g in reader.layout.groups}
    wanted = {name: want for name, want in wants.items() if name in mine}
    remotes = [s.model for s in sources]
    image, unspecified, least = reader.model.expect(lists, wanted, granules(reader.model, remotes))
    assert transfer.state == pb.TRANSFER_STATE_DONE
    assert transfer.quiesced
    assert not (wrong := reader.differences(image, unspecified)), wrong
    by_group = dict.fromkeys(least, 0)
    for source in transfer.sources:
        assert source.reported_bytes == source.bytes == sum(g.bytes for g in source.groups)
        for group in source.groups:
            by_group[group.group] += group.bytes
    assert by_group == least
    assert transfer.bytes == sum(least.values())
    assert transfer.descriptors == sum(s.descriptors for s in transfer.sources)
    reader.model.image = image
    if unspecified.any():
        reader.write()
