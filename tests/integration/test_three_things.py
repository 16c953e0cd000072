"""One expired lease, one stale read that is refused, one lost peer: three different things to whoever looks.

Two sidecar processes over real NIXL; what each tells is looked up where an operator looks: metrics, log, inspect.
And the way that bytes really take, where both are on one host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.cli.inspect.look import look, target_of
from kvxfer.core.errors import Reason
from kvxfer.doctor import probe
from tests.support.engines import publication
from tests.support.errors import refused
from tests.support.plain import PlainEngine
from tests.support.processes import SidecarProcess, sidecars, until
from tests.support.scrape import Scraped, scrape

SETTINGS = {"http_port": 0, "drain_timeout": 2, "log_level": "debug"}
FEW = [1, 3]


class Side:
    """A sidecar, and what it tells."""

    def __init__(self, letter: str, process: SidecarProcess) -> None:
        self.process = process
        self.engine = PlainEngine(f"engine-{letter}", process, 8).register()
        (serving,) = self.logged("serving")
        self.port = int(serving["http"].rpartition(":")[2])

    def logged(self, event: str, **fields: object) -> list[dict[str, Any]]:
        lines = [json.loads(x) for x in self.process.log().splitlines() if x.startswith("{")]
        return [x for x in lines if x["event"] == event and fields.items() <= x.items()]

    def metrics(self) -> Scraped:
        return scrape(self.port)

    def inspect(self) -> dict[str, Any]:
        """What `kvxfer inspect --json` says, without its process."""
        return look(target_of(str(self.process.socket)), 20).as_json()

    def counts(self) -> tuple[int, int, int]:
        """Expired leases, stale reads that were refused, links that were lost: as inspect, and as the metrics say."""
        told = self.inspect()["status"]["counts"]
        inspected = [int(told.get(name, 0)) for name in ("leases_expired", "stale_reads_refused", "links_lost")]
        metrics = self.metrics()
        measured = [
            metrics.sum("kvxfer_leases_ended_total", state="expired"),
            metrics.sum("kvxfer_reads_refused_total"),
            metrics.sum("kvxfer_links_lost_total"),
        ]
        assert inspected == measured
        logged = [
            len(self.logged("lease ended", state="expired")),
            len(self.logged("read refused")),
            len(self.logged("peer lost")),
        ]
        assert logged == measured
        return inspected[0], inspected[1], inspected[2]


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    with sidecars(["p", "d"], SETTINGS) as (p, d):
        made = Side("p", p), Side("d", d)
        made[0].engine.fill(1)
        for _ in range(2):  # what one look at a link has shown, another one must show, too
            made[1].engine.read(made[0].engine, FEW)
        yield made
        for side in made:
            side.engine.close()


def test_an_expired_lease_a_refused_read_and_a_lost_peer(sides: tuple[Side, Side]) -> None:
    p, d = sides
    until(lambda: p.logged("lease ended", state="released"), what="the end of the good lease")
    assert (p.counts(), d.counts()) == ((0, 0, 0), (0, 0, 0))

    # One lease expires.
    ticket = p.engine.ticket(FEW)
    late = p.engine.ticket([2])
    again = publication("engine-p", late, 60.0)
    again.request_id, again.lease_token = "expires", bytes(range(16))
    again.ttl.FromMilliseconds(50)
    p.process.stub.PublishBlocks(again, timeout=10)
    until(lambda: p.logged("lease ended", state="expired"), what="the expiry")
    assert (p.counts(), d.counts()) == ((1, 0, 0), (0, 0, 0))
    (ended,) = p.logged("lease ended", state="expired")
    assert (ended["request"], ended["level"], ended["engine"]) == ("expires", "warning", "engine-p")
    assert ended["incarnation"] == p.engine.member.registered.incarnation
    states = {x["request_id"]: x["state"] for x in p.inspect()["leases"]}
    assert states["expires"] == "LEASE_STATE_EXPIRED"

    # One read comes too late.
    request = d.engine.request(ticket, FEW, transfer_id="late")
    request.spec.ticket.request_id, request.spec.ticket.lease_token = "expires", bytes(range(16))
    request.spec.ticket.blocks[0].CopyFrom(again.blocks[0])
    request.spec.ticket.num_tokens = 1
    request.spec.local_blocks[0].CopyFrom(again.blocks[0])
    error = refused(lambda: d.process.stub.ReadBlocks(request, timeout=30))
    assert error.reason is Reason.LEASE_EXPIRED
    until(lambda: d.logged("transfer ended", transfer="late"), what="the end of the transfer")
    assert (p.counts(), d.counts()) == ((1, 1, 0), (0, 0, 0))
    (told,) = p.logged("read refused")
    assert (told["request"], told["reason"], told["peer"], told["peer_rank"]) == (
        *("expires", "LEASE_EXPIRED", "engine-d", "tp0"),
    )
    assert told["peer_incarnation"] == d.engine.member.registered.incarnation
    assert told["transfer"].startswith("late")
    (failed,) = d.logged("transfer ended", transfer="late")
    assert (failed["reason"], failed["peer"], failed["request"]) == ("LEASE_EXPIRED", "engine-p", "expires")
    assert failed["peer_incarnations"] == [p.engine.member.registered.incarnation]
    assert d.metrics().sum("kvxfer_transfers_total", outcome="failed", reason="LEASE_EXPIRED") == 1
    (transfer,) = [x for x in d.inspect()["transfers"] if x["transfer_id"] == "late"]
    assert transfer["state"] == "TRANSFER_STATE_FAILED"
    assert transfer["error"]["details"][0]["reason"] == "LEASE_EXPIRED"

    # One peer dies.
    p.process.kill()
    until(lambda: d.logged("peer lost"), what="the loss")
    assert d.counts() == (0, 0, 1)
    (lost,) = d.logged("peer lost")
    assert (lost["engine"], lost["peer"], lost["peer_rank"]) == ("engine-d", "engine-p", "tp0")
    assert lost["peer_incarnation"] == p.engine.member.registered.incarnation
    found = d.inspect()["status"]
    (gone,) = found["lost_peers"]
    assert (gone["remote_engine_id"], gone["role"]) == ("engine-p", "PEER_ROLE_SOURCE")
    assert "peers" not in found

    # None of the secrets was told by anybody.
    for text in (p.process.log(), d.process.log(), d.metrics().text, json.dumps(d.inspect())):
        for secret in (ticket.lease_token, late.lease_token, bytes(range(16))):
            assert secret.hex() not in text
            assert repr(secret)[2:-1] not in text


def test_where_the_kernel_copies_nobody_is_warned(sides: tuple[Side, Side]) -> None:
    _, pair = probe.look(os.environ)
    lanes = pair.paths[-1].lanes if pair.paths else ()
    if not any(lane.startswith("cma/") for lane in lanes):
        pytest.skip(f"UCX does not get CMA between two processes here, as kvxfer doctor says: {lanes or pair.failure}")
    p, d = sides

    def seen() -> bool:
        """One look may see nothing, on a busy machine; a few reads are looked at."""
        d.engine.read(p.engine, FEW)
        return d.metrics().sum("kvxfer_peers", role="source", transport="cma") == 1

    until(seen, what="a read that was seen to be over at once")
    assert d.inspect()["status"]["peers"][0]["transport"] == "UCX: cma"
    assert not d.logged("reads from a sidecar on this host come over TCP")


def test_the_slow_way_on_one_host_is_told_once() -> None:
    """UCX without CMA falls back to TCP, and says nothing."""
    with sidecars(["p", "d"], SETTINGS, {"UCX_TLS": "^cma"}) as (p, d):
        source, reader = Side("p", p), Side("d", d)
        source.engine.fill(1)
        for _ in range(3):
            reader.engine.read(source.engine, FEW)
        (warned,) = reader.logged("reads from a sidecar on this host come over TCP")
        assert (warned["level"], warned["peer"]) == ("warning", "engine-p")
        assert reader.metrics().sum("kvxfer_slow_links_total") == 1
        assert reader.metrics().sum("kvxfer_peers", role="source", transport="tcp") == 1
        status = reader.inspect()["status"]
        assert status["peers"][0]["transport"] == "UCX: tcp"
        versions = {"nixl_version": status["nixl_version"], "ucx_version": status["ucx_version"]}
        assert all(versions.values()), "versions of libraries that are loaded with the first agent"
        assert reader.metrics().sum("kvxfer_build_info", **versions) == 1
        for side in (source, reader):
            side.engine.close()
