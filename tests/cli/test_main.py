"""Standard output that takes no more ends a command in a line, not in a traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MODEL = ("--model", "llama-3.1-70b")
COMMANDS = [
    ("--version",),
    ("--help",),
    ("plan", "--help"),
    ("plan", *MODEL),
    ("plan", *MODEL, "--json"),
    ("volume", *MODEL, "--tokens", "512"),
    ("serve", "--print-settings"),
    ("doctor", "--only", "tls"),
]


def run(arguments: tuple[str, ...], stdout: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvxfer", *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_full_disk_is_told_in_one_line(arguments: tuple[str, ...]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = run(arguments, full)
    finally:
        os.close(full)
    assert done.stderr == "kvxfer: standard output: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("arguments", [("--version",), ("plan", *MODEL, "--json")], ids=" ".join)
def test_a_reader_that_has_left_is_no_news(arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(arguments, writing)
    finally:
        os.close(writing)
    assert (done.stderr, done.returncode) == ("", 1)


def test_other_faults_of_the_system_are_not_blamed_on_it() -> None:
    fails = "from kvxfer.cli.main import app, main\n@app.command('x')\ndef x(): raise OSError(28, 'elsewhere')\nmain()"
    command = [sys.executable, "-c", fails, "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "standard output" not in done.stderr
    assert "OSError: [Errno 28] elsewhere" in done.stderr
    assert done.returncode == 1


def test_ctrl_c_while_it_is_imported_is_no_fault() -> None:
    program = (
        "import builtins, sys\n"
        "from kvxfer.__main__ import main\n"
        "true = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name == 'typer': raise KeyboardInterrupt\n"
        "    return true(name, *rest)\n"
        "builtins.__import__ = interrupted\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
