"""docs/reliability.md says what the code does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvxfer.core import leases, transfers
from tests.chaos.report import Row, fault_table, section, with_section

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")


def cells(name: str) -> dict[tuple[str, str], str]:
    """A state table as it is read: (state, event) -> what is in the cell."""
    lines = [line.strip("| ").split("|") for line in section(TEXT, name).splitlines() if line.startswith("|")]
    head = [cell for raw in lines[0] if (cell := raw.strip(" `"))]
    found = {}
    for line in lines[2:]:
        state, *after = (cell.strip(" *") for cell in line)
        after += [""] * (len(head) - len(after))  # empty cells at the end of a line
        found.update({(state, event): cell for event, cell in zip(head, after, strict=False)})
    return found


@pytest.mark.parametrize("core", [transfers, leases], ids=["transfers", "leases"])
def test_the_state_tables_are_those_of_the_code(core: ModuleType) -> None:
    told = cells(core.__name__.rpartition(".")[2])
    for state in core.State:
        for event in core.Event:
            after = core.TRANSITIONS.get((state, event))
            expected = "" if after is None else "stays" if after is state else after.value
            assert told[state.value, event.value] == expected, (state, event)
    assert len(told) == len(core.State) * len(core.Event)


def test_the_script_has_nothing_to_write() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gen_reliability.py"), "--check"]
    subprocess.run(command, check=True, timeout=60, cwd=ROOT)


@pytest.mark.parametrize("name", ["processes", "network", "soak"])
def test_what_was_seen_is_told(name: str) -> None:
    assert section(TEXT, name).count("\n| ") >= 10


def test_a_section_is_replaced_and_nothing_else() -> None:
    row = Row("kill -9", "open", "PEER_LOST", 0.1, "GONE", 0.0)
    text = with_section("a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n", "x", fault_table([row]))
    assert text.startswith("a\n<!-- x: begin -->\n| fault |")
    assert text.endswith("\n<!-- x: end -->\nb\n")
    assert section(text, "x") == fault_table([row])
    with pytest.raises(ValueError, match="section y"):
        section(text, "y")
