"""Write the table of metrics into docs/reference/metrics.md; ``--check`` only compares."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvxfer.service import gauges
from kvxfer.service.meters import Kind, Spec
from kvxfer.service.metrics import Metrics

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "reference" / "metrics.md"
BEGIN, END = "<!-- metrics: begin -->\n", "<!-- metrics: end -->"


def specs() -> list[Spec]:
    """Everything that a sidecar tells of itself, by kind and name."""
    order = [Kind.COUNTER, Kind.HISTOGRAM, Kind.GAUGE]
    return sorted([*Metrics().specs, *gauges.SPECS], key=lambda spec: (order.index(spec.kind), spec.name))


def table() -> str:
    """One line for each."""
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for spec in specs():
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        lines.append(f"| `{spec.name}` | {spec.kind.value} | {labels} | {spec.help} |")
    return "\n".join(lines) + "\n"


def written(text: str) -> str:
    """The document with the table in it."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = DOCUMENT.read_text(encoding="utf-8")
    new = written(text)
    if options.check:
        if new != text:
            print(f"{DOCUMENT.name} is not what {Path(__file__).name} writes", file=sys.stderr)
        return int(new != text)
    DOCUMENT.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
