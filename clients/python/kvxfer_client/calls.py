"""Every call as data: which method, which message, how long, and what the answer means.

Each function here becomes a method of both clients; what it says about its arguments and errors holds for both.  It
builds the message and knows how to read the answer, but calls nobody.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import Message

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, Rank
from kvxfer.core.pairing import PairingOptions
from kvxfer.core.resolve import BlockList
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.addresses import RankAddress
from kvxfer.wire.fields import MAX_PAGE, duration
from kvxfer.wire.requests import (
    PublishBlocks,
    RegisterCache,
    Target,
    handshake_to_pb,
    publish_to_pb,
    register_to_pb,
    spec_to_pb,
)
from kvxfer.wire.tickets import Ticket, TicketRank
from kvxfer_client import checks
from kvxfer_client.channel import target_of
from kvxfer_client.local import Memory
from kvxfer_client.results import (
    LEASE_STATES_OUT,
    STATES_OUT,
    LeaseInfo,
    LeaseState,
    PlanInfo,
    Registered,
    Status,
    TransferInfo,
    TransferState,
    lease_from_pb,
    plan_from_pb,
    registered_from_pb,
    seconds_of,
    status_from_pb,
    transfer_from_pb,
)

T = TypeVar("T")

#: Where a sidecar listens unless it is told otherwise.
DEFAULT_TARGET: Final = "unix:/run/kvxfer/kvxfer.sock"
#: How long a call may take that asks for no time of its own, seconds.
DEFAULT_TIMEOUT: Final = 30.0
#: How long a read may take unless the call says otherwise, seconds.
DEFAULT_READ_TIMEOUT: Final = 60.0
#: How long mapping and registering a cache may take unless the call says otherwise, seconds: pinning is slow.
DEFAULT_REGISTER_TIMEOUT: Final = 300.0


class Origin:
    """Who calls: what both clients know.

    :param target: the sidecar's engine listener, a gRPC target (``unix:/run/kvxfer/kvxfer.sock``) or the
        socket's path (``/run/kvxfer/kvxfer.sock``).
    :param engine_id: the local engine; may stay empty where only :meth:`status` and :meth:`wait_ready` are called.
    :param timeout: deadline of calls that only ask, and what calls get on top that give the sidecar a time of its own,
        seconds.
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, engine_id: str = "", timeout: float = DEFAULT_TIMEOUT) -> None:
        self.target: Final = target_of(checks.text(target, "target"))
        self.engine_id: Final = checks.text(engine_id, "engine_id")
        self.timeout: Final = checks.seconds(timeout)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.target} engine {self.engine_id!r}>"


@dataclass(frozen=True)
class Call(Generic[T]):
    """A call and its answer.

    :param method: the RPC.
    :param deadline: seconds.
    :param wait_for_ready: wait for the sidecar to be there, within the deadline, instead of failing at once.
    :param facts: what an error of this call tells besides.
    """

    method: str
    request: Message
    parse: Callable[[Any], T]
    deadline: float
    wait_for_ready: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pages(Generic[T]):
    """A list that comes in pages.

    :param call: the first page.
    :param following: the request of the next page, from the last request and its answer; ``None`` at the end.
    """

    call: Call[Sequence[T]]
    following: Callable[[Any, Any], Message | None]


@dataclass(frozen=True)
class Stream(Generic[T]):
    """A call whose answer goes on.

    :param parse: what a message means; ``None`` for one that only says that the stream is live.
    """

    method: str
    request: Message
    parse: Callable[[Any], T | None]


@dataclass(frozen=True)
class RemoteEngine:
    """An engine to get ready for by its addresses, before there is a ticket.

    :param ranks: every rank of it.
    """

    engine_id: str
    ranks: tuple[RankAddress, ...]


# -- registration -----------------------------------------------------------------------------------------------------


def register(
    origin: Origin,
    layout: CacheLayout,
    memory: Sequence[Memory],
    *,
    compatibility_key: str,
    rank: Rank = Rank(),  # noqa: B008 - frozen
    ranks: Iterable[tuple[Rank, str]] = (),
    dp_rank: int = 0,
    dp_size: int = 1,
    replace: bool = False,
    timeout: float = DEFAULT_REGISTER_TIMEOUT,
) -> Call[Registered]:
    """Hand over the cache's memory and its layout.  The same content again answers as before.

    :param memory: one for each of the layout's regions, in their order and of their size.
    :param compatibility_key: whatever changes the meaning of the bytes; two engines that exchange blocks give the same.
    :param ranks: peer address of every rank of the engine, or none where they are not known yet.
    :param replace: an earlier registration of this engine with other content is replaced, after draining.
    :param timeout: seconds; a registration that takes longer may still come about.
    :raises KvxferError: LAYOUT_INVALID, MEMORY_HANDLE_INVALID, MEMORY_NOT_ALLOWED, REGION_TOO_SMALL, MEMORY_LIMIT,
        REGISTRATION_BUSY, LIMIT_EXCEEDED, FIELD_INVALID; and what every call may raise.
    """
    record = RegisterCache(
        engine_id=origin.engine_id,
        rank=checks.instance(rank, Rank, "rank"),
        compatibility_key=checks.text(compatibility_key, "compatibility_key"),
        layout=checks.instance(layout, CacheLayout, "layout"),
        memory=checks.handles(memory),
        dp_rank=checks.small(dp_rank, "dp_rank"),
        dp_size=checks.small(dp_size, "dp_size"),
        ranks=checks.addresses(ranks),
        replace=checks.flag(replace, "replace"),
    )
    request = register_to_pb(record)

    def parse(answer: pb.RegisterCacheResponse) -> Registered:
        return registered_from_pb(answer, record.engine_id, rank)

    return Call("RegisterCache", request, parse, checks.seconds(timeout))


#: Makes the call that registers a session's cache: how the memory is named, and whether it was registered before.
MakeRegister = Callable[[tuple[Memory, ...], bool], Call[Registered]]


def held(
    origin: Origin, layout: CacheLayout, memory: Sequence[Memory], *, replace: bool, **options: Any
) -> tuple[tuple[Memory, ...], MakeRegister]:
    """What memory a session keeps, and how it registers its cache, now and again; arguments as for :meth:`register`."""
    kept = tuple(checks.each(memory, "memory", checks.MEMORY))

    def make(named: tuple[Memory, ...], again: bool) -> Call[Registered]:
        # Whoever is registered by the time that this one comes back is not to be driven out.
        call = register(origin, layout, named, replace=checks.flag(replace, "replace") and not again, **options)
        request: Any = call.request
        request.held = True
        return call

    checks.handles(kept)
    return kept, make


def unregister(origin: Origin, incarnation: str = "", *, drain_timeout: float | None = None) -> Call[None]:
    """Take the cache back; returns once nothing reads or writes the memory any more.

    :param incarnation: only this registration is undone; a later one is left alone.
    :param drain_timeout: how long to wait for transfers and readers, seconds; ``None``: the sidecar's setting.
    :raises KvxferError: NOT_REGISTERED, STALE_INCARNATION, REGISTRATION_BUSY; and what every call may raise.
    """
    request = pb.UnregisterCacheRequest(
        engine_id=origin.engine_id,
        incarnation=checks.text(incarnation, "incarnation"),
        drain_timeout=_duration(drain_timeout, "drain_timeout"),
    )
    return Call("UnregisterCache", request, _nothing, origin.timeout + (drain_timeout or 0.0))


def hold(origin: Origin, incarnation: str, keep_leases: bool) -> Stream[None]:
    """Keeps a registration as long as it is open."""
    request = pb.HoldRegistrationRequest(
        engine_id=origin.engine_id, incarnation=incarnation, keep_leases=checks.flag(keep_leases, "keep_leases")
    )
    return Stream("HoldRegistration", request, _nothing)


# -- handshake --------------------------------------------------------------------------------------------------------


def handshake(
    origin: Origin,
    remote: Ticket | str | RemoteEngine,
    *,
    options: PairingOptions | None = None,
    timeout: float | None = None,
) -> Call[PlanInfo]:
    """Get ready to read from an engine.  Cheap when repeated.

    :param remote: a ticket (or its string), whose incarnations must still be there, or an engine by its addresses.
    :param options: what is allowed when the layouts are paired; they hold until the next handshake that gives some.
    :param timeout: seconds; ``None``: the client's ``timeout``.
    :raises KvxferError: NOT_REGISTERED, PEER_UNREACHABLE, PEER_LOST, DEADLINE_EXCEEDED, PEER_METADATA_INVALID,
        INCOMPATIBLE_PEER, LAYOUT_MISMATCH, STALE_INCARNATION, TOO_MANY_DESCRIPTORS; and what every call may raise.
    """
    whom: Ticket | Target
    if isinstance(remote, RemoteEngine):
        ranks = checks.addresses(remote.ranks, "remote.ranks")
        whom = Target(checks.text(remote.engine_id, "remote.engine_id"), tuple(TicketRank(r, "", a) for r, a in ranks))
    elif isinstance(remote, Ticket | str):
        whom = checks.ticket(remote)
    else:
        raise checks.wrong_type(remote, "remote", "a Ticket, its string, or a RemoteEngine")
    if options is not None:
        checks.instance(options, PairingOptions, "options")
    within = origin.timeout if timeout is None else checks.seconds(timeout)
    request = handshake_to_pb(origin.engine_id, whom, options, within)
    return Call("Handshake", request, lambda answer: plan_from_pb(answer.plan), origin.timeout + within)


# -- transfers --------------------------------------------------------------------------------------------------------


def prepare(
    origin: Origin,
    ticket: Ticket | str,
    local_blocks: Sequence[BlockList],
    *,
    skip_tokens: int = 0,
    num_tokens: int | None = None,
    transfer_id: str = "",
) -> Call[TransferInfo]:
    """Validate and resolve a read, and make the request.  Moves nothing.

    :param ticket: of the blocks to read, or its string.
    :param local_blocks: where to put them: one list for each local group that is read; none, with ``skip_tokens`` equal
        to ``num_tokens``, to give the ticket back unread.
    :param skip_tokens: first token to read; a multiple of the granule (:attr:`PlanInfo.granule_tokens`).
    :param num_tokens: one past the last token to read, and the position of the snapshots; ``None``: the ticket's.
    :param transfer_id: chosen by the caller; the same ID with the same content is the same transfer.  Empty: a new one.
    :raises KvxferError: NOT_REGISTERED, STALE_INCARNATION, INCOMPATIBLE_PEER, GROUP_MISMATCH, BLOCK_OUT_OF_RANGE,
        NULL_BLOCK, DUPLICATE_BLOCK, RANGE_INVALID, RANGE_NOT_COVERED, STATE_POSITION_MISMATCH, TOO_MANY_DESCRIPTORS,
        LOCAL_BLOCK_BUSY, LIMIT_EXCEEDED, TRANSFER_ID_REUSED, TRANSFER_CANCELLED, those of a handshake; and what every
        call may raise.
    """
    spec = _spec(origin, ticket, local_blocks, skip_tokens, num_tokens, transfer_id)
    request = pb.PrepareTransferRequest(spec=spec)
    facts = {"transfer_id": spec.transfer_id}
    return Call("PrepareTransfer", request, _transfer, origin.timeout, facts=facts)


def read(
    origin: Origin,
    ticket: Ticket | str,
    local_blocks: Sequence[BlockList],
    *,
    skip_tokens: int = 0,
    num_tokens: int | None = None,
    transfer_id: str = "",
    wait: bool = True,
    timeout: float = DEFAULT_READ_TIMEOUT,
) -> Call[TransferInfo]:
    """Prepare and read in one call; arguments as for :meth:`prepare`, and:

    An error tells this transfer's ID in its metadata (``transfer_id``), also when the sidecar did not answer; with
    LOCAL_BLOCK_BUSY, ``other_transfer_id`` is the one that still writes the block.  The local blocks must not be reused
    before the transfer has quiesced: metadata ``quiesced`` says so where the sidecar told, otherwise ask with
    :meth:`get_transfer` or :meth:`cancel`.

    :param wait: return when the read has ended, and raise if it failed; otherwise return once it is posted.
    :param timeout: how long the read may take from being posted, seconds; past it the transfer fails.  A handshake that
        has to come first may take as long.
    :raises KvxferError: as :meth:`prepare`, and TRANSFER_STATE, TRANSFER_CANCELLED, TRANSFER_FAILED, PEER_LOST,
        DEADLINE_EXCEEDED, LEASE_UNKNOWN, LEASE_EXPIRED, LEASE_TOKEN_MISMATCH.
    """
    spec = _spec(origin, ticket, local_blocks, skip_tokens, num_tokens, transfer_id)
    return _read(origin, pb.ReadBlocksRequest(spec=spec), spec.transfer_id, wait, timeout)


def read_prepared(
    origin: Origin,
    transfer_id: str,
    *,
    wait: bool = True,
    timeout: float = DEFAULT_READ_TIMEOUT,
) -> Call[TransferInfo]:
    """Read what :meth:`prepare` made.  One that is being read is waited for; one that has ended answers as it ended.

    :param wait: as for :meth:`read`, and ``timeout``.
    :raises KvxferError: TRANSFER_UNKNOWN, and as :meth:`read`.
    """
    request = pb.ReadBlocksRequest(engine_id=origin.engine_id, transfer_id=checks.text(transfer_id, "transfer_id"))
    return _read(origin, request, transfer_id, wait, timeout)


def get_transfer(origin: Origin, transfer_id: str) -> Call[TransferInfo]:
    """One transfer as it is now.  Ended ones are remembered for a while.

    :raises KvxferError: NOT_REGISTERED, TRANSFER_UNKNOWN; and what every call may raise.
    """
    request = pb.GetTransferRequest(engine_id=origin.engine_id, transfer_id=checks.text(transfer_id, "transfer_id"))
    return Call("GetTransfer", request, _transfer, origin.timeout, facts={"transfer_id": transfer_id})


def cancel(origin: Origin, transfer_id: str, *, timeout: float | None = None) -> Call[TransferInfo]:
    """Cancel a transfer; returns once its local blocks are safe to reuse (``quiesced``), or as it is after ``timeout``.

    One that has ended is answered as it ended.  It is final, also where the transfer is not known (yet): no call with
    its ID reads anything from then on.  The sidecar remembers the last 16,384 IDs of an engine for that.

    :param timeout: seconds; ``None``: the client's ``timeout``.
    :raises KvxferError: NOT_REGISTERED, TRANSFER_UNKNOWN; and what every call may raise.
    """
    within = origin.timeout if timeout is None else checks.seconds(timeout)
    request = pb.CancelTransferRequest(
        engine_id=origin.engine_id,
        transfer_id=checks.text(transfer_id, "transfer_id"),
        timeout=_duration(within, "timeout"),
    )
    return Call("CancelTransfer", request, _transfer, origin.timeout + within, facts={"transfer_id": transfer_id})


def list_transfers(origin: Origin, states: Iterable[TransferState] = (), *, page_size: int = 0) -> Pages[TransferInfo]:
    """All transfers of the engine that the sidecar remembers, newest first.

    :param states: only these; none: all.
    :param page_size: transfers asked for at a time; 0: the sidecar's choice.
    :raises KvxferError: while iterating: NOT_REGISTERED; and what every call may raise.
    """
    wanted = checks.states(states, TransferState, TransferState.UNKNOWN)
    request = pb.ListTransfersRequest(
        engine_id=origin.engine_id,
        states=[STATES_OUT[state] for state in wanted],
        page_size=checks.small(page_size, "page_size"),
    )

    def parse(answer: pb.ListTransfersResponse) -> Sequence[TransferInfo]:
        return [transfer_from_pb(t) for t in answer.transfers]

    return Pages(Call("ListTransfers", request, parse, origin.timeout), _following)


def watch(origin: Origin, include_current: bool) -> Stream[TransferInfo]:
    """The changes of all transfers."""
    request = pb.WatchTransfersRequest(
        engine_id=origin.engine_id, include_current=checks.flag(include_current, "include_current")
    )

    def parse(message: pb.WatchTransfersResponse) -> TransferInfo | None:
        return transfer_from_pb(message.event.transfer) if message.HasField("event") else None

    return Stream("WatchTransfers", request, parse)


# -- publishing -------------------------------------------------------------------------------------------------------


def publish(
    origin: Origin,
    request_id: str,
    blocks: Sequence[BlockList],
    num_tokens: int,
    lease_token: bytes,
    *,
    ttl: float | None = None,
    readers: int | None = None,
    incarnation: str = "",
) -> Call[float]:
    """Say that a request's blocks are complete in memory, and hold them for readers.

    Call it on every rank, and only when the device has finished writing the blocks and no step that could still write
    them is under way.  The same content again extends the hold.

    :param blocks: one list for each group of this rank.
    :param num_tokens: tokens whose cache they hold.
    :param lease_token: 16 random bytes, the same on every rank and in the ticket.
    :param ttl: how long to hold them at least, seconds; ``None``: the sidecar's setting.
    :param readers: how many ranks will read from this one, where that is known.
    :param incarnation: the registration that the blocks belong to; empty: whichever there is.
    :returns: seconds that are left.
    :raises KvxferError: NOT_REGISTERED, STALE_INCARNATION, GROUP_MISMATCH, BLOCK_OUT_OF_RANGE, DUPLICATE_BLOCK,
        RANGE_INVALID, STATE_POSITION_MISMATCH, REQUEST_ID_REUSED, LEASE_EXPIRED, LIMIT_EXCEEDED, FIELD_INVALID; and
        what every call may raise.
    """
    record = PublishBlocks(
        engine_id=origin.engine_id,
        incarnation=checks.text(incarnation, "incarnation"),
        request_id=checks.text(request_id, "request_id"),
        blocks=checks.blocks(blocks, "blocks"),
        num_tokens=checks.tokens(num_tokens, "num_tokens"),
        lease_token=checks.token(lease_token),
        ttl=None if ttl is None else checks.seconds(ttl, "ttl"),
        readers=None if readers is None else checks.small(readers, "readers"),
    )
    return Call("PublishBlocks", publish_to_pb(record), lambda answer: seconds_of(answer.expires_in), origin.timeout)


def renew(origin: Origin, request_id: str, lease_token: bytes, *, ttl: float | None = None) -> Call[float]:
    """Hold a published request longer; never shorter.

    :param lease_token: as given to :meth:`publish`.
    :param ttl: how long to hold it at least from now, seconds; ``None``: the sidecar's setting.
    :returns: seconds that are left.
    :raises KvxferError: NOT_REGISTERED, LEASE_UNKNOWN, LEASE_EXPIRED, LEASE_TOKEN_MISMATCH, FIELD_INVALID; and what
        every call may raise.
    """
    request = pb.RenewLeaseRequest(
        engine_id=origin.engine_id,
        request_id=checks.text(request_id, "request_id"),
        lease_token=checks.token(lease_token),
        ttl=_duration(ttl, "ttl"),
    )
    return Call("RenewLease", request, lambda answer: seconds_of(answer.expires_in), origin.timeout)


def list_leases(origin: Origin, states: Iterable[LeaseState] = (), *, page_size: int = 0) -> Pages[LeaseInfo]:
    """All published requests of the engine that the sidecar remembers, newest first.

    :param states: only these; none: all.
    :param page_size: requests asked for at a time; 0: the sidecar's choice.
    :raises KvxferError: while iterating: NOT_REGISTERED; and what every call may raise.
    """
    wanted = checks.states(states, LeaseState, LeaseState.UNKNOWN)
    request = pb.ListLeasesRequest(
        engine_id=origin.engine_id,
        states=[LEASE_STATES_OUT[state] for state in wanted],
        page_size=checks.small(page_size, "page_size"),
    )

    def parse(answer: pb.ListLeasesResponse) -> Sequence[LeaseInfo]:
        return [lease_from_pb(lease) for lease in answer.leases]

    return Pages(Call("ListLeases", request, parse, origin.timeout), _following)


def watch_leases(origin: Origin, include_current: bool) -> Stream[LeaseInfo]:
    """What becomes of all published requests."""
    request = pb.WatchLeasesRequest(
        engine_id=origin.engine_id, include_current=checks.flag(include_current, "include_current")
    )

    def parse(message: pb.WatchLeasesResponse) -> LeaseInfo | None:
        return lease_from_pb(message.event.lease) if message.HasField("event") else None

    return Stream("WatchLeases", request, parse)


def withdraw(origin: Origin, request_id: str, lease_token: bytes) -> Call[float]:
    """Stop offering a request's blocks.  Withdrawing what has ended is no error.

    :returns: seconds for which reads that were granted may still go on; the blocks may be freed only then.  0: now.
    :raises KvxferError: NOT_REGISTERED, LEASE_UNKNOWN, LEASE_TOKEN_MISMATCH; and what every call may raise.
    """
    request = pb.WithdrawBlocksRequest(
        engine_id=origin.engine_id,
        request_id=checks.text(request_id, "request_id"),
        lease_token=checks.token(lease_token),
    )
    return Call("WithdrawBlocks", request, lambda answer: seconds_of(answer.held_for), origin.timeout)


# -- status -----------------------------------------------------------------------------------------------------------


def status_pages(origin: Origin) -> Pages[pb.GetStatusResponse]:
    """The pages of a status, for :func:`kvxfer_client.results.status_from_pb`."""

    def parse(answer: pb.GetStatusResponse) -> Sequence[pb.GetStatusResponse]:
        return [answer]

    def following(_: object, answer: pb.GetStatusResponse) -> Message | None:
        token = answer.next_peers_page_token
        return pb.GetStatusRequest(peers_page_size=MAX_PAGE, peers_page_token=token) if token else None

    request = pb.GetStatusRequest(peers_page_size=MAX_PAGE)
    return Pages(Call("GetStatus", request, parse, origin.timeout), following)


def wait_ready(origin: Origin, timeout: float = DEFAULT_TIMEOUT) -> Call[Status]:
    """Wait until the sidecar answers and takes work.

    A sidecar that is not there yet is waited for; no cache has to be registered.

    :param timeout: seconds.
    :returns: its status, with the first 100 peers at most.
    :raises KvxferError: DEADLINE_EXCEEDED; SHUTTING_DOWN where it is about to stop; and what every call may raise.
    """

    def parse(answer: pb.GetStatusResponse) -> Status:
        if not answer.serving:
            raise KvxferError(Reason.SHUTTING_DOWN, f"the sidecar at {origin.target} is stopping", target=origin.target)
        return status_from_pb([answer])

    return Call("GetStatus", pb.GetStatusRequest(), parse, checks.seconds(timeout), wait_for_ready=True)


# -- parts ------------------------------------------------------------------------------------------------------------


def signature_of(build: Callable[..., Call[Any]]) -> inspect.Signature:
    """The signature of the method that a function here becomes, for ``help()``: it returns what the call answers."""
    signature = inspect.signature(build)
    me, *others = signature.parameters.values()
    answer = str(signature.return_annotation).removeprefix("Call[").removesuffix("]")
    return signature.replace(parameters=[me.replace(name="self"), *others], return_annotation=answer)


def _duration(value: float | None, name: str) -> Any:
    return None if value is None else duration(checks.seconds(value, name))


def _spec(
    origin: Origin,
    ticket: Ticket | str,
    local_blocks: Sequence[BlockList],
    skip_tokens: int,
    num_tokens: int | None,
    transfer_id: str,
) -> pb.TransferSpec:
    # Chosen on this side, so that the caller can ask for the transfer when the answer has been lost.
    return spec_to_pb(
        origin.engine_id,
        checks.ticket(ticket),
        checks.blocks(local_blocks, "local_blocks"),
        transfer_id=checks.text(transfer_id, "transfer_id") or uuid.uuid4().hex,
        skip_tokens=checks.tokens(skip_tokens, "skip_tokens"),
        num_tokens=None if num_tokens is None else checks.tokens(num_tokens, "num_tokens"),
    )


def _read(
    origin: Origin, request: pb.ReadBlocksRequest, transfer_id: str, wait: bool, timeout: float
) -> Call[TransferInfo]:
    request.wait = checks.flag(wait, "wait")
    request.timeout.CopyFrom(duration(checks.seconds(timeout)))
    # The sidecar's own limit comes first, so that a read which takes too long is answered with its reason.
    deadline = origin.timeout + (timeout if wait else 0.0)
    return Call("ReadBlocks", request, _transfer, deadline, facts={"transfer_id": transfer_id})


def _following(last: Any, answer: Any) -> Message | None:
    """The request of the next page of a list."""
    if not answer.next_page_token:
        return None
    page = type(last)()
    page.CopyFrom(last)
    page.page_token = answer.next_page_token
    found: Message = page
    return found


def _transfer(answer: Any) -> TransferInfo:
    return transfer_from_pb(answer.transfer)


def _nothing(_: object) -> None:
    return None
