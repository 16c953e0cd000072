"""The model of a demo: found by name or path, and cut to a size that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvxfer.cli.demo.scenario import Choices, Scenario, invalid
from kvxfer.cli.model import find
from kvxfer.core.errors import KvxferError
from kvxfer.models import model_spec, scale_down
from kvxfer.sizes import mib

#: What widths may be divided by where fewer layers are not enough.
_SHRINKS: Final = (1, 2, 4, 8, 16, 32)

Config = dict[str, object]


@dataclass(frozen=True)
class Fitted:
    """A model and its scenario.

    :param note: how it was scaled down; empty where it was not.
    """

    name: str
    config: Config
    scenario: Scenario
    note: str


def fit(model: str, choices: Choices, limit: int) -> Fitted:
    """The scenario of a model whose caches, of both engines, take at most ``limit`` bytes.

    Layers go first, from the end: those that are left are what they were.  But at least half are kept as long as
    dividing the widths helps, since with few layers the groups of a hybrid model are no longer like its own.

    :raises KvxferError: FIELD_INVALID where the model cannot be run so, or cannot be made small enough.
    """
    name, config = find(model, "--model")
    whole = Scenario.of(config, choices)
    if whole.memory <= limit:
        return Fitted(name, config, whole, "")
    spec = model_spec(config)
    firsts: Mapping[str, int] = {layer.kind: layer.index for layer in reversed(spec.layers)}
    fewest = max(firsts.values()) + 1
    half = max(fewest, spec.depth // 2)
    for least, shrink in [*((half, s) for s in _SHRINKS), *((fewest, s) for s in _SHRINKS)]:

        def at(depth: int, shrink: int = shrink) -> tuple[Config, Scenario]:
            scaled = scale_down(config, max_layers=depth, shrink=shrink)
            return scaled, Scenario.of(scaled, choices)

        try:
            depth = _largest(least, spec.depth, lambda depth: at(depth)[1].memory <= limit)
        except KvxferError:
            if shrink == 1:
                raise
            continue  # some width is no multiple of it
        if depth:
            scaled, scenario = at(depth)
            done = [f"the first {depth} of {spec.depth} layers"] if depth < spec.depth else []
            done += [f"head and state sizes divided by {shrink}"] if shrink > 1 else []
            note = f"scaled down: {', '.join(done)} (all of it would need {mib(whole.memory)}, --memory-mib allows "
            return Fitted(name, scaled, scenario, f"{note}{mib(limit)})")
    raise invalid(
        "memory_mib",
        f"{name} with {choices.tokens} tokens cannot be cut to {mib(limit)}; the whole needs {mib(whole.memory)}",
        needed=whole.memory,
    )


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from ``low`` to ``high`` that fits; 0 where none does."""
    if not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
