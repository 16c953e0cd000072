"""A long run of the truth test over both cores: ``python -m tests.property.soak --seed 1 --count 100000``.

The same worlds are made from a seed and a count on every machine.  A failure is made small and printed as a recipe that
the test takes as an example.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

from tests.property.test_truth import check_world
from tests.property.worlds import CHOICES, Recipe

BATCH = 250


def fails(recipe: bytes) -> str:
    """What goes wrong in the world that ``recipe`` spells; empty where nothing does."""
    try:
        check_world(recipe)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return f"{type(error).__name__}: {error}"
    return ""


def run_batch(seed: int, batch: int, size: int) -> list[bytes]:
    """The recipes of one batch that fail."""
    source = random.Random(f"{seed}/{batch}")
    return [r for r in (source.randbytes(CHOICES) for _ in range(size)) if fails(r)]


def smaller(recipe: bytes) -> Iterator[bytes]:
    """Recipes that are plainer than ``recipe``."""
    end = len(recipe.rstrip(bytes(1)))
    width = end
    while width:
        for at in range(0, end, width):
            yield recipe[:at] + bytes(len(recipe[at : at + width])) + recipe[at + width :]
        width //= 2
    for at in range(end):
        for value in {recipe[at] // 2, max(recipe[at] - 1, 0)} - {recipe[at]}:
            yield recipe[:at] + bytes([value]) + recipe[at + 1 :]


def minimal(recipe: bytes, is_bad: Callable[[bytes], object]) -> bytes:
    """The plainest recipe that still fails, as far as a greedy search finds it."""
    while (found := next((r for r in smaller(recipe) if r != recipe and is_bad(r)), None)) is not None:
        recipe = found
    return recipe


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    sizes = [min(BATCH, options.count - at) for at in range(0, options.count, BATCH)]
    started, done = time.monotonic(), 0
    bad: list[bytes] = []
    with ProcessPoolExecutor(options.workers) as pool:
        results = pool.map(run_batch, [options.seed] * len(sizes), range(len(sizes)), sizes)
        for size, found in zip(sizes, results, strict=True):
            done += size
            bad.extend(found)
            if sys.stderr.isatty():
                print(f"\r{done} worlds, {len(bad)} failures", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    print(f"\nseed {options.seed}: {done} worlds, {len(bad)} failures, {seconds:.0f} s, {options.workers} workers")
    for recipe in bad[:3]:
        small = minimal(recipe, fails)
        print(f"  {fails(small)}\n  {Recipe(small)!r}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
