"""The gRPC API as pages, one for each .proto file, from the comments in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from scripts.reference.markdown import escaped, table

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = "kvxfer.v1"

#: Where a path of SourceCodeInfo leads: numbers of fields in descriptor.proto.
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_FIELD, _VALUE, _METHOD = 2, 2, 2

Comments = Mapping[tuple[int, ...], str]


def files() -> dict[str, FileDescriptorProto]:
    """The protos by their short names (``transfer``), comments included, as buf reads them."""
    beside = Path(sys.executable).with_name("buf")
    buf = str(beside) if beside.exists() else shutil.which("buf")
    if buf is None:
        raise FileNotFoundError("buf, which reads the protos, is not installed")
    image = subprocess.run([buf, "build", "--output", "-"], cwd=ROOT, capture_output=True, check=True, timeout=60)
    found = FileDescriptorSet.FromString(image.stdout).file
    return {Path(file.name).stem: file for file in found if file.package == PACKAGE}


def pages() -> dict[str, str]:
    """A page for each file: ``grpc-transfer``, ``grpc-peer``, ``grpc-layout``."""
    found = files()
    homes = {
        f".{PACKAGE}.{name}": f"grpc-{stem}.md#{name.lower()}"
        for stem, file in found.items()
        for name in (*(m.name for m in file.message_type), *(e.name for e in file.enum_type))
    }
    return {f"grpc-{stem}": _page(file, homes) for stem, file in found.items()}


def _page(file: FileDescriptorProto, homes: Mapping[str, str]) -> str:
    comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
    parts = []
    for i, service in enumerate(file.service):
        parts += _service(service, (_SERVICE, i), comments, homes)
    if file.message_type:
        parts += ["## Messages", ""]
    for i, message in enumerate(file.message_type):
        parts += _message(message, (_MESSAGE, i), comments, homes)
    if file.enum_type:
        parts += ["## Enums", ""]
    for i, enum in enumerate(file.enum_type):
        parts += _enum(enum, (_ENUM, i), comments)
    return "\n".join(parts)


def _said(comments: Comments, path: tuple[int, ...]) -> str:
    return escaped(" ".join(comments.get(path, "").split()))


def _service(
    service: ServiceDescriptorProto, path: tuple[int, ...], comments: Comments, homes: Mapping[str, str]
) -> list[str]:
    lines = [f"## {service.name}", "", _said(comments, path), ""]
    for i, rpc in enumerate(service.method):
        asks, tells = (f"[{t.rpartition('.')[2]}]({homes[t]})" for t in (rpc.input_type, rpc.output_type))
        stream = "stream of " if rpc.server_streaming else ""
        errors = f"../../proto/kvxfer/v1/errors.md#{(service.name + rpc.name).lower()}"
        lines += [
            f"### {rpc.name}",
            "",
            f"{asks} → {stream}{tells} · [errors]({errors})",
            "",
            _said(comments, (*path, _METHOD, i)),
            "",
        ]
    return lines


def _message(
    message: DescriptorProto, path: tuple[int, ...], comments: Comments, homes: Mapping[str, str]
) -> list[str]:
    lines = [f"### {message.name}", "", _said(comments, path), ""]
    rows = []
    for i, field in enumerate(message.field):
        said = _said(comments, (*path, _FIELD, i))
        if field.HasField("oneof_index") and not field.proto3_optional:
            said = f"One of `{message.oneof_decl[field.oneof_index].name}`. {said}"
        rows.append((str(field.number), f"`{field.name}`", _type(message, field, homes), said))
    if rows:
        lines += [table(("no.", "field", "type", "what it says"), rows), ""]
    oneofs = [o.name for i, o in enumerate(message.oneof_decl) if not _synthetic(message, i)]
    for i, name in enumerate(oneofs):
        if said := _said(comments, (*path, 8, i)):
            lines += [f"One of `{name}`: {said}", ""]
    return lines


def _synthetic(message: DescriptorProto, oneof: int) -> bool:
    """Whether a oneof is only how proto3 writes ``optional``."""
    return any(f.proto3_optional and f.HasField("oneof_index") and f.oneof_index == oneof for f in message.field)


def _type(message: DescriptorProto, field: FieldDescriptorProto, homes: Mapping[str, str]) -> str:
    entry: Any = next((n for n in message.nested_type if field.type_name.endswith(f".{n.name}")), None)
    if entry is not None and entry.options.map_entry:
        key, value = (_type(entry, part, homes) for part in entry.field)
        return f"map of {key} to {value}"
    if field.type_name:
        name = field.type_name.removeprefix(".").removeprefix(f"{PACKAGE}.")
        name = f"[{name}]({homes[field.type_name]})" if field.type_name in homes else f"`{name}`"
    else:
        name = f"`{FieldDescriptorProto.Type.Name(field.type).removeprefix('TYPE_').lower()}`"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {name}"
    return f"optional {name}" if field.proto3_optional else name


def _enum(enum: EnumDescriptorProto, path: tuple[int, ...], comments: Comments) -> list[str]:
    rows = [(str(v.number), f"`{v.name}`", _said(comments, (*path, _VALUE, i))) for i, v in enumerate(enum.value)]
    return [f"### {enum.name}", "", _said(comments, path), "", table(("no.", "value", "what it means"), rows), ""]
