"""What a section gives back: rows for tables and plots, and lines that say whether a promise holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of any number of values but none."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4))

    @classmethod
    def ratio(cls, ours: Sequence[float], theirs: Sequence[float]) -> Spread:
        """Of what was measured in turn, pair by pair."""
        return cls.of([a / b for a, b in zip(ours, theirs, strict=True)])

    def rounded(self, digits: int = 3) -> list[float]:
        """For JSON."""
        return [round(x, digits) for x in (self.low, self.median, self.high)]


@dataclass(frozen=True)
class Line:
    """A promise, and what was seen.

    :param limit: what is allowed, at most (or at least, where ``least``).
    :param spread: the quartiles, where ``seen`` is a median.
    """

    promise: str
    what: str
    seen: float
    limit: float
    least: bool = False
    unit: str = ""
    spread: tuple[float, float] | None = None

    @classmethod
    def median(cls, promise: str, what: str, seen: Spread, limit: float, **more: Any) -> Line:
        """Of paired measurements."""
        return cls(promise, what, seen.median, limit, spread=(seen.low, seen.high), **more)

    @property
    def holds(self) -> bool:
        """Whether it is kept."""
        return self.seen >= self.limit if self.least else self.seen <= self.limit


@dataclass
class Section:
    """The result of one section.

    :param rows: of one kind each, by name; what tables and plots are made of.
    """

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def add(self, kind: str, **row: Any) -> None:
        """One more row."""
        self.rows.setdefault(kind, []).append(row)


@dataclass(frozen=True)
class Effort:
    """How much is done: ``1.0`` is what the performance page shows, less is for trying out."""

    share: float = 1.0

    def rounds(self, full: int, least: int = 3) -> int:
        """So many of ``full`` rounds."""
        return max(least, round(full * self.share))


def in_turn(what: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 2) -> dict[str, list[T]]:
    """Each of several things once a round, in an order that rotates: whoever comes second finds warmer caches."""
    names = list(what)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seen = what[name]()
            if number >= 0:
                found[name].append(seen)
    return found
