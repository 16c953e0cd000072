"""A sidecar that may not open many files refuses what would take the last ones, and goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from kvxfer.core.errors import Reason
from kvxfer.files import AGENT, RESERVE
from tests.support.errors import refused
from tests.support.plain import PlainEngine
from tests.support.processes import SidecarProcess, shared_directory, sidecars

FEW = (1, 3, 5)


@contextmanager
def may_open(side: SidecarProcess, more: int) -> Iterator[None]:
    """Only so many more than it has now."""
    process = psutil.Process(side.pid)
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{side.pid}/fd")) + more, before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, before)


def test_a_link_is_refused_while_there_is_room_left() -> None:
    """UCX, where it runs out by itself, could make no agent any more, however many files it were allowed later."""
    with sidecars(["p", "d"], {"drain_timeout": 2}) as (p_side, d_side):
        p, d = (PlainEngine(name, side, 8).register() for name, side in (("p", p_side), ("d", d_side)))
        p.fill(1)
        # Enough for the call, for one of two agents, nearly for both; and then for a reader at P.
        tried = [(d_side, more) for more in (*range(8, 56, 8), RESERVE + AGENT + 8)] + [(p_side, RESERVE)]
        for side, more in tried:
            ticket = p.ticket(FEW)
            with may_open(side, more):
                error = refused(lambda at=ticket: d_side.stub.ReadBlocks(d.request(at, FEW), timeout=30))  # type: ignore[misc]
            assert (error.reason, error.metadata["limit_name"]) == (Reason.LIMIT_EXCEEDED, "RLIMIT_NOFILE"), more
        d.read(p, FEW)
        with may_open(p_side, 8), may_open(d_side, 8):
            d.read(p, FEW)  # what is there goes on
        p.close()
        d.close()


def test_a_sidecar_raises_its_limit_itself() -> None:
    with shared_directory() as directory:
        side = SidecarProcess(directory, "s", prefix=("prlimit", "--nofile=256:1000"))
        try:
            side.ready()
            assert psutil.Process(side.pid).rlimit(psutil.RLIMIT_NOFILE) == (1000, 1000)
            side.stop()
        finally:
            side.discard()
