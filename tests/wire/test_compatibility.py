"""What docs/versioning.md promises of kvxfer.v1: `make lint` compares the protos with those of the last release."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASELINE = "proto/baseline.txtpb"


def breaking(directory: Path) -> subprocess.CompletedProcess[str]:
    """What `make lint` runs, on the protos of ``directory``."""
    command = re.search(r"^\t\$\(BIN\)/(buf breaking .*)$", (ROOT / "Makefile").read_text(), re.M)
    assert command, "make lint does not look for breaking changes"
    buf, *arguments = command[1].split()
    program = Path(sys.executable).with_name(buf)
    return subprocess.run(
        [str(program), *arguments], cwd=directory, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


def change(copy: Path, file: str, before: str, after: str) -> None:
    path = copy / "proto" / "kvxfer" / "v1" / file
    text = path.read_text()
    assert text.count(before) == 1, f"{before!r} is {text.count(before)} times in {file}"
    path.write_text(text.replace(before, after))


def test_nothing_that_was_released_has_changed() -> None:
    done = breaking(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "file, before, after, says",
    [
        ("transfer.proto", "  rpc RenewLease(RenewLeaseRequest) returns (RenewLeaseResponse);\n", "", "RenewLease"),
        ("transfer.proto", "  bool held = 10;", "  bool held = 11;", '"10" with name "held"'),
        ("transfer.proto", "  bool held = 10;", '  reserved 10;\n  reserved "held";', '"10" with name "held"'),
        ("transfer.proto", "  bool held = 10;", "  bool is_held = 10;", "is_held"),
        ("transfer.proto", "  bool held = 10;", "  uint32 held = 10;", "type"),
        ("transfer.proto", "  TRANSFER_STATE_CANCELLED = 6;\n", "", "TransferState"),
        ("transfer.proto", "returns (stream WatchLeasesResponse)", "returns (WatchLeasesResponse)", "streaming"),
        ("peer.proto", "service KvPeer {", "service KvPeers {", "KvPeer"),
    ],
)
def test_a_breaking_change_is_found(copy: Path, file: str, before: str, after: str, says: str) -> None:
    change(copy, file, before, after)
    done = breaking(copy)
    assert done.returncode != 0
    assert re.search(says, done.stdout), done.stdout + done.stderr


def test_what_is_added_breaks_nothing(copy: Path) -> None:
    change(copy, "transfer.proto", "  bool held = 10;", "  bool held = 10;\n  // OPTIONAL.\n  bool more = 11;")
    call = "  // New.\n  rpc Ask(ExchangeRequest) returns (ExchangeResponse);"
    change(copy, "peer.proto", "service KvPeer {", f"service KvPeer {{\n{call}")
    done = breaking(copy)
    assert done.returncode == 0, done.stdout + done.stderr
