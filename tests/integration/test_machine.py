"""The commands of docs/how-to/check-a-machine.md, on this machine; with fewer rounds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import console
from tests.support.console import ROOT

PAGE = ROOT / "docs" / "how-to" / "check-a-machine.md"
COMMANDS = [c.text for c in console.commands(PAGE) if c.mark == "run by tests/integration/test_machine.py"]


def test_both_commands_are_shown() -> None:
    assert {text.split("kvxfer ")[1].split()[0] for text in COMMANDS} == {"doctor", "bench"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page(command: str, tmp_path: Path) -> None:
    # doctor may find something wrong with a machine, which is 1; nonsense would be 2.
    fewer = re.sub(r"--rounds \d+", "--rounds 2", command)
    (output,) = console.run([f"{fewer} || [ $? -eq 1 ]" if "doctor" in command else fewer], tmp_path)
    assert output.strip()
