"""Both listeners: sockets, health, reflection, and the end."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvxfer.config import Settings
from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory.handles import FileHandle, Owned
from kvxfer.memory.owned import create_owned
from kvxfer.memory.policy import MemoryPolicy
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.pb import transfer_pb2_grpc
from kvxfer.sidecar import Sidecar
from kvxfer.xfer.loopback import Fabric, LoopbackEngine
from tests.support.errors import refusal
from tests.support.loopback import Cluster, Node, Reading, soon

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
LISTENERS = {"channel": "kvxfer.v1.KvTransfer", "peer_channel": "kvxfer.v1.KvPeer"}


async def health(node: Node, listener: str, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(getattr(node, listener))
    status: int = (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status
    return status


async def test_health_follows_the_registrations(cluster: Cluster) -> None:
    node = await cluster.node()

    async def all_are(expected: int) -> None:
        for listener, service in LISTENERS.items():
            assert await health(node, listener, "") == SERVING
            assert await health(node, listener, service) == expected

    await all_are(NOT_SERVING)
    await cluster.engine("engine-x", [node])
    await asyncio.sleep(0)
    await all_are(SERVING)
    await node.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id="engine-x"))
    await asyncio.sleep(0)
    await all_are(NOT_SERVING)
    for listener in LISTENERS:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(node, listener, "nothing")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_calls_that_come_while_the_loop_stands_still_are_answered(cluster: Cluster) -> None:
    """By itself gRPC would refuse many of them, at random, as CANCELLED."""
    node = await cluster.node()
    sent = threading.Event()

    def call() -> list[grpc.StatusCode]:
        with grpc.insecure_channel(node.sidecar.engine_target) as channel:
            grpc.channel_ready_future(channel).result(10)
            stub: Any = transfer_pb2_grpc.KvTransferStub(channel)
            calls = [stub.GetStatus.future(pb.GetStatusRequest()) for _ in range(4_000)]
            sent.set()
            return [one.code() for one in calls]

    calling = asyncio.get_running_loop().run_in_executor(None, call)
    assert sent.wait(30)  # the loop stands still
    assert set(await calling) == {grpc.StatusCode.OK}


async def ask(node: Node, listener: str, **request: Any) -> Any:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(getattr(node, listener))
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**request)]))
    return await anext(aiter(call))


@pytest.mark.parametrize("listener", LISTENERS)
async def test_reflection_lists_services_and_describes_messages(cluster: Cluster, listener: str) -> None:
    node = await cluster.node()
    listed = {s.name for s in (await ask(node, listener, list_services="")).list_services_response.service}
    mine = LISTENERS[listener]
    assert listed == {mine, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    names = {
        "channel": {"kvxfer.v1.KvTransfer", "kvxfer.v1.RegisterCacheRequest", "kvxfer.v1.Ticket"},
        "peer_channel": {"kvxfer.v1.KvPeer", "kvxfer.v1.ExchangeResponse", "kvxfer.v1.ReadNotice"},
    }[listener]
    for name in names:
        answer = await ask(node, listener, file_containing_symbol=name)
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(raw)
            for raw in answer.file_descriptor_response.file_descriptor_proto
        ]
        short = name.rpartition(".")[2]
        described = [m.name for f in files for m in f.message_type] + [s.name for f in files for s in f.service]
        assert short in described
    answer = await ask(node, listener, file_containing_symbol=mine)
    raw = answer.file_descriptor_response.file_descriptor_proto
    services = [s for r in raw for s in descriptor_pb2.FileDescriptorProto.FromString(r).service]
    methods = {m.name for s in services for m in s.method}
    assert methods >= ({"ReadBlocks", "GetStatus"} if listener == "channel" else {"Exchange", "OpenRead"})


async def test_each_listener_serves_its_own_service_only(reading: Reading) -> None:
    node = reading.d.nodes[0]
    for channel, method in (
        (node.channel, "/kvxfer.v1.KvPeer/Exchange"),
        (node.peer_channel, "/kvxfer.v1.KvTransfer/GetStatus"),
        (node.channel, "/kvxfer.v1.KvTransfer/Nothing"),
        (node.channel, "/nobody.Service/Nothing"),
    ):
        call: Any = channel.unary_unary(method)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await reading.good()


async def test_the_socket_is_private_and_goes_with_the_sidecar(cluster: Cluster) -> None:
    path = cluster.directory / "own" / "x.sock"
    node = await cluster.node(engine_socket=path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    await node.stop()
    assert not path.exists()
    other = await cluster.node(engine_socket=path, engine_socket_mode="0660", engine_socket_group=str(os.getgid()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert path.stat().st_gid == os.getgid()
    assert (await other.stub.GetStatus(pb.GetStatusRequest())).serving


async def test_a_socket_that_nobody_listens_on_is_taken_over(cluster: Cluster) -> None:
    path = cluster.directory / "stale.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    node = await cluster.node(engine_socket=path)
    assert (await node.stub.GetStatus(pb.GetStatusRequest())).serving


async def test_a_live_socket_is_left_alone(cluster: Cluster) -> None:
    path = cluster.directory / "live.sock"
    node = await cluster.node(engine_socket=path)
    with pytest.raises(KvxferError) as caught:
        await cluster.node(engine_socket=path)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "engine_socket")
    assert "another sidecar" in caught.value.message
    assert (await node.stub.GetStatus(pb.GetStatusRequest())).serving
    file = cluster.directory / "file.sock"
    file.write_text("precious")
    with pytest.raises(KvxferError):
        await cluster.node(engine_socket=file)
    assert file.read_text() == "precious"


async def test_a_peer_port_that_is_taken(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    node = await cluster.node()
    port = int(node.sidecar.peer_address.rpartition(":")[2])
    with pytest.raises(KvxferError) as caught:
        await cluster.node(peer_port=port)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "peer_port")
    assert caught.value.message == f"the peer listener cannot bind 127.0.0.1:{port}: Address already in use"
    assert capfd.readouterr().err == ""  # gRPC's own line would say it once more, and worse
    await cluster.engine("engine-x", [node])


@pytest.mark.parametrize(
    "host, says", [("203.0.113.77", "Cannot assign requested address"), ("x.invalid", "not known")]
)
async def test_a_peer_host_that_is_not_of_this_machine(cluster: Cluster, host: str, says: str) -> None:
    with pytest.raises(KvxferError, match=says) as caught:
        await cluster.node(peer_host=host, insecure_peer=True)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "peer_host")


async def test_a_directory_that_takes_no_socket(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KvxferError, match=r"cannot bind /proc/x\.sock: No such file or directory") as caught:
        await cluster.node(engine_socket=Path("/proc/x.sock"))
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "engine_socket")
    assert capfd.readouterr().err == ""


async def test_stopping_drains(reading: Reading) -> None:
    """A read under way ends by itself or is cancelled; new work is refused; health says so."""
    await reading.d.handshake(reading.ticket())
    reading.fabric.hold()
    waiting = asyncio.ensure_future(refusal(reading.stub.ReadBlocks(reading.request("t1"))))
    await soon(lambda: reading.fabric.posts == 1)
    node = reading.d.nodes[0]
    stopping = asyncio.ensure_future(node.sidecar.stop())
    assert (await waiting).reason is Reason.TRANSFER_CANCELLED
    for listener, service in LISTENERS.items():
        assert await health(node, listener, service) == NOT_SERVING
    status = await reading.stub.GetStatus(pb.GetStatusRequest())
    assert not status.serving
    assert (await refusal(reading.stub.ReadBlocks(reading.request("t2")))).reason is Reason.SHUTTING_DOWN
    reading.fabric.let_go()
    await stopping
    assert not node.sidecar.settings.engine_socket.exists()


async def test_status(reading: Reading) -> None:
    await reading.good()
    status = await reading.stub.GetStatus(pb.GetStatusRequest())
    assert (status.protocol_version_min, status.protocol_version_max) == (1, 1)
    (registered,) = status.registrations
    assert (registered.engine_id, registered.regions, registered.bytes) == ("engine-d", 1, 24 * 96)
    assert list(registered.groups) == ["attn", "ssm"]
    assert registered.layout_fingerprint == reading.d.members[0].layout.fingerprint
    (source,) = status.peers
    assert (source.role, source.remote_engine_id) == (pb.PEER_ROLE_SOURCE, "engine-p")
    assert source.address == reading.p.nodes[0].sidecar.peer_address
    (reader,) = (await reading.p.nodes[0].stub.GetStatus(pb.GetStatusRequest())).peers
    assert (reader.role, reader.remote_engine_id) == (pb.PEER_ROLE_READER, "engine-d")
    assert status.counts.bytes_read == 3 * 64 + 76
    for token in ("x", "-1", "9" * 257):
        error = await refusal(reading.stub.GetStatus(pb.GetStatusRequest(peers_page_token=token)))
        assert (error.reason, error.field) == (Reason.FIELD_INVALID, "peers_page_token")
    # Past the end is an empty page.
    beyond = await reading.stub.GetStatus(pb.GetStatusRequest(peers_page_token="9" * 256))
    assert not beyond.peers


async def test_a_group_may_reach_the_socket_that_is_made_for_it(tmp_path: Path) -> None:
    """A directory that only its owner may enter would make the socket's group useless."""
    path = tmp_path / "run" / "kvxfer.sock"
    group = os.getgid()
    settings = Settings(
        engine_socket=path,
        engine_socket_mode="0660",
        engine_socket_group=str(group),
        memory_directories=(str(tmp_path),),
    )
    fabric = Fabric()
    sidecar = Sidecar(settings, lambda name, tell: LoopbackEngine(name, fabric, tell))
    await sidecar.start()
    try:
        made = path.parent.stat()
        assert (stat.S_IMODE(made.st_mode), made.st_gid) == (0o710, group)
        assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o660, group)
    finally:
        await sidecar.stop()


async def test_memory_of_a_former_sidecar_is_named_at_the_start_and_at_the_end(
    cluster: Cluster, logged: list[Any]
) -> None:
    """It waits for an engine that takes it again; nobody else would ever say that it is there."""
    policy = MemoryPolicy(directories=(str(cluster.directory),))
    left = create_owned(Owned(4096), policy)
    handle = left.export()
    left.close(keep=True)
    node = await cluster.node()
    await node.sidecar.stop()
    assert isinstance(handle, FileHandle)
    told = [e["event"][:40] for e in logged if (e.get("path"), e.get("bytes")) == (handle.path, 4096)]
    assert told == ["memory that a sidecar made is there to b", "memory that a sidecar made stays, for an"]


async def test_a_memory_directory_that_is_not_there_is_told(cluster: Cluster, logged: list[Any]) -> None:
    """It may come later, so it is no reason not to serve."""
    missing = str(cluster.directory / "missing")
    await cluster.node(memory_directories=(str(cluster.directory), missing))
    told = [e["path"] for e in logged if e["event"].startswith("there is no such memory directory")]
    assert told == [missing]
