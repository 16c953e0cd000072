"""The KvTransfer service: what an engine asks of its sidecar.  Thin: check, convert, hand on, answer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias, TypeVar

import grpc.aio

from kvxfer import __version__
from kvxfer.core import transfers as life
from kvxfer.core.errors import KvxferError
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.pb import transfer_pb2_grpc
from kvxfer.service.describe import (
    LEASE_STATES,
    STATES,
    add_counts,
    lease_to_pb,
    library_to_pb,
    limits_to_pb,
    lost_to_pb,
    peers_to_pb,
    plan_to_pb,
    registration_to_pb,
    transfer_to_pb,
)
from kvxfer.service.lifetimes import unregistered
from kvxfer.service.limits import limits
from kvxfer.service.links import PROTOCOL_VERSIONS
from kvxfer.service.opening import looked_at
from kvxfer.service.registrations import Registration, Registrations, stale
from kvxfer.service.settings import ServiceSettings
from kvxfer.service.transfer import Transfer
from kvxfer.service.transfers import new_transfer_id
from kvxfer.service.watch import Watchers
from kvxfer.wire import fields
from kvxfer.wire.handles import handle_to_pb
from kvxfer.wire.requests import (
    TransferSpec,
    handshake_from_pb,
    prepare_from_pb,
    publish_from_pb,
    read_from_pb,
    register_from_pb,
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
T = TypeVar("T")

#: Where a spec says what the parts below the service call so.  What they say of other things is not about the request.
_IN_SPEC: Final = {
    "local_blocks": "spec.local_blocks",
    "remote_blocks": "spec.ticket.blocks",
    **{name: f"spec.{name}" for name in ("engine_id", "ticket", "transfer_id", "skip_tokens", "num_tokens")},
}


class EngineService(transfer_pb2_grpc.KvTransferServicer):
    """See proto/kvxfer/v1/transfer.proto.

    :param peer_address: where this sidecar's peers find it, ``host:port``.
    :param versions: versions of NIXL and UCX, known before anything is registered.
    """

    def __init__(
        self, registrations: Registrations, settings: ServiceSettings, peer_address: str, versions: tuple[str, str]
    ) -> None:
        self._registrations = registrations
        self._settings = settings
        self._peer_address = peer_address
        self._versions = versions
        self._started = time.monotonic()
        #: False once a shutdown has begun.
        self.serving = True

    # -- registration ----------------------------------------------------------------------------------------------

    async def RegisterCache(self, request: pb.RegisterCacheRequest, context: Context) -> pb.RegisterCacheResponse:
        """Hand over a cache."""
        record = await asyncio.to_thread(register_from_pb, request)
        # A caller that goes away must not leave half a registration.
        registration = await asyncio.shield(asyncio.ensure_future(self._registrations.register(record)))
        return pb.RegisterCacheResponse(
            incarnation=registration.incarnation,
            layout_fingerprint=registration.layout.fingerprint,
            exported=[
                pb.ExportedRegion(region=i, handle=handle_to_pb(handle))
                for i, handle in enumerate(registration.exported)
                if handle is not None
            ],
            peer_address=self._peer_address,
        )

    async def UnregisterCache(self, request: pb.UnregisterCacheRequest, context: Context) -> pb.UnregisterCacheResponse:
        """Take it back, after draining."""
        engine_id = fields.text(request.engine_id, "engine_id")
        incarnation = fields.optional_text(request.incarnation, "incarnation", fields.MAX_INCARNATION)
        drain = fields.optional_seconds(request, "drain_timeout", "")
        await asyncio.shield(asyncio.ensure_future(self._registrations.unregister(engine_id, incarnation, drain)))
        return pb.UnregisterCacheResponse()

    async def HoldRegistration(
        self, request: pb.HoldRegistrationRequest, context: Context
    ) -> AsyncIterator[pb.HoldRegistrationResponse]:
        """Keep it as long as the caller is there."""
        engine_id = fields.text(request.engine_id, "engine_id")
        incarnation = fields.text(request.incarnation, "incarnation", fields.MAX_INCARNATION)
        await self._registrations.ending(engine_id, incarnation)
        with self._registrations.hold(engine_id, incarnation, keep_leases=request.keep_leases) as registration:
            yield pb.HoldRegistrationResponse(grace=fields.duration(registration.hold.grace))
            why = await asyncio.shield(registration.ended)
        raise why

    # -- handshake -------------------------------------------------------------------------------------------------

    async def Handshake(self, request: pb.HandshakeRequest, context: Context) -> pb.HandshakeResponse:
        """Get ready to read from an engine."""
        record = handshake_from_pb(request)
        registration = self._registrations.get(record.engine_id)
        timeout = record.timeout or self._settings.handshake_timeout
        try:
            link = await registration.links.get(record.target, record.options, timeout)
        except KvxferError as error:
            # Of what the request says only the options can be at fault now.
            raise _at(error, f"options.{error.field}" if error.field.startswith("ignore_") else "") from error
        return pb.HandshakeResponse(plan=plan_to_pb(registration, link))

    # -- transfers -------------------------------------------------------------------------------------------------

    async def PrepareTransfer(self, request: pb.PrepareTransferRequest, context: Context) -> pb.PrepareTransferResponse:
        """The dry run."""
        registration, transfer = await self._prepare(prepare_from_pb(request))
        return pb.PrepareTransferResponse(transfer=transfer_to_pb(registration, transfer))

    async def ReadBlocks(self, request: pb.ReadBlocksRequest, context: Context) -> pb.ReadBlocksResponse:
        """The read."""
        record = read_from_pb(request)
        timeout = record.timeout or self._settings.read_timeout
        if isinstance(record.source, TransferSpec):
            registration, transfer = await self._prepare(record.source, timeout)
        else:
            registration = self._registrations.get(record.engine_id)
            transfer = registration.transfers.get(record.source)
        try:
            registration.transfers.post(transfer, timeout)
        except KvxferError as error:
            if isinstance(record.source, TransferSpec):
                await registration.transfers.take_back(transfer, error, self._settings.drain_timeout)
                raise _of_spec(error) from error
            raise
        if record.wait:
            await transfer.settled.wait()
            if transfer.error is not None:
                raise _told(transfer.error, transfer)
        return pb.ReadBlocksResponse(transfer=transfer_to_pb(registration, transfer))

    async def _prepare(self, spec: TransferSpec, read: float | None = None) -> tuple[Registration, Transfer]:
        """Prepare a transfer.

        :param read: it is read at once, within so many seconds.
        """
        named = spec if spec.transfer_id else replace(spec, transfer_id=new_transfer_id())
        try:
            transfers = (registration := self._registrations.get(spec.engine_id)).transfers
            # The transfer is the sidecar's: a caller that goes away while it is made changes nothing.
            preparing = asyncio.ensure_future(transfers.prepare(named, read=read))
            preparing.add_done_callback(looked_at)
            return registration, await asyncio.shield(preparing)
        except KvxferError as error:
            raise _of_spec(error) from error

    async def GetTransfer(self, request: pb.GetTransferRequest, context: Context) -> pb.GetTransferResponse:
        """One transfer."""
        registration, transfer_id = self._named(request.engine_id, request.transfer_id)
        transfer = registration.transfers.get(transfer_id)
        return pb.GetTransferResponse(transfer=transfer_to_pb(registration, transfer))

    async def ListTransfers(self, request: pb.ListTransfersRequest, context: Context) -> pb.ListTransfersResponse:
        """All transfers, newest first."""
        registration = self._registrations.get(fields.text(request.engine_id, "engine_id"))
        wanted = _known_states(request.states, STATES.values(), "a transfer")
        listed = [(t.number, t) for t in registration.transfers if not wanted or STATES[t.state] in wanted]
        page, following = _newest(listed, request.page_token, request.page_size)
        return pb.ListTransfersResponse(
            transfers=[transfer_to_pb(registration, t) for t in page], next_page_token=following
        )

    async def CancelTransfer(self, request: pb.CancelTransferRequest, context: Context) -> pb.CancelTransferResponse:
        """Cancel, and wait until the local blocks are safe."""
        registration, transfer_id = self._named(request.engine_id, request.transfer_id)
        timeout = fields.optional_seconds(request, "timeout", "") or self._settings.read_timeout
        transfer = await registration.transfers.cancel(transfer_id, timeout)
        return pb.CancelTransferResponse(transfer=transfer_to_pb(registration, transfer))

    async def WatchTransfers(
        self, request: pb.WatchTransfersRequest, context: Context
    ) -> AsyncIterator[pb.WatchTransfersResponse]:
        """Every change, as it happens."""
        registration = self._registrations.get(fields.text(request.engine_id, "engine_id"))
        transfers = registration.transfers
        current = transfers.current() if request.include_current else []
        async for number, transfer in _changes(transfers.watchers, current, registration):
            if transfer is None:
                yield pb.WatchTransfersResponse(ready=pb.WatchReady())
            else:
                event = pb.TransferEvent(sequence=number, transfer=transfer_to_pb(registration, transfer))
                yield pb.WatchTransfersResponse(event=event)

    def _named(self, engine_id: str, transfer_id: str) -> tuple[Registration, str]:
        # Also while it is unregistered: an engine must be able to ask when its blocks are quiet.
        registration = self._registrations.get(fields.text(engine_id, "engine_id"), closing=True)
        return registration, fields.text(transfer_id, "transfer_id")

    # -- publishing ------------------------------------------------------------------------------------------------

    async def PublishBlocks(self, request: pb.PublishBlocksRequest, context: Context) -> pb.PublishBlocksResponse:
        """Hold a request's blocks."""
        record = publish_from_pb(request)
        registration = self._registrations.get(record.engine_id)
        if record.incarnation not in ("", registration.incarnation):
            raise stale(record.engine_id, registration.incarnation, record.incarnation)
        lease = registration.leases.publish(record)
        return pb.PublishBlocksResponse(
            expires_in=fields.duration(lease.left(time.monotonic())), publication=lease.number
        )

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseResponse:
        """Hold them longer."""
        registration = self._registrations.get(fields.text(request.engine_id, "engine_id"), closing=True)
        request_id = fields.text(request.request_id, "request_id")
        token = fields.token(request.lease_token, "lease_token")
        left = registration.leases.renew(request_id, token, fields.optional_seconds(request, "ttl", ""))
        return pb.RenewLeaseResponse(expires_in=fields.duration(left))

    async def WithdrawBlocks(self, request: pb.WithdrawBlocksRequest, context: Context) -> pb.WithdrawBlocksResponse:
        """Hold them no more."""
        # Also while it is unregistered: an engine must be able to ask when its blocks are free.
        registration = self._registrations.get(fields.text(request.engine_id, "engine_id"), closing=True)
        request_id = fields.text(request.request_id, "request_id")
        held = registration.leases.withdraw(request_id, fields.token(request.lease_token, "lease_token"))
        return pb.WithdrawBlocksResponse(held_for=None if held is None else fields.duration(held))

    async def ListLeases(self, request: pb.ListLeasesRequest, context: Context) -> pb.ListLeasesResponse:
        """All leases, newest first."""
        registration = self._registrations.get(fields.text(request.engine_id, "engine_id"), closing=True)
        wanted = _known_states(request.states, LEASE_STATES.values(), "a lease")
        listed = [(n, x) for n, x in registration.leases if not wanted or LEASE_STATES[x.state] in wanted]
        page, following = _newest(listed, request.page_token, request.page_size)
        return pb.ListLeasesResponse(
            leases=[lease_to_pb(registration, lease) for lease in page], next_page_token=following
        )

    async def WatchLeases(
        self, request: pb.WatchLeasesRequest, context: Context
    ) -> AsyncIterator[pb.WatchLeasesResponse]:
        """Every lease that is published or has ended, as it happens."""
        registration = self._registrations.get(fields.text(request.engine_id, "engine_id"), closing=True)
        leases = registration.leases
        current = [lease for _, lease in leases][::-1] if request.include_current else []
        async for number, lease in _changes(leases.watchers, current, registration):
            if lease is None:
                yield pb.WatchLeasesResponse(ready=pb.WatchReady())
            else:
                event = pb.LeaseEvent(sequence=number, lease=lease_to_pb(registration, lease))
                yield pb.WatchLeasesResponse(event=event)

    # -- status ----------------------------------------------------------------------------------------------------

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """What there is."""
        start = _page_number(request.peers_page_token, "peers_page_token") or 0
        message = pb.GetStatusResponse(
            version=__version__,
            protocol_version_min=PROTOCOL_VERSIONS[0],
            protocol_version_max=PROTOCOL_VERSIONS[1],
            uptime=fields.duration(time.monotonic() - self._started),
            serving=self.serving,
            nixl_version=self._versions[0],
            ucx_version=self._versions[1],
            unready_reason=self._registrations.unready if self.serving else "the sidecar is stopping",
            limits=limits_to_pb(
                limits(self._settings, self._registrations), self._registrations.metrics.limit_refusals.family()
            ),
        )
        peers: list[pb.PeerStatus] = []
        for registration in self._registrations:
            message.registrations.append(registration_to_pb(registration))
            peers.extend(peers_to_pb(registration))
            add_counts(message.counts, registration)
            message.lost_peers.extend(lost_to_pb(registration))
            if not message.backends:
                library_to_pb(message, await registration.engine.info())
        page, following = _page(peers, start, fields.page_size(request.peers_page_size))
        message.peers.extend(page)
        message.next_peers_page_token = following
        return message


async def _changes(
    watchers: Watchers[T], current: Sequence[T], registration: Registration
) -> AsyncIterator[tuple[int, T | None]]:
    """What there is, then ``None`` once, then what changes; each with its number in the stream.

    :raises KvxferError: LIMIT_EXCEEDED for a caller that is too slow, NOT_REGISTERED at the end of the registration.
    """
    watcher = watchers.watch()
    number = 0
    try:
        for number, item in enumerate(current, 1):
            yield number, item
        yield 0, None
        while (changed := await watcher.next()) is not None:
            number += 1
            yield number, changed
    finally:
        watchers.unwatch(watcher)
    raise unregistered(registration.identity.engine_id)


def _of_spec(error: KvxferError) -> KvxferError:
    """An error about what a spec says, with the field's path in the request."""
    head = re.match(r"\w*", error.field)
    name = head[0] if head else ""
    return _at(error, _IN_SPEC[name] + error.field[len(name) :] if name in _IN_SPEC else "")


def _at(error: KvxferError, field: str) -> KvxferError:
    return KvxferError(error.reason, error.message, field=field, **dict(error.metadata))


def _told(error: KvxferError, transfer: Transfer) -> KvxferError:
    """A transfer's error as its caller gets it: with the ID, and whether the blocks may be reused."""
    facts = {"transfer_id": transfer.id, "quiesced": str(transfer.state in life.QUIESCENT).lower()}
    return KvxferError(error.reason, error.message, field=error.field, **{**error.metadata, **facts})


def _known_states(asked: Sequence[int], known: Iterable[int], of: str) -> frozenset[int]:
    states = frozenset(known)
    for i, state in enumerate(asked):
        if state not in states:
            raise fields.refuse(f"states[{i}]", f"is {state}, which is no state of {of}", value=state)
    return frozenset(asked)


def _newest(listed: Sequence[tuple[int, T]], token: str, size: int) -> tuple[Sequence[T], str]:
    """A page of what comes newest first, each with its number, and the token of the page that follows."""
    before = _page_number(token, "page_token")
    older = [(n, item) for n, item in listed if before is None or n < before]
    page = older[: fields.page_size(size)]
    return [item for _, item in page], str(page[-1][0]) if len(page) < len(older) else ""


def _page_number(token: str, field: str) -> int | None:
    if not token:
        return None
    if len(token) > fields.MAX_PAGE_TOKEN or not (token.isascii() and token.isdigit()):
        raise fields.refuse(field, "is not a page token of this sidecar")
    return int(token)


def _page(items: Sequence[T], start: int, size: int) -> tuple[Sequence[T], str]:
    end = start + size
    return items[start:end], str(end) if end < len(items) else ""
