"""The table of what was seen, for docs/reliability.md.  KVXFER_CHAOS_REPORT names the file to write it into."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Sections of the document that are written by programs lie between a pair of these.
_MARK = "<!-- {name}: {edge} -->"


@dataclass(frozen=True)
class Row:
    """One fault.

    :param saw: what the survivor's callers were told, in words.
    :param after: seconds from the fault.
    :param lease: how P's lease ended.
    :param third: seconds that a read by or from somebody else took while the fault lasted.
    :param remark: what else is worth a word.
    """

    what: str
    phase: str
    saw: str
    after: float
    lease: str
    third: float
    remark: str = ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def fault_table(rows: Iterable[Row]) -> str:
    """Fault, phase, what the survivor saw, after how long."""
    head = ("fault", "phase", "what the survivor saw", "after", "P's lease", "a third was served in", "remark")
    return table(
        head,
        (
            (r.what, r.phase, r.saw, f"{r.after:.2f} s", r.lease, f"{r.third:.2f} s" if r.third else "", r.remark)
            for r in rows
        ),
    )


def section(text: str, name: str) -> str:
    """What a section of the document says."""
    begin, end = (re.escape(_MARK.format(name=name, edge=edge)) for edge in ("begin", "end"))
    found = re.search(rf"{begin}\n(.*?){end}", text, re.DOTALL)
    if found is None:
        raise ValueError(f"the document has no section {name}")
    return found.group(1)


def with_section(text: str, name: str, content: str) -> str:
    """The document with a section replaced."""
    section(text, name)
    begin, end = (_MARK.format(name=name, edge=edge) for edge in ("begin", "end"))
    head, rest = text.split(begin + "\n", 1)
    return f"{head}{begin}\n{content}{end}{rest.split(end, 1)[1]}"


def write_section(path: Path, name: str, content: str) -> None:
    """Replace a section of a file."""
    path.write_text(with_section(path.read_text(encoding="utf-8"), name, content), encoding="utf-8")
