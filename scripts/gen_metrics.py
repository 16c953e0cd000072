"""Write the table of metrics into docs/reference/metrics.md; ``--check`` only compares."""

from __future__ import annotations

import sys

from kvxfer.service import gauges
from kvxfer.service.meters import Kind, Spec
from kvxfer.service.metrics import Metrics
from scripts.generated import DOCS, main


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


if __name__ == "__main__":
    sys.exit(main(DOCS / "reference" / "metrics.md", {"metrics": table()}, __doc__))
