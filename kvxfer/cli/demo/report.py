"""The result for people: tables, colours and a progress bar on a terminal, aligned plain text elsewhere."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from kvxfer.cli.demo.result import GroupResult, Page, Result
from kvxfer.cli.fitting import put
from kvxfer.cli.tables import READ_PHASES, console, new_table, say
from kvxfer.sizes import counted, mib

#: Phases of a read that are over before it begins.
_PREPARED: Final = ("resolve", "make")
#: The phases in the order in which they are told, with what they are; those of a read below the call that they are of.
_PHASES: Final = {
    "start": "processes up, memory filled",
    "fill": "of that, filling memory (slowest rank)",
    "register": "RegisterCache",
    "publish": "PublishBlocks",
    "handshake": "Handshake: peers met, plans compiled, lists prepared",
    "prepare": "PrepareTransfer, the whole call",
    **{phase: what for phase, what in READ_PHASES.items() if phase in _PREPARED},
    "read": "ReadBlocks on all ranks at once",
    **{phase: what for phase, what in READ_PHASES.items() if phase not in _PREPARED},
    "verify": "comparing every byte",
}
#: Columns that a narrow terminal does without.
_SPARE: Final = ("rows", "merged", "NIXL says", "GB/s")


class Reporter:
    """Progress on standard error: a bar on a terminal, else a line a phase unless ``quiet``.  A context manager."""

    def __init__(self, quiet: bool) -> None:
        self._console: Final = console(stderr=True)
        self._quiet: Final = quiet
        self._bar: Final = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """No more progress."""
        self._bar.stop()

    def phase(self, what: str, steps: int) -> None:
        """A phase of so many steps begins."""
        if self._console.is_terminal:
            self._bar.reset(self._task, description=what, total=steps)
        elif not self._quiet:
            self._console.print(what, markup=False)

    def step(self) -> None:
        """One of them is done."""
        self._bar.advance(self._task)


def show(result: Result, notes: Sequence[str]) -> None:
    """Print everything."""
    out = console()
    choices = result.choices
    out.print()
    skip = f" (the first {choices.skip:,} are there already)" if choices.skip else ""
    say(out, f"{result.model}: {choices.tokens:,} tokens{skip}, P with TP {choices.p_tp} -> D with TP {choices.d_tp}")
    say(
        out,
        f"NIXL {result.nixl}, UCX {result.ucx}; caches of {mib(result.p_memory)} on P and {mib(result.d_memory)} on D",
    )
    for note in (result.scaled, *notes, *(f"warning: {w}" for w in _together(result.warnings))):
        if note:
            say(out, note, "yellow")
    for table in (_groups(out, result.groups), _ranks(out, result), _phases(out, result)):
        out.print()
        put(out, table, _SPARE)
    out.print()
    moved = result.bytes
    pages = sum(r.pages for r in result.ranks)
    say(out, f"{moved:,} bytes in {result.phases['read'] * 1e3:.1f} ms: {result.rate / 1e9:.2f} GB/s over all ranks")
    less = f"{pages - moved:,} bytes less than whole pages ({moved / pages:.1%} of them)"
    say(out, less if pages > moved else "as many bytes as in whole pages: these have no padding")
    for problem in result.problems:
        say(out, problem, "bold red")
    if result.problems:
        say(out, "the demo FAILED", "bold red")
    else:
        say(
            out,
            f"every byte verified: {result.verified:,} bytes on {counted(len(result.ranks), 'D rank')}",
            "bold green",
        )


def show_by_hand(result: Result) -> None:
    """What to try while everything runs."""
    import json

    out = sys.stdout
    out.write("\nEverything is left running.  Sockets, and their directory:\n")
    for name, path in result.by_hand["sockets"].items():
        out.write(f"  {name}  {path}\n")
    out.write(f"  DIR={shlex.quote(result.by_hand['directory'])}\n")
    out.write(f"\nA ticket of P's blocks:\n{json.dumps(result.by_hand['ticket'])}\n\n{_try()}:\n")
    for command in result.by_hand["commands"]:
        out.write(f"  {command}\n")
    for name, address in result.by_hand["metrics"].items():
        out.write(f"  curl -s {address}  # {name}\n")
    if not result.by_hand["metrics"]:
        out.write("(with --http-port 9100 they serve metrics, too)\n")
    out.write("\nEnter or Ctrl-C ends it all.\n")
    out.flush()


def _try() -> str:
    """What to do before commands can be pasted into another terminal, which knows nothing of this environment."""
    words = "Try"
    if shutil.which("kvxfer") is None and sys.prefix != sys.base_prefix:
        words += f", after source {shlex.quote(sys.prefix)}/bin/activate"
    here = os.pathsep.join((os.environ.get("PATH", os.defpath), f"{sys.prefix}/bin"))
    return words if shutil.which("grpcurl", path=here) else f"{words} (grpcurl comes with make setup)"


def _together(warnings: Sequence[str]) -> list[str]:
    """One of those that say the same of other groups and sources, and how many there are."""
    found: dict[str, list[str]] = {}
    for warning in warnings:
        who, _, what = warning.partition(": ")
        found.setdefault(what, []).append(who)
    return [
        f"{all_[0]}{f' (and {len(all_) - 1} more like it)' if len(all_) > 1 else ''}: {what}"
        for what, all_ in found.items()
    ]


def _groups(out: Console, groups: Sequence[GroupResult]) -> Table:
    titles = ("group", "kind", "layers", "P block", "P page", "P data", "D block", "D page", "D data")
    table = new_table(out, "Cache groups (bytes of one layer's block on one rank)", *titles, left=2)
    for group in groups:
        cells = [cell for page in (group.p, group.d) for cell in (_block(page), f"{page.page:,}", f"{page.data:,}")]
        table.add_row(group.name, group.kind, str(group.layers), *cells)
    return table


def _block(page: Page) -> str:
    if not page.block_tokens:
        return "snapshot"
    return f"{page.block_tokens:,} tok" + (
        f" ({page.ratio} x {page.block_tokens // page.ratio})" if page.ratio > 1 else ""
    )


def _ranks(out: Console, result: Result) -> Table:
    titles = ("D rank", "reads from", "rows", "descriptors", "merged", "bytes", "optimum", "NIXL says", "whole pages")
    table = new_table(out, "Reads (bytes)", *titles, "ms", "GB/s", "verified", left=2)
    for rank in result.ranks:
        reported = "-" if rank.reported is None else f"{rank.reported:,}"
        table.add_row(
            f"tp{rank.rank}",
            ", ".join(f"P tp{source}" for source in rank.sources),
            f"{rank.rows:,}",
            f"{rank.descriptors:,}",
            f"{rank.merged:,}",
            f"{rank.bytes:,}",
            f"{rank.least:,}",
            reported,
            f"{rank.pages:,}",
            f"{rank.seconds * 1e3:.1f}",
            f"{rank.bytes / rank.seconds / 1e9:.2f}",
            "FAILED" if rank.problems else f"{rank.verified:,}",
        )
    return table


def _phases(out: Console, result: Result) -> Table:
    table = new_table(out, "Time (the slowest rank's)", "phase", "what", "ms", left=2)
    for phase, what in _PHASES.items():
        indent = "  " if phase in READ_PHASES else ""
        table.add_row(indent + phase, what, f"{result.phases[phase] * 1e3:,.1f}")
    return table
