"""The protos, the generated modules and the documents say the same."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from kvxfer.core.errors import SPECS, Reason
from kvxfer.pb import layout_pb2, peer_pb2, peer_pb2_grpc, transfer_pb2, transfer_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = ROOT / "proto" / "kvxfer" / "v1"
MODULES = {"layout": layout_pb2, "transfer": transfer_pb2, "peer": peer_pb2}
RPCS = {
    "KvTransfer": [
        "RegisterCache",
        "UnregisterCache",
        "HoldRegistration",
        "Handshake",
        "PrepareTransfer",
        "ReadBlocks",
        "GetTransfer",
        "ListTransfers",
        "CancelTransfer",
        "WatchTransfers",
        "PublishBlocks",
        "RenewLease",
        "WithdrawBlocks",
        "ListLeases",
        "WatchLeases",
        "GetStatus",
    ],
    "KvPeer": ["Exchange", "OpenRead", "RenewRead", "CloseReads"],
}
ROW = re.compile(r"\| (?P<condition>[^|]+) \| (?P<code>[A-Z_]+) \| (?P<reason>[A-Z_]+) \| (?P<action>[^|]+) \|")


def _source() -> dict[str, FileDescriptorProto]:
    """The .proto files as they are now, parsed by buf."""
    beside = Path(sys.executable).parent / "buf"
    buf = str(beside) if beside.exists() else shutil.which("buf")
    if buf is None:
        pytest.skip("buf is not installed")
    image = subprocess.run(
        [buf, "build", "--exclude-source-info", "-o", "-"], cwd=ROOT, capture_output=True, check=True, timeout=60
    )
    return {file.name: file for file in FileDescriptorSet.FromString(image.stdout).file}


def _bare(file: FileDescriptorProto) -> FileDescriptorProto:
    """Without what compilers add as they like."""
    copy = FileDescriptorProto.FromString(file.SerializeToString())
    copy.DiscardUnknownFields()

    def walk(messages: object) -> None:
        for message in messages:  # type: ignore[attr-defined]
            for field in message.field:
                field.ClearField("json_name")
            walk(message.nested_type)

    walk(copy.message_type)
    return copy


def test_generated_modules_are_up_to_date() -> None:
    source = _source()
    for name, module in MODULES.items():
        generated = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        assert _bare(generated) == _bare(source[f"kvxfer/v1/{name}.proto"]), f"run make proto: {name}"


def test_descriptors_keep_the_names_of_the_protos() -> None:
    for name, module in MODULES.items():
        assert (module.DESCRIPTOR.name, module.DESCRIPTOR.package) == (f"kvxfer/v1/{name}.proto", "kvxfer.v1")


def test_services_have_these_rpcs() -> None:
    services = {
        name: [method.name for method in service.methods]
        for module in (transfer_pb2, peer_pb2)
        for name, service in module.DESCRIPTOR.services_by_name.items()
    }
    assert services == RPCS
    assert transfer_pb2_grpc.KvTransferServicer is not None
    assert peer_pb2_grpc.KvPeerServicer is not None


def test_every_field_says_whether_it_is_required() -> None:
    """Requests say REQUIRED or OPTIONAL, answers OUTPUT; a field of a oneof is described instead."""
    missing = []
    for name in MODULES:
        comment: list[str] = []
        oneof = False
        for number, line in enumerate((CONTRACT / f"{name}.proto").read_text().splitlines(), 1):
            stripped = line.strip()
            if stripped.startswith("//"):
                comment.append(stripped)
                continue
            oneof = (oneof and stripped != "}") or stripped.startswith("oneof ")
            is_field = re.fullmatch(r"(repeated |optional )?[\w.<>, ]+ \w+ = \d+( \[.*\])?;", stripped)
            wanted = (is_field and not stripped.startswith("option ") and not oneof) or stripped.startswith("oneof ")
            enum_value = re.fullmatch(r"[A-Z_0-9]+ = \d+;", stripped)
            if wanted and not enum_value and not re.match(r"// (REQUIRED|OPTIONAL|OUTPUT)\b", (comment or [""])[0]):
                missing.append(f"{name}.proto:{number}: {stripped}")
            comment = []
    assert not missing, "\n".join(missing)


def test_enums_begin_unspecified() -> None:
    for module in MODULES.values():
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


def test_secrets_are_marked() -> None:
    marked = {
        f"{message.name}.{field.name}"
        for module in MODULES.values()
        for message in module.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if field.GetOptions().debug_redact
    }
    assert marked == {
        "Ticket.lease_token",
        "PublishBlocksRequest.lease_token",
        "RenewLeaseRequest.lease_token",
        "WithdrawBlocksRequest.lease_token",
        "OpenReadRequest.lease_token",
        "RenewReadRequest.lease_token",
        "ReadEnd.lease_token",
        "ReadNotice.lease_token",
        "ExchangeResponse.agent_metadata",
    }


def test_block_ids_and_positions_are_packed() -> None:
    file = FileDescriptorProto.FromString(transfer_pb2.DESCRIPTOR.serialized_pb)
    message = next(m for m in file.message_type if m.name == "BlockList")
    packed = {f.name: f.type for f in message.field if f.options.packed}
    assert packed == {
        "block_ids": FieldDescriptorProto.TYPE_SINT32,
        "snapshot_positions": FieldDescriptorProto.TYPE_UINT64,
    }


def _rows() -> dict[str, list[re.Match[str]]]:
    sections: dict[str, list[re.Match[str]]] = {}
    section = ""
    for line in (CONTRACT / "errors.md").read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
            sections[section] = []
        elif section and line.startswith("|") and not re.match(r"\| condition|\|---", line):
            row = ROW.fullmatch(line)
            assert row, f"not a row of four columns: {line}"
            sections[section].append(row)
    return sections


def test_errors_md_knows_every_reason_and_no_other() -> None:
    assert {row["reason"] for rows in _rows().values() for row in rows} == {reason.value for reason in Reason}


def test_errors_md_tells_the_right_codes_and_retries() -> None:
    for rows in _rows().values():
        for row in rows:
            spec = SPECS[Reason(row["reason"])]
            assert row["code"] == spec.code.value, row[0]
            if "**retry**" in row["action"]:
                assert spec.retry, row[0]


def test_errors_md_has_a_section_for_every_rpc() -> None:
    expected = ["Every RPC", *(f"{service}.{rpc}" for service, rpcs in RPCS.items() for rpc in rpcs)]
    assert list(_rows()) == expected
    for section, rows in _rows().items():
        conditions = [row["condition"] for row in rows]
        assert len(set(conditions)) == len(conditions), section
