"""deploy/compose.yaml, brought up as its first lines say; but for the build, which `image` has done."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.conftest import ROOT
from tests.containers.containers import Containers
from tests.support.processes import until


class Compose:
    """Docker's Compose, as the plugin of `docker` or of the environment that the tests run in."""

    def __init__(self, containers: Containers, image: str) -> None:
        own = Path(sys.executable).with_name("docker-compose")
        self.command = [str(own)] if own.exists() else ["docker", "compose"]
        self.project = containers.prefix
        self.environment = {**containers.environment, "KVXFER_IMAGE": image}

    def __call__(self, *arguments: str, timeout: float = 90, check: bool = True) -> str:
        file = ROOT / "deploy/compose.yaml"
        command = [*self.command, "--file", str(file), "--project-name", self.project, *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout)
        assert not check or done.returncode == 0, f"{command} ended {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def compose(containers: Containers, image: str) -> Iterator[Compose]:
    """Compose, and everything taken down in the end."""
    made = Compose(containers, image)
    try:
        yield made
    finally:
        made("down", "--volumes", "--timeout", "10")


def test_the_pairs_of_the_compose_file_read_from_each_other(compose: Compose) -> None:
    compose("up", "--no-build", "--detach")
    said = ""

    def done() -> bool:
        nonlocal said
        said = compose("logs", "--no-color", "--no-log-prefix", "decode-engine", check=False)
        return "read 10:" in said or "decode:" in said

    try:
        until(done, 60, "ten reads")
    except AssertionError:
        said += compose("logs", "--no-color", check=False)
    reads = [line for line in said.splitlines() if line.startswith("read ")]
    assert len(reads) == 10, said
    assert all(line.endswith("every byte is right") for line in reads), said
    assert '"peer_security": "mutual TLS"' in compose("logs", "--no-color", "prefill")
    # What the file says of mode and owner is so.
    listed = compose("exec", "-T", "decode", "stat", "-c", "%a %u", "/run/kvxfer", "/run/kvxfer/socket", "/tls/tls.key")
    assert listed.split() == ["700", "10001", "700", "10001", "600", "10001"]
