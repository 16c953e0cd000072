"""What came of it, as data and for people."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvxfer.cli.bench.case import Case
from kvxfer.cli.fitting import put
from kvxfer.cli.tables import READ_PHASES, console

PHASES: Final = {**READ_PHASES, "total": "in the sidecar"}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile, interpolated; of one value, itself."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


@dataclass(frozen=True)
class Outcome:
    """What was measured.

    :param seconds: of each ReadBlocks call as its caller sees it.
    :param phases: of each, what the sidecar says of itself, seconds.
    :param wrong: blocks that were not what they must be, in the rounds that were verified.
    """

    case: Case
    transports: Sequence[str]
    versions: Mapping[str, str]
    descriptors: int
    seconds: Sequence[float]
    phases: Sequence[Mapping[str, float]]
    verified: Sequence[int]
    wrong: int
    warnings: Sequence[str]

    def json(self) -> dict[str, Any]:
        """Everything, for machines."""
        low, middle, high = quartiles(self.seconds)
        return {
            "ok": self.wrong == 0,
            "bytes": self.case.bytes,
            "block": self.case.block,
            "layers": self.case.layers,
            "order": "scrambled" if self.case.scrambled else "contiguous",
            "descriptors": self.descriptors,
            "transports": list(self.transports),
            **self.versions,
            "rounds": len(self.seconds),
            "seconds": {"lower_quartile": low, "median": middle, "upper_quartile": high},
            "bytes_per_s": self.case.bytes / middle,
            "phases": {name: statistics.median(found) for name in PHASES if (found := self._of(name))},
            "verified_rounds": list(self.verified),
            "wrong_blocks": self.wrong,
            "warnings": list(self.warnings),
        }

    def _of(self, phase: str) -> list[float]:
        return [round_[phase] for round_ in self.phases if phase in round_]


def bar(quiet: bool) -> Progress:
    """A progress bar on standard error, where that is a terminal."""
    out = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=out, transient=True, disable=quiet or not out.is_terminal)


def show(outcome: Outcome) -> None:
    """Print it."""
    out, told = console(), outcome.json()
    plain = not out.is_terminal
    out.print(
        f"{told['bytes']:,} bytes a read: {told['descriptors']:,} blocks of {told['block']:,} bytes, {told['order']}; "
        f"NIXL {told['nixl']}, UCX {told['ucx']}, {', '.join(told['transports'])}",
        markup=False,
        soft_wrap=True,
    )
    for text in outcome.warnings:
        out.print(f"warning: {text}", markup=False, soft_wrap=True, style="yellow")
    table = Table(box=None, pad_edge=False, show_header=True, header_style="" if plain else "bold")
    for title in ("", "lower quartile", "median", "upper quartile"):
        table.add_column(title, justify="left" if not title else "right", no_wrap=True)
    times = quartiles(outcome.seconds)
    table.add_row("ReadBlocks, ms", *(f"{value * 1e3:.3f}" for value in times))
    table.add_row("GB/s", *(f"{outcome.case.bytes / value / 1e9:.2f}" for value in times))
    for name, median in told["phases"].items():
        table.add_row(f"  {name}: {PHASES[name]}, ms", "", f"{median * 1e3:.3f}", "")
    put(out, table)
    rounds = " and ".join(str(number + 1) for number in outcome.verified)
    if outcome.wrong:
        out.print(f"{outcome.wrong:,} blocks are WRONG (rounds {rounds} of {told['rounds']})", style="bold red")
    else:
        out.print(f"{told['rounds']} rounds; every byte verified in rounds {rounds}", style="bold green")
