"""The sidecars of README.md start as they are told, serve, and end well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import console
from tests.support.certificates import Authority, Identity
from tests.support.console import ROOT

MARK = "run by tests/integration/test_readme.py"
COMMANDS = [c.text for c in console.commands(ROOT / "README.md") if c.mark == MARK and not c.text.startswith("pip ")]
SERVE = [text for text in COMMANDS if text.startswith("kvxfer serve ")]


def test_the_readme_serves_with_and_without_tls() -> None:
    assert len(SERVE) == 2
    assert "--peer-tls-cert" in SERVE[1]


@pytest.mark.parametrize("command", SERVE, ids=["plain", "tls"])
def test_a_sidecar_of_the_readme(command: str, tmp_path: Path) -> None:
    identity = Identity(Authority("readme"), "rank0.decode.kv.svc")
    for name, content in {"tls.crt": identity.cert, "tls.key": identity.key, "ca.crt": identity.ca}.items():
        (tmp_path / name).write_bytes(content)
    health = "grpcurl -plaintext -unix /run/kvxfer/rank0.sock grpc.health.v1.Health/Check"
    before = [text for text in COMMANDS if text.startswith("mkdir ")]
    after = [f"until {health}; do kill -0 $!; sleep 0.1; done", "kill $!", "wait $!"]
    # What the commands leave to the defaults.
    defaults = "export KVXFER_ENGINE_SOCKET=/run/kvxfer/rank0.sock KVXFER_MEMORY_DIRECTORIES='[\"/dev/shm/kvxfer\"]'"
    with console.places([defaults, *before, f"{command} &", *after]) as texts:
        output = console.run(texts, tmp_path, timeout=60)
    assert '"SERVING"' in output[-3]
