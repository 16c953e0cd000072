"""Requests to try with grpcurl against a demo that has been left running."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, MessageToJson
from google.protobuf.message import Message

from kvxfer.cli.demo.scenario import Scenario
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.requests import handshake_to_pb, spec_to_pb
from kvxfer.wire.tickets import Ticket, ticket_to_pb

_SERVICE = "kvxfer.v1.KvTransfer"


def by_hand(
    directory: Path, scenario: Scenario, sockets: dict[str, str], metrics: dict[str, str], ticket: Ticket
) -> dict[str, Any]:
    """Write requests for the first D rank into ``directory``; sockets, metrics, the ticket, and commands to paste."""
    spec = spec_to_pb(scenario.d.engine_id, ticket, scenario.d.blocks, skip_tokens=scenario.choices.skip)
    requests: dict[str, Message] = {
        "Handshake": handshake_to_pb(scenario.d.engine_id, ticket),
        "PrepareTransfer": pb.PrepareTransferRequest(spec=spec),
        "ReadBlocks": pb.ReadBlocksRequest(spec=spec),
    }
    commands = [f"kvxfer inspect {shlex.quote(path)}" for path in sockets.values()]
    call = f"grpcurl -plaintext -unix {{}} {sockets['D0']}"
    commands += [call.format("").replace("  ", " ") + " list", call.format("-d '{}'") + f" {_SERVICE}/GetStatus"]
    for name, request in requests.items():
        path = directory / f"{name}.json"
        path.write_text(MessageToJson(request, preserving_proto_field_name=True), encoding="utf-8")
        commands.append(f"{call.format('-d @')} {_SERVICE}/{name} < {path}")
    message = MessageToDict(ticket_to_pb(ticket), preserving_proto_field_name=True)
    told = {"directory": str(directory), "sockets": sockets, "metrics": metrics}
    return {**told, "ticket": message, "commands": commands}
