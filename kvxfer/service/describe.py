"""The service's state as messages: plans, transfers, status."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from kvxfer.core import transfers as life
from kvxfer.core.layout import GroupKind
from kvxfer.core.leases import Lease
from kvxfer.core.leases import State as LeaseState
from kvxfer.core.plan import GroupCost
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.service.events import SLOW
from kvxfer.service.limits import Limit
from kvxfer.service.link import Link
from kvxfer.service.meters import Distribution, Family
from kvxfer.service.registrations import Registration
from kvxfer.service.transfer import Timings, Transfer
from kvxfer.wire.fields import duration
from kvxfer.wire.layouts import GROUP_KINDS_OUT, rank_to_pb
from kvxfer.wire.status import to_status
from kvxfer.xfer.api import EngineInfo

STATES: Final = {
    life.State.PREPARED: pb.TRANSFER_STATE_PREPARED,
    life.State.POSTED: pb.TRANSFER_STATE_POSTED,
    life.State.DRAINING_FAILED: pb.TRANSFER_STATE_DRAINING,
    life.State.DRAINING_CANCELLED: pb.TRANSFER_STATE_DRAINING,
    life.State.DONE: pb.TRANSFER_STATE_DONE,
    life.State.FAILED: pb.TRANSFER_STATE_FAILED,
    life.State.CANCELLED: pb.TRANSFER_STATE_CANCELLED,
}
LEASE_STATES: Final = {
    LeaseState.HELD: pb.LEASE_STATE_HELD,
    LeaseState.RELEASING: pb.LEASE_STATE_HELD,
    LeaseState.EXPIRING: pb.LEASE_STATE_HELD,
    LeaseState.WITHDRAWING: pb.LEASE_STATE_HELD,
    LeaseState.RELEASED: pb.LEASE_STATE_RELEASED,
    LeaseState.EXPIRED: pb.LEASE_STATE_EXPIRED,
    LeaseState.WITHDRAWN: pb.LEASE_STATE_WITHDRAWN,
}


def plan_to_pb(registration: Registration, link: Link) -> pb.Plan:
    """What a handshake agreed on."""
    costs = link.plan.costs()
    return pb.Plan(
        engine_id=registration.identity.engine_id,
        remote_engine_id=link.target.engine_id,
        sources=[
            pb.PlanSource(
                rank=rank_to_pb(s.facts.rank),
                incarnation=s.facts.incarnation,
                address=s.client.address,
                local_rows=len(s.plan.local),
                remote_rows=len(s.plan.remote),
                local_descriptors=s.plan.local.descriptors,
                remote_descriptors=s.plan.remote.descriptors,
                transport=link.transport.told,
                groups=[_cost(c) for c in costs if c.source == s.facts.rank],
            )
            for s in link.sources
        ],
        warnings=[*link.plan.warnings, *([SLOW] if link.slow else [])],
        explanation=link.plan.explain(),
    )


def _cost(cost: GroupCost) -> pb.GroupCost:
    message = pb.GroupCost(group=cost.group, kind=GROUP_KINDS_OUT[cost.kind], layers=cost.layers)
    if cost.kind is GroupKind.STATE:
        message.snapshot_bytes, message.snapshot_descriptors = cost.granule_bytes, cost.granule_runs
        return message
    message.granule_tokens, message.granule_bytes = cost.granule_tokens, cost.granule_bytes
    message.granule_descriptors = cost.granule_runs
    message.block_tokens, message.block_bytes = cost.block_tokens, cost.block_bytes
    message.block_descriptors = cost.block_runs
    return message


def transfer_to_pb(registration: Registration, transfer: Transfer) -> pb.Transfer:
    """A transfer as it is now."""
    message = pb.Transfer(
        transfer_id=transfer.id,
        engine_id=registration.identity.engine_id,
        remote_engine_id=transfer.remote_engine_id,
        request_id=transfer.request_id,
        state=STATES[transfer.state],
        quiesced=transfer.quiesced,
        skip_tokens=transfer.skip_tokens,
        num_tokens=transfer.num_tokens,
        descriptors=transfer.descriptors,
        bytes=transfer.bytes,
        timings=_timings(transfer.timings),
        create_time=_timestamp(transfer.created),
    )
    for part in transfer.parts:
        source = message.sources.add(
            rank=rank_to_pb(part.rank),
            incarnation=part.incarnation,
            descriptors=part.descriptors,
            bytes=part.bytes,
            groups=[pb.GroupBytes(group=g, bytes=n) for g, n in part.bytes_by_group.items()],
        )
        if part.result is not None and (telemetry := part.result.telemetry) is not None:
            source.reported_bytes = telemetry.bytes
            source.reported_descriptors = telemetry.descriptors
    if transfer.error is not None:
        message.error.CopyFrom(to_status(transfer.error))
    if transfer.ended is not None:
        message.end_time.CopyFrom(_timestamp(transfer.ended))
    return message


def lease_to_pb(registration: Registration, lease: Lease) -> pb.Lease:
    """A lease as it is now."""
    now = time.monotonic()
    held = lease.state is LeaseState.HELD
    return pb.Lease(
        engine_id=registration.identity.engine_id,
        request_id=lease.request_id,
        state=LEASE_STATES[lease.state],
        ending=not held and not lease.ended,
        expires_in=duration(lease.left(now)) if held else None,
        open_reads=lease.open_reads,
        readers=[
            pb.LeaseReaders(engine_id=engine_id, expected=tally.readers, done=len(tally.done))
            for engine_id, tally in sorted(lease.tallies.items())
        ],
        num_tokens=lease.num_tokens,
        age=duration(now - lease.published),
        publication=lease.number,
    )


def _timings(timings: Timings) -> pb.TransferTimings:
    known = {name: duration(value) for name, value in vars(timings).items() if value is not None}
    return pb.TransferTimings(**known)


def _timestamp(seconds: float) -> Timestamp:
    whole, nanos = divmod(round(seconds * 1_000_000_000), 1_000_000_000)
    return Timestamp(seconds=whole, nanos=nanos)


def registration_to_pb(registration: Registration) -> pb.RegistrationStatus:
    """A registered cache."""
    identity, hold = registration.identity, registration.hold
    left = hold.left(time.monotonic())
    return pb.RegistrationStatus(
        engine_id=identity.engine_id,
        rank=rank_to_pb(identity.rank),
        dp_rank=identity.dp_rank,
        dp_size=identity.dp_size,
        incarnation=registration.incarnation,
        compatibility_key=identity.compatibility_key,
        layout_fingerprint=registration.layout.fingerprint,
        regions=len(registration.layout.regions),
        bytes=registration.size,
        groups=[g.name for g in registration.layout.groups],
        published=len(registration.leases),
        holders=hold.streams,
        undone_in=None if left is None else duration(left),
        orphaned=hold.over,
    )


def peers_to_pb(registration: Registration) -> list[pb.PeerStatus]:
    """Everyone whom a registration deals with."""
    engine_id = registration.identity.engine_id
    reads: dict[str, int] = {}
    for transfer in registration.transfers:
        if transfer.state is life.State.POSTED:
            for part in transfer.parts:
                if part.live is not None:
                    name = part.live.source.peer.name
                    reads[name] = reads.get(name, 0) + 1
    peers = [
        pb.PeerStatus(
            engine_id=engine_id,
            role=pb.PEER_ROLE_SOURCE,
            remote_engine_id=s.facts.engine_id,
            rank=rank_to_pb(s.facts.rank),
            address=s.client.address,
            incarnation=s.facts.incarnation,
            transport=link.transport.told,
            reads=reads.get(s.peer.name, 0),
            idle=duration(time.monotonic() - s.rank.heard_at),
        )
        for link in registration.links
        for s in link.sources
    ]
    peers.extend(
        pb.PeerStatus(
            engine_id=engine_id,
            role=pb.PEER_ROLE_READER,
            remote_engine_id=r.reader.engine_id,
            rank=rank_to_pb(r.reader.rank),
            address=r.address,
            incarnation=r.reader.incarnation,
            reads=r.reads,
            idle=duration(r.idle),
        )
        for r in registration.readers.status()
    )
    return peers


def lost_to_pb(registration: Registration) -> list[pb.LostPeer]:
    """The peers that a registration has lost, the last one first."""
    now = time.monotonic()
    return [
        pb.LostPeer(
            engine_id=registration.identity.engine_id,
            role=pb.PEER_ROLE_READER if lost.reading else pb.PEER_ROLE_SOURCE,
            remote_engine_id=lost.remote_engine_id,
            rank=None if lost.rank is None else rank_to_pb(lost.rank),
            address=lost.address,
            incarnation=lost.incarnation,
            error=to_status(lost.error),
            age=duration(now - lost.when),
        )
        for lost in reversed(registration.events.lost)
    ]


def limits_to_pb(known: Iterable[Limit], refused: Family) -> list[pb.LimitStatus]:
    """The limits, with how often each was refused."""
    times = {labels[0]: int(n) for labels, n in refused.values.items() if not isinstance(n, Distribution)}
    return [
        pb.LimitStatus(name=limit.name, value=limit.value, used=limit.used, refused=times.get(limit.name, 0))
        for limit in known
    ]


def add_counts(counts: pb.Counts, registration: Registration) -> None:
    """Add a registration's figures to ``counts``."""
    for transfer in registration.transfers:
        counts.prepared += transfer.state is life.State.PREPARED
        counts.posted += transfer.state is life.State.POSTED
        counts.draining += transfer.state in (life.State.DRAINING_FAILED, life.State.DRAINING_CANCELLED)
    totals = registration.transfers.totals
    counts.done += totals.done
    counts.failed += totals.failed
    counts.cancelled += totals.cancelled
    counts.bytes_read += totals.bytes_read
    counts.bytes_in_flight += registration.transfers.bytes_in_flight
    counts.limited += registration.transfers.limited + registration.links.limited
    counts.published += len(registration.leases)
    ended = registration.leases.totals
    counts.leases_released += ended.released
    counts.leases_expired += ended.expired
    counts.leases_withdrawn += ended.withdrawn
    counts.reads_refused += registration.events.reads_refused
    counts.stale_reads_refused += registration.events.stale_reads_refused
    counts.links_lost += registration.events.links_lost
    counts.readers_lost += registration.events.readers_lost
    counts.reads_open += registration.readers.open_reads


def library_to_pb(message: pb.GetStatusResponse, info: EngineInfo) -> None:
    """What NIXL says of itself."""
    message.nixl_version, message.ucx_version = info.library_version, info.transport_version
    message.backends.extend(pb.Backend(name=n, params=dict(p)) for n, p in sorted(info.backends.items()))
    message.settings.extend(
        pb.TransportSetting(
            name=name,
            value=value,
            origin=pb.SETTING_ORIGIN_DEFAULT if name in info.defaults else pb.SETTING_ORIGIN_USER,
        )
        for name, value in sorted(info.environment.items())
    )
