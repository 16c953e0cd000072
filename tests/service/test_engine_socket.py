"""The engine listener asks nobody who he is: its socket's file mode is the lock.  Other users get no RPC at all."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from kvxfer.pb import transfer_pb2 as pb
from tests.support.loopback import Cluster, Node, Reading

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")

NOBODY = 65534

#: Calls every RPC of the engine listener, as user argv[1]; prints what each came to.
CALLER = """
import json, os, socket, sys
import grpc
from google.protobuf import empty_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvxfer.pb import transfer_pb2, transfer_pb2_grpc

path, user = sys.argv[1], int(sys.argv[2])
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
found = {}
with socket.socket(socket.AF_UNIX) as plain:
    found["connect"] = plain.connect_ex(path)
with grpc.insecure_channel(f"unix:{path}") as channel:
    stub = transfer_pb2_grpc.KvTransferStub(channel)
    calls = {}
    for method in transfer_pb2.DESCRIPTOR.services_by_name["KvTransfer"].methods:
        request = getattr(transfer_pb2, method.input_type.name)()
        calls[method.name] = (getattr(stub, method.name), request, method.server_streaming)
    calls["Check"] = (health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest(), False)
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    calls["Reflection"] = (reflection, iter([reflection_pb2.ServerReflectionRequest(list_services="")]), True)
    for name, (call, request, streams) in calls.items():
        try:
            answer = call(request, timeout=10)
            found[name] = "OK " + type(next(answer) if streams else answer).__name__
        except grpc.RpcError as error:
            found[name] = f"{error.code().name} {error.details()}"
print(json.dumps(found), flush=True)
os._exit(0)  # gRPC's streams may lock up in an ordinary exit
"""


async def call_all(node: Node, user: int) -> dict[str, Any]:
    path = str(node.sidecar.settings.engine_socket)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CALLER, path, str(user), stdout=asyncio.subprocess.PIPE
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(out)
    return found


async def check(node: Node) -> None:
    """The owner is answered, somebody else is not, whatever he calls."""
    other = await call_all(node, NOBODY)
    methods = [m.name for m in pb.DESCRIPTOR.services_by_name["KvTransfer"].methods]
    assert list(other) == ["connect", *methods, "Check", "Reflection"]
    assert other.pop("connect") == 13  # EACCES
    for name, came in other.items():
        assert came.startswith("UNAVAILABLE") and "Permission denied" in came, (name, came)
    own = await call_all(node, 0)
    assert own.pop("connect") == 0
    assert own["GetStatus"] == "OK GetStatusResponse"
    assert not any(came.startswith("UNAVAILABLE") for came in own.values()), own


async def test_another_user_cannot_pass_the_directory(cluster: Cluster) -> None:
    node = await cluster.node(engine_socket=cluster.directory / "private" / "x.sock", engine_socket_mode="0666")
    cluster.directory.chmod(0o755)  # not what keeps him out
    assert stat.S_IMODE((cluster.directory / "private").stat().st_mode) == 0o700
    await check(node)


async def test_another_user_cannot_open_the_socket(cluster: Cluster, reading: Reading) -> None:
    cluster.directory.chmod(0o755)
    node = reading.p.nodes[0]
    assert stat.S_IMODE(node.sidecar.settings.engine_socket.stat().st_mode) == 0o600
    await check(node)
    await reading.good()


async def test_a_directory_that_others_can_write_to_is_told(cluster: Cluster, logged: list[Any]) -> None:
    await cluster.node()
    assert not [e for e in logged if "directory" in e["event"]]
    cluster.directory.chmod(0o777)
    await cluster.node()
    assert [e["log_level"] for e in logged if "engine socket's directory" in e["event"]] == ["warning"]


@pytest.mark.parametrize("mode, masks", [(0o700, []), (0o711, [0o177])])
async def test_the_mask_of_the_process_changes_only_where_others_could_get_in(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, masks: list[int]
) -> None:
    os.chmod(tmp_path, mode)
    seen: list[int] = []
    real = os.umask

    def umask(value: int) -> int:
        seen.append(value)
        return real(value)

    monkeypatch.setattr(os, "umask", umask)
    before = real(0o22)
    await cluster.node(engine_socket=tmp_path / "engine.sock")
    assert seen[:1] == masks
    assert stat.S_IMODE((tmp_path / "engine.sock").stat().st_mode) == 0o600
    assert real(before) == 0o22
