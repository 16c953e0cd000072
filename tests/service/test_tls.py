"""The peer port over mutual TLS: who gets in, who does not, and what happens when the files change."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvxfer.core.errors import Reason
from kvxfer.pb import peer_pb2, peer_pb2_grpc
from kvxfer.service.access import is_allowed
from kvxfer.service.links import PROTOCOL_VERSIONS
from kvxfer.service.peer_client import GrpcPeerClient
from kvxfer.wire.peer import ExchangeQuery, Reader, exchange_to_pb
from kvxfer.wire.status import from_rpc_error
from tests.support.certificates import HOST, Authority, Identity, write
from tests.support.errors import refusal
from tests.support.loopback import Cluster, LoopEngine, Reading, small_lists, soon

METHODS = [m.name for m in peer_pb2.DESCRIPTOR.services_by_name["KvPeer"].methods]
ALLOWED = ("spiffe://kv.example/decode/*", "*.kv.example")

Secured = tuple[Reading, Authority]


@pytest.fixture(scope="module")
def ca() -> Authority:
    return Authority("ca")


@pytest.fixture(scope="module")
def other_ca() -> Authority:
    return Authority("other ca")


@pytest.fixture
async def reading(cluster: Cluster, ca: Authority) -> Reading:
    """As in other tests, over TLS: P takes only certificates of ``*.kv.example``, which D's is."""
    p_files = write(cluster.directory / "p-tls", Identity(ca, HOST, "p.kv.example"))
    d_files = write(cluster.directory / "d-tls", Identity(ca, HOST, "d.kv.example"))
    p = await cluster.engine("engine-p", [await cluster.node(**p_files, peer_allowed_sans=ALLOWED)])
    d = await cluster.engine("engine-d", [await cluster.node(**d_files)])
    return Reading(cluster, p, d)


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., grpc.aio.Channel]]:
    """Channels to a peer port; plaintext without credentials.  None shares a connection with another."""
    made = []

    def make(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        if credentials is None:
            made.append(grpc.aio.insecure_channel(address, options=options))
        else:
            made.append(grpc.aio.secure_channel(address, credentials, options=options))
        return made[-1]

    yield make
    for channel in made:
        await channel.close()


def address_of(engine: LoopEngine) -> str:
    return engine.nodes[0].sidecar.peer_address


def exchange_request(reading: Reading) -> peer_pb2.ExchangeRequest:
    """What D asks of P in a handshake."""
    identity = reading.d.nodes[0].sidecar.registrations.get("engine-d").identity
    query = ExchangeQuery(
        protocol_versions=PROTOCOL_VERSIONS,
        engine_id="engine-p",
        rank=identity.rank,
        reader=Reader("engine-d", identity.rank, "an-incarnation"),
        compatibility_key=identity.compatibility_key,
        expected_incarnation="",
        known_incarnation="",
    )
    return exchange_to_pb(query)


async def reflected(call: Any, ask: bool) -> Any:
    """The services that reflection lists."""
    # A refusal may be quicker than the request, which gRPC then cannot send and takes for an error of its own.
    if ask:
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    return await call.read()


async def attempts(
    channel: grpc.aio.Channel, reading: Reading, *, answered: bool = False
) -> AsyncIterator[tuple[str, Any]]:
    """Every RPC of the peer listener, one after the other: its name, and the call."""
    stub: Any = peer_pb2_grpc.KvPeerStub(channel)
    for name in METHODS:
        request = getattr(peer_pb2, f"{name}Request")()
        if name == "Exchange":
            request = exchange_request(reading)
        yield name, getattr(stub, name)(request)
    health: Any = health_pb2_grpc.HealthStub(channel)
    yield "Check", health.Check(health_pb2.HealthCheckRequest())
    yield "Watch", anext(aiter(health.Watch(health_pb2.HealthCheckRequest())))
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    yield "Reflection", reflected(reflection.ServerReflectionInfo(), answered)
    raw: Any = channel.unary_unary("/kvxfer.v1.KvPeer/Exchange")
    yield "no message", raw(b"\xff\xff")


async def test_a_read_over_tls(reading: Reading) -> None:
    await reading.good()


async def test_an_allowed_certificate_is_answered_by_every_rpc(
    reading: Reading, ca: Authority, connect: Callable[..., grpc.aio.Channel]
) -> None:
    """What the refusals below are compared with: the very same calls."""
    channel = connect(address_of(reading.p), Identity(ca, "spiffe://kv.example/decode/3").credentials)
    seen = []
    async for name, call in attempts(channel, reading, answered=True):
        seen.append(name)
        try:
            answer = await asyncio.wait_for(call, 10)
        except grpc.aio.AioRpcError as error:  # an empty request, or none
            assert from_rpc_error(error).reason is Reason.FIELD_INVALID
        else:
            assert name in ("Exchange", "Check", "Watch", "Reflection")
            if name == "Exchange":
                assert reading.p.nodes[0].sidecar.registrations.get("engine-p").metadata in answer.SerializeToString()
    assert seen == [*METHODS, "Check", "Watch", "Reflection", "no message"]


@pytest.mark.parametrize("who", ["no certificate", "another CA", "expired", "plaintext"])
async def test_no_rpc_without_a_certificate_of_the_ca(
    reading: Reading,
    ca: Authority,
    other_ca: Authority,
    connect: Callable[..., grpc.aio.Channel],
    who: str,
) -> None:
    credentials = {
        "no certificate": grpc.ssl_channel_credentials(ca.pem),
        "another CA": Identity(other_ca, "d.kv.example", trusts=ca).credentials,
        "expired": Identity(ca, "d.kv.example", expired=True).credentials,
        "plaintext": None,
    }[who]
    count = 0
    async for name, call in attempts(connect(address_of(reading.p), credentials), reading):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call, 10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, name
        assert not caught.value.trailing_metadata(), name
        count += 1
    assert count == len(METHODS) + 4
    await reading.good()


@pytest.mark.parametrize("names", [["d.elsewhere.example"], ["spiffe://kv.example/prefill/1"], ["d@x.kv.example"], []])
async def test_no_rpc_with_a_certificate_that_is_not_allowed(
    reading: Reading, ca: Authority, connect: Callable[..., grpc.aio.Channel], names: list[str]
) -> None:
    credentials = Identity(ca, *names, common="d.kv.example").credentials
    told = ", ".join(name for name in names if "@" not in name)
    count = 0
    async for name, call in attempts(connect(address_of(reading.p), credentials), reading):
        error = await refusal(call)
        assert error.reason is Reason.PEER_NOT_ALLOWED, name
        assert error.metadata == {"names": told or "nothing"}
        assert not any(pattern in str(error) for pattern in ALLOWED)
        count += 1
    assert count == len(METHODS) + 4
    calls = reading.p.nodes[0].sidecar.metrics.calls.family().values
    refused = {labels[1]: n for labels, n in calls.items() if labels[2] == "PERMISSION_DENIED"}
    assert refused == {**dict.fromkeys(METHODS, 1), "Exchange": 2}


async def test_a_reader_that_is_not_allowed_hears_why(cluster: Cluster, reading: Reading, ca: Authority) -> None:
    files = write(cluster.directory / "x-tls", Identity(ca, HOST, "d.elsewhere.example"))
    x = await cluster.engine("engine-x", [await cluster.node(**files)])
    error = await refusal(x.handshake(reading.ticket()))
    assert error.reason is Reason.PEER_NOT_ALLOWED
    assert error.metadata["names"] == f"d.elsewhere.example, {HOST}"


async def test_a_reader_does_not_talk_to_a_server_it_does_not_trust(
    cluster: Cluster, reading: Reading, ca: Authority, other_ca: Authority
) -> None:
    """Of another CA, with another name, out of date, or without TLS: the reader says so, and takes nothing from it."""
    strangers = {
        "another CA": Identity(other_ca, HOST, trusts=ca),
        "another name": Identity(ca, "p.kv.example"),
        "expired": Identity(ca, HOST, expired=True),
        "plaintext": None,
    }
    for number, (who, identity) in enumerate(strangers.items()):
        files = write(cluster.directory / f"tls-{number}", identity) if identity else {}
        p = await cluster.engine(f"engine-{number}", [await cluster.node(**files)])
        p.hold(reading.p_lists)
        error = await refusal(reading.d.handshake(p.ticket(reading.p_lists, reading.TOKENS)))
        assert error.reason is Reason.PEER_UNREACHABLE, who
        assert "TLS certificate or name is not accepted here" in error.message, who
        assert error.metadata["security"] == "tls"
        assert not p.nodes[0].sidecar.registrations.get(f"engine-{number}").readers.status(), who


async def test_a_reader_without_tls_hears_of_it(cluster: Cluster, reading: Reading) -> None:
    x = await cluster.engine("engine-x", [await cluster.node()])
    error = await refusal(x.handshake(reading.ticket()))
    assert error.reason is Reason.PEER_UNREACHABLE
    assert "may want TLS" in error.message


async def test_a_reader_whose_certificate_is_not_trusted_hears_of_tls(
    cluster: Cluster, reading: Reading, ca: Authority, other_ca: Authority
) -> None:
    files = write(cluster.directory / "x-tls", Identity(other_ca, HOST, trusts=ca))
    x = await cluster.engine("engine-x", [await cluster.node(**files)])
    error = await refusal(x.handshake(reading.ticket()))
    assert error.reason is Reason.PEER_UNREACHABLE
    assert "it does not accept this side's certificate" in error.message


async def test_the_name_of_servers_may_be_set(cluster: Cluster, ca: Authority) -> None:
    """Certificates without an address: the usual case where addresses are those of pods."""
    files = write(cluster.directory / "tls", Identity(ca, "workers.kv.example"))
    named = {**files, "peer_server_name": "workers.kv.example"}
    p = await cluster.engine("engine-p", [await cluster.node(**named)])
    d = await cluster.engine("engine-d", [await cluster.node(**named)])
    await Reading(cluster, p, d).good()
    x = await cluster.engine("engine-x", [await cluster.node(**files, peer_server_name="others.kv.example")])
    error = await refusal(x.handshake(p.ticket(small_lists(8, 3), 8)))
    assert error.reason is Reason.PEER_UNREACHABLE
    assert "TLS certificate or name" in error.message


@pytest.mark.parametrize("host", ["::1", "localhost"])
async def test_addresses_of_every_kind(cluster: Cluster, ca: Authority, host: str) -> None:
    files = write(cluster.directory / "tls", Identity(ca, host))
    p, d = [await cluster.engine(f"engine-{n}", [await cluster.node(**files, peer_host=host)]) for n in "pd"]
    await Reading(cluster, p, d).good()


async def test_the_log_tells_how_the_peer_port_is_protected(cluster: Cluster, ca: Authority, logged: list[Any]) -> None:
    def told() -> tuple[str, bool]:
        security = [e["peer_security"] for e in logged if e["event"] == "serving"][-1]
        warned = any(e["log_level"] == "warning" and "plaintext" in e["event"] for e in logged)
        logged.clear()
        return security, warned

    files = write(cluster.directory / "tls", Identity(ca, HOST))
    await cluster.node()
    assert told() == ("plaintext", False)
    await cluster.node(peer_host="0.0.0.0", insecure_peer=True)
    assert told() == ("plaintext", True)
    await cluster.node(peer_host="0.0.0.0", **files)
    assert told() == ("mutual TLS", False)
    node = await cluster.node(peer_host="0.0.0.0", **files, insecure_peer=True)  # TLS where it can be had
    assert told() == ("mutual TLS", False)
    assert not await gets_in(f"127.0.0.1:{node.sidecar.peer_address.rpartition(':')[2]}", None)


# -- reloading ---------------------------------------------------------------------------------------------------------


async def gets_in(address: str, identity: Identity | None) -> bool:
    """Whether a fresh connection with this identity, or in plaintext, reaches the service."""
    client = GrpcPeerClient(address, 1 << 20, identity.credentials if identity else None)
    stub: Any = client._stub
    try:
        await stub.CloseReads(peer_pb2.CloseReadsRequest(), timeout=10)
    except grpc.aio.AioRpcError as error:
        assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT)
        return error.code() is grpc.StatusCode.INVALID_ARGUMENT
    finally:
        await client.close()
    raise AssertionError("an empty request was taken")


async def test_new_files_are_used_by_new_connections(
    cluster: Cluster, reading: Reading, ca: Authority, other_ca: Authority
) -> None:
    await reading.good()
    address = address_of(reading.p)
    old, new = Identity(ca, HOST, "d.kv.example"), Identity(other_ca, HOST, "d.kv.example")
    assert await gets_in(address, old)
    assert not await gets_in(address, new)
    write(cluster.directory / "p-tls", Identity(other_ca, HOST, "p.kv.example"))
    assert await gets_in(address, new)
    assert not await gets_in(address, old)
    await reading.good()  # over the connection that is there
    # As a reader it uses them, too.
    write(cluster.directory / "d-tls", new)
    y = await cluster.engine("engine-y", [reading.d.nodes[0]])
    await Reading(cluster, reading.p, y).good()


async def test_a_swapped_symlink_is_seen(cluster: Cluster, ca: Authority, other_ca: Authority) -> None:
    """How Kubernetes replaces a mounted secret: ..data points to another directory, all names stay."""
    root = cluster.directory / "mounted"
    root.mkdir()
    write(root / "..1", Identity(ca, HOST))
    write(root / "..2", Identity(other_ca, HOST))
    (root / "..data").symlink_to("..1")
    files = {}
    for name in ("peer_tls_cert", "peer_tls_key", "peer_tls_ca"):
        files[name] = root / name
        files[name].symlink_to(Path("..data") / name)
    address = (await cluster.node(**files)).sidecar.peer_address
    assert await gets_in(address, Identity(ca, "d"))
    (root / "..data_tmp").symlink_to("..2")
    os.replace(root / "..data_tmp", root / "..data")
    shutil.rmtree(root / "..1")
    assert await gets_in(address, Identity(other_ca, "d"))
    assert not await gets_in(address, Identity(ca, "d"))


@pytest.mark.parametrize(
    "name, how",
    [
        *((n, h) for n in ("peer_tls_cert", "peer_tls_key", "peer_tls_ca") for h in ("half", "empty", "gone")),
        ("peer_tls_cert", "of another"),
        ("peer_tls_key", "of another"),
    ],
)
async def test_files_that_cannot_be_used_change_nothing(
    cluster: Cluster, reading: Reading, ca: Authority, other_ca: Authority, logged: list[Any], name: str, how: str
) -> None:
    path = cluster.directory / "p-tls" / name
    new = Identity(other_ca, HOST, "d.kv.example")
    if how == "gone":
        path.unlink()
    else:
        content = new.files[name]
        path.write_bytes({"half": content[: len(content) // 2], "empty": b"", "of another": content}[how])
    old = Identity(ca, HOST, "d.kv.example")
    for _ in range(2):
        assert await gets_in(address_of(reading.p), old)
    await reading.good()
    warnings = [e for e in logged if "former serve on" in e["event"]]
    assert len(warnings) == 1
    assert "peer_tls_" in warnings[0]["problem"]
    assert "PRIVATE KEY" not in str(logged)
    write(cluster.directory / "p-tls", Identity(other_ca, HOST))
    assert await gets_in(address_of(reading.p), new)
    await soon(lambda: any(e["event"] == "TLS files reloaded" for e in logged))


# -- patterns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, uris, patterns, allowed",
    [
        (["a.example"], [], [], True),
        ([], [], [], True),
        ([], [], ["*"], False),
        (["A.Example"], [], ["a.eXample"], True),
        (["a.example.evil"], [], ["*.example"], False),
        (["example"], [], ["*.example"], False),
        (["10.1.2.3"], [], ["10.1.*"], True),
        ([], ["spiffe://x/a/b"], ["spiffe://x/*"], True),
        ([], ["spiffe://x/A"], ["spiffe://x/a"], False),
        ([], ["spiffe://x/a.example"], ["*.example", "*"], False),
        (["spiffe://x/a"], [], ["spiffe://x/*"], False),
        (["b", "a"], ["u://v"], ["c", "a"], True),
    ],
)
def test_patterns(names: list[str], uris: list[str], patterns: list[str], allowed: bool) -> None:
    assert is_allowed(names, uris, patterns) is allowed
