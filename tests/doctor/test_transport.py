"""What two agents got, judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvxfer.doctor import transport
from kvxfer.doctor.findings import Status
from kvxfer.doctor.probe import Pair, Survey
from kvxfer.doctor.processes import Confinement
from kvxfer.doctor.ucxlog import ReadPath

SURVEY = Survey("1.5.1", "1.23.0", ("cma",), ("cma",), {"lo": "tcp"}, ("cma", "tcp"))
FREE = Confinement({}, 0, None, True)
PAIR = Pair((ReadPath("0..inf", "zero-copy", ("cma/memory",)),), 2**24, 0.004, True)
TCP = replace(PAIR, paths=(ReadPath("0..inf", "software emulation", ("tcp/lo", "tcp/eth0")),))


def judge(pair: Pair | None, survey: Survey | None = SURVEY, confined: Confinement = FREE) -> tuple[Status, str, str]:
    (found,) = transport.judge(pair, survey, confined)
    return found.status, found.what, found.todo


def test_memory_of_the_host() -> None:
    status, what, _ = judge(PAIR)
    assert status is Status.OK
    assert "cma/memory (zero-copy) at 4.2 GB/s" in what


@pytest.mark.parametrize("lane, status", [("rc_mlx5/mlx5_0:1", Status.OK), ("posix/memory", Status.OK)])
def test_other_transports(lane: str, status: Status) -> None:
    assert judge(replace(PAIR, paths=(ReadPath("0..inf", "zero-copy", (lane,)),)))[0] is status


@pytest.mark.parametrize(
    "survey, confined, says",
    [
        (SURVEY, FREE, "UCX_TLS"),
        (SURVEY, Confinement({}, 1000, 1, False), "ptrace_scope is 1"),
        (SURVEY, Confinement({}, 0, 1, True), "UCX_TLS"),
        (replace(SURVEY, transports=("tcp",)), FREE, "CMA cannot be used here"),
    ],
)
def test_tcp_on_one_host_is_a_warning_that_says_why(survey: Survey, confined: Confinement, says: str) -> None:
    status, what, todo = judge(TCP, survey, confined)
    assert status is Status.WARNING
    assert "over tcp/lo, tcp/eth0 (software emulation)" in what
    assert says in todo


def test_failures() -> None:
    status, what, _ = judge(Pair(failure="no backend", problems=("no active messages transport",)))
    assert status is Status.ERROR
    assert "no backend; UCX says: no active messages transport" in what
    assert judge(replace(PAIR, right=False))[0] is Status.ERROR
    assert judge(replace(PAIR, paths=()))[0] is Status.UNKNOWN
    assert judge(None, None)[0] is Status.UNKNOWN
