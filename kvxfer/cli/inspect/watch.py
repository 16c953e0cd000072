"""What is seen of a sidecar in a terminal's height, the most lively first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvxfer.cli.fitting import fit
from kvxfer.cli.inspect.look import View
from kvxfer.cli.inspect.show import Section, coloured, sections

#: Tables from top to bottom; what does not fit is missing at the bottom.
_ORDER: Final = ("transfers", "leases", "peers", "lost", "registrations")
#: What a narrow terminal does without, the first one first.
_SPARE: Final = (
    "incarnation",
    "groups",
    "descriptors",
    "rank",
    "transport",
    "role",
    "age",
    "tokens",
    "engine",
    "address",
)
#: A limit is told of from this part on, or where it has refused anything.
_MUCH: Final = 0.5


@dataclass
class _Shown:
    """A table and how many of its rows there is room for."""

    section: Section
    rows: int

    def table(self, out: Console) -> RenderableType:
        """Without frames; folded and with fewer columns where it is too wide."""
        section, count = self.section, len(self.section.rows)
        title = section.title if self.rows == count else f"{section.title} ({self.rows} of {count})"
        made = Table(
            title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False
        )
        for column in section.columns:
            made.add_column(column, justify="right" if column in section.numbers else "left", overflow="fold")
        for row in section.rows[: self.rows]:
            made.add_row(*(coloured(cell) for cell in row))
        return fit(out, made, _SPARE, break_words=True) or made


def screen(out: Console, view: View, only: Sequence[str] = (), gone: str = "") -> Group:
    """No more lines than ``out`` is high; the last one tells how many are missing.

    :param only: tables that were asked for, in this order; else those that have rows, with what counts and limits
        have to tell.
    :param gone: why there is nothing newer.
    """
    known = {section.name: section for section in sections(view)}
    shown = [_Shown(known[n], min(len(known[n].rows), out.height)) for n in only or _ORDER if known[n].rows]
    heads: list[RenderableType] = [Text(f"the sidecar is {gone}", style="bold red")] if gone else []
    heads.append(_status(known["sidecar"]))
    tails = [] if only else [text for text in (_counts(view), _limits(view)) if text.plain]
    missing = sum(len(s.section.rows) - s.rows for s in shown)
    while True:
        body: list[RenderableType] = [x for s in shown for x in (Text(""), s.table(out))]
        body += [Text(""), *tails] if tails else []
        end: list[RenderableType] = [_missing(missing)] if missing else []
        group = Group(*heads, *body, *end)
        over = len(out.render_lines(group, out.options.update(height=None))) - out.height
        if over <= 0 or not (shown or tails):
            return group
        longest = max(shown, key=lambda s: s.rows, default=None)
        if longest is not None and longest.rows > 1:
            second = sorted(s.rows for s in shown)[-2:][0] if len(shown) > 1 else 1
            fewer = max(1, min(over, longest.rows - second, longest.rows - 1))
            longest.rows -= fewer
            missing += fewer
        elif tails:
            tails.pop()
            missing += 1
        else:
            missing += shown.pop().rows


def _missing(count: int) -> Text:
    lines = "1 line is" if count == 1 else f"{count} lines are"
    return Text(f"{lines} not shown: see --only {','.join(_ORDER[:2])},..., or leave out --watch", style="dim")


def _status(sidecar: Section) -> Text:
    (row,) = sidecar.rows
    told = dict(zip(sidecar.columns, row, strict=True))
    state = told.pop("state")
    return Text.assemble(coloured(state), ", ", ", ".join(f"{what} {value}" for what, value in told.items()))


def _counts(view: View) -> Text:
    (section,) = (s for s in sections(view) if s.name == "counts")
    told = [f"{what} {count}" for what, count in section.rows if count not in ("0", "0 B")]
    return Text.assemble(("Counts: ", "bold"), ", ".join(told)) if told else Text()


def _limits(view: View) -> Text:
    much = {x.name for x in view.status.limits if x.refused or (x.value and x.used >= _MUCH * x.value)}
    (section,) = (s for s in sections(view) if s.name == "limits")
    told = [
        f"{name} {used} of {value}, {refused} refused" for name, value, used, _, refused in section.rows if name in much
    ]
    return Text.assemble(("Limits: ", "bold"), "; ".join(told)) if told else Text()
