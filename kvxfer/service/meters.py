"""Counters, gauges and histograms as plain data, without locks: the event loop writes them, others get copies.

Nothing here knows what is measured (:mod:`kvxfer.service.metrics`) or how it is told (:mod:`kvxfer.web`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

#: The values of a metric's labels, in the order of its specification.
Labels = tuple[str, ...]


class Kind(str, Enum):
    """What a metric is to Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Spec:
    """What a metric is.

    :param name: as it is told, with unit and, for a counter, ``_total``.
    :param labels: names of its labels.
    :param buckets: upper bounds of a histogram, rising, without infinity.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a histogram has seen: how many in each bucket and above the last one, and the sum of all."""

    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with its values, as they were at one moment."""

    spec: Spec
    values: Mapping[Labels, float | Distribution]


class Counter:
    """Counts up, for each combination of label values.

    :param heads: how many of the first labels say whose a series is: what has them in common can be forgotten at once.
    """

    def __init__(self, spec: Spec, heads: int = 0) -> None:
        self.spec: Final = spec
        self.heads: Final = heads
        self._values: dict[Labels, dict[Labels, float]] = {}

    def add(self, labels: Labels, amount: float = 1) -> None:
        """So much more; 0 only makes the series."""
        values = self._values.setdefault(labels[: self.heads], {})
        values[labels] = values.get(labels, 0) + amount

    def forget(self, head: Labels) -> None:
        """Drop every series of this head."""
        self._values.pop(head, None)

    def family(self) -> Family:
        """A copy."""
        return Family(self.spec, {labels: n for values in self._values.values() for labels, n in values.items()})


class Histogram:
    """Counts observations in buckets, for each combination of label values.

    :param heads: as for :class:`Counter`.
    """

    def __init__(self, spec: Spec, heads: int = 0) -> None:
        self.spec: Final = spec
        self.heads: Final = heads
        self._bounds: Final = spec.buckets
        # For each: the buckets, what lies above them, and the sum.
        self._values: dict[Labels, dict[Labels, list[float]]] = {}

    def observe(self, labels: Labels, value: float) -> None:
        """One more."""
        values = self._values.setdefault(labels[: self.heads], {})
        found = values.get(labels)
        if found is None:
            found = values[labels] = [0] * (len(self._bounds) + 1) + [0.0]
        found[bisect_left(self._bounds, value)] += 1
        found[-1] += value

    def forget(self, head: Labels) -> None:
        """Drop every series of this head."""
        self._values.pop(head, None)

    def family(self) -> Family:
        """A copy."""
        return Family(
            self.spec,
            {
                labels: Distribution(tuple(int(n) for n in row[:-1]), row[-1])
                for values in self._values.values()
                for labels, row in values.items()
            },
        )


def gauge(spec: Spec, values: Iterable[tuple[Labels, float]]) -> Family:
    """A gauge as it is now."""
    return Family(spec, dict(values))
