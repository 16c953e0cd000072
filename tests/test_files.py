"""Whoever makes UCX open files asks first."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from kvxfer import files
from kvxfer.core.errors import KvxferError, Reason
from kvxfer.files import AGENT, RESERVE, Files


@pytest.fixture
def room() -> Iterator[int]:
    """This process may open so many more files until the test is over."""
    left = RESERVE + 2 * AGENT
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + left, before[1]))
    yield left
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_what_leaves_enough_is_let_through(room: int) -> None:
    Files().require(room - RESERVE)
    with pytest.raises(KvxferError, match="128 must be left") as caught:
        Files().require(room - RESERVE + 1)
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
    assert caught.value.metadata["limit_name"] == "RLIMIT_NOFILE"
    assert caught.value.metadata["limit"] == str(files.limit())


def test_agents_that_are_being_made_count(room: int) -> None:
    """They have not opened anything yet."""
    ours = Files()
    with ExitStack() as making:
        for _ in range(2):
            making.enter_context(ours.agent())
        with pytest.raises(KvxferError, match="ulimit -n"), ours.agent():
            raise AssertionError("a third one was let through")
    with ours.agent():
        pass


def test_where_none_is_left_to_look_with(room: int) -> None:
    with ExitStack() as taken:
        with suppress(OSError):  # EMFILE
            for _ in range(10 * room):
                taken.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(KvxferError, match="ulimit -n"):
            Files().require(0)


def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))\n"
        "from kvxfer import files; files.raise_limit(); print(files.limit())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "300\n", done.stderr
