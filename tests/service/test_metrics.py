"""What is measured: names, and how many series there can be."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvxfer.config import Settings
from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.service import gauges, limits, metrics
from kvxfer.service.events import Events
from kvxfer.service.meters import Kind, Spec
from kvxfer.service.metrics import (
    FORGET_AFTER,
    MAX_PEERS,
    MAX_RANKS,
    MAX_STRANGE_RANKS,
    MAX_STRANGERS,
    OTHER,
    SECONDS,
    STALE,
    Metrics,
)
from kvxfer.service.settings import ServiceSettings
from kvxfer.wire.peer import Reader, ReadRef

ROOT = Path(__file__).parents[2]
SPECS = [*Metrics().specs, *gauges.SPECS]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_names_are_as_prometheus_wants_them(spec: Spec) -> None:
    assert re.fullmatch(r"kvxfer_[a-z]+(_[a-z]+)*", spec.name)
    assert spec.name.endswith("_total") == (spec.kind is Kind.COUNTER)
    if spec.kind is Kind.HISTOGRAM:
        assert spec.name.endswith("_seconds")
        assert spec.buckets == tuple(sorted(set(spec.buckets)))
    assert not re.search(r"_(ms|us|millis\w*|kb|mb|mib)(_|$)", spec.name)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", label) for label in spec.labels)
    # What is fresh for every request would be a series for every request.
    assert not {"request", "request_id", "transfer", "transfer_id", "incarnation", "address"} & set(spec.labels)
    assert spec.help.endswith(".")
    assert len(spec.help) > 20


def test_no_name_is_given_twice() -> None:
    assert len({spec.name for spec in SPECS}) == len(SPECS)


def test_buckets_reach_from_microseconds_to_a_minute() -> None:
    assert (SECONDS[0], SECONDS[-1]) == (0.00005, 60.0)


def series(of: Metrics) -> int:
    return sum(len(family.values) for family in of.families())


def count_everything(of: Metrics, engine: str, remote: str, rank: str = "tp0") -> None:
    pair = of.pair(engine, remote)
    of.transfers.add((*pair, "done", "NONE"))
    of.phases.observe((*pair, "total"), 1.0)
    of.read_bytes.add(of.rank(pair, rank), 1)
    of.reads_refused.add((*of.rank(pair, rank), "LEASE_EXPIRED"))


def test_peers_of_ever_new_names_do_not_pile_up() -> None:
    counted = Metrics()
    for i in range(MAX_PEERS):
        count_everything(counted, "d", f"p{i}")
    full = series(counted)
    for i in range(MAX_PEERS, MAX_PEERS + 50):
        count_everything(counted, "d", f"p{i}")
        count_everything(counted, "d", "p10")  # one that is in use is not the one that goes
    assert series(counted) <= full
    known = {labels[1] for labels in counted.transfers.family().values}
    assert "p10" in known
    assert "p0" not in known
    assert f"p{MAX_PEERS + 49}" in known


def test_ranks_of_ever_new_names_share_a_series() -> None:
    counted = Metrics()
    for i in range(MAX_RANKS + 50):
        count_everything(counted, "d", "p", f"tp{i}")
    ranks = {labels[2]: n for labels, n in counted.read_bytes.family().values.items()}
    assert len(ranks) == MAX_RANKS + 1
    assert ranks[OTHER] == 50
    count_everything(counted, "d", "p", "tp3")
    assert counted.read_bytes.family().values["d", "p", "tp3"] == 2


def test_strangers_take_nobodys_place() -> None:
    """Whoever reaches the peer port can have reads refused, and fall silent, under ever new names."""
    counted = Metrics()
    counted.leases_published.add(counted.local("p"))
    events = Events(counted, "p", "one")
    events.read_granted(read_of("d"))
    refused = KvxferError(Reason.LEASE_UNKNOWN, "there is none")
    for i in range(2 * MAX_PEERS):
        events.reader_met(read_of(f"met{i}").reader)
        events.read_refused(read_of(f"stranger{i}", i % 100), refused)
        events.reader_lost(read_of(f"silent{i}").reader, "ipv4:1.2.3.4:5", 30.0)
    assert counted.reads_granted.family().values == {("p", "d", "tp0"): 1}
    assert counted.leases_published.family().values == {("p",): 1}
    found = counted.reads_refused.family().values
    assert sum(n for n in found.values() if isinstance(n, float | int)) == 2 * MAX_PEERS  # none goes uncounted
    assert series(counted) < 8 * MAX_STRANGERS + 2 * MAX_RANKS
    assert {labels[1] for labels in found} >= {"stranger0", OTHER}
    for i in range(100):
        events.read_refused(read_of("stranger0", i), refused)
    assert (
        len({labels for labels in counted.reads_refused.family().values if labels[1] == "stranger0"})
        <= MAX_STRANGE_RANKS + 1
    )
    events.read_granted(read_of("stranger0"))  # one that was granted a read is none
    for i in range(100):
        events.read_refused(read_of("stranger0", i), refused)
    assert len({labels for labels in counted.reads_refused.family().values if labels[1] == "stranger0"}) == MAX_RANKS


def read_of(engine: str, rank: int = 0) -> ReadRef:
    reader = Reader(engine, Rank(rank, 1_000), "incarnation")
    return ReadRef("p", Rank(0, 1), "one", "request", bytes(16), reader, 1, "transfer")


def test_a_peer_that_is_gone_for_long_is_forgotten() -> None:
    counted = Metrics()
    count_everything(counted, "d", "gone")
    count_everything(counted, "d", "connected")
    counted.leases_ended.add((*counted.local("d"), "expired"))
    now = time.monotonic()
    counted.tick(now + FORGET_AFTER - 5, {("d", "connected"), ("d", "")})
    assert {labels[1] for labels in counted.transfers.family().values} == {"gone", "connected"}
    counted.tick(now + FORGET_AFTER + 5, {("d", "connected"), ("d", "")})
    assert {labels[1] for labels in counted.transfers.family().values} == {"connected"}
    assert counted.leases_ended.family().values == {("d", "expired"): 1}


def test_a_local_engine_that_is_gone_for_long_takes_what_is_its_own() -> None:
    counted = Metrics()
    counted.leases_ended.add((*counted.local("x"), "expired"))
    counted.leases_ended.add((*counted.local("y"), "expired"))
    count_everything(counted, "x", "p")
    count_everything(counted, "y", "p")
    counted.calls.add(("service", "method", "OK"))
    counted.tick(time.monotonic() + FORGET_AFTER + 5, {("y", ""), ("y", "p"), ("x", "p")})
    assert counted.leases_ended.family().values == {("y", "expired"): 1}
    assert {labels[0] for labels in counted.transfers.family().values} == {"x", "y"}
    assert counted.calls.family().values == {("service", "method", "OK"): 1}


def test_every_stale_reason_is_about_the_ticket() -> None:
    assert {Reason.LEASE_EXPIRED, Reason.LEASE_UNKNOWN, Reason.LEASE_TOKEN_MISMATCH} < STALE
    assert Reason.PEER_LOST not in STALE
    assert Reason.LIMIT_EXCEEDED not in STALE


def test_every_limit_of_the_settings_is_told() -> None:
    told = {limit.name: limit.value for limit in limits.limits(ServiceSettings(), [])}
    wanted = {name for name in Settings.model_fields if name.startswith("max_")}
    assert wanted - set(told) == {"max_lease_ttl", "max_read", "max_region_bytes"}  # times, and one of the memory
    for name in wanted & set(told):
        assert told[name] == Settings.model_fields[name].default
    assert set(told) == limits.NAMES
    assert told["message_limit"] == Settings.model_fields["message_limit"].default


def test_the_reference_is_what_the_code_says() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gen_metrics.py"), "--check"]
    subprocess.run(command, check=True, timeout=60, cwd=ROOT)
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    for spec in SPECS:
        assert f"| `{spec.name}` |" in text
    assert f"{metrics.MAX_PEERS:,} pairs" in text
    assert f"{metrics.MAX_RANKS} ranks" in text
    assert f"{MAX_STRANGERS} such engines, and {MAX_STRANGE_RANKS} ranks" in text
    labels = set(re.findall(r"^\| (`[^|]+`) \|", text.partition("## Labels")[2], re.M))
    told = {name for cell in labels for name in re.findall(r"`(\w+)`", cell)}
    wanted = {label for spec in SPECS for label in spec.labels}
    assert wanted - told <= {"role", "version", "protocol_version", "nixl_version", "ucx_version"}
