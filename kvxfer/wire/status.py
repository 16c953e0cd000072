"""Errors on the wire: :class:`KvxferError` to ``google.rpc.Status`` and back.

A status carries one ErrorInfo (domain ``kvxfer``, the reason, the metadata), a BadRequest where a field is at fault,
and a RetryInfo where the same call may succeed later.  It travels in a gRPC trailer, whose size gRPC limits to 8 KiB,
so everything is cut to a bound: a message that is too long must not turn the error into another one.

grpc is not imported: ``grpc_status.rpc_status.to_status(to_status(error))`` is what a servicer aborts with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2
from google.rpc.status_pb2 import Status

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.wire.fields import duration

#: The domain of all our reasons.
DOMAIN: Final = "kvxfer"
#: Where gRPC puts a serialised status.
TRAILER: Final = "grpc-status-details-bin"
#: Seconds after which to try again, where a reason has no delay of its own in :data:`RETRY_DELAYS`.
RETRY_DELAY: Final = 1.0
RETRY_DELAYS: Final[Mapping[Reason, float]] = MappingProxyType(
    {
        Reason.LOCAL_BLOCK_BUSY: 0.01,
        Reason.LIMIT_EXCEEDED: 0.1,
        Reason.REGISTRATION_BUSY: 0.5,
        Reason.SHUTTING_DOWN: 2.0,
    }
)

# Bytes of UTF-8.  A message may grow to three times its size in the grpc-message header (percent-encoding), all the
# rest by a third (base64); together they stay below 8 KiB.
_MOST_MESSAGE: Final = 800
_MOST_DESCRIPTION: Final = 200
_MOST_FIELD: Final = 200
_MOST_VALUE: Final = 200
_MOST_METADATA: Final = 1_500
# Read more generously than written, but not without end.
_MOST_STATUS: Final = 64 * 1024

_KEY: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: Metadata that would be taken for an argument of :class:`KvxferError`.
_TAKEN: Final = frozenset({"self", "reason", "message", "field"})

#: What a failure means that carries no details of ours: gRPC's own, or another server's.
_PLAIN: Final[Mapping[str, Reason]] = MappingProxyType(
    {
        "UNAVAILABLE": Reason.PEER_UNREACHABLE,
        # The call was cut off; a caller that cancels its own call hears of that in another way.
        "CANCELLED": Reason.PEER_UNREACHABLE,
        "DEADLINE_EXCEEDED": Reason.DEADLINE_EXCEEDED,
        "INVALID_ARGUMENT": Reason.FIELD_INVALID,
        "UNIMPLEMENTED": Reason.UNSUPPORTED,
        # A message over the limit: trying it again does not help.
        "RESOURCE_EXHAUSTED": Reason.FIELD_INVALID,
    }
)


class _Code(Protocol):
    @property
    def name(self) -> str: ...


class RpcFailure(Protocol):
    """What ``grpc.RpcError`` of a call and ``grpc.aio.AioRpcError`` both offer."""

    def code(self) -> Any:
        """The status code, a ``grpc.StatusCode``."""

    def details(self) -> str | None:
        """The status message."""

    def trailing_metadata(self) -> Any:
        """Pairs of key and value, or ``None``."""


def to_status(error: KvxferError, *, retry_delay: float | None = None) -> Status:
    """The error as a status.

    :param retry_delay: seconds after which to try again, instead of the reason's own; only where the reason is one
        that may be retried.
    """
    spec = error.spec
    status = Status(code=code_pb2.Code.Value(spec.code.value), message=_cut(error.message, _MOST_MESSAGE))
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN)
    left = _MOST_METADATA
    for key, value in error.metadata.items():
        shown = _cut(value, _MOST_VALUE)
        left -= len(key) + len(shown.encode())
        if left < 0:
            break
        if _KEY.fullmatch(key):
            info.metadata[key] = shown
    status.details.add().Pack(info)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field, _MOST_FIELD), description=_cut(error.message, _MOST_DESCRIPTION)
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if spec.retry:
        delay = RETRY_DELAYS.get(error.reason, RETRY_DELAY) if retry_delay is None else retry_delay
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=duration(delay)))
    return status


def from_status(status: Status) -> KvxferError:
    """The error that a status tells of.

    A reason that is not known here (of a later version) becomes INTERNAL, with the reason in its metadata; a status
    without our details is taken by its code.
    """
    code = code_pb2.Code.Name(status.code) if status.code in code_pb2.Code.values() else str(status.code)
    info = _detail(status, error_details_pb2.ErrorInfo())
    if info is None or info.domain != DOMAIN:
        return _plain(code, status.message)
    values: dict[str, Any] = {f"{key}_" if key in _TAKEN else key: value for key, value in info.metadata.items()}
    try:
        reason = Reason(info.reason)
    except ValueError:
        reason = Reason.INTERNAL
        values |= {"unknown_reason": info.reason, "grpc_code": code}
    bad = _detail(status, error_details_pb2.BadRequest())
    field = bad.field_violations[0].field if bad is not None and bad.field_violations else ""
    return KvxferError(reason, status.message, field=field, **values)


def retry_delay(status: Status) -> float | None:
    """Seconds after which to try again, or ``None`` where the status does not say that it may help."""
    info = _detail(status, error_details_pb2.RetryInfo())
    if info is None:
        return None
    delay: float = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
    return max(0.0, delay)


def status_of(failure: RpcFailure) -> Status:
    """The status of a failed call, with details where it carries sound ones."""
    name = str(failure.code().name)
    plain = Status(
        code=code_pb2.Code.Value(name) if name in code_pb2.Code.keys() else code_pb2.UNKNOWN,  # noqa: SIM118
        message=failure.details() or "",
    )
    pairs: Iterable[tuple[str, str | bytes]] = failure.trailing_metadata() or ()
    for key, value in pairs:
        if key == TRAILER and isinstance(value, bytes) and len(value) <= _MOST_STATUS:
            try:
                rich = Status.FromString(value)
            except DecodeError:
                break
            # A proxy on the way may have replaced the status and kept the trailer.
            return rich if rich.code == plain.code else plain
    return plain


def from_rpc_error(failure: RpcFailure) -> KvxferError:
    """The error behind a failed call, of grpc or grpc.aio; also for failures that carry no details (UNAVAILABLE)."""
    return from_status(status_of(failure))


def _plain(code: str, message: str) -> KvxferError:
    reason = _PLAIN.get(code, Reason.INTERNAL)
    return KvxferError(reason, message or f"the call failed with {code}", grpc_code=code)


def _detail(status: Status, into: Any) -> Any:
    """``into``, filled with the first detail of its kind; ``None`` where there is none that can be read."""
    for detail in status.details:
        if detail.Is(into.DESCRIPTOR):
            try:
                detail.Unpack(into)
            except DecodeError:
                return None
            return into
    return None


def _cut(value: str, most: int) -> str:
    """At most ``most`` bytes of UTF-8, whatever the string holds."""
    raw = value.encode("utf-8", "replace")
    return raw.decode() if len(raw) <= most else raw[: most - 3].decode("utf-8", "ignore") + "..."
