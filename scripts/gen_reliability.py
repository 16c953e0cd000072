"""Write the state tables of kvxfer/core into docs/reliability.md; ``--check`` only compares."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from kvxfer.core import leases, transfers
from scripts.generated import DOCS, main

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


def state_table(transitions: Mapping[tuple[S, E], S], states: type[S], events: type[E]) -> str:
    """States down, events across."""
    head = ["", *(f"`{event.value}`" for event in events)]
    rows = []
    for state in states:
        after = (transitions.get((state, event)) for event in events)
        rows.append([f"**{state.value}**", *("" if a is None else "stays" if a is state else a.value for a in after)])
    lines = [head, ["---"] * len(head), *rows]
    told = "\n".join(f"- `{event.value}`: {meaning}" for event, meaning in meanings(events))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n\n" + told + "\n"


def meanings(events: type[E]) -> list[tuple[E, str]]:
    """What each event is, from the string below it in the source."""
    source = Path(sys.modules[events.__module__].__file__ or "").read_text(encoding="utf-8")
    body = source[source.index(f"class {events.__name__}(") :]
    found = []
    for event in events:
        told = re.search(rf'^    {event.name} = "[^"]*"\n    """(.*?)"""', body, re.MULTILINE | re.DOTALL)
        if told is None:
            raise ValueError(f"nothing is said of {event}")
        found.append((event, " ".join(told.group(1).split())))
    return found


def tables() -> dict[str, str]:
    """The generated sections, by name."""
    return {
        "transfers": state_table(transfers.TRANSITIONS, transfers.State, transfers.Event),
        "leases": state_table(leases.TRANSITIONS, leases.State, leases.Event),
    }


if __name__ == "__main__":
    sys.exit(main(DOCS / "reliability.md", tables(), __doc__))
