"""Pieces of Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def escaped(text: str) -> str:
    """Text of people, in which nothing is meant to be markup."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are Markdown, each of one line.  Bars are escaped, also in code."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in line) + " |" for line in lines)
