"""Pods on a bridge: reads by name, and what becomes of them when a container or the network fails."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.conftest import ROOT, SUBNET
from tests.containers.containers import Containers
from tests.containers.pods import PEER_IS_AWAY, Pair, pair, wait_healthy


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What deploy/certificates.sh makes."""
    directory = tmp_path_factory.mktemp("tls")
    directory.parent.chmod(0o755)
    script = [ROOT / "deploy/certificates.sh", directory / "prefill", directory / "decode"]
    subprocess.run(script, check=True, env={**os.environ, "OWNER": "10001:10001"}, timeout=60)
    return directory


@pytest.fixture(scope="module")
def pods(containers: Containers, image: str, certificates: Path) -> Iterator[Pair]:
    """A pair with mutual TLS, for all tests here: each leaves it as it was."""
    with containers.network("pods", SUBNET) as network, pair(containers, image, network, SUBNET, certificates) as both:
        yield both


def test_a_read_by_name_and_every_byte_is_right(pods: Pair) -> None:
    for _ in range(3):
        pods.check()
    assert '"peer_security": "mutual TLS"' in pods.prefill.logs()
    assert "prefill:9000" in pods.prefill.logs()


def test_readiness_follows_the_cache(pods: Pair) -> None:
    for pod in (pods.prefill, pods.decode):
        wait_healthy(pod)
        wait_healthy(pod, "kvxfer.v1.KvTransfer")


def test_a_killed_sidecar_is_a_clear_error_and_works_again_when_restarted(pods: Pair) -> None:
    ticket, before = pods.ticket(), pods.prefill.engine("incarnation").answer
    pods.prefill.containers("kill", "--signal", "KILL", pods.prefill.sidecar)
    told = pods.read(ticket, timeout=10)
    assert told.reason in PEER_IS_AWAY, told
    assert told.seconds < 12
    pods.prefill.containers("start", pods.prefill.sidecar)
    wait_healthy(pods.prefill, "kvxfer.v1.KvTransfer")  # the engine has registered again by itself
    assert pods.prefill.engine("incarnation").answer != before
    assert pods.read(ticket, timeout=10).reason == "STALE_INCARNATION"
    pods.works_again()


def test_a_paused_sidecar_does_not_hold_a_reader_past_its_deadline(pods: Pair) -> None:
    pods.check()
    ticket = pods.ticket()
    pods.prefill.containers("pause", pods.prefill.sidecar)
    try:
        told = pods.read(ticket, timeout=3)
    finally:
        pods.prefill.containers("unpause", pods.prefill.sidecar)
    assert told.reason in PEER_IS_AWAY, told
    assert 2.5 < told.seconds < 8
    pods.works_again()


def test_a_lost_network_is_a_clear_error_within_seconds(pods: Pair) -> None:
    pods.check()
    ticket = pods.ticket()
    with pods.prefill.disconnected():
        told = pods.read(ticket, timeout=30)
    assert told.reason in PEER_IS_AWAY, told
    assert told.seconds < 20
    # What UCX makes of an interface that vanishes and comes back is its own affair: it may go on, abort the process, or
    # never finish another read.  What must help is a restart.
    pods.prefill.restart()
    pods.works_again(90)
