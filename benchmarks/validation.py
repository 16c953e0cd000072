"""What it costs to know that a read counts: ReadBlocks with and without the check, in turn.

Two D sidecars read the same blocks, each of a P of its own.  The one is as it is.  The other asks just the same, so
that P polls, but waits for no answer and believes in what it finds: it is what kvxfer would be without leases.

    python -m benchmarks.validation --mib 64
    UCX_TLS=tcp python -m benchmarks.validation --mib 64
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.caches import Case, Memory, Order, largest, memory
from benchmarks.results import Spread, in_turn
from benchmarks.sidecars import Pair, Sidecar, phases

#: A sidecar that does not wait for grants.
UNCHECKED = """
import asyncio
from kvxfer.service import opening, telling

really = opening.announce

def believe(source, record, timeout):
    really(source, record, timeout).add_done_callback(opening.looked_at)
    granted = asyncio.get_running_loop().create_future()
    granted.set_result(opening.Grant(3600.0, opening.clock() + 3600.0))
    return granted

telling.announce = believe
from kvxfer.cli import main
main()
"""

#: How either D is started.
MAINS = {"checked": ("-m", "kvxfer"), "unchecked": ("-c", UNCHECKED)}


def run(case: Case, rounds: int) -> dict[str, Any]:
    """All rounds of a case."""
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(memory(largest([case])))
        pairs = {}
        for name, main in MAINS.items():
            p = stack.enter_context(Sidecar(place.directory, f"p-{name}"))
            d = stack.enter_context(Sidecar(place.directory, name, main=main))
            pairs[name] = Pair(p, d, case, place, name)
        waited: dict[str, list[float]] = {name: [] for name in pairs}
        seen = in_turn({name: _checked(pair, place, waited[name]) for name, pair in pairs.items()}, rounds)
    return {
        "bytes": case.bytes,
        "order": case.order,
        "transport": os.environ.get("UCX_TLS", "default"),
        "rounds": rounds,
        **{f"{name}_ms": round(statistics.median(seconds) * 1e3, 3) for name, seconds in seen.items()},
        **{f"{name}_grant_ms": round(statistics.median(seconds) * 1e3, 3) for name, seconds in waited.items()},
        "ratio": Spread.ratio(seen["checked"], seen["unchecked"]).rounded(),
    }


def _checked(pair: Pair, place: Memory, waited: list[float]) -> Callable[[], float]:
    def once() -> float:
        seconds, transfer = pair.read()
        waited.append(phases(transfer)["open"])
        place.check(pair.case)
        return seconds

    return once


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=64.0, help="MiB a read")
    parser.add_argument("--block", type=int, default=65_536, help="bytes of a block in one layer")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    blocks = max(1, round(arguments.mib * 2**20 / arguments.block / arguments.layers))
    orders: tuple[Order, ...] = ("contiguous", "scrambled")
    for order in orders:
        case = Case(arguments.block, blocks, arguments.layers, order)
        print(json.dumps(run(case, arguments.rounds), indent=1))


if __name__ == "__main__":
    main()
