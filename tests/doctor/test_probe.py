"""Real agents in processes of their own; and processes that do not do what they should."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvxfer.doctor import agent, probe

pytestmark = pytest.mark.nixl


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_what_is_here() -> None:
    before = children()
    survey, pair = probe.look({**os.environ, "UCX_LOG_LEVEL": "error", "UCX_NOSUCH": "1"})
    assert survey.failure == pair.failure == ""
    assert survey.nixl.startswith("1.")
    assert survey.ucx
    assert "cma" in survey.modules
    assert set(survey.modules) <= set(survey.shipped)
    assert survey.devices is not None
    assert "lo" in survey.devices
    assert survey.transports is not None
    assert "tcp" in survey.transports
    assert pair.right
    assert pair.bytes == agent.SIZE
    assert pair.seconds > 0
    assert pair.paths[-1].lanes
    assert "UCX_NOSUCH" in pair.unused
    assert children() <= before


@pytest.mark.parametrize(
    "program, deadline, says",
    [
        ("import time; time.sleep(600)", 2.0, "did not answer within"),
        ("import os; os.abort()", 60.0, "ended by signal 6"),
        ("raise SystemExit('no such thing')", 60.0, "ended with status 1: no such thing"),
        ("", 60.0, "ended with status 0: it said nothing"),
    ],
)
def test_children_that_fail_are_told_and_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, deadline: float, says: str
) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} -S -c "{program}"\n')
    stand_in.chmod(0o755)
    monkeypatch.setattr(probe.sys, "executable", str(stand_in))
    monkeypatch.setattr(probe, "_GRACE", 0.2)
    before, began = children(), time.monotonic()
    survey, pair = probe.look(os.environ, deadline=deadline)
    assert says in survey.failure
    assert says in pair.failure
    assert children() <= before
    assert time.monotonic() - began < 30
