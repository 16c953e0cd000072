"""What the sidecar answers, as plain frozen data.  Sizes are bytes, durations seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from enum import Enum
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from kvxfer.core.errors import KvxferError
from kvxfer.core.layout import GroupKind, Rank
from kvxfer.memory.handles import Handle
from kvxfer.pb import layout_pb2 as layout_pb
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.fields import choice
from kvxfer.wire.handles import handle_from_pb
from kvxfer.wire.layouts import GROUP_KINDS
from kvxfer.wire.status import from_status
from kvxfer.wire.tickets import TicketRank


class TransferState(str, Enum):
    """Where a transfer is in its life."""

    #: Of a later version of the sidecar.
    UNKNOWN = "unknown"
    #: Validated and made; nothing moves.
    PREPARED = "prepared"
    #: Being read.
    POSTED = "posted"
    #: Failed or cancelled, but the local blocks may still be written.
    DRAINING = "draining"
    #: All bytes have arrived and are valid.
    DONE = "done"
    #: Failed; nothing in the local blocks may be used.
    FAILED = "failed"
    #: Cancelled; nothing in the local blocks may be used.
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether it stays as it is."""
        return self in (TransferState.DONE, TransferState.FAILED, TransferState.CANCELLED)


STATES: Final = {
    pb.TRANSFER_STATE_PREPARED: TransferState.PREPARED,
    pb.TRANSFER_STATE_POSTED: TransferState.POSTED,
    pb.TRANSFER_STATE_DRAINING: TransferState.DRAINING,
    pb.TRANSFER_STATE_DONE: TransferState.DONE,
    pb.TRANSFER_STATE_FAILED: TransferState.FAILED,
    pb.TRANSFER_STATE_CANCELLED: TransferState.CANCELLED,
}
STATES_OUT: Final = {state: number for number, state in STATES.items()}


class LeaseState(str, Enum):
    """Where a published request is in its life."""

    #: Of a later version of the sidecar.
    UNKNOWN = "unknown"
    #: Its blocks must stay as they are.
    HELD = "held"
    #: Every reader is done.
    RELEASED = "released"
    #: Its time has passed.
    EXPIRED = "expired"
    #: It was withdrawn.
    WITHDRAWN = "withdrawn"

    @property
    def ended(self) -> bool:
        """Whether its blocks may be freed."""
        return self in (LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.WITHDRAWN)


LEASE_STATES: Final = {
    pb.LEASE_STATE_HELD: LeaseState.HELD,
    pb.LEASE_STATE_RELEASED: LeaseState.RELEASED,
    pb.LEASE_STATE_EXPIRED: LeaseState.EXPIRED,
    pb.LEASE_STATE_WITHDRAWN: LeaseState.WITHDRAWN,
}
LEASE_STATES_OUT: Final = {state: number for number, state in LEASE_STATES.items()}


@dataclass(frozen=True, slots=True)
class Registered:
    """A registration.

    :param incarnation: fresh for every registration; part of every ticket.
    :param fingerprint: SHA-256 of the layout, 64 hexadecimal digits.
    :param exported: what to map (:meth:`SharedRegion.map`) for each region that the sidecar owns, by region index.
    :param peer_address: ``host:port`` of the sidecar for its peers.
    """

    engine_id: str
    rank: Rank
    incarnation: str
    fingerprint: str
    exported: Mapping[int, Handle]
    peer_address: str

    @property
    def ticket_rank(self) -> TicketRank:
        """This rank as tickets name it."""
        return TicketRank(self.rank, self.incarnation, self.peer_address)


@dataclass(frozen=True, slots=True)
class GroupCost:
    """What one local group costs from one source.

    :param layers: layers that are read.
    :param granule_tokens: attention: tokens in the smallest unit that can be read; ``skip_tokens`` must be a multiple
        of it.  0 in a state group, as everything else about tokens.
    :param granule_bytes: bytes of such a unit, and ``granule_descriptors`` its descriptors.
    :param block_tokens: tokens in the largest unit that is read as a whole.
    :param block_bytes: bytes of such a unit, and ``block_descriptors`` its descriptors.
    :param snapshot_bytes: state: bytes of a snapshot, and ``snapshot_descriptors`` its descriptors.
    """

    group: str
    kind: GroupKind
    layers: int
    granule_tokens: int
    granule_bytes: int
    granule_descriptors: int
    block_tokens: int
    block_bytes: int
    block_descriptors: int
    snapshot_bytes: int
    snapshot_descriptors: int


@dataclass(frozen=True, slots=True)
class PlanSource:
    """One rank that is read from.

    :param local_rows: rows (runs over all blocks) prepared for the local memory.
    :param local_descriptors: descriptors that they stand for; likewise for the remote memory.
    :param transport: for people.
    :param groups: a group whose layers differ in kernel block size occurs once for each size; its costs add up.
    """

    rank: Rank
    incarnation: str
    address: str
    local_rows: int
    remote_rows: int
    local_descriptors: int
    remote_descriptors: int
    transport: str
    groups: tuple[GroupCost, ...]


@dataclass(frozen=True, slots=True)
class PlanInfo:
    """What reading from a remote engine takes.

    :param sources: the ranks that are read from.
    :param warnings: what works at a cost that its owner should know.
    :param explanation: the plan as a table for people; its form may change.
    """

    engine_id: str
    remote_engine_id: str
    sources: tuple[PlanSource, ...]
    warnings: tuple[str, ...]
    explanation: str

    @property
    def granule_tokens(self) -> int:
        """The least common granule: what ``skip_tokens`` must be a multiple of; 1 without attention groups."""
        sizes = [g.granule_tokens for s in self.sources for g in s.groups if g.granule_tokens]
        return math.lcm(*sizes)


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """What is read from one rank.

    :param descriptors: descriptor pairs, before NIXL merges neighbours.
    :param bytes: bytes that the plan says, and ``groups`` the same by local group.
    :param reported_bytes: bytes that NIXL counted; ``None`` before the end and where it does not tell.
    :param reported_descriptors: descriptors that NIXL counted, after merging; ``None`` likewise.
    """

    rank: Rank
    incarnation: str
    descriptors: int
    bytes: int
    groups: Mapping[str, int]
    reported_bytes: int | None
    reported_descriptors: int | None


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a transfer's time went, seconds; ``None`` for phases that were not reached.

    Sources are read at once: of each phase the longest is told.

    :param resolve: validating, and turning block IDs into descriptors.
    :param make: making the NIXL requests; of a large read in part inside ``move``.
    :param queue: waiting for the NIXL thread.
    :param post: inside NIXL's posting calls; the whole copy, where the transport copies there.
    :param move: the rest, from the first posting until completion was seen.
    :param open: from sending OpenRead until the answer: beside ``resolve`` and ``make``, or after them where the
        transfer has an ID of its own; ``queue``, ``post`` and ``move`` follow.
    :param total: from ReadBlocks until the end.
    """

    resolve: float | None = None
    make: float | None = None
    queue: float | None = None
    post: float | None = None
    move: float | None = None
    open: float | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True)
class TransferInfo:
    """A transfer as it was when the sidecar answered.

    :param id: the transfer ID.
    :param quiesced: nothing writes the local blocks any more; they may be reused.  Also true before the read is posted.
    :param skip_tokens: first token that is read; ``num_tokens`` is one past the last.
    :param descriptors: descriptor pairs of all sources; ``bytes`` likewise.
    :param error: why it failed or was cancelled; set from ``DRAINING`` on.
    :param create_time: when it was prepared, by the sidecar's wall clock; for people.  ``end_time`` likewise.
    """

    id: str
    engine_id: str
    remote_engine_id: str
    request_id: str
    state: TransferState
    quiesced: bool
    skip_tokens: int
    num_tokens: int
    sources: tuple[SourceInfo, ...]
    descriptors: int
    bytes: int
    timings: Timings
    error: KvxferError | None
    create_time: datetime | None
    end_time: datetime | None

    @property
    def reported_bytes(self) -> int | None:
        """Bytes that NIXL counted over all sources; ``None`` where it does not tell of each."""
        told = [s.reported_bytes for s in self.sources if s.reported_bytes is not None]
        return sum(told) if len(told) == len(self.sources) else None


@dataclass(frozen=True, slots=True)
class LeaseReaders:
    """How far one reading engine is with a published request.

    :param expected: ranks that will read; 0 where nobody has said.
    :param done: ranks that are done.
    """

    engine_id: str
    expected: int
    done: int


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A published request as it was when the sidecar answered.

    :param ending: nothing new is granted any more: it ends with the reads that are open.
    :param expires_in: seconds until it ends by itself; ``None`` where that has begun.
    :param open_reads: granted reads that are open.
    :param num_tokens: tokens that were published.
    :param age: seconds since it was published.
    """

    engine_id: str
    request_id: str
    state: LeaseState
    ending: bool
    expires_in: float | None
    open_reads: int
    readers: tuple[LeaseReaders, ...]
    num_tokens: int
    age: float


@dataclass(frozen=True, slots=True)
class RegistrationInfo:
    """A registered cache.

    :param regions: number of memory regions, and ``bytes`` the size of all.
    :param groups: names of the layout's groups.
    :param published: requests whose blocks are held for readers.
    :param holders: sessions that hold it now.
    :param undone_in: seconds until it is undone unless it is held again; ``None`` where it is held, or never was.
    :param orphaned: its engine is gone, and it lives on until its leases have ended.
    """

    engine_id: str
    rank: Rank
    dp_rank: int
    dp_size: int
    incarnation: str
    compatibility_key: str
    fingerprint: str
    regions: int
    bytes: int
    groups: tuple[str, ...]
    published: int
    holders: int
    undone_in: float | None
    orphaned: bool


class PeerRole(str, Enum):
    """What a peer is to the sidecar."""

    #: Of a later version of the sidecar.
    UNKNOWN = "unknown"
    #: A local engine reads from it.
    SOURCE = "source"
    #: It reads from a local engine.
    READER = "reader"


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """One rank that the sidecar has met.

    :param engine_id: the local engine that deals with it.
    :param address: of a source: where it listens; of a reader: where it calls from.
    :param reads: reads that are under way.
    :param idle: seconds since it was last heard of; ``None`` where that is not told.
    """

    engine_id: str
    role: PeerRole
    remote_engine_id: str
    rank: Rank
    address: str
    incarnation: str
    transport: str
    reads: int
    idle: float | None


@dataclass(frozen=True, slots=True)
class Counts:
    """Transfers now (``prepared``, ``posted``, ``draining``) and since the start (``done``, ``failed``, ``cancelled``).

    :param bytes_read: bytes that arrived since the start.
    :param bytes_in_flight: bytes posted and not quiesced now.
    :param published: requests held for readers now.
    :param reads_open: peers' reads under way now.
    :param leases_released: published requests that ended so since the start; likewise ``leases_expired`` and
        ``leases_withdrawn``.
    :param reads_refused: peers' reads that were not granted, since the start.
    """

    prepared: int
    posted: int
    draining: int
    done: int
    failed: int
    cancelled: int
    bytes_read: int
    bytes_in_flight: int
    published: int
    reads_open: int
    leases_released: int
    leases_expired: int
    leases_withdrawn: int
    reads_refused: int


@dataclass(frozen=True, slots=True)
class Status:
    """What the sidecar is, holds and is connected to.

    :param protocol_versions: lowest and highest that it speaks to its peers.
    :param backends: NIXL's backends with their parameters.
    :param settings: variables that steer NIXL and UCX, by name.
    :param uptime: seconds since its start.
    :param serving: false once a shutdown has begun.
    """

    version: str
    protocol_versions: tuple[int, int]
    nixl_version: str
    ucx_version: str
    backends: Mapping[str, Mapping[str, str]]
    settings: Mapping[str, str]
    registrations: tuple[RegistrationInfo, ...]
    peers: tuple[PeerInfo, ...]
    counts: Counts
    uptime: float
    serving: bool


# -- from messages ----------------------------------------------------------------------------------------------------


def registered_from_pb(message: pb.RegisterCacheResponse, engine_id: str, rank: Rank) -> Registered:
    """:raises KvxferError: MEMORY_HANDLE_INVALID where the sidecar exports what cannot be mapped."""
    return Registered(
        engine_id=engine_id,
        rank=rank,
        incarnation=message.incarnation,
        fingerprint=message.layout_fingerprint,
        exported={e.region: handle_from_pb(e.handle, f"exported[{i}].handle") for i, e in enumerate(message.exported)},
        peer_address=message.peer_address,
    )


def plan_from_pb(message: pb.Plan) -> PlanInfo:
    """A plan."""
    return PlanInfo(
        engine_id=message.engine_id,
        remote_engine_id=message.remote_engine_id,
        sources=tuple(_plan_source(source) for source in message.sources),
        warnings=tuple(message.warnings),
        explanation=message.explanation,
    )


def transfer_from_pb(message: pb.Transfer) -> TransferInfo:
    """A transfer."""
    return TransferInfo(
        id=message.transfer_id,
        engine_id=message.engine_id,
        remote_engine_id=message.remote_engine_id,
        request_id=message.request_id,
        state=STATES.get(message.state, TransferState.UNKNOWN),
        quiesced=message.quiesced,
        skip_tokens=message.skip_tokens,
        num_tokens=message.num_tokens,
        sources=tuple(_source(source) for source in message.sources),
        descriptors=message.descriptors,
        bytes=message.bytes,
        timings=_timings(message.timings),
        error=from_status(message.error) if message.HasField("error") else None,
        create_time=_time(message.create_time) if message.HasField("create_time") else None,
        end_time=_time(message.end_time) if message.HasField("end_time") else None,
    )


def lease_from_pb(message: pb.Lease) -> LeaseInfo:
    """A published request."""
    return LeaseInfo(
        engine_id=message.engine_id,
        request_id=message.request_id,
        state=LEASE_STATES.get(message.state, LeaseState.UNKNOWN),
        ending=message.ending,
        expires_in=seconds_of(message.expires_in) if message.HasField("expires_in") else None,
        open_reads=message.open_reads,
        readers=tuple(LeaseReaders(r.engine_id, r.expected, r.done) for r in message.readers),
        num_tokens=message.num_tokens,
        age=seconds_of(message.age),
    )


def status_from_pb(pages: Iterable[pb.GetStatusResponse]) -> Status:
    """A status from its pages, at least one: peers of all, everything else as the first says."""
    first, *others = pages
    counts = first.counts
    return Status(
        version=first.version,
        protocol_versions=(first.protocol_version_min, first.protocol_version_max),
        nixl_version=first.nixl_version,
        ucx_version=first.ucx_version,
        backends={b.name: dict(b.params) for b in first.backends},
        settings={s.name: s.value for s in first.settings},
        registrations=tuple(_registration(r) for r in first.registrations),
        peers=tuple(_peer(peer) for page in (first, *others) for peer in page.peers),
        counts=Counts(**{f.name: getattr(counts, f.name) for f in fields(Counts)}),
        uptime=seconds_of(first.uptime),
        serving=first.serving,
    )


def seconds_of(value: Duration) -> float:
    """A duration in seconds."""
    seconds: float = value.seconds + value.nanos / 1e9
    return seconds


def _rank(message: layout_pb.Rank) -> Rank:
    return Rank(message.tp_rank, message.tp_size, message.pp_rank, message.pp_size)


def _plan_source(message: pb.PlanSource) -> PlanSource:
    return PlanSource(
        rank=_rank(message.rank),
        incarnation=message.incarnation,
        address=message.address,
        local_rows=message.local_rows,
        remote_rows=message.remote_rows,
        local_descriptors=message.local_descriptors,
        remote_descriptors=message.remote_descriptors,
        transport=message.transport,
        groups=tuple(_cost(cost) for cost in message.groups),
    )


def _cost(message: pb.GroupCost) -> GroupCost:
    return GroupCost(
        group=message.group,
        kind=choice(message.kind, GROUP_KINDS, "plan.sources.groups.kind"),
        layers=message.layers,
        granule_tokens=message.granule_tokens,
        granule_bytes=message.granule_bytes,
        granule_descriptors=message.granule_descriptors,
        block_tokens=message.block_tokens,
        block_bytes=message.block_bytes,
        block_descriptors=message.block_descriptors,
        snapshot_bytes=message.snapshot_bytes,
        snapshot_descriptors=message.snapshot_descriptors,
    )


def _source(message: pb.TransferSource) -> SourceInfo:
    return SourceInfo(
        rank=_rank(message.rank),
        incarnation=message.incarnation,
        descriptors=message.descriptors,
        bytes=message.bytes,
        groups={g.group: g.bytes for g in message.groups},
        reported_bytes=message.reported_bytes if message.HasField("reported_bytes") else None,
        reported_descriptors=message.reported_descriptors if message.HasField("reported_descriptors") else None,
    )


def _timings(message: Message) -> Timings:
    known = [f.name for f in fields(Timings) if message.HasField(f.name)]
    return Timings(**{name: seconds_of(getattr(message, name)) for name in known})


def _time(value: Timestamp) -> datetime:
    moment: datetime = value.ToDatetime(tzinfo=timezone.utc)
    return moment


def _registration(message: pb.RegistrationStatus) -> RegistrationInfo:
    return RegistrationInfo(
        engine_id=message.engine_id,
        rank=_rank(message.rank),
        dp_rank=message.dp_rank,
        dp_size=message.dp_size,
        incarnation=message.incarnation,
        compatibility_key=message.compatibility_key,
        fingerprint=message.layout_fingerprint,
        regions=message.regions,
        bytes=message.bytes,
        groups=tuple(message.groups),
        published=message.published,
        holders=message.holders,
        undone_in=seconds_of(message.undone_in) if message.HasField("undone_in") else None,
        orphaned=message.orphaned,
    )


_ROLES: Final = {pb.PEER_ROLE_SOURCE: PeerRole.SOURCE, pb.PEER_ROLE_READER: PeerRole.READER}


def _peer(message: pb.PeerStatus) -> PeerInfo:
    return PeerInfo(
        engine_id=message.engine_id,
        role=_ROLES.get(message.role, PeerRole.UNKNOWN),
        remote_engine_id=message.remote_engine_id,
        rank=_rank(message.rank),
        address=message.address,
        incarnation=message.incarnation,
        transport=message.transport,
        reads=message.reads,
        idle=seconds_of(message.idle) if message.HasField("idle") else None,
    )
