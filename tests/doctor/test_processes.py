"""Namespaces, judged and looked at."""

from __future__ import annotations

import os
import subprocess

import pytest

from kvxfer.doctor import processes
from kvxfer.doctor.findings import Status
from kvxfer.doctor.processes import Confinement, Engine

FIRST = {"pid": 0xEFFFFFFC, "user": 0xEFFFFFFD}
FREE = Confinement(FIRST, 1000, None, False)


@pytest.mark.parametrize(
    "mine, engine, status, says",
    [
        (FIRST, None, Status.OK, "the machine's own"),
        ({**FIRST, "pid": 7}, None, Status.WARNING, "in a pid namespace of its own"),
        ({"pid": 7, "user": 8}, None, Status.WARNING, "a pid and a user namespace"),
        (FIRST, Engine(5, True, FIRST, 1000), Status.OK, "shares"),
        (FIRST, Engine(5, False, {}, None), Status.ERROR, "there is no process 5"),
        (FIRST, Engine(5, True, {}, 1000), Status.UNKNOWN, "may not be read by uid 1000"),
        (FIRST, Engine(5, True, {**FIRST, "pid": 7}, 1000), Status.WARNING, "pid namespace of its own"),
        (FIRST, Engine(5, True, {**FIRST, "user": 7}, 1000), Status.WARNING, "another user namespace"),
    ],
)
def test_namespaces(mine: dict[str, int], engine: Engine | None, status: Status, says: str) -> None:
    (found,) = processes.judge(Confinement(mine, 1000, None, False), engine)
    assert found.status is status
    assert says in found.what


def test_an_engine_of_another_user() -> None:
    engine = Engine(5, True, FIRST, 2000)
    assert [f.status for f in processes.judge(FREE, engine)] == [Status.OK, Status.WARNING]
    may = Confinement(FIRST, 0, None, True)
    assert [f.status for f in processes.judge(may, engine)] == [Status.OK]


@pytest.mark.parametrize(
    "scope, ptrace, transports, causes",
    [
        (None, False, ("cma",), 0),
        (0, False, None, 0),
        (1, False, ("cma",), 1),
        (1, True, ("cma",), 0),
        (2, False, ("tcp",), 2),
    ],
)
def test_what_keeps_cma_away(scope: int | None, ptrace: bool, transports: tuple[str, ...] | None, causes: int) -> None:
    assert len(Confinement(FIRST, 0, scope, ptrace).against_cma(transports)) == causes


def test_this_process_and_a_child_share_everything() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            mine, its = processes.look(), processes.look_at(child.pid)
        finally:
            child.kill()
    assert set(mine.namespaces) == {"pid", "user"}
    assert its == Engine(child.pid, True, mine.namespaces, os.geteuid())


def test_a_process_that_is_gone() -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    assert not processes.look_at(child.pid).exists
