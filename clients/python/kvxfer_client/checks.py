"""Arguments as Python hands them over: whether they are of a type that a call can take.

Bounds that only the sidecar knows are left to it; here nothing gets through that a message could not hold.  Every
error is FIELD_INVALID with the argument's name, the type found and what is allowed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from enum import Enum
from numbers import Real
from typing import Any, Final, TypeVar

import numpy as np

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.core.resolve import BlockList
from kvxfer.memory.handles import Handle
from kvxfer.wire.addresses import RankAddress
from kvxfer.wire.blocks import tokens as checked_tokens
from kvxfer.wire.fields import MAX_SECONDS, integer
from kvxfer.wire.tickets import Ticket, ticket_from_string
from kvxfer_client.local import LocalRegion
from kvxfer_client.memory import SharedRegion

T = TypeVar("T")
E = TypeVar("E", bound=Enum)

#: One past the largest number of 32 bits.
_UINT32: Final = 2**32
#: What an engine gives as its memory.
MEMORY: Final = "a SharedRegion, LocalRegion or handle for each region"


def wrong_type(value: object, field: str, allowed: str) -> KvxferError:
    """An error about an argument's type; its value, which may be a secret, is not told."""
    found = "None" if value is None else f"a value of type {type(value).__name__}"
    if isinstance(value, list | tuple | dict | str | bytes):
        found = f"a {type(value).__name__}"
    return KvxferError(
        Reason.FIELD_INVALID,
        f"{field} is {found}; {allowed} is needed",
        field=field,
        type=type(value).__name__,
        allowed=allowed,
    )


def instance(value: object, kind: type[T], field: str) -> T:
    """An object of this class."""
    if not isinstance(value, kind):
        raise wrong_type(value, field, f"a {kind.__name__}")
    return value


def text(value: object, field: str) -> str:
    """A string, which UTF-8 can hold."""
    if not isinstance(value, str):
        raise wrong_type(value, field, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        message = f"{field} is {value[:80]!a}; a string without lone surrogates is needed"
        raise KvxferError(Reason.FIELD_INVALID, message, field=field) from None
    return value


def token(value: object, field: str = "lease_token") -> bytes:
    """A lease token."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise wrong_type(value, field, "bytes (16 of them, see new_lease_token())")
    return bytes(value)


def flag(value: object, field: str) -> bool:
    """Yes or no."""
    if not isinstance(value, bool | np.bool_):
        raise wrong_type(value, field, "True or False")
    return bool(value)


def whole(value: Any, field: str) -> int:
    """A whole number, of Python or NumPy."""
    try:
        return operator.index(value)
    except TypeError:
        raise wrong_type(value, field, "a whole number") from None


def small(value: Any, field: str) -> int:
    """A whole number from 0 on that 32 bits hold."""
    return integer(whole(value, field), field, 0, _UINT32 - 1)


def tokens(value: Any, field: str, least: int = 0) -> int:
    """A number of tokens, or a position.  :raises KvxferError: FIELD_INVALID (its type), RANGE_INVALID."""
    return checked_tokens(whole(value, field), field, least)


def seconds(value: Any, field: str = "timeout") -> float:
    """A duration that may be asked for: more than 0, at most a day."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong_type(value, field, "a number of seconds")
    if not 0 < float(value) <= MAX_SECONDS:  # also refuses NaN
        raise KvxferError(
            Reason.FIELD_INVALID,
            f"{field} is {value} s; it must be more than 0 and at most {MAX_SECONDS} s",
            field=field,
            value=value,
            maximum=MAX_SECONDS,
        )
    return float(value)


def each(values: Any, field: str, allowed: str) -> tuple[Any, ...]:
    """The items of an iterable.  A string is none: its characters are never meant."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise wrong_type(values, field, allowed)
    return tuple(values)


def blocks(lists: Any, field: str) -> tuple[BlockList, ...]:
    """One list for each group."""
    if isinstance(lists, BlockList):
        raise wrong_type(lists, field, "a sequence of BlockLists, one for each group")
    found = each(lists, field, "a sequence of BlockLists, one for each group,")
    for i, item in enumerate(found):
        if not isinstance(item, BlockList):
            raise wrong_type(item, f"{field}[{i}]", "a BlockList (see grouped())")
        text(item.group, f"{field}[{i}].group")
    return found


def ticket(value: object, field: str = "ticket") -> Ticket:
    """A ticket, or its string."""
    if isinstance(value, str):
        return ticket_from_string(value, field)
    if not isinstance(value, Ticket):
        raise wrong_type(value, field, "a Ticket or its string")
    return value


def handles(memory: Any) -> tuple[Handle, ...]:
    """What the sidecar maps, one for each region."""
    found = tuple(m.handle if isinstance(m, SharedRegion | LocalRegion) else m for m in each(memory, "memory", MEMORY))
    for i, item in enumerate(found):
        if not isinstance(item, Handle):
            raise wrong_type(
                item,
                f"memory[{i}]",
                "a SharedRegion, a LocalRegion or a handle (PosixShm, FileHandle, Memfd, Owned, Address)",
            )
    return found


def addresses(ranks: Any, field: str = "ranks") -> tuple[RankAddress, ...]:
    """The peer address of every rank."""
    found = []
    for i, item in enumerate(each(ranks, field, "pairs of Rank and address")):
        pair = each(item, f"{field}[{i}]", "a pair of Rank and address")
        if len(pair) != 2:
            raise wrong_type(item, f"{field}[{i}]", "a pair of Rank and address")
        found.append(RankAddress(instance(pair[0], Rank, f"{field}[{i}]"), text(pair[1], f"{field}[{i}].address")))
    return tuple(found)


def states(values: Any, kind: type[E], unknown: E) -> tuple[E, ...]:
    """Members of an enum, or their values; never ``unknown``, which stands for those of a later version."""
    known = ", ".join(str(member.value) for member in kind if member is not unknown)
    found = []
    for i, value in enumerate(each(values, "states", f"a sequence of {kind.__name__}")):
        try:
            member = kind(value)
        except ValueError:
            member = unknown
        if member is unknown:
            message = f"states[{i}] is {value!r}; there is no asking for others than {known}"
            raise KvxferError(Reason.FIELD_INVALID, message, field="states", value=value, allowed=known)
        found.append(member)
    return tuple(found)
