"""Findings for people: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvxfer.doctor.findings import Finding, Status

_STYLES: Final = {Status.OK: "green", Status.UNKNOWN: "cyan", Status.WARNING: "yellow", Status.ERROR: "bold red"}


@contextlib.contextmanager
def progress(checks: int) -> Iterator[Callable[[str], None]]:
    """Says on a terminal which check is running; yields what is to be told the name of each."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    done = 0
    with console.status("") as line:

        def step(name: str) -> None:
            nonlocal done
            done += 1
            line.update(f"{done} of {checks}: {name}")

        yield step


def show(findings: Sequence[Finding]) -> None:
    """Print everything, and a line that sums it up."""
    out = Console(highlight=False)
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    summary = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    if not out.is_terminal:
        for finding in findings:
            out.out("\n".join(_lines(finding)))
        out.out(f"\n{summary}")
        return
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("status", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("what, why it matters, what to do", overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.status.value, _STYLES[finding.status]), finding.check, _text(finding))
    out.print(table)
    out.print(summary, markup=False)


def _lines(finding: Finding) -> list[str]:
    lines = [f"{finding.status.value:<8} {finding.check:<11} {finding.what}"]
    indent = " " * 21
    if finding.why:
        lines.append(f"{indent}why: {finding.why}")
    if finding.todo:
        lines.append(f"{indent}do:  {finding.todo}")
    return lines


def _text(finding: Finding) -> Text:
    text = Text(finding.what)
    if finding.why:
        text.append(f"\n{finding.why}", "dim")
    if finding.todo:
        text.append(f"\n→ {finding.todo}")
    return text
