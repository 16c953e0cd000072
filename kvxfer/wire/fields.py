"""Checks of single message fields.  Every error names the field's path in the message, as a client wrote it."""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from kvxfer.core.errors import KvxferError, Reason

#: Longest engine, transfer, request and agent ID; longest incarnation, compatibility key and address, in characters.
MAX_ID: Final = 256
MAX_INCARNATION: Final = 64
MAX_KEY: Final = 1_024
MAX_ADDRESS: Final = 300
#: Longest page token, in characters; most entries of a page, and as many as are given when nothing is asked for.
MAX_PAGE_TOKEN: Final = 256
MAX_PAGE: Final = 1_000
DEFAULT_PAGE: Final = 100
#: Bytes of a lease token.
TOKEN_BYTES: Final = 16
#: Longest duration that anybody may ask for, seconds.
MAX_SECONDS: Final = 86_400

_TEXT: Final = re.compile(r"[!-~]([ -~]*[!-~])?")
#: The host of a peer address: a name or IPv4 address, or an IPv6 address (with a zone) in brackets.
_ADDRESS: Final = re.compile(
    r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9.])?|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]):(\d{1,5})", re.A
)
_NANOS: Final = 1_000_000_000

MessageT = TypeVar("MessageT", bound=Message)
KeyT = TypeVar("KeyT", bound=int)
ValueT = TypeVar("ValueT")


def at(prefix: str, name: str) -> str:
    """The path of ``name`` inside ``prefix``, which may be empty: the message itself."""
    return f"{prefix}.{name}" if prefix else name


def refuse(field: str, message: str, *, reason: Reason = Reason.FIELD_INVALID, **values: object) -> KvxferError:
    """An error about ``field``; ``message`` follows the field's name."""
    return KvxferError(reason, f"{field} {message}", field=field, **values)


@contextmanager
def under(prefix: str) -> Iterator[None]:
    """Errors from inside get ``prefix`` before their field path."""
    try:
        yield
    except KvxferError as error:
        if not prefix:
            raise
        raise error.within(prefix) from None


def parse(kind: type[MessageT], data: bytes, field: str, most: int) -> MessageT:
    """Decode a message that travelled as bytes.

    :param most: longest that is looked at, bytes.
    :raises KvxferError: FIELD_INVALID.
    """
    if len(data) > most:
        raise refuse(field, f"has {len(data)} bytes; allowed are {most}", value=len(data), maximum=most)
    try:
        return kind.FromString(data)
    except DecodeError:
        raise refuse(field, f"is not a {kind.DESCRIPTOR.full_name}", bytes=len(data)) from None


def text(value: str, field: str, most: int = MAX_ID) -> str:
    """A required string of printable ASCII that neither starts nor ends with a space."""
    if len(value) > most or not _TEXT.fullmatch(value):
        shown = repr(value[:80])
        raise refuse(
            field,
            f"is {shown}; it takes 1 to {most} printable ASCII characters, the first and last no space",
            value=shown,
            maximum=most,
        )
    return value


def optional_text(value: str, field: str, most: int = MAX_ID) -> str:
    """As :func:`text`, or empty."""
    return text(value, field, most) if value else ""


def address(value: str, field: str) -> str:
    """A peer address: ``host:port`` and no other form of gRPC target, which could lead to a local socket.

    :raises KvxferError: FIELD_INVALID.
    """
    match = _ADDRESS.fullmatch(value) if len(value) <= MAX_ADDRESS else None
    if match is None or not 1 <= int(match[2]) <= 65_535 or not _is_host(match[1]):
        shown = repr(value[:80])
        raise refuse(
            field,
            f"is {shown}; it takes host:port, the host a name, an IPv4 address, or an IPv6 address in brackets",
            value=shown,
        )
    return value


@functools.lru_cache(maxsize=4096)
def _is_host(host: str) -> bool:
    """Whether a host of the right characters is an address, or a name that nobody can take for a damaged one."""
    try:
        if host.startswith("["):
            ipaddress.IPv6Address(host[1:-1])
        elif not host.strip("0123456789."):
            ipaddress.IPv4Address(host)
        else:
            labels = host.removesuffix(".").split(".")
            return all(1 <= len(label) <= 63 for label in labels) and not labels[-1].isdigit()
    except ValueError:
        return False
    return True


def split_address(value: str) -> tuple[str, int]:
    """Host (an IPv6 address without its brackets) and port of a checked address."""
    host, _, port = value.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def token(value: bytes, field: str) -> bytes:
    """A lease token: 16 bytes.  Its value is a secret and not told."""
    if len(value) != TOKEN_BYTES:
        raise refuse(field, f"has {len(value)} bytes; it takes {TOKEN_BYTES}", bytes=len(value))
    return value


def digest(value: bytes, field: str) -> bytes:
    """A SHA-256: 32 bytes."""
    if len(value) != 32:
        raise refuse(field, f"has {len(value)} bytes; it takes 32", bytes=len(value))
    return value


def integer(value: int, field: str, low: int, high: int, *, reason: Reason = Reason.FIELD_INVALID) -> int:
    """A number from ``low`` to ``high``."""
    if not low <= value <= high:
        raise refuse(
            field, f"is {value}; allowed are {low} to {high}", reason=reason, value=value, minimum=low, maximum=high
        )
    return value


def page_size(value: int) -> int:
    """Entries of a page: the default for 0, never more than :data:`MAX_PAGE`."""
    return min(value or DEFAULT_PAGE, MAX_PAGE)


def choice(value: KeyT, known: Mapping[KeyT, ValueT], field: str) -> ValueT:
    """What an enum's number stands for; UNSPECIFIED and numbers of a later version are refused."""
    if value not in known:
        raise refuse(field, "must be set" if value == 0 else f"is {value}, which is not known here", value=value)
    return known[value]


def required(message: Message, name: str, prefix: str) -> None:
    """Refuse a message whose field ``name`` (a message or in a oneof) is not set."""
    if not message.HasField(name):
        raise refuse(at(prefix, name), "must be set")


def variant(message: Message, oneof: str, prefix: str) -> str:
    """The name of the field that is set in ``oneof``; refuses a message that sets none."""
    chosen: str | None = message.WhichOneof(oneof)
    if chosen is None:
        names = ", ".join(f.name for f in message.DESCRIPTOR.oneofs_by_name[oneof].fields)
        raise refuse(at(prefix, oneof), f"must be set: one of {names}")
    return chosen


def seconds(message: Message, name: str, prefix: str, most: float = MAX_SECONDS) -> float:
    """A required duration in seconds: more than 0, at most ``most``."""
    required(message, name, prefix)
    value = optional_seconds(message, name, prefix, most)
    if value is None:  # only a field that is not set
        raise refuse(at(prefix, name), "must be set")
    return value


def optional_seconds(message: Message, name: str, prefix: str, most: float = MAX_SECONDS) -> float | None:
    """A duration in seconds, or ``None`` where it is not set."""
    if not message.HasField(name):
        return None
    field = at(prefix, name)
    duration = getattr(message, name)
    if not isinstance(duration, Duration):
        raise TypeError(f"{name} is no duration")
    total = duration.seconds * _NANOS + duration.nanos
    if not 0 <= duration.nanos < _NANOS or not 0 < total <= most * _NANOS:
        raise refuse(
            field,
            f"is {duration.seconds} s {duration.nanos} ns; it must be more than 0 and at most {most:g} s",
            seconds=duration.seconds,
            nanos=duration.nanos,
            maximum=most,
        )
    return total / _NANOS


def duration(value: float) -> Duration:
    """Seconds as a message; negative ones, which only a clock's rounding can give, become 0."""
    whole, nanos = divmod(round(max(0.0, value) * _NANOS), _NANOS)
    return Duration(seconds=whole, nanos=nanos)
