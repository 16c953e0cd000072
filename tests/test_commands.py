"""What the Makefile and the README tell people to run exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from kvxfer.cli.main import app

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("file", ["Makefile", "README.md"])
def test_every_kvxfer_command_exists(file: str) -> None:
    told = re.findall(r"^[\t$` ]*(?:\$\(BIN\)/)?kvxfer ([a-z-]+)", (ROOT / file).read_text(), re.M)
    known = getattr(get_command(app), "commands")  # noqa: B009 - click's Group, of whichever click Typer brings
    assert told
    assert set(told) <= set(known)


def test_every_script_that_make_runs_exists() -> None:
    scripts = re.findall(r"^\t\$\(\w+\)(?:/bin)?/python (\S+\.py)", (ROOT / "Makefile").read_text(), re.M)
    assert "benchmarks/read_blocks.py" in scripts
    assert all((ROOT / script).is_file() for script in scripts)


def test_the_readme_makes_the_directory_that_its_example_uses() -> None:
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")  # commands may go over several lines
    commands = [shlex.split(line[2:]) for line in re.findall(r"^\$ .*", text, re.M)]
    made = {c[-1] for c in commands if c[0] == "mkdir"}
    served = {c[c.index("--memory-directory") + 1] for c in commands if "--memory-directory" in c}
    used = {str(Path(p).parent) for p in re.findall(r'create_file\(f"([^"]+)"', text)}
    assert used <= served <= made
