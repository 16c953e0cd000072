"""How both clients connect, and what a failed call means."""

from __future__ import annotations

import socket
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
    # Also how long an attempt may take: a busy sidecar needs more than an instant to say hello.
    ("grpc.min_reconnect_backoff_ms", 3_000),
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
def told_as_kvxfer_errors(
    target: str, method: str, facts: Mapping[str, str], waited: float | None = None
) -> Iterator[None]:
    """Failures of the call inside become :class:`KvxferError`.

    :param waited: the deadline of a call that waits for somebody to be there, seconds.
    """
    try:
        yield
    except grpc.RpcError as error:
        failure: Any = error  # what is raised is the call itself, with code and details
        if waited is not None and failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED and (why := unreachable(target)):
            raise nobody_error(target, method, waited, why) from None
        # Its code is in the metadata; its traceback says nothing to whoever made the call.
        raise error_of(failure, target, method, facts) from None


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
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            message += "; this may be a sidecar's peer listener: give its engine socket"
    delay = retry_delay(status)
    if delay is not None:
        values["retry_delay_s"] = f"{delay:g}"
    return KvxferError(error.reason, message, field=error.field, **values)


def target_of(target: str) -> str:
    """What gRPC is given: a path is a unix socket."""
    return f"unix:{target}" if target.startswith("/") else target


def unreachable(target: str) -> str:
    """Why a unix socket takes no connection, as the system says it; empty where it does, or where it is none."""
    scheme, _, path = target.partition(":")
    if scheme != "unix":
        return ""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
            tried.setblocking(False)
            tried.connect(path.removeprefix("//") if path.startswith("///") else path)
    except BlockingIOError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def nobody_error(target: str, method: str, waited: float, why: str) -> KvxferError:
    """What a call gets that has waited in vain, seconds, for somebody to be there."""
    message = f"nobody answered at {target} within {waited:g} s: {why}; is the sidecar running, and is this its engine "
    return KvxferError(
        Reason.DEADLINE_EXCEEDED,
        f"{message}socket?",
        target=target,
        method=method,
        timeout_s=f"{waited:g}",
        cause=why,
        grpc_code="DEADLINE_EXCEEDED",
    )


def session_closed_error(target: str) -> KvxferError:
    """What is told of a session that its owner has closed."""
    return KvxferError(Reason.FIELD_INVALID, f"the session at {target} is closed", field="session", target=target)


def closed_error(target: str) -> KvxferError:
    """What a call on a closed client gets."""
    return KvxferError(Reason.FIELD_INVALID, f"the client of {target} is closed", field="client", target=target)


def late_error(target: str, method: str, after: float) -> KvxferError:
    """What a stream gets that did not begin in time; ``after`` is in seconds."""
    message = f"{method} at {target}: nothing came within {after:g} s"
    return KvxferError(Reason.DEADLINE_EXCEEDED, message, target=target, method=method, timeout_s=after)
