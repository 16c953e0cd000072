"""From which P rank to read what several of them hold.

The fewest source ranks win: each costs a connection, a descriptor list and a completion.  Among equally few, the rank
at the same relative place as the reader is preferred (``floor(d_rank * P / D)``), then the next ones after it, so that
different readers spread over the holders.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations
from math import comb
from typing import Final

from kvxfer.core.layout import Rank

#: Most combinations to try for an exact minimum; past it the choice is greedy (at most a logarithm worse).
EXACT_LIMIT: Final = 20_000


def preference(reader: Rank, holders: Sequence[Rank]) -> list[int]:
    """Indices of ``holders`` from the most to the least preferred for ``reader``."""

    def key(i: int) -> tuple[int, int]:
        holder = holders[i]
        aligned = reader.tp_rank * holder.tp_size // reader.tp_size
        return (holder.tp_rank - aligned) % holder.tp_size, holder.pp_rank

    return sorted(range(len(holders)), key=key)


def fewest(wanted: Iterable[frozenset[int]], order: Sequence[int]) -> frozenset[int]:
    """The smallest set of indices that hits every set of ``wanted``, the earliest in ``order`` among equals.

    :param wanted: for each thing to be read, the (non-empty) set of ranks that hold it.
    :param order: all indices, most preferred first.
    """
    sets = set(wanted)
    chosen = frozenset(next(iter(s)) for s in sets if len(s) == 1)
    open_sets = [s for s in sets if not s & chosen]
    if not open_sets:
        return chosen
    useful = [i for i in order if any(i in s for s in open_sets)]
    for size in range(1, len(open_sets) + 1):
        if comb(len(useful), size) > EXACT_LIMIT:
            break
        for candidate in combinations(useful, size):
            picked = frozenset(candidate)
            if all(s & picked for s in open_sets):
                return chosen | picked
    return chosen | _greedy(open_sets, useful)


def _greedy(open_sets: Collection[frozenset[int]], useful: Sequence[int]) -> frozenset[int]:
    left = list(open_sets)
    picked: set[int] = set()
    while left:
        best = max(useful, key=lambda i: sum(i in s for s in left))  # max keeps the first, the most preferred
        picked.add(best)
        left = [s for s in left if best not in s]
    return frozenset(picked)
