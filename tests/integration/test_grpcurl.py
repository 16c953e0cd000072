"""Every command of the grpcurl walk-through, as it is written there, with the real grpcurl against the real demo."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WALK = ROOT / "clients" / "grpcurl" / "README.md"
GRPCURL = Path(sys.executable).with_name("grpcurl")
COMMANDS = re.findall(r"^\$ grpcurl (.+)$", WALK.read_text(), re.M)


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """The directory of a demo that has been left running."""
    command = [sys.executable, "-m", "kvxfer", "demo", "--keep", "--p-tp", "1", "--d-tp", "1", "--tokens", "500"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None
            found = next((m for line in demo.stdout if (m := re.search(r"< (\S+)/ReadBlocks\.json", line))), None)
            assert found, "the demo ended without telling its commands"
            yield Path(found[1])
        finally:
            demo.send_signal(signal.SIGINT)
            demo.communicate(timeout=30)


def run(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """A command of the walk-through."""
    assert GRPCURL.exists() or shutil.which("grpcurl"), "grpcurl is among the developer tools"
    program = GRPCURL if GRPCURL.exists() else Path(shutil.which("grpcurl") or "")
    line = f"{program} {command}".replace("$DIR", str(directory))
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)


def test_the_walk_has_the_whole_transfer() -> None:
    text = "\n".join(COMMANDS)
    for call in ("list", "describe", "GetStatus", "Handshake", "PrepareTransfer", "ReadBlocks"):
        assert call in text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_works(command: str, directory: Path) -> None:
    done = run(command, directory)
    assert done.returncode == 0, done.stderr
    if command.endswith("ReadBlocks.json"):
        transfer = json.loads(done.stdout)["transfer"]
        assert transfer["state"] == "TRANSFER_STATE_DONE"
        assert [s["reported_bytes"] for s in transfer["sources"]] == [transfer["bytes"]]


def test_a_wrong_block_is_explained(directory: Path, tmp_path: Path) -> None:
    request = json.loads((directory / "ReadBlocks.json").read_text())
    blocks = next(b for b in request["spec"]["local_blocks"] if "snapshot_positions" not in b)
    blocks["block_ids"][0] = 99_999
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(request))
    done = run(f"-plaintext -unix -d @ $DIR/D0.sock kvxfer.v1.KvTransfer/ReadBlocks < {broken}", directory)
    assert done.returncode != 0
    for part in ("BLOCK_OUT_OF_RANGE", "spec.local_blocks[", "99999", "allowed are 0 to"):
        assert part in done.stderr
