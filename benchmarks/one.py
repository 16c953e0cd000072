"""One section in a process of its own: ``python -m benchmarks.one reads --share 0.2 --out FILE``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path

from benchmarks.results import Effort


def main() -> int:
    """Measure, and write what was found as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    found = importlib.import_module(f"benchmarks.{chosen.section}").run(Effort(chosen.share))
    text = json.dumps({"rows": found.rows, "lines": [dataclasses.asdict(line) for line in found.lines]}, indent=1)
    if chosen.out is None:
        print(text)
    else:
        chosen.out.write_text(text + "\n", encoding="utf-8")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    status = main()
    os._exit(status)  # without destructors: NIXL's can crash where ibverbs-providers is installed
