"""What the Makefile and the documentation tell people to run exists, and is run by a test.

A page says by a comment who runs the commands below it, until the next comment:

    <!-- console: run by tests/integration/test_grpcurl.py -->     that test takes them from this page
    <!-- console: not run: starts containers -->                   nobody does; a reason of REASONS

Where no comment stands, they are run here, all of a page in one shell, in an empty directory in which the top of the
repository can be seen.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvxfer.config import Settings
from scripts.reference.cli import commands as cli_commands
from scripts.reference.cli import examples
from tests.support import console
from tests.support.console import ROOT, Command

#: Why a command is run by no test.  Whoever adds one says why it cannot be.
REASONS = {
    "changes the shell": "it is for the shell of a person",
    "installs software": "setup and the test of the wheel do the same",
    "is the test suite": "it is what runs this",
    "changes the checkout": "each is a step of a developer; what it writes is compared by a test",
    "takes minutes": "the full suites, of which make test runs a part",
    "starts containers": "make containers does, where there is an engine for them",
    "needs a cluster": "manifests are validated by tests of their own",
    "needs other hosts": "names and addresses of somebody's network",
}

#: What is the same wherever it stands, whatever the page says.
KNOWN = (
    (r"make demo\b", "run by tests/cli/test_demo.py"),
    (r"make (test|pytest|lint|types|docs|wheel|proto-check|containers|engines|bench)\b", "not run: is the test suite"),
    (r"make (setup|format|proto|proto-baseline|clean)\b", "not run: changes the checkout"),
    (r"make help\b", "run by tests/test_commands.py"),
    (r"(docker|podman)\b", "not run: starts containers"),
    (r"kubectl\b", "not run: needs a cluster"),
    (r"(pip|apt|apt-get) ", "not run: installs software"),
    (r"source ", "not run: changes the shell"),
)

ALL = [command for page in console.pages() for command in console.commands(page)]
ELSEWHERE = re.compile(r"run by (?P<test>tests/\S+\.py)")
NOT_RUN = re.compile(r"not run: (?P<reason>.+)")


def mark(command: Command) -> str:
    """Who runs it, or why nobody does; empty: this module."""
    return next((known for pattern, known in KNOWN if re.match(pattern, command.text)), command.mark)


MARKS = sorted({mark(c) for c in ALL} - {""})
HERE = {
    page: texts
    for page in sorted({c.page for c in ALL})
    if (texts := [c.text for c in ALL if c.page == page and not mark(c)])
}


def kvxfer_arguments(text: str) -> list[list[str]]:
    """The arguments of every `kvxfer` in a command line; an image of that name is no command."""
    if re.match(r"(docker|podman)\b", text):
        return []
    words = shlex.split(text.replace(";", " ; "), comments=True)
    found: list[list[str]] = []
    inside = False
    for word in words:
        if word in ("|", "||", "&&", "&", ";", ">", "2>", "<", ">>", "2>&1"):
            inside = False
        elif word == "kvxfer" and not inside:
            inside = True
            found.append([])
        elif inside:
            found[-1].append(word)
    return found


# -- the pages ----------------------------------------------------------------------------------


def test_commands_stand_in_console_blocks_only() -> None:
    for page in console.pages():
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"^ *```(?:bash|sh|shell|zsh)\b", text, re.MULTILINE), f"{page}: take ```console"
        outside = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"^ {4}(?:\$ |make |kvxfer |\.venv/)", outside, re.MULTILINE), f"{page}: take ```console"
    assert {c.page for c in ALL} >= {"README.md", "CONTRIBUTING.md", "clients/grpcurl/README.md"}


@pytest.mark.parametrize("told", MARKS)
def test_every_mark_means_something(told: str) -> None:
    if other := ELSEWHERE.fullmatch(told):
        test = ROOT / other["test"]
        assert test.is_file(), told
        pages = {Path(c.page) for c in ALL if c.mark == told}
        assert all(page.name in test.read_text() for page in pages), f"{test} takes nothing from {pages}"
    else:
        why = NOT_RUN.fullmatch(told)
        assert why, f"{told!r} is neither 'run by tests/...' nor 'not run: REASON'"
        assert why["reason"] in REASONS, f"{why['reason']!r} is none of {sorted(REASONS)}"


@pytest.mark.parametrize("page", list(HERE))
def test_the_commands_of_a_page_work(page: str, tmp_path: Path) -> None:
    for top in ("clients", "deploy", "docs", "kvxfer", "proto"):
        if (ROOT / top).exists():
            (tmp_path / top).symlink_to(ROOT / top)
    console.run(HERE[page], tmp_path, {"HOME": str(tmp_path), "COLUMNS": "120"})


def test_make_help_works() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert "make demo" in done.stdout


# -- what they name ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [c for c in ALL if c.text.startswith("make ")], ids=lambda c: c.text)
def test_what_is_made_can_be_made(command: Command) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    words = shlex.split(command.text, comments=True)[1:]
    assert {word for word in words if "=" not in word} <= targets


def parse(arguments: list[str]) -> None:
    """Take a command line as `kvxfer` would, without doing anything."""
    known: dict[str, Any] = cli_commands()
    name = next((n for n in (" ".join(arguments[:2]), arguments[0]) if n in known), None)
    assert name is not None, f"there is no kvxfer {arguments[0]}; known are {sorted(known)}"
    known[name].make_context(name, arguments[len(name.split()) :]).close()


@pytest.mark.parametrize("command", [c for c in ALL if kvxfer_arguments(c.text)], ids=lambda c: f"{c.page}:{c.line}")
def test_what_kvxfer_is_told_makes_sense(command: Command) -> None:
    for arguments in kvxfer_arguments(command.text):
        if "--help" not in arguments:
            parse(arguments)


@pytest.mark.parametrize("name", list(cli_commands()))
def test_every_command_has_examples_that_make_sense(name: str) -> None:
    shown = examples(cli_commands()[name])
    assert shown, f"kvxfer {name} --help shows no example"
    for example in shown:
        for arguments in kvxfer_arguments(example):
            parse(arguments)


def test_every_kvxfer_command_of_the_makefile_exists() -> None:
    told = re.findall(r"^[\t$` ]*\$\(BIN\)/kvxfer ([a-z-]+)", (ROOT / "Makefile").read_text(), re.M)
    assert told
    assert set(told) <= set(cli_commands())


def test_every_script_that_make_runs_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    scripts = re.findall(r"^\t\$\(\w+\)(?:/bin)?/python (\S+\.py)", makefile, re.M)
    scripts += re.findall(r"^\t(scripts/\S+)", makefile, re.M)
    assert {"scripts/gen_proto.py", "scripts/bench.sh"} <= set(scripts)
    assert all((ROOT / script).is_file() for script in scripts)


def test_every_benchmark_that_is_told_of_exists() -> None:
    told = [re.findall(r"-m (benchmarks[\w.]*)", page.read_text()) for page in (*console.pages(), ROOT / "Makefile")]
    modules = {module for found in told for module in found}
    assert {"benchmarks", "benchmarks.validation"} <= modules
    for module in modules:
        path = ROOT.joinpath(*module.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_the_readme_makes_the_directory_that_its_example_uses() -> None:
    lines = [shlex.split(c.text) for c in ALL if c.page == "README.md"]
    made = {c[-1] for c in lines if c[0] == "mkdir"}
    served = {c[c.index("--memory-directory") + 1] for c in lines if "--memory-directory" in c}
    used = {str(Path(p).parent) for p in re.findall(r'create_file\(f"([^"]+)"', (ROOT / "README.md").read_text())}
    assert used <= served <= made


# -- other languages ----------------------------------------------------------------------------------


def blocks(language: str) -> list[Any]:
    found = []
    for page in console.pages():
        for block in re.finditer(rf"^( *)```{language}\n(.*?)^\1```", page.read_text(), re.MULTILINE | re.DOTALL):
            text = "\n".join(line[len(block[1]) :] for line in block[2].splitlines())
            found.append(pytest.param(text, id=f"{page.relative_to(ROOT)}:{len(found)}"))
    return found


@pytest.mark.parametrize("text", blocks("python"))
def test_python_compiles(text: str) -> None:
    compile(text, "page", "exec")


@pytest.mark.parametrize("text", blocks("toml"))
def test_settings_in_toml_exist(text: str) -> None:
    assert set(re.findall(r"^#? ?(\w+) = ", text, re.MULTILINE)) <= set(Settings.model_fields)
