"""The KvPeer service: what other sidecars ask of this one.  Thin: check, look up, answer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import grpc.aio

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.pb import peer_pb2 as pb
from kvxfer.pb import peer_pb2_grpc
from kvxfer.service.links import PROTOCOL_VERSIONS
from kvxfer.service.readers import IDLE_TIMEOUT
from kvxfer.service.registrations import Registration, Registrations
from kvxfer.wire.fields import duration
from kvxfer.wire.peer import (
    ExchangeAnswer,
    ExchangeQuery,
    PeerMemory,
    ReadRef,
    RegionSpan,
    answer_to_pb,
    close_from_pb,
    exchange_from_pb,
    open_from_pb,
    renew_from_pb,
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class PeerService(peer_pb2_grpc.KvPeerServicer):
    """See proto/kvxfer/v1/peer.proto."""

    def __init__(self, registrations: Registrations) -> None:
        self._registrations = registrations

    async def Exchange(self, request: pb.ExchangeRequest, context: Context) -> pb.ExchangeResponse:
        """Introduce a reader."""
        query = exchange_from_pb(request)
        version = _agreed(query)
        # Those that are reading still must not take a cache that is being unregistered for one that is lost.
        registration = self._find(query.engine_id, query.rank, closing=query.goodbye or bool(query.known_incarnation))
        reader = query.reader
        if query.goodbye:
            # One that is meant for an earlier registration says nothing about this one, which the reader has met since.
            if query.expected_incarnation in ("", registration.incarnation):
                registration.readers.leave(reader)
            return pb.ExchangeResponse(protocol_version=version)
        identity = registration.identity
        if query.compatibility_key != identity.compatibility_key:
            raise KvxferError(
                Reason.INCOMPATIBLE_PEER,
                f"the reader's compatibility key is {query.compatibility_key!r}, this engine's "
                f"{identity.compatibility_key!r}",
                field="compatibility_key",
                reader=query.compatibility_key,
                engine=identity.compatibility_key,
            )
        if query.expected_incarnation:
            _check_incarnation(registration, query.expected_incarnation, "expected_incarnation")
        known = query.known_incarnation == registration.incarnation
        registration.readers.meet(reader, context.peer(), connecting=not known)
        registration.events.reader_met(reader)
        memory = PeerMemory(
            registration.layout,
            tuple(RegionSpan(s.address, s.length, s.kind, s.device) for s in registration.spans),
            registration.engine.name,
            registration.metadata,
        )
        return answer_to_pb(
            ExchangeAnswer(
                protocol_version=version,
                engine_id=identity.engine_id,
                rank=identity.rank,
                dp_rank=identity.dp_rank,
                dp_size=identity.dp_size,
                incarnation=registration.incarnation,
                compatibility_key=identity.compatibility_key,
                idle_timeout=IDLE_TIMEOUT,
                host=registration.links.host,
                tcp_segment=registration.segments.sent,
                memory=None if known else memory,
            )
        )

    async def OpenRead(self, request: pb.OpenReadRequest, context: Context) -> pb.OpenReadResponse:
        """A read is wanted."""
        record = open_from_pb(request)
        ref = record.ref
        with self._refusals(ref):
            registration = self._find(ref.engine_id, ref.rank)
            _check_incarnation(registration, ref.incarnation)
            registration.readers.ask(ref.reader, ref.transfer_id, context.peer())
            granted = await registration.leases.open(record)
            registration.readers.open(ref.reader, ref.transfer_id, context.peer())
        registration.events.read_granted(ref)
        return pb.OpenReadResponse(granted=duration(granted))

    async def RenewRead(self, request: pb.RenewReadRequest, context: Context) -> pb.RenewReadResponse:
        """A read goes on."""
        ref, wanted = renew_from_pb(request)
        with self._refusals(ref):
            registration = self._of_read(ref, closing=True)
            granted = registration.leases.renew_read(ref, wanted)
            registration.readers.open(ref.reader, ref.transfer_id, context.peer())
        return pb.RenewReadResponse(granted=duration(granted))

    async def CloseReads(self, request: pb.CloseReadsRequest, context: Context) -> pb.CloseReadsResponse:
        """Reads are over."""
        records = close_from_pb(request)
        registration = self._of_read(records[0].ref, closing=True)
        refused: list[KvxferError] = []
        for i, record in enumerate(records):
            registration.readers.close_read(record.ref.reader, record.ref.transfer_id)
            try:
                registration.leases.close_read(record)
            except KvxferError as error:  # which must not keep the others' blocks
                refused.append(error.within(f"reads[{i}]"))
        if refused:
            raise refused[0]
        return pb.CloseReadsResponse()

    @contextlib.contextmanager
    def _refusals(self, ref: ReadRef) -> Iterator[None]:
        """Inside, what is refused is told, where the engine is one that is or was registered just now."""
        try:
            yield
        except KvxferError as error:
            if (known := self._registrations.known(ref.engine_id)) is not None:
                known.events.read_refused(ref, error)
            raise

    def _find(self, engine_id: str, rank: Rank, *, closing: bool = False) -> Registration:
        registration = self._registrations.get(engine_id, closing=closing, orphaned=True)
        own = registration.identity.rank
        if rank != own:
            raise KvxferError(
                Reason.NOT_REGISTERED,
                f"engine {engine_id} is registered here as rank {own} of {own.tp_size} x {own.pp_size}; rank {rank} of "
                f"{rank.tp_size} x {rank.pp_size} was asked for",
                field="rank",
                registered=own,
                asked=rank,
            )
        return registration

    def _of_read(self, ref: ReadRef, *, closing: bool = False) -> Registration:
        registration = self._find(ref.engine_id, ref.rank, closing=closing)
        _check_incarnation(registration, ref.incarnation)
        return registration


def _agreed(query: ExchangeQuery) -> int:
    """The highest protocol version that both speak."""
    (low, high), (own_low, own_high) = query.protocol_versions, PROTOCOL_VERSIONS
    if low > own_high or high < own_low:
        raise KvxferError(
            Reason.INCOMPATIBLE_PEER,
            f"the reader speaks protocol versions {low} to {high}, this side {own_low} to {own_high}",
            field="protocol_version_min",
            reader=f"{low}-{high}",
            engine=f"{own_low}-{own_high}",
        )
    return min(high, own_high)


def _check_incarnation(registration: Registration, given: str, field: str = "incarnation") -> None:
    if given != registration.incarnation:
        raise KvxferError(
            Reason.STALE_INCARNATION,
            f"engine {registration.identity.engine_id} is {registration.incarnation} now, not {given}",
            field=field,
            expected=given,
            found=registration.incarnation,
        )
