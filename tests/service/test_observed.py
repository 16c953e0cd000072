"""What happens is told: in the metrics, in the log, and by GetStatus; and whether the sidecar is ready."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.json_format import MessageToJson
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvxfer.core.errors import Reason
from kvxfer.core.layout import Rank
from kvxfer.pb import peer_pb2
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.service import readers as service_readers
from kvxfer.service import transport
from kvxfer.service.limits import NAMES
from kvxfer.service.link import MAX_LOOKS
from kvxfer.service.metrics import LINK_BREAKERS, STALE
from kvxfer.service.transport import Transport
from kvxfer.wire.layouts import rank_to_pb
from kvxfer.wire.tickets import Ticket
from kvxfer.xfer import watch as xfer_watch
from tests.support.errors import refusal
from tests.support.loopback import Cluster, Node, Reading, soon
from tests.support.scrape import Scraped, get, scrape

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ("kvxfer.v1.KvTransfer", "kvxfer.v1.KvPeer")


@pytest.fixture
async def reading(cluster: Cluster) -> Reading:
    """Two sidecars that tell."""
    p = await cluster.engine("engine-p", [await cluster.node(http_port=0, publish_wait=0.1)])
    d = await cluster.engine("engine-d", [await cluster.node(http_port=0)])
    return Reading(cluster, p, d)


async def told(node: Node) -> Scraped:
    return await asyncio.to_thread(scrape, node.sidecar.http_port)


def logged_as(logged: list[Any], event: str) -> list[Any]:
    return [entry for entry in logged if entry["event"] == event]


async def status_of(node: Node) -> pb.GetStatusResponse:
    status: pb.GetStatusResponse = await node.stub.GetStatus(pb.GetStatusRequest())
    return status


async def test_a_good_read(reading: Reading, logged: list[Any]) -> None:
    transfer = await reading.good()
    p, d = [await told(e.nodes[0]) for e in (reading.p, reading.d)]
    pair = {"engine": "engine-d", "remote_engine": "engine-p"}
    assert d.of("kvxfer_transfers_total", **pair) == {
        tuple(sorted({**pair, "outcome": "done", "reason": "NONE"}.items())): 1
    }
    assert d.sum("kvxfer_read_bytes_total", **pair, remote_rank="tp0") == transfer.bytes
    assert d.sum("kvxfer_read_descriptors_total", **pair) == transfer.descriptors
    assert d.sum("kvxfer_read_merged_descriptors_total", **pair) == transfer.sources[0].reported_descriptors
    for phase in ("resolve", "make", "queue", "post", "move", "open", "total"):
        assert d.sum("kvxfer_transfer_phase_seconds_count", **pair, phase=phase) == 1, phase
    assert d.sum("kvxfer_handshakes_total", **pair, reason="NONE") == 1
    assert d.sum("kvxfer_handshake_seconds_count", engine="engine-d") == 1
    assert d.sum("kvxfer_peers", role="source", transport="unknown") == 1
    assert d.sum("kvxfer_grpc_calls_total", method="ReadBlocks", code="OK") == 1
    assert d.sum("kvxfer_registered_bytes", engine="engine-d", rank="tp0") == 24 * 96
    assert d.sum("kvxfer_ready") == d.sum("kvxfer_nixl_up") == d.sum("kvxfer_build_info") == 1
    back = {"engine": "engine-p", "remote_engine": "engine-d"}
    assert p.sum("kvxfer_reads_granted_total", **back, remote_rank="tp0") == 1
    assert p.sum("kvxfer_reads_refused_total") == 0
    assert p.sum("kvxfer_leases_published_total", engine="engine-p") == 1
    assert p.sum("kvxfer_peers", role="reader") == 1
    await soon(lambda: logged_as(logged, "lease ended"))
    assert (await told(reading.p.nodes[0])).sum("kvxfer_leases_ended_total", state="released") == 1
    (ended,) = logged_as(logged, "transfer ended")
    assert (ended["peer"], ended["peer_ranks"], ended["state"]) == ("engine-p", ["tp0"], "done")
    assert ended["transfer"] == transfer.transfer_id
    assert ended["request"] == transfer.request_id
    assert ended["peer_incarnations"] == [reading.p.members[0].registered.incarnation]


async def test_what_should_never_happen_begins_at_nothing(reading: Reading) -> None:
    """Prometheus does not see an event with which a series begins."""
    await reading.d.handshake(reading.ticket())
    p, d = [await told(e.nodes[0]) for e in (reading.p, reading.d)]
    to_p, to_d = [{"engine": f"engine-{a}", "remote_engine": f"engine-{b}"} for a, b in ("dp", "pd")]
    rank = {**to_d, "remote_rank": "tp0"}
    assert all(p.of("kvxfer_reads_refused_total", **rank, reason=reason.value) for reason in STALE)
    assert p.of("kvxfer_readers_lost_total", **to_d)
    assert all(d.of("kvxfer_links_lost_total", **to_p, reason=reason.value) for reason in LINK_BREAKERS)
    assert d.of("kvxfer_slow_links_total", **to_p)
    for node, engine in ((p, "engine-p"), (d, "engine-d")):
        for state in ("released", "expired", "withdrawn"):
            assert node.of("kvxfer_leases_ended_total", engine=engine, state=state)
        assert node.of("kvxfer_engines_lost_total", engine=engine)
        assert {dict(labels)["limit"] for labels in node.of("kvxfer_limit_refusals_total")} == NAMES
        internal = {dict(labels)["method"] for labels in node.of("kvxfer_grpc_calls_total", code="INTERNAL")}
        assert {"ReadBlocks", "RegisterCache", "OpenRead", "Exchange"} <= internal
        for name in ("reads_refused", "readers_lost", "links_lost", "leases_ended", "limit_refusals"):
            assert not node.moved(f"kvxfer_{name}_total"), name


async def test_a_stale_read_an_expired_lease_and_a_lost_peer_are_three_things(
    reading: Reading, logged: list[Any]
) -> None:
    """The first two at P, whose reader was too late; the third at D."""
    node_p, node_d = reading.p.nodes[0], reading.d.nodes[0]
    await reading.good()
    ticket = reading.p.ticket(reading.p_lists, reading.TOKENS, publish=False)
    reading.p.publish(ticket, ttl=0.01)
    await soon(lambda: any(ended["state"] == "expired" for ended in logged_as(logged, "lease ended")))
    found = await told(node_p)
    assert found.sum("kvxfer_leases_ended_total", engine="engine-p", state="expired") == 1
    assert found.sum("kvxfer_reads_refused_total") == 0
    request = reading.d.request(ticket, reading.d_lists, transfer_id="late")
    assert (await refusal(reading.stub.ReadBlocks(request))).reason is Reason.LEASE_EXPIRED
    await soon(lambda: logged_as(logged, "transfer ended")[-1]["transfer"] == "late")
    found = await told(node_p)
    labels = {"engine": "engine-p", "remote_engine": "engine-d", "remote_rank": "tp0", "reason": "LEASE_EXPIRED"}
    assert found.moved("kvxfer_reads_refused_total") == {tuple(sorted(labels.items())): 1}
    assert found.sum("kvxfer_leases_ended_total", state="expired") == 1
    (refused,) = logged_as(logged, "read refused")
    assert refused["log_level"] == "warning"
    assert (refused["request"], refused["peer"], refused["peer_rank"]) == (ticket.request_id, "engine-d", "tp0")
    assert refused["transfer"].startswith("late")
    assert refused["peer_incarnation"] == reading.d.members[0].registered.incarnation
    assert refused["incarnation"] == reading.p.members[0].registered.incarnation
    counts = (await status_of(node_p)).counts
    assert (counts.leases_expired, counts.stale_reads_refused, counts.links_lost) == (1, 1, 0)
    found = await told(node_d)
    assert found.sum("kvxfer_transfers_total", outcome="failed", reason="LEASE_EXPIRED") == 1
    assert found.sum("kvxfer_links_lost_total") == 0
    await node_p.stop()
    await soon(lambda: logged_as(logged, "peer lost"))
    (lost,) = logged_as(logged, "peer lost")
    assert (lost["engine"], lost["peer"], lost["peer_rank"]) == ("engine-d", "engine-p", "tp0")
    assert lost["peer_incarnation"] == reading.p.members[0].registered.incarnation
    found = await told(node_d)
    assert found.moved("kvxfer_links_lost_total") == {
        (("engine", "engine-d"), ("reason", "PEER_LOST"), ("remote_engine", "engine-p")): 1
    }
    status = await status_of(node_d)
    assert (status.counts.links_lost, status.counts.stale_reads_refused) == (1, 0)
    (told_lost,) = status.lost_peers
    assert (told_lost.remote_engine_id, told_lost.role) == ("engine-p", pb.PEER_ROLE_SOURCE)
    assert told_lost.incarnation == reading.p.members[0].registered.incarnation


async def test_a_reader_that_falls_silent(reading: Reading, logged: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    await reading.good()
    monkeypatch.setattr(service_readers, "IDLE_TIMEOUT", 0.0)
    await soon(lambda: logged_as(logged, "reader lost"))
    node = reading.p.nodes[0]
    assert (await told(node)).sum("kvxfer_readers_lost_total", engine="engine-p", remote_engine="engine-d") >= 1
    status = await status_of(node)
    assert status.counts.readers_lost >= 1
    assert status.lost_peers[0].role == pb.PEER_ROLE_READER


async def test_a_handshake_that_fails(reading: Reading, logged: list[Any]) -> None:
    request = reading.request("t1")
    await reading.p.nodes[0].stop()
    assert (await refusal(reading.stub.ReadBlocks(request))).reason is Reason.PEER_UNREACHABLE
    found = await told(reading.d.nodes[0])
    assert found.sum("kvxfer_handshakes_total", remote_engine="engine-p", reason="PEER_UNREACHABLE") == 1
    assert found.sum("kvxfer_handshake_seconds_count") == 0
    assert found.sum("kvxfer_grpc_calls_total", method="ReadBlocks", code="UNAVAILABLE") == 1
    assert logged_as(logged, "handshake failed")[0]["peer"] == "engine-p"


async def test_limits_tell_how_often_they_refused(cluster: Cluster) -> None:
    node = await cluster.node(http_port=0, max_registrations=1, max_leases=1, max_transfers=1, max_descriptors=3)
    p = await cluster.engine("engine-p", [await cluster.node(http_port=0)])
    d = await cluster.engine("engine-d", [node])
    reading = Reading(cluster, p, d)
    other = await cluster.engine("engine-x", [node], register=False)
    assert (await refusal(other.register())).reason is Reason.LIMIT_EXCEEDED
    assert (await refusal(reading.stub.ReadBlocks(reading.request()))).reason is Reason.TOO_MANY_DESCRIPTORS
    found = await told(node)
    assert {dict(k)["limit"]: n for k, n in found.moved("kvxfer_limit_refusals_total").items()} == {
        "max_registrations": 1,
        "max_descriptors": 1,
    }
    assert found.sum("kvxfer_limit", limit="max_registrations") == 1
    assert found.sum("kvxfer_limit_used", limit="max_registrations") == 1
    status = {x.name: x for x in (await status_of(node)).limits}
    assert (status["max_registrations"].used, status["max_registrations"].refused) == (1, 1)
    assert not status["max_descriptors"].HasField("used")
    assert (await told(p.nodes[0])).sum("kvxfer_limit_refusals_total") == 0


async def test_what_a_peer_has_refused_is_counted_there(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    await reading.good()
    monkeypatch.setattr(service_readers, "MAX_READS", 0)
    assert (await refusal(reading.stub.ReadBlocks(reading.request()))).reason is Reason.LIMIT_EXCEEDED
    p, d = [await told(e.nodes[0]) for e in (reading.p, reading.d)]
    assert p.sum("kvxfer_limit_refusals_total", limit="max_reads") == 1
    assert p.sum("kvxfer_reads_refused_total", reason="LIMIT_EXCEEDED") == 1
    assert d.sum("kvxfer_limit_refusals_total") == 0


async def test_an_idle_link_is_no_limit(reading: Reading) -> None:
    """It makes room for another: a full table of them is no reason to call somebody."""
    await reading.good()
    node = reading.d.nodes[0]
    assert len(node.sidecar.registrations.get("engine-d").links) == 1

    async def used() -> float:
        return (await told(node)).sum("kvxfer_limit_used", limit="max_peers")

    await soon(lambda: all(link.idle for link in node.sidecar.registrations.get("engine-d").links))
    assert await used() == 0
    reading.fabric.hold()
    waiting = asyncio.ensure_future(reading.stub.ReadBlocks(reading.request("t1")))
    await soon(lambda: not any(link.idle for link in node.sidecar.registrations.get("engine-d").links))
    assert await used() == 1
    reading.fabric.let_go()
    await waiting


def of_read(reading: Reading, ticket: Ticket, **changes: Any) -> dict[str, Any]:
    """The fields of a peer's message about a read that was never opened."""
    reader = peer_pb2.Reader(engine_id="engine-d", rank=rank_to_pb(Rank()), incarnation="abc")
    known = {
        "engine_id": "engine-p",
        "rank": rank_to_pb(Rank()),
        "incarnation": reading.p.members[0].registered.incarnation,
        "request_id": ticket.request_id,
        "lease_token": ticket.lease_token,
        "reader": reader,
        "readers": 1,
        "transfer_id": "t9",
    }
    return {**known, **changes}


async def test_every_read_that_is_refused_is_counted(reading: Reading, logged: list[Any]) -> None:
    """Also where another incarnation is meant, where it is a renewal, and where the registration is ending."""
    node = reading.p.nodes[0]
    ticket = reading.ticket()

    async def counted(call: Callable[[], Any], reason: Reason) -> None:
        before, refused = await told(node), len(logged_as(logged, "read refused"))
        counts = (await status_of(node)).counts
        assert (await refusal(call())).reason is reason
        after = await told(node)
        for found, n in ((before, 0), (after, 1)):
            of_reason = found.sum("kvxfer_reads_refused_total", engine="engine-p", reason=reason.value)
            assert of_reason - before.sum("kvxfer_reads_refused_total", reason=reason.value) == n
        now = (await status_of(node)).counts
        assert now.reads_refused == counts.reads_refused + 1
        assert now.stale_reads_refused == counts.stale_reads_refused + (reason in STALE)
        assert len(logged_as(logged, "read refused")) == refused + 1

    renew, opening = node.peer_stub.RenewRead, node.peer_stub.OpenRead
    await counted(lambda: renew(peer_pb2.RenewReadRequest(**of_read(reading, ticket))), Reason.LEASE_EXPIRED)
    gone = of_read(reading, ticket, incarnation="gone")
    await counted(lambda: opening(peer_pb2.OpenReadRequest(**gone, num_tokens=1)), Reason.STALE_INCARNATION)
    await counted(lambda: renew(peer_pb2.RenewReadRequest(**gone)), Reason.STALE_INCARNATION)
    node.sidecar.registrations.get("engine-p").closing = True
    late = peer_pb2.OpenReadRequest(**of_read(reading, ticket), num_tokens=1)
    await counted(lambda: opening(late), Reason.NOT_REGISTERED)
    nobody = of_read(reading, ticket, engine_id="nobody")
    before = await told(node)
    assert (await refusal(renew(peer_pb2.RenewReadRequest(**nobody)))).reason is Reason.NOT_REGISTERED
    assert (await told(node)).of("kvxfer_reads_refused_total") == before.of("kvxfer_reads_refused_total")


async def test_a_refused_call_is_logged_with_what_it_was_about(reading: Reading, logged: list[Any]) -> None:
    request = reading.request("t1")
    request.spec.ticket.lease_token = bytes(16)
    await refusal(reading.stub.ReadBlocks(request))
    found = {entry["method"].rpartition("/")[2]: entry for entry in logged_as(logged, "call refused")}
    asked = request.spec.ticket.request_id
    here = {"engine": "engine-d", "peer": "engine-p", "request": asked, "transfer": "t1"}
    assert here.items() <= found["ReadBlocks"].items()
    there = {
        "engine": "engine-p",
        "incarnation": reading.p.members[0].registered.incarnation,
        "peer": "engine-d",
        "peer_incarnation": reading.d.members[0].registered.incarnation,
        "request": asked,
    }
    assert there.items() <= found["OpenRead"].items()
    assert found["OpenRead"]["transfer"].startswith("t1")
    await refusal(reading.stub.GetTransfer(pb.GetTransferRequest(engine_id="e" * 10_000, transfer_id="t" * 10_000)))
    long = next(e for e in logged_as(logged, "call refused") if e["method"].endswith("GetTransfer"))
    assert len(long["engine"]) <= 128
    assert len(long.get("transfer", "")) <= 128


async def test_an_agent_that_is_destroyed_is_told_of_with_both_engines(cluster: Cluster, logged: list[Any]) -> None:
    p = await cluster.engine("engine-p", [await cluster.node()])
    d = await cluster.engine("engine-d", [await cluster.node(drain_limit=0.1)])
    reading = Reading(cluster, p, d)
    cluster.fabric.hold()
    request = reading.request("t1", wait=False)
    await reading.stub.ReadBlocks(request)
    await soon(lambda: cluster.fabric.posts == 1)  # before that there is nothing to drain
    await d.cancel("t1", timeout=0.01)
    await soon(lambda: logged_as(logged, "agent destroyed"))
    (told_so,) = logged_as(logged, "agent destroyed")
    wanted = {"engine": "engine-d", "peer": "engine-p", "transfer": "t1", "request": request.spec.ticket.request_id}
    assert wanted.items() <= told_so.items()
    cluster.fabric.let_go()


async def test_an_open_http_port_is_told_of(cluster: Cluster, logged: list[Any]) -> None:
    for host, times in (("127.0.0.1", 0), ("0.0.0.0", 1)):
        await cluster.node(http_port=0, http_host=host)
        assert len(logged_as(logged, "whoever reaches the HTTP port can read the metrics")) == times


async def test_only_some_reads_are_looked_at(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes time, also where they fail or show nothing."""
    monkeypatch.setattr(transport, "LEAST_BYTES", 0)
    looked = 0

    def look() -> int:
        nonlocal looked
        looked += 1
        return 0

    monkeypatch.setattr(transport, "received_over_tcp", look)
    await reading.d.handshake(reading.ticket())
    more = 0  # a refusal can be there before the read was posted, and then nothing is looked at
    for i in range(20 * MAX_LOOKS):
        more += looked == MAX_LOOKS
        if more > 3:
            break
        request = reading.request(f"t{i}")
        request.spec.ticket.lease_token = bytes(16)
        assert (await refusal(reading.stub.ReadBlocks(request))).reason is Reason.LEASE_TOKEN_MISMATCH
        await reading.d.cancel(f"t{i}", 10.0)  # which waits until its blocks are free for the next
    assert looked == MAX_LOOKS


async def test_secrets_are_told_nowhere(reading: Reading, logged: list[Any]) -> None:
    ticket = reading.ticket()
    await reading.stub.ReadBlocks(reading.d.request(ticket, reading.d_lists))
    metadata = reading.p.nodes[0].sidecar.registrations.get("engine-p").metadata
    everything = [json.dumps(logged, default=str)]
    for engine in (reading.p, reading.d):
        node = engine.nodes[0]
        everything.append((await told(node)).text)
        everything.append(MessageToJson(await status_of(node)))
    for text in everything:
        for secret in (ticket.lease_token, metadata):
            assert secret.hex() not in text
            assert repr(secret)[2:-1] not in text


async def test_the_slow_way_is_told_once(reading: Reading, logged: list[Any]) -> None:
    await reading.good()
    (link,) = reading.d.nodes[0].sidecar.registrations.get("engine-d").links
    assert link.on_one_host
    for way in (Transport.UNKNOWN, Transport.TCP, Transport.OTHER, Transport.TCP, Transport.UNKNOWN, Transport.TCP):
        link.found(way)
    assert link.transport is Transport.UNKNOWN  # other traffic may have looked so: no two agree
    assert link.to_be_seen
    link.found(Transport.TCP)
    assert not link.to_be_seen
    link.found(Transport.TCP)
    (warned,) = [e for e in logged if "over TCP" in e["event"]]
    assert (warned["log_level"], warned["peer"], warned["peer_ranks"]) == ("warning", "engine-p", ["tp0"])
    found = await told(reading.d.nodes[0])
    assert found.sum("kvxfer_slow_links_total", engine="engine-d", remote_engine="engine-p") == 1
    assert found.sum("kvxfer_peers", transport="tcp") == 1
    plan = await reading.d.handshake(reading.ticket())
    assert any("CMA" in warning for warning in plan.warnings)
    assert plan.sources[0].transport == "UCX: tcp"


async def test_the_direct_way_and_other_hosts_are_no_matter_for_a_warning(reading: Reading, logged: list[Any]) -> None:
    await reading.good()
    (link,) = reading.d.nodes[0].sidecar.registrations.get("engine-d").links
    link.found(Transport.CMA)
    assert link.transport is Transport.CMA
    link.found(Transport.OTHER)
    link.found(Transport.OTHER)
    assert link.transport is Transport.CMA
    reading.d.nodes[0].sidecar.registrations.get("engine-d").links.host = "elsewhere"  # type: ignore[misc]
    link.found(Transport.TCP)
    assert link.transport is Transport.CMA
    link.found(Transport.TCP)
    assert link.transport is Transport.TCP
    assert not [e for e in logged if "over TCP" in e["event"]]


# -- readiness -------------------------------------------------------------------------------------------------------


async def health(node: Node, service: str) -> set[int]:
    """Over both listeners."""
    found = set()
    for channel in (node.channel, node.peer_channel):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        found.add((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)
    return found


async def ready(node: Node, *, why: str = "") -> None:
    """All who are asked say the same; soon."""
    expected = {NOT_SERVING if why else SERVING}

    async def agreed() -> bool:
        answer = await asyncio.to_thread(get, node.sidecar.http_port, "/readyz")
        http = why in answer.body and answer.status == 503 if why else answer.status == 200
        return http and [await health(node, name) for name in SERVICES] == [expected] * 2

    deadline = time.monotonic() + 20
    while not await agreed():
        assert time.monotonic() < deadline, f"not everybody says {why or 'ready'!r}"
        await asyncio.sleep(0.01)
    assert await health(node, "") == {SERVING}
    assert (await asyncio.to_thread(get, node.sidecar.http_port, "/healthz")).status == 200
    assert why in (await status_of(node)).unready_reason
    assert (await told(node)).sum("kvxfer_ready") == (not why)


async def test_ready_while_a_cache_is_registered_that_takes_work(cluster: Cluster) -> None:
    node = await cluster.node(http_port=0)
    await ready(node, why="no cache is registered")
    await cluster.engine("engine-x", [node])
    await ready(node)
    await node.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id="engine-x"))
    await ready(node, why="no cache is registered")


async def test_not_ready_while_it_drains(reading: Reading) -> None:
    """As long as a read that was granted is open; told at once, not when somebody next looks."""
    node = reading.p.nodes[0]
    node.sidecar._ticker.cancel()
    await reading.d.handshake(reading.ticket())
    reading.fabric.hold()
    waiting = asyncio.ensure_future(reading.stub.ReadBlocks(reading.request("t1")))
    leases = node.sidecar.registrations.get("engine-p").leases
    await soon(lambda: leases.open_reads == 1)
    request = pb.UnregisterCacheRequest(engine_id="engine-p")
    request.drain_timeout.FromSeconds(10)
    ending = asyncio.ensure_future(node.stub.UnregisterCache(request))
    await ready(node, why="the cache is being unregistered")
    reading.fabric.let_go()
    await waiting
    await ending
    await ready(node, why="no cache is registered")


async def test_not_ready_while_nixl_does_not_work(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    await reading.good()
    node = reading.p.nodes[0]
    monkeypatch.setattr(xfer_watch, "FAILING", 0.05)
    broken = True
    driver = node.engines[0].driver
    really = driver.notifications

    def fail() -> Any:
        if broken:
            raise RuntimeError("the library is in a bad way")
        return really()

    monkeypatch.setattr(driver, "notifications", fail)
    await ready(node, why="engine engine-p: polling the transfer library has failed for")
    assert (await told(node)).sum("kvxfer_nixl_up", engine="engine-p") == 0
    broken = False
    await ready(node)
    assert (await told(node)).sum("kvxfer_nixl_up", engine="engine-p") == 1


async def test_health_can_be_watched(cluster: Cluster) -> None:
    node = await cluster.node()
    watches = {}
    for name in (*SERVICES, ""):
        for listener in (node.channel, node.peer_channel):
            stub: Any = health_pb2_grpc.HealthStub(listener)
            watches[name, listener] = stub.Watch(health_pb2.HealthCheckRequest(service=name))
    for (name, _), watch in watches.items():
        assert (await asyncio.wait_for(watch.read(), 5)).status == (NOT_SERVING if name else SERVING)
    await cluster.engine("engine-x", [node])
    for (name, _), watch in watches.items():
        if name:
            assert (await asyncio.wait_for(watch.read(), 5)).status == SERVING
    await node.stub.UnregisterCache(pb.UnregisterCacheRequest(engine_id="engine-x"))
    for (name, _), watch in watches.items():
        if name:
            assert (await asyncio.wait_for(watch.read(), 5)).status == NOT_SERVING
        watch.cancel()
