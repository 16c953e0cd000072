"""Setting up gets promtool where it can, soon, and goes on without it where it cannot."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "get_promtool.sh"


@pytest.fixture
def bin_(tmp_path: Path) -> Path:
    """A PATH with what the script stands on, and programs that write down how they were called."""
    found = tmp_path / "bin"
    found.mkdir()
    for name in ("bash", "ln", "mktemp", "rm", "chmod", "timeout", "tar", "mv"):
        (found / name).symlink_to(next(p for d in os.get_exec_path() if (p := Path(d, name)).exists()))
    return found


def program(at: Path, text: str) -> None:
    at.write_text(f"#!/bin/bash\n{text}\n")
    at.chmod(0o755)


def run(bin_: Path) -> tuple[int, str]:
    target = bin_.parent / "promtool"
    done = subprocess.run(
        ["bash", str(SCRIPT), str(target)],
        env={"PATH": str(bin_), "TMPDIR": str(bin_.parent), "CALLS": str(bin_.parent / "calls")},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stderr


def test_that_of_the_path_is_taken(bin_: Path) -> None:
    program(bin_ / "promtool", "echo mine")
    assert run(bin_) == (0, "")
    assert (bin_.parent / "promtool").resolve() == (bin_ / "promtool").resolve()


def test_no_apt_is_told(bin_: Path) -> None:
    status, told = run(bin_)
    assert status == 1
    assert "no Debian or Ubuntu" in told


@pytest.mark.parametrize("user, calls", [(1000, ["download"]), (0, ["download", "update"])])
def test_apt_that_fails_is_told_and_lists_are_fetched_by_root_alone(bin_: Path, user: int, calls: list[str]) -> None:
    program(bin_ / "apt-get", 'for w; do case $w in update|download) echo $w >>"$CALLS";; esac; done; exit 100')
    program(bin_ / "dpkg-deb", "exit 1")
    program(bin_ / "id", f"echo {user}")
    status, told = run(bin_)
    assert status != 0
    assert ("after apt-get update it may" in told) == bool(user)
    assert (bin_.parent / "calls").read_text().split() == calls
    assert not (bin_.parent / "promtool").exists()


def test_the_tests_do_not_fetch_it() -> None:
    """Once everything is set up, `make pytest` installs nothing."""
    ready = [flag for name in ("venv", "run", "dev") for flag in ("-o", f".venv/.ready-{name}")]
    done = subprocess.run(
        ["make", "--dry-run", *ready, "pytest"], capture_output=True, text=True, timeout=30, check=True, cwd=ROOT
    )
    assert "pytest" in done.stdout
    assert "promtool" not in done.stdout
