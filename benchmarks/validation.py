"""What it costs to know that a read counts: ReadBlocks with and without the check, in turn.

Two D sidecars read the same blocks of one P.  The one is as it is.  The other announces its reads just the same, so
that P polls, but waits for no answer and believes in what it finds: it is what kvxfer would be without leases.

    python benchmarks/validation.py --mib 64
    UCX_TLS=tcp python benchmarks/validation.py --mib 64
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

from read_blocks import WARM_UP, Case, Sidecars, shared

#: A sidecar that does not wait for grants.
UNCHECKED = """
import asyncio
from kvxfer.service import reading

really = reading._open
tasks = set()

async def believe(source, record, timeout):
    task = asyncio.ensure_future(really(source, record, timeout))
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return reading._Grant(3600.0, reading.clock() + 3600.0), 3600.0, True

reading._open = believe
from kvxfer.cli import main
main()
"""


def run(case: Case, rounds: int) -> dict[str, Any]:
    """All rounds of a case."""
    times: list[tuple[float, float]] = []
    with shared(case) as (directory, local, remote):
        mains = (("-m", "kvxfer"), ("-c", UNCHECKED))
        sidecars = Sidecars(case, directory, local, remote, rounds + WARM_UP, mains)
        try:
            for i in range(rounds + WARM_UP):
                order = (0, 1) if i % 2 else (1, 0)
                found = {reader: sidecars.once(reader)[0] for reader in order}
                if i >= WARM_UP:
                    times.append((found[0], found[1]))
        finally:
            sidecars.close()
    low, middle, high = statistics.quantiles((a / b for a, b in times), n=4)
    return {
        "bytes": case.block * case.blocks * case.layers,
        "order": "scrambled" if case.scrambled else "contiguous",
        "transport": os.environ.get("UCX_TLS", "default"),
        "rounds": rounds,
        "checked_ms": round(statistics.median(a for a, _ in times) * 1e3, 3),
        "unchecked_ms": round(statistics.median(b for _, b in times) * 1e3, 3),
        "ratio": [round(x, 3) for x in (low, middle, high)],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=64.0, help="MiB a read")
    parser.add_argument("--block", type=int, default=65_536, help="bytes of a block in one layer")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    blocks = max(1, round(arguments.mib * 2**20 / arguments.block / arguments.layers))
    for scrambled in (False, True):
        print(json.dumps(run(Case(arguments.block, blocks, arguments.layers, scrambled), arguments.rounds), indent=1))


if __name__ == "__main__":
    main()
