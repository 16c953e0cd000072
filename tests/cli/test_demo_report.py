"""The demo's result for people."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from kvxfer.cli.demo.report import show, show_by_hand
from kvxfer.cli.demo.result import RankResult, Result
from kvxfer.cli.demo.scenario import Choices
from kvxfer.cli.tables import READ_PHASES

RANK: Final = RankResult(
    rank=0,
    sources=[0],
    rows=1,
    descriptors=1,
    merged=1,
    bytes=100,
    least=100,
    reported=100,
    pages=100,
    seconds=0.1,
    verified=200,
    missing=0,
    touched=0,
    first_wrong="",
)
CALLS = ("start", "fill", "register", "publish", "handshake", "prepare", "read", "verify")
RESULT: Final = Result(
    model="a-model",
    scaled="",
    choices=Choices(),
    nixl="1",
    ucx="1",
    transport="",
    p_memory=2**20,
    d_memory=2**20,
    groups=[],
    ranks=[RANK],
    phases=dict.fromkeys((*CALLS, *READ_PHASES), 0.1),
    warnings=[],
)


def shown(result: Result, capsys: pytest.CaptureFixture[str]) -> list[str]:
    show(result, [])
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_warnings_that_are_alike_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    warnings = [
        "group a from tp0: short",
        "group b from tp0: long",
        "group b from tp1: short",
        "group c from tp1: short",
    ]
    lines = shown(replace(RESULT, warnings=warnings), capsys)
    assert [line for line in lines if line.startswith("warning")] == [
        "warning: group a from tp0 (and 2 more like it): short",
        "warning: group b from tp0: long",
    ]


def test_phases_stand_below_the_call_that_they_are_of(capsys: pytest.CaptureFixture[str]) -> None:
    phases = [found[1] for line in shown(RESULT, capsys) if (found := re.match(r"( *[a-z]+)  .* 100\.0$", line))]
    prepared, read = ["  resolve", "  make"], ["  queue", "  open", "  post", "  move"]
    assert phases == [*CALLS[:5], "prepare", *prepared, "read", *read, "verify"]


def test_what_another_terminal_needs_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def first() -> str:
        hand = {"directory": "/d", "sockets": {}, "metrics": {}, "ticket": {}, "commands": []}
        show_by_hand(replace(RESULT, by_hand=hand))
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Try"))

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    assert first() == f"Try, after source {tmp_path}/venv/bin/activate (grpcurl comes with make setup):"
    for tool in ("kvxfer", "grpcurl"):
        (tmp_path / tool).write_text("")
        (tmp_path / tool).chmod(0o755)
    assert first() == "Try:"


def test_whole_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert "as many bytes as in whole pages: these have no padding" in shown(RESULT, capsys)
    padded = replace(RESULT, ranks=[replace(RANK, pages=200), replace(RANK, rank=1)])
    lines = shown(padded, capsys)
    assert "100 bytes less than whole pages (66.7% of them)" in lines
    assert lines[-1] == "every byte verified: 400 bytes on 2 D ranks"
    assert shown(RESULT, capsys)[-1] == "every byte verified: 200 bytes on 1 D rank"
