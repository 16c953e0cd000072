"""What sidecars tell one another, as plain frozen data and as messages.  Durations are seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import MAX_BYTES, MAX_GROUPS, CacheLayout, MemoryKind, Rank
from kvxfer.pb import peer_pb2 as pb
from kvxfer.wire.addresses import MAX_RANKS
from kvxfer.wire.blocks import tokens
from kvxfer.wire.fields import (
    MAX_INCARNATION,
    MAX_KEY,
    at,
    choice,
    digest,
    duration,
    integer,
    optional_seconds,
    optional_text,
    parse,
    refuse,
    required,
    seconds,
    text,
    token,
    under,
)
from kvxfer.wire.layouts import MEMORY_KINDS, MEMORY_KINDS_OUT, layout_from_pb, layout_to_pb, rank_from_pb, rank_to_pb

#: Longest agent metadata and longest notification that are looked at, bytes.
MAX_METADATA: Final = 1024 * 1024
MAX_NOTICE: Final = 4096
#: Most reads that one call ends.
MAX_ENDS: Final = 1024
_MAX_VERSION: Final = 65_535
_MAX_SEGMENT: Final = 1 << 40


class Outcome(Enum):
    """What became of a READ."""

    DONE = pb.READ_OUTCOME_DONE
    FAILED = pb.READ_OUTCOME_FAILED
    CANCELLED = pb.READ_OUTCOME_CANCELLED
    NOT_NEEDED = pb.READ_OUTCOME_NOT_NEEDED


_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads: one rank of an engine, in one registration."""

    engine_id: str
    rank: Rank
    incarnation: str


@dataclass(frozen=True, slots=True)
class ExchangeQuery:
    """A reader's introduction; see ``ExchangeRequest``."""

    protocol_versions: tuple[int, int]
    engine_id: str
    rank: Rank
    reader: Reader
    compatibility_key: str
    expected_incarnation: str = ""
    known_incarnation: str = ""
    goodbye: bool = False


@dataclass(frozen=True, slots=True)
class RegionSpan:
    """A registered range in the peer's process."""

    address: int
    size: int
    memory: MemoryKind
    device: int


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """All that reading from a peer takes.

    :param spans: one for each region of the layout.
    :param agent_metadata: opaque, its digest checked; a secret.
    """

    layout: CacheLayout
    spans: tuple[RegionSpan, ...]
    agent_name: str
    agent_metadata: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ExchangeAnswer:
    """A peer's answer.

    :param memory: ``None`` where the reader knows this incarnation already.
    :param idle_timeout: the peer forgets a reader of which it hears nothing for so long, seconds.
    :param host: equal to the reader's own where both run on one host; empty where it is not told.
    :param tcp_segment: the largest message that the peer's UCX sends over TCP, bytes; 0 where it is not told.
    """

    protocol_version: int
    engine_id: str
    rank: Rank
    dp_rank: int
    dp_size: int
    incarnation: str
    compatibility_key: str
    idle_timeout: float
    memory: PeerMemory | None
    host: str = ""
    tcp_segment: int = 0


@dataclass(frozen=True, slots=True)
class ReadRef:
    """A read of a published request, as OpenRead and CloseRead name it."""

    engine_id: str
    rank: Rank
    incarnation: str
    request_id: str
    lease_token: bytes = field(repr=False)
    reader: Reader
    readers: int
    transfer_id: str


@dataclass(frozen=True, slots=True)
class OpenRead:
    """A read is wanted.  ``digests`` by group and ``num_tokens`` (0: not told) are what the ticket promised."""

    ref: ReadRef
    num_tokens: int = 0
    digests: tuple[tuple[str, bytes], ...] = ()
    wanted: float | None = None


@dataclass(frozen=True, slots=True)
class CloseRead:
    """A READ has ended."""

    ref: ReadRef
    outcome: Outcome
    will_retry: bool = False


@dataclass(frozen=True, slots=True)
class ReadNotice:
    """The payload of a READ's NIXL notification."""

    engine_id: str
    incarnation: str
    request_id: str
    lease_token: bytes = field(repr=False)
    reader: Reader
    transfer_id: str


# -- exchange --------------------------------------------------------------------------------------------------------


def exchange_from_pb(message: pb.ExchangeRequest) -> ExchangeQuery:
    """:raises KvxferError: FIELD_INVALID."""
    lowest = integer(message.protocol_version_min, "protocol_version_min", 1, _MAX_VERSION)
    highest = integer(message.protocol_version_max, "protocol_version_max", lowest, _MAX_VERSION)
    required(message, "rank", "")
    required(message, "reader", "")
    return ExchangeQuery(
        (lowest, highest),
        text(message.engine_id, "engine_id"),
        rank_from_pb(message.rank, "rank"),
        _reader(message.reader, "reader"),
        text(message.compatibility_key, "compatibility_key", MAX_KEY),
        optional_text(message.expected_incarnation, "expected_incarnation", MAX_INCARNATION),
        optional_text(message.known_incarnation, "known_incarnation", MAX_INCARNATION),
        message.goodbye,
    )


def exchange_to_pb(query: ExchangeQuery) -> pb.ExchangeRequest:
    """An introduction as a request."""
    lowest, highest = query.protocol_versions
    return pb.ExchangeRequest(
        protocol_version_min=lowest,
        protocol_version_max=highest,
        engine_id=query.engine_id,
        rank=rank_to_pb(query.rank),
        reader=_reader_to_pb(query.reader),
        compatibility_key=query.compatibility_key,
        expected_incarnation=query.expected_incarnation,
        known_incarnation=query.known_incarnation,
        goodbye=query.goodbye,
    )


def answer_from_pb(message: pb.ExchangeResponse) -> ExchangeAnswer:
    """Check a peer's answer (not one to a goodbye) before anything of it reaches NIXL.

    :raises KvxferError: PEER_METADATA_INVALID, whatever is wrong with it: it is the peer's doing, not the caller's.
    """
    try:
        return _answer(message)
    except KvxferError as error:
        raise _unsound(error, "Exchange") from None


def _unsound(error: KvxferError, rpc: str) -> KvxferError:
    values: dict[str, Any] = {**error.metadata, "cause": error.reason.value}
    message = f"the peer's answer to {rpc} is not sound: {error.message}"
    return KvxferError(Reason.PEER_METADATA_INVALID, message, field=error.field, **values)


def answer_to_pb(answer: ExchangeAnswer) -> pb.ExchangeResponse:
    """An answer as a message, digests included."""
    message = pb.ExchangeResponse(
        protocol_version=answer.protocol_version,
        engine_id=answer.engine_id,
        rank=rank_to_pb(answer.rank),
        dp_rank=answer.dp_rank,
        dp_size=answer.dp_size,
        incarnation=answer.incarnation,
        compatibility_key=answer.compatibility_key,
        idle_timeout=duration(answer.idle_timeout),
        host=answer.host,
        tcp_segment=answer.tcp_segment,
    )
    if memory := answer.memory:
        message.layout.CopyFrom(layout_to_pb(memory.layout))
        message.layout_fingerprint = memory.layout.fingerprint
        message.spans.extend(
            pb.RegionSpan(address=s.address, size=s.size, memory=MEMORY_KINDS_OUT[s.memory], device=s.device)
            for s in memory.spans
        )
        message.agent_name = memory.agent_name
        message.agent_metadata = memory.agent_metadata
        message.metadata_sha256 = hashlib.sha256(memory.agent_metadata).digest()
    return message


def _answer(message: pb.ExchangeResponse) -> ExchangeAnswer:
    required(message, "rank", "")
    dp_size = integer(message.dp_size, "dp_size", 1, MAX_RANKS)
    return ExchangeAnswer(
        protocol_version=integer(message.protocol_version, "protocol_version", 1, _MAX_VERSION),
        engine_id=text(message.engine_id, "engine_id"),
        rank=rank_from_pb(message.rank, "rank"),
        dp_rank=integer(message.dp_rank, "dp_rank", 0, dp_size - 1),
        dp_size=dp_size,
        incarnation=text(message.incarnation, "incarnation", MAX_INCARNATION),
        compatibility_key=text(message.compatibility_key, "compatibility_key", MAX_KEY),
        idle_timeout=seconds(message, "idle_timeout", ""),
        memory=_memory(message) if message.HasField("layout") else None,
        host=optional_text(message.host, "host", MAX_INCARNATION),
        tcp_segment=integer(message.tcp_segment, "tcp_segment", 0, _MAX_SEGMENT),
    )


def _memory(message: pb.ExchangeResponse) -> PeerMemory:
    metadata = message.agent_metadata
    integer(len(metadata), "agent_metadata", 1, MAX_METADATA)
    if hashlib.sha256(metadata).digest() != digest(message.metadata_sha256, "metadata_sha256"):
        raise refuse("metadata_sha256", f"is not that of the {len(metadata)} bytes of agent_metadata")
    layout = layout_from_pb(message.layout)
    if message.layout_fingerprint != layout.fingerprint:
        raise refuse(
            "layout_fingerprint", f"is not that of the layout, {layout.fingerprint}", fingerprint=layout.fingerprint
        )
    if len(message.spans) != len(layout.regions):
        raise refuse("spans", f"are {len(message.spans)} for {len(layout.regions)} regions", value=len(message.spans))
    spans = []
    for i, (span, region) in enumerate(zip(message.spans, layout.regions, strict=True)):
        where = f"spans[{i}]"
        memory = choice(span.memory, MEMORY_KINDS, at(where, "memory"))
        integer(span.address, at(where, "address"), 1, MAX_BYTES - region.size)
        if (span.size, memory, span.device) != (region.size, region.memory, region.device):
            raise refuse(
                where,
                f"is {span.size} bytes of {memory.value}:{span.device}; the layout says {region.size} bytes of "
                f"{region.memory.value}:{region.device}",
            )
        spans.append(RegionSpan(span.address, span.size, memory, span.device))
    return PeerMemory(layout, tuple(spans), text(message.agent_name, "agent_name"), metadata)


# -- reads -----------------------------------------------------------------------------------------------------------


def open_from_pb(message: pb.OpenReadRequest) -> OpenRead:
    """:raises KvxferError: FIELD_INVALID, RANGE_INVALID."""
    integer(len(message.blocks), "blocks", 0, MAX_GROUPS)
    digests = tuple(
        (text(entry.group, f"blocks[{i}].group"), digest(entry.sha256, f"blocks[{i}].sha256"))
        for i, entry in enumerate(message.blocks)
    )
    if len(dict(digests)) != len(digests):
        raise refuse("blocks", "name a group twice")
    num_tokens = tokens(message.num_tokens, "num_tokens")
    return OpenRead(_ref(message), num_tokens, digests, optional_seconds(message, "wanted", ""))


def open_to_pb(record: OpenRead) -> pb.OpenReadRequest:
    """OpenRead as a request."""
    ref = record.ref
    return pb.OpenReadRequest(
        engine_id=ref.engine_id,
        rank=rank_to_pb(ref.rank),
        incarnation=ref.incarnation,
        request_id=ref.request_id,
        lease_token=ref.lease_token,
        reader=_reader_to_pb(ref.reader),
        readers=ref.readers,
        transfer_id=ref.transfer_id,
        num_tokens=record.num_tokens,
        blocks=[pb.BlockDigest(group=group, sha256=sha256) for group, sha256 in record.digests],
        wanted=None if record.wanted is None else duration(record.wanted),
    )


def granted_from_pb(message: pb.OpenReadResponse) -> float:
    """Check a peer's grant, seconds.  :raises KvxferError: PEER_METADATA_INVALID."""
    return _granted(message, "OpenRead")


def renew_from_pb(message: pb.RenewReadRequest) -> tuple[ReadRef, float | None]:
    """The read that goes on, and for how much longer.  :raises KvxferError: FIELD_INVALID."""
    return _ref(message), optional_seconds(message, "wanted", "")


def renew_to_pb(ref: ReadRef, wanted: float) -> pb.RenewReadRequest:
    """RenewRead as a request."""
    return pb.RenewReadRequest(
        engine_id=ref.engine_id,
        rank=rank_to_pb(ref.rank),
        incarnation=ref.incarnation,
        request_id=ref.request_id,
        lease_token=ref.lease_token,
        reader=_reader_to_pb(ref.reader),
        readers=ref.readers,
        transfer_id=ref.transfer_id,
        wanted=duration(wanted),
    )


def renewed_from_pb(message: pb.RenewReadResponse) -> float:
    """Seconds that a peer grants from now on.

    :raises KvxferError: PEER_METADATA_INVALID.
    """
    return _granted(message, "RenewRead")


def _granted(message: pb.OpenReadResponse | pb.RenewReadResponse, rpc: str) -> float:
    try:
        return seconds(message, "granted", "")
    except KvxferError as error:
        raise _unsound(error, rpc) from None


def close_from_pb(message: pb.CloseReadsRequest) -> tuple[CloseRead, ...]:
    """:raises KvxferError: FIELD_INVALID."""
    integer(len(message.reads), "reads", 1, MAX_ENDS)
    required(message, "rank", "")
    required(message, "reader", "")
    engine_id, rank = text(message.engine_id, "engine_id"), rank_from_pb(message.rank, "rank")
    incarnation = text(message.incarnation, "incarnation", MAX_INCARNATION)
    reader = _reader(message.reader, "reader")
    records = []
    for i, end in enumerate(message.reads):
        with under(f"reads[{i}]"):
            outcome = choice(end.outcome, _OUTCOMES, "outcome")
            if end.will_retry and outcome in (Outcome.DONE, Outcome.NOT_NEEDED):
                raise refuse("will_retry", f"does not go with outcome {outcome.name}", outcome=outcome.name)
            ref = ReadRef(engine_id, rank, incarnation, *_request(end), reader, *_transfer(end))
            records.append(CloseRead(ref, outcome, end.will_retry))
    return tuple(records)


def close_to_pb(records: Sequence[CloseRead]) -> pb.CloseReadsRequest:
    """Ends of reads of one reader from one rank as a request."""
    first = records[0].ref
    return pb.CloseReadsRequest(
        engine_id=first.engine_id,
        rank=rank_to_pb(first.rank),
        incarnation=first.incarnation,
        reader=_reader_to_pb(first.reader),
        reads=[
            pb.ReadEnd(
                request_id=record.ref.request_id,
                lease_token=record.ref.lease_token,
                readers=record.ref.readers,
                transfer_id=record.ref.transfer_id,
                outcome=record.outcome.value,
                will_retry=record.will_retry,
            )
            for record in records
        ],
    )


def notice_from_bytes(payload: bytes) -> ReadNotice:
    """Check a NIXL notification.  :raises KvxferError: FIELD_INVALID; anybody may send one."""
    message = parse(pb.ReadNotice, payload, "notification", MAX_NOTICE)
    required(message, "reader", "")
    return ReadNotice(
        text(message.engine_id, "engine_id"),
        text(message.incarnation, "incarnation", MAX_INCARNATION),
        text(message.request_id, "request_id"),
        token(message.lease_token, "lease_token"),
        _reader(message.reader, "reader"),
        text(message.transfer_id, "transfer_id"),
    )


def notice_to_bytes(notice: ReadNotice) -> bytes:
    """The payload of a READ's NIXL notification."""
    return pb.ReadNotice(
        engine_id=notice.engine_id,
        incarnation=notice.incarnation,
        request_id=notice.request_id,
        lease_token=notice.lease_token,
        reader=_reader_to_pb(notice.reader),
        transfer_id=notice.transfer_id,
    ).SerializeToString()


def _ref(message: pb.OpenReadRequest | pb.RenewReadRequest) -> ReadRef:
    required(message, "rank", "")
    required(message, "reader", "")
    return ReadRef(
        text(message.engine_id, "engine_id"),
        rank_from_pb(message.rank, "rank"),
        text(message.incarnation, "incarnation", MAX_INCARNATION),
        *_request(message),
        _reader(message.reader, "reader"),
        *_transfer(message),
    )


def _request(message: pb.OpenReadRequest | pb.RenewReadRequest | pb.ReadEnd) -> tuple[str, bytes]:
    return text(message.request_id, "request_id"), token(message.lease_token, "lease_token")


def _transfer(message: pb.OpenReadRequest | pb.RenewReadRequest | pb.ReadEnd) -> tuple[int, str]:
    return integer(message.readers, "readers", 1, MAX_RANKS), text(message.transfer_id, "transfer_id")


def _reader(message: pb.Reader, where: str) -> Reader:
    required(message, "rank", where)
    return Reader(
        text(message.engine_id, at(where, "engine_id")),
        rank_from_pb(message.rank, at(where, "rank")),
        text(message.incarnation, at(where, "incarnation"), MAX_INCARNATION),
    )


def _reader_to_pb(reader: Reader) -> pb.Reader:
    return pb.Reader(engine_id=reader.engine_id, rank=rank_to_pb(reader.rank), incarnation=reader.incarnation)
