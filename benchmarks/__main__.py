"""Measure everything, print what holds, and write it down.

    python -m benchmarks
    python -m benchmarks --only reads --share 0.2

Every section runs in a process of its own.  ``results.json`` and the plots go to ``--out``; with ``--docs`` the page in
``docs/`` and its pictures are made from them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks import machine, plots, show
from benchmarks.results import Line

ROOT = Path(__file__).resolve().parent.parent
TCP: Mapping[str, str] = {"UCX_TLS": "tcp"}


class Job(NamedTuple):
    """A section, and what UCX is told."""

    section: str
    environment: Mapping[str, str] = {}

    @property
    def name(self) -> str:
        """As it is printed."""
        return " ".join([self.section, *(f"{k}={v}" for k, v in self.environment.items())])


JOBS = (
    Job("reads"),
    Job("reads", TCP),
    Job("crowd"),
    Job("crowd", TCP),
    Job("others", TCP),
    Job("resolving"),
    Job("models"),
    Job("lasting"),
)


def measure(jobs: Sequence[Job], share: float, console: Console) -> dict[str, Any]:
    """Run every job; raises SystemExit where one fails."""
    rows: dict[str, list[dict[str, Any]]] = {}
    lines: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    for job in jobs:
        began = time.monotonic()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, "-m", "benchmarks.one", job.section, "--share", str(share), "--out", file.name]
            with console.status(job.name):
                done = subprocess.run(command, cwd=ROOT, env={**os.environ, **job.environment})
            if done.returncode != 0:
                raise SystemExit(f"{job.name}: failed with status {done.returncode}")
            found = json.loads(Path(file.name).read_text(encoding="utf-8"))
        for kind, more in found["rows"].items():
            rows.setdefault(kind, []).extend(more)
        lines += found["lines"]
        seconds[job.name] = round(time.monotonic() - began, 1)
        console.print(f"{job.name}: {seconds[job.name]} s", style="dim")
    return {"machine": machine.facts(), "share": share, "seconds": seconds, "lines": lines, "rows": rows}


def main() -> int:
    """Command line; the status is 1 where a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted({job.section for job in JOBS})
    parser.add_argument("--only", action="append", choices=names, help="this section; may be given again")
    parser.add_argument("--share", type=float, default=1.0, help="of the rounds, for trying out")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--docs", action="store_true", help="write docs/performance.md and its pictures")
    parser.add_argument("--show", type=Path, help="print and plot this results.json instead of measuring")
    chosen = parser.parse_args()
    console = Console()
    if chosen.show is not None:
        results = json.loads(chosen.show.read_text(encoding="utf-8"))
    else:
        results = measure([j for j in JOBS if not chosen.only or j.section in chosen.only], chosen.share, console)
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    lines = [Line(**{**line, "spread": line["spread"] and tuple(line["spread"])}) for line in results["lines"]]
    show.tables(results, lines, console)
    list(plots.draw(results, ROOT / "docs" / "images" if chosen.docs else chosen.out))
    if chosen.docs:
        show.page(results, lines, ROOT / "docs" / "performance.md")
    total = sum(results["seconds"].values())
    broken = [line for line in lines if not line.holds]
    console.print(f"{len(lines) - len(broken)} of {len(lines)} lines hold; {total:.0f} s; {chosen.out}/results.json")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
