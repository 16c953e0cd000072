"""Tables on a terminal of any width: whatever is said of a number or a name is said in full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

#: As wide as any line may become.
_ENDLESS: Final = 10_000


def put(out: Console, table: Table, spare: Sequence[str] = ()) -> None:
    """Print a table.  On a terminal that is too narrow it folds headers and texts between words, then leaves out
    columns; where that is not enough it is printed as it is elsewhere, in lines that the terminal breaks.

    :param spare: titles of columns to leave out, the first one first.
    """
    found = fit(out, table, spare) if out.is_terminal else None
    if found is not None:
        out.print(found)
        return
    width = out.width
    try:
        out.width = _ENDLESS
        out.print(_copy(table, frozenset(), box=False))
    finally:
        out.width = width


def fit(out: Console, table: Table, spare: Sequence[str] = (), break_words: bool = False) -> Table | None:
    """The table for the width of ``out``, or None where that is too little; no cell is cut.

    :param break_words: rather break texts within words than be None; numbers (columns to the right) are not broken.
    """
    for count in range(len(spare) + 1):
        found = _copy(table, frozenset(spare[:count]))
        if _narrow(out, found, break_words=False):
            return found
    return found if break_words and _narrow(out, found, break_words=True) else None


def _copy(table: Table, without: frozenset[str], box: bool = True) -> Table:
    """As it is, but for some columns; texts are no markup."""
    made = Table(
        title=table.title,
        title_justify=table.title_justify,
        title_style=table.title_style,
        box=table.box if box else None,
        header_style=table.header_style,
        padding=table.padding,
        pad_edge=table.pad_edge,
    )
    kept = [column for column in table.columns if str(column.header) not in without]
    for column in kept:
        made.add_column(Text(str(column.header)), justify=column.justify, no_wrap=not box, overflow="fold")
    for cells in zip(*(column.cells for column in kept), strict=True):
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells))
    return made


def _narrow(out: Console, table: Table, break_words: bool) -> bool:
    """Give every column a width with which the table fits; False where there are none."""
    natural, least = [], []
    for column in table.columns:
        texts = [str(cell) for cell in column.cells]
        title = _longest_word([str(column.header)])
        content = max((len(text) for text in texts), default=0)
        folded = content if column.justify == "right" else 1 if break_words else _longest_word(texts)
        natural.append(max(title, content))
        least.append(max(title, folded))
        # The header may stand on one line where there is room.
        column.width = max(len(str(column.header)), content)
    if (over := _width(out, table) - out.width) <= 0:
        return True
    for column, width in zip(table.columns, natural, strict=True):
        over -= (column.width or 0) - width
        column.width = width
    while over > 0:
        i = max(range(len(least)), key=lambda i: (natural[i] - least[i] > 0, natural[i]))
        if natural[i] <= least[i]:
            return False
        natural[i] -= 1
        over -= 1
        table.columns[i].width = natural[i]
    return True


def _longest_word(texts: Sequence[str]) -> int:
    return max((len(word) for text in texts for word in text.split()), default=0)


def _width(out: Console, table: Table) -> int:
    return Measurement.get(out, out.options.update(width=_ENDLESS), table).maximum
