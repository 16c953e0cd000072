"""Every way to spoil one field of a message, for messages of any kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

_INTEGERS = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 65_537, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2, 2**31, 2**40 + 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-2, -1, 0, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (-1, 0, 2**63 - 1),
}
_STRINGS = (
    "",
    " ",
    " x",
    "x ",
    "a\nb",
    "ü",
    "x" * 257,
    "x" * 5_000,
    "../x",
    "/",
    "127.0.0.1:1",
    "unix:/tmp/x",
    "[::1]:0",
)
_BYTES = (b"", b"x", b"x" * 16, b"x" * 17, b"\0" * 32, b"x" * 5_000)
_DURATIONS = ((0, 0), (-1, 0), (0, -1), (0, 10**9), (1, -5), (86_401, 0), (2**62, 0), (0, 2**31 - 1))


class Spoilt(NamedTuple):
    """A changed message: where, and to what."""

    path: str
    change: str
    message: Message


def spoilt(message: Message) -> Iterator[Spoilt]:
    """Copies of ``message``, each with one field changed."""
    for path, steps, field in _fields(message, "", ()):
        for change, apply in _changes(field):
            copy = type(message)()
            copy.CopyFrom(message)
            parent: Any = copy
            for step in steps:
                parent = getattr(parent, step) if isinstance(step, str) else parent[step]
            apply(parent)
            yield Spoilt(path, change, copy)


def _fields(
    message: Any, path: str, steps: tuple[str | int, ...]
) -> Iterator[tuple[str, tuple[str | int, ...], FieldDescriptor]]:
    for field in message.DESCRIPTOR.fields:
        where = f"{path}.{field.name}" if path else field.name
        yield where, steps, field
        if field.message_type is None or field.message_type is Duration.DESCRIPTOR:
            continue
        if field.is_repeated:
            for i in range(min(2, len(getattr(message, field.name)))):
                yield from _fields(getattr(message, field.name)[i], f"{where}[{i}]", (*steps, field.name, i))
        elif message.HasField(field.name):
            yield from _fields(getattr(message, field.name), where, (*steps, field.name))


def _changes(field: FieldDescriptor) -> Iterator[tuple[str, Callable[[Any], None]]]:
    name = field.name

    def clear(parent: Any) -> None:
        parent.ClearField(name)

    yield "clear", clear
    if field.is_repeated:
        yield from _list_changes(field)
    elif field.message_type is Duration.DESCRIPTOR:
        for seconds, nanos in _DURATIONS:

            def put_duration(parent: Any, seconds: int = seconds, nanos: int = nanos) -> None:
                getattr(parent, name).CopyFrom(Duration(seconds=seconds, nanos=nanos))

            yield f"= {seconds} s {nanos} ns", put_duration
    elif field.message_type is not None:

        def empty(parent: Any) -> None:
            parent.ClearField(name)
            getattr(parent, name).SetInParent()

        yield "= {}", empty
    else:
        for value in _values(field):

            def put(parent: Any, value: Any = value) -> None:
                setattr(parent, name, value)

            yield f"= {value!r:.30}", put


def _list_changes(field: FieldDescriptor) -> Iterator[tuple[str, Callable[[Any], None]]]:
    name = field.name

    def twice(parent: Any) -> None:
        values = getattr(parent, name)
        if values:
            values.append(values[0])

    def shorter(parent: Any) -> None:
        values = getattr(parent, name)
        if values:
            del values[-1]

    yield "first one twice", twice
    yield "last one missing", shorter
    if field.message_type is not None:
        yield "one more, empty", lambda parent: getattr(parent, name).add()
        return
    for value in _values(field):

        def more(parent: Any, value: Any = value) -> None:
            getattr(parent, name).append(value)

        def first(parent: Any, value: Any = value) -> None:
            values = getattr(parent, name)
            if values:
                values[0] = value

        yield f"and {value!r:.30}", more
        yield f"[0] = {value!r:.30}", first


def _values(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.enum_type is not None:
        return (0, 1, 2, 99, -1)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return (False, True)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _BYTES if field.type == FieldDescriptor.TYPE_BYTES else _STRINGS
    return _INTEGERS[field.cpp_type]


def is_path(kind: Any, path: str) -> bool:
    """Whether ``path`` leads to a field (or a oneof) of messages with this descriptor."""
    current = kind
    for part in path.split("."):
        match = re.fullmatch(r"(\w+)(\[\d+\])?", part)
        if match is None or current is None:
            return False
        name, index = match[1], match[2]
        if name in current.oneofs_by_name:
            current = None
            continue
        field = current.fields_by_name.get(name)
        if field is None or (index is not None and not field.is_repeated):
            return False
        current = field.message_type
    return True
