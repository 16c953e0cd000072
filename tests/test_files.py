"""Whoever makes UCX open files asks first."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

import pytest

from kvxfer import files
from kvxfer.core.errors import KvxferError, Reason
from kvxfer.files import AGENT, RESERVE, Files


def test_what_leaves_enough_is_let_through() -> None:
    ours = Files(lambda: 100, lambda: 100 + RESERVE + 7)
    ours.require(7)
    with pytest.raises(
        KvxferError, match=r"100 files open and may have 235 .* about 8, and 128 must be left"
    ) as caught:
        ours.require(8)
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
    assert (caught.value.metadata["limit_name"], caught.value.metadata["limit"]) == ("RLIMIT_NOFILE", "235")


def test_agents_that_are_being_made_count() -> None:
    """They have not opened anything yet."""
    ours = Files(lambda: 100, lambda: 100 + RESERVE + 2 * AGENT)
    with ours.agent(), ours.agent(), pytest.raises(KvxferError, match="ulimit -n"), ours.agent():
        raise AssertionError("a third one was let through")
    with ours.agent(), ours.agent():
        pass


def test_what_is_open_is_counted() -> None:
    program = (
        "import os; from kvxfer import files; before = files.used()\n"
        "kept = [os.open('/dev/null', os.O_RDONLY) for _ in range(50)]; print(files.used() - before)"
    )
    assert run(program) == "50\n"


def test_where_none_is_left_to_look_with() -> None:
    """A kernel that does not tell how many there are has them listed, which takes one."""
    program = (
        "import os, resource; from types import SimpleNamespace; from kvxfer import files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)); os.stat = lambda path: SimpleNamespace(st_size=0)\n"
        "before, kept = files.used(), []\n"
        "try:\n"
        "    while True: kept.append(os.open('/dev/null', os.O_RDONLY))\n"
        "except OSError: print(0 < before < 200, files.used())"
    )
    assert run(program) == "True 200\n"


def test_where_nobody_can_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is refused for that."""

    def missing(path: str) -> os.stat_result:
        raise OSError(errno.ENOENT, "no /proc")

    monkeypatch.setattr(os, "stat", missing)
    assert files.used() == 0


def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))\n"
        "from kvxfer import files; files.raise_limit(); print(files.limit())"
    )
    assert run(program) == "300\n"


def test_where_it_may_not_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(what: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refused)
    files.raise_limit()


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
