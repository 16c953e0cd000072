"""What a sidecar costs while nothing happens."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from kvxfer.core.layout import Rank
from tests.support.fleet import Engine
from tests.support.loopback import small_layout, small_lists
from tests.support.processes import SidecarProcess, sidecars, until
from tests.truth import Labels, Want

TOKENS = 10
#: How long to look, seconds; a minute by hand: KVXFER_TEST_IDLE=60.
WINDOW = float(os.environ.get("KVXFER_TEST_IDLE", "10"))


def shares(processes: Sequence[SidecarProcess], seconds: float) -> list[float]:
    """The share of a core that each process uses."""
    began, before = time.monotonic(), [p.cpu_seconds() for p in processes]
    time.sleep(seconds)  # the time is what is measured, nothing is waited for
    passed = time.monotonic() - began
    return [(p.cpu_seconds() - b) / passed for p, b in zip(processes, before, strict=True)]


def test_idle_sidecars_cost_less_than_a_hundredth_of_a_core() -> None:
    """One that is registered only, one that reads, one that is read from: connected, and nothing under way."""
    labels = Labels()
    one = [(Rank(), small_layout())]
    with (
        sidecars(["alone", "p", "d"]) as (alone, p_side, d_side),
        Engine("a", one, [alone], labels),
        Engine("p", one, [p_side], labels) as p,
        Engine("d", one, [d_side], labels) as d,
    ):
        lists = small_lists(TOKENS, 3)
        p.hold(lists)
        ticket = p.ticket(lists, TOKENS)
        d.read(0, p, ticket, lists, {g.name: Want(0, TOKENS) for g in d.groups})
        # P polls without pause for a moment after it has met a reader.
        until(lambda: max(shares([p_side, d_side], 0.25)) < 0.05, 10, "calm")
        found = dict(zip(("alone", "p", "d"), shares([alone, p_side, d_side], WINDOW), strict=True))
        print({name: f"{share:.2%}" for name, share in found.items()})
        assert max(found.values()) < 0.01, found
        assert found["alone"] < 0.005, found
        # It is still connected, and wakes up at once.
        assert len(p_side.status().peers) == len(d_side.status().peers) == 1
        d.read(0, p, ticket, lists, {g.name: Want(0, TOKENS) for g in d.groups})
