"""Tables and lines for people: coloured on a terminal, aligned plain text elsewhere."""

from __future__ import annotations

from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

#: The phases of a read, as a transfer tells them, and what each is.
READ_PHASES: Final = {
    "resolve": "block IDs to descriptors",
    "make": "the NIXL request",
    "queue": "waiting for the NIXL thread",
    "open": "OpenRead, until it is answered",
    "post": "inside NIXL's posting call",
    "move": "from then until completion",
}

#: Wide enough for every table, where no terminal says how wide it is.
_PLAIN_WIDTH: Final = 160


def console(stderr: bool = False) -> Console:
    """A console; on anything but a terminal without colour, and wide."""
    found = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=_PLAIN_WIDTH)


def say(out: Console, text: str, style: str = "") -> None:
    """Print one line as it is, however long."""
    out.print(text, style=style or None, markup=False, soft_wrap=True)


def new_table(out: Console, title: str, *columns: str, left: int = 1) -> Table:
    """An empty table; all columns but the first ``left`` hold numbers."""
    plain = not out.is_terminal
    made = Table(
        title=Text(title, no_wrap=True, overflow="ignore") if plain else title,
        title_justify="left",
        title_style="" if plain else "bold",
        box=None if plain else box.SIMPLE_HEAD,
        header_style="" if plain else "bold",
        pad_edge=False,
    )
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i < left else "right", no_wrap=plain)
    return made
