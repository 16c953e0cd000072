"""The error taxonomy: one exception type, a closed set of reasons, and what each reason means.

Every failure that a caller or a peer can see is a :class:`KvxferError`.  Its ``reason`` is stable and
machine-readable; the message is for people; everything in the message that varies is also in ``metadata``.
The service turns it into a ``google.rpc.Status`` (``ErrorInfo.reason``, domain ``kvxfer``); the client library
turns that back.  ``proto/kvxfer/v1/errors.md`` lists the same table, and a test keeps the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final


class Code(str, Enum):
    """The gRPC status codes that kvxfer uses, by name (the core does not import grpc)."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"


class Fault(str, Enum):
    """Whose doing it was: who has to change something before it can work."""

    CALLER = "caller"
    PEER = "peer"
    LOCAL = "local"


class Reason(str, Enum):
    """Every reason that kvxfer gives, in the order of a request's life."""

    FIELD_INVALID = "FIELD_INVALID"
    LAYOUT_INVALID = "LAYOUT_INVALID"
    MEMORY_HANDLE_INVALID = "MEMORY_HANDLE_INVALID"
    MEMORY_NOT_ALLOWED = "MEMORY_NOT_ALLOWED"
    REGION_TOO_SMALL = "REGION_TOO_SMALL"
    MEMORY_LIMIT = "MEMORY_LIMIT"
    NOT_REGISTERED = "NOT_REGISTERED"
    REGISTRATION_BUSY = "REGISTRATION_BUSY"
    UNSUPPORTED = "UNSUPPORTED"
    PEER_UNREACHABLE = "PEER_UNREACHABLE"
    PEER_NOT_ALLOWED = "PEER_NOT_ALLOWED"
    PEER_METADATA_INVALID = "PEER_METADATA_INVALID"
    INCOMPATIBLE_PEER = "INCOMPATIBLE_PEER"
    LAYOUT_MISMATCH = "LAYOUT_MISMATCH"
    NO_HANDSHAKE = "NO_HANDSHAKE"
    STALE_INCARNATION = "STALE_INCARNATION"
    GROUP_MISMATCH = "GROUP_MISMATCH"
    BLOCK_OUT_OF_RANGE = "BLOCK_OUT_OF_RANGE"
    NULL_BLOCK = "NULL_BLOCK"
    DUPLICATE_BLOCK = "DUPLICATE_BLOCK"
    RANGE_INVALID = "RANGE_INVALID"
    RANGE_NOT_COVERED = "RANGE_NOT_COVERED"
    STATE_POSITION_MISMATCH = "STATE_POSITION_MISMATCH"
    TOO_MANY_DESCRIPTORS = "TOO_MANY_DESCRIPTORS"
    LOCAL_BLOCK_BUSY = "LOCAL_BLOCK_BUSY"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    TRANSFER_UNKNOWN = "TRANSFER_UNKNOWN"
    TRANSFER_ID_REUSED = "TRANSFER_ID_REUSED"
    TRANSFER_STATE = "TRANSFER_STATE"
    TRANSFER_CANCELLED = "TRANSFER_CANCELLED"
    TRANSFER_FAILED = "TRANSFER_FAILED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    PEER_LOST = "PEER_LOST"
    LEASE_UNKNOWN = "LEASE_UNKNOWN"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    LEASE_TOKEN_MISMATCH = "LEASE_TOKEN_MISMATCH"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class ReasonSpec:
    """What a reason means to whoever receives it.

    ``retry`` is true where the very same call may succeed later without anybody changing it.
    """

    code: Code
    fault: Fault
    retry: bool = False


SPECS: Final[Mapping[Reason, ReasonSpec]] = MappingProxyType(
    {
        Reason.FIELD_INVALID: ReasonSpec(Code.INVALID_ARGUMENT, Fault.CALLER),
        Reason.LAYOUT_INVALID: ReasonSpec(Code.INVALID_ARGUMENT, Fault.CALLER),
        Reason.MEMORY_HANDLE_INVALID: ReasonSpec(Code.INVALID_ARGUMENT, Fault.CALLER),
        Reason.MEMORY_NOT_ALLOWED: ReasonSpec(Code.PERMISSION_DENIED, Fault.CALLER),
        Reason.REGION_TOO_SMALL: ReasonSpec(Code.FAILED_PRECONDITION, Fault.CALLER),
        Reason.MEMORY_LIMIT: ReasonSpec(Code.FAILED_PRECONDITION, Fault.LOCAL),
        Reason.NOT_REGISTERED: ReasonSpec(Code.FAILED_PRECONDITION, Fault.CALLER),
        Reason.REGISTRATION_BUSY: ReasonSpec(Code.FAILED_PRECONDITION, Fault.CALLER, retry=True),
        Reason.UNSUPPORTED: ReasonSpec(Code.UNIMPLEMENTED, Fault.CALLER),
        Reason.PEER_UNREACHABLE: ReasonSpec(Code.UNAVAILABLE, Fault.PEER, retry=True),
        Reason.PEER_NOT_ALLOWED: ReasonSpec(Code.PERMISSION_DENIED, Fault.CALLER),
        Reason.PEER_METADATA_INVALID: ReasonSpec(Code.FAILED_PRECONDITION, Fault.PEER),
        Reason.INCOMPATIBLE_PEER: ReasonSpec(Code.FAILED_PRECONDITION, Fault.PEER),
        Reason.LAYOUT_MISMATCH: ReasonSpec(Code.FAILED_PRECONDITION, Fault.PEER),
        Reason.NO_HANDSHAKE: ReasonSpec(Code.FAILED_PRECONDITION, Fault.CALLER),
        Reason.STALE_INCARNATION: ReasonSpec(Code.FAILED_PRECONDITION, Fault.PEER),
        Reason.GROUP_MISMATCH: ReasonSpec(Code.INVALID_ARGUMENT, Fault.CALLER),
        Reason.BLOCK_OUT_OF_RANGE: ReasonSpec(Code.INVALID_ARGUMENT, Fault.CALLER),
        Reason.NULL_BLOCK: ReasonSpec(Code.INVALID_ARGUMENT, Fault.CALLER),
        Reason.DUPLICATE_BLOCK: ReasonSpec(Code.INVALID_ARGUMENT, Fault.CALLER),
        Reason.RANGE_INVALID: ReasonSpec(Code.INVALID_ARGUMENT, Fault.CALLER),
        Reason.RANGE_NOT_COVERED: ReasonSpec(Code.INVALID_ARGUMENT, Fault.CALLER),
        Reason.STATE_POSITION_MISMATCH: ReasonSpec(Code.INVALID_ARGUMENT, Fault.CALLER),
        Reason.TOO_MANY_DESCRIPTORS: ReasonSpec(Code.INVALID_ARGUMENT, Fault.CALLER),
        Reason.LOCAL_BLOCK_BUSY: ReasonSpec(Code.FAILED_PRECONDITION, Fault.CALLER, retry=True),
        Reason.LIMIT_EXCEEDED: ReasonSpec(Code.RESOURCE_EXHAUSTED, Fault.LOCAL, retry=True),
        Reason.TRANSFER_UNKNOWN: ReasonSpec(Code.NOT_FOUND, Fault.CALLER),
        Reason.TRANSFER_ID_REUSED: ReasonSpec(Code.ALREADY_EXISTS, Fault.CALLER),
        Reason.TRANSFER_STATE: ReasonSpec(Code.FAILED_PRECONDITION, Fault.CALLER),
        Reason.TRANSFER_CANCELLED: ReasonSpec(Code.CANCELLED, Fault.CALLER),
        Reason.TRANSFER_FAILED: ReasonSpec(Code.UNAVAILABLE, Fault.PEER, retry=True),
        Reason.DEADLINE_EXCEEDED: ReasonSpec(Code.DEADLINE_EXCEEDED, Fault.PEER, retry=True),
        Reason.PEER_LOST: ReasonSpec(Code.UNAVAILABLE, Fault.PEER, retry=True),
        Reason.LEASE_UNKNOWN: ReasonSpec(Code.NOT_FOUND, Fault.CALLER),
        Reason.LEASE_EXPIRED: ReasonSpec(Code.FAILED_PRECONDITION, Fault.CALLER),
        Reason.LEASE_TOKEN_MISMATCH: ReasonSpec(Code.PERMISSION_DENIED, Fault.CALLER),
        Reason.REQUEST_ID_REUSED: ReasonSpec(Code.ALREADY_EXISTS, Fault.CALLER),
        Reason.SHUTTING_DOWN: ReasonSpec(Code.UNAVAILABLE, Fault.LOCAL, retry=True),
        Reason.INTERNAL: ReasonSpec(Code.INTERNAL, Fault.LOCAL),
    }
)


class KvxferError(Exception):
    """A failure with a stable reason.

    :param reason: one of :class:`Reason`; fixes the status code.
    :param message: one sentence for a person: what was wrong, what was allowed.
    :param field: path of the request field at fault (``groups[2].block_ids``), where there is one.
    :param metadata: every value that varies in the message; stored as strings.
    """

    def __init__(self, reason: Reason, message: str, *, field: str = "", **metadata: object) -> None:
        super().__init__(message)
        self.reason: Final = reason
        self.message: Final = message
        self.field: Final = field
        self.metadata: Final[Mapping[str, str]] = MappingProxyType({k: str(v) for k, v in metadata.items()})

    @property
    def spec(self) -> ReasonSpec:
        """Code, fault and retry of this error's reason."""
        return SPECS[self.reason]

    def bare(self) -> KvxferError:
        """The same error as it is kept: the traceback and the cause of one that was raised keep alive all that was
        under way then, connections included."""
        values: dict[str, Any] = dict(self.metadata)
        return KvxferError(self.reason, self.message, field=self.field, **values)

    def within(self, prefix: str) -> KvxferError:
        """The same error with ``prefix.`` put before its field path."""
        field = f"{prefix}.{self.field}" if self.field else prefix
        values: dict[str, Any] = dict(self.metadata)
        return KvxferError(self.reason, self.message, field=field, **values)

    def __str__(self) -> str:
        where = f" ({self.field})" if self.field else ""
        return f"{self.reason.value}: {self.message}{where}"
