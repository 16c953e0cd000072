"""The guide's commands can be given, and its table has every check."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kvxfer.cli.main import app
from kvxfer.doctor.checks import CHECKS

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "check-a-machine.md").read_text()
COMMANDS = re.findall(r"^\$ (.*)$", GUIDE, re.M)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_understood(line: str) -> None:
    words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    assert words[0] == "kvxfer"
    commands: Any = getattr(get_command(app), "commands")  # noqa: B009 - click's Group, of whichever click Typer brings
    # Options are parsed, and nothing is run.
    assert commands[words[1]].make_context(words[1], words[2:]).params


def test_the_table_has_every_check() -> None:
    assert re.findall(r"^\| `(\w+)` \|", GUIDE, re.M) == list(CHECKS)
