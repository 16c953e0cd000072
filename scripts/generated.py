"""Sections of documents that programs write, each between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def written(text: str, sections: Mapping[str, str]) -> str:
    """The document with the sections in it.

    :raises ValueError: where a section's marks are not there once each.
    """
    for name, content in sections.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"the document has no section {name}, or more than one")
        head, rest = text.split(begin)
        text = head + begin + content + end + rest.split(end)[1]
    return text


def main(document: Path, sections: Mapping[str, str], about: str | None) -> int:
    """Write the sections into a document, or with ``--check`` only compare.

    :returns: the exit status: 1 where the document is not what would be written.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = document.read_text(encoding="utf-8")
    new = written(text, sections)
    if options.check:
        if new != text:
            print(f"{document.name} is not what {Path(sys.argv[0]).name} writes", file=sys.stderr)
        return int(new != text)
    document.write_text(new, encoding="utf-8")
    return 0
