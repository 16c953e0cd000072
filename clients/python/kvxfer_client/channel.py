"""How both clients connect, and what a failed call means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import grpc

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.wire.status import RpcFailure, from_status, retry_delay, status_of

#: Largest message, either way, bytes: the same as the sidecar's own setting.
MESSAGE_LIMIT: Final = 16 * 1024 * 1024

OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    # A sidecar is on this machine: no proxy of the environment leads to it.
    ("grpc.enable_http_proxy", 0),
    # One that restarts is back within seconds; gRPC's own back-off would go up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Two clients of one process do not share a connection, nor each other's back-off.
    ("grpc.use_local_subchannel_pool", 1),
    # A stream has no deadline; a sidecar that hangs is noticed by its silence.  It allows a ping every 5 seconds.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # What gRPC itself allows a ping is a minute, whatever is said above.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)

#: Calls that ended so were not answered by the sidecar.
_UNANSWERED: Final = "grpc_code"


@contextmanager
def told_as_kvxfer_errors(target: str, method: str, facts: Mapping[str, str]) -> Iterator[None]:
    """Failures of the call inside become :class:`KvxferError`."""
    try:
        yield
    except grpc.RpcError as error:
        failure: Any = error  # what is raised is the call itself, with code and details
        raise error_of(failure, target, method, facts) from error


def error_of(failure: RpcFailure, target: str, method: str, facts: Mapping[str, str]) -> KvxferError:
    """The error behind a failed call.

    Metadata: ``facts`` about the call, and what the sidecar told; where that has the name of a fact and means another,
    as the transfer that keeps a block busy, it is found under ``other_`` and the name.  Besides, ``retry_delay_s``
    where the sidecar says that the same call may succeed later, and ``target`` and ``method`` where the failure is
    gRPC's own (nobody answers, the deadline has passed).
    """
    status = status_of(failure)
    error = from_status(status)
    told = {f"other_{key}" if facts.get(key, value) != value else key: value for key, value in error.metadata.items()}
    values: dict[str, Any] = {**facts, **told}
    message = error.message
    if _UNANSWERED in error.metadata:
        values |= {"target": target, "method": method}
        message = f"{method} at {target}: {message}"
    delay = retry_delay(status)
    if delay is not None:
        values["retry_delay_s"] = f"{delay:g}"
    return KvxferError(error.reason, message, field=error.field, **values)


def closed_error(target: str) -> KvxferError:
    """What a call on a closed client gets."""
    return KvxferError(Reason.FIELD_INVALID, f"the client of {target} is closed", field="client", target=target)


def late_error(target: str, method: str, after: float) -> KvxferError:
    """What a stream gets that did not begin in time; ``after`` is in seconds."""
    message = f"{method} at {target}: nothing came within {after:g} s"
    return KvxferError(Reason.DEADLINE_EXCEEDED, message, target=target, method=method, timeout_s=after)
