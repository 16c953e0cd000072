"""The commands of the documentation: ``console`` blocks of Markdown pages, and how they are run."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: How a page says who runs its commands; it holds for the blocks that follow, until the next.
_MARK = r"<!-- console: (?P<mark>.+?) -->"
_FENCE = r"```console\n(?P<block>.*?)^ *```$"
_PART = re.compile(rf"^ *(?:{_MARK}|{_FENCE})", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One command of a page, on one line.

    :param mark: what the page says of who runs it; empty where it says nothing.
    """

    page: str
    line: int
    mark: str
    text: str


def pages() -> list[Path]:
    """Every Markdown page with commands for people."""
    tops = ("docs", "clients", "deploy", "proto")
    return sorted([*ROOT.glob("*.md"), *(page for top in tops for page in ROOT.glob(f"{top}/**/*.md"))])


def commands(page: Path) -> list[Command]:
    """The commands of a page: lines that begin with ``$``; other lines are their output.

    A command goes on after a backslash, and until its quotes are closed.
    """
    text = page.read_text(encoding="utf-8")
    mark = ""
    found = []
    for part in _PART.finditer(text):
        if part["mark"]:
            mark = part["mark"]
            continue
        first = text.count("\n", 0, part.start("block")) + 1
        lines = enumerate(part["block"].splitlines(), first)
        for number, line in lines:
            if begin := re.match(r" *\$ (.*)", line):
                whole = begin[1]
                while _goes_on(whole):
                    whole += f"\n{next(lines)[1]}"
                whole = re.sub(r"\s*\\\n\s*", " ", whole).strip()
                found.append(Command(str(page.relative_to(ROOT)), number, mark, _without_comment(whole)))
    return found


def _goes_on(command: str) -> bool:
    if command.endswith("\\"):
        return True
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


def _without_comment(command: str) -> str:
    return re.sub(r"\s{2,}# .*$", "", command)


@contextlib.contextmanager
def shell(
    commands: Sequence[str], directory: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """One shell that runs commands one after the other and stops at the first that fails.

    At the end all that it has started is gone.  Its output is that of :func:`outputs`.
    """
    lines = ["set -eu", *(part for i, c in enumerate(commands) for part in (f"echo '==> {i}'", c))]
    with subprocess.Popen(
        ["bash", "-c", "\n".join(lines)],
        cwd=directory,
        env=_environment(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def started(
    command: str, directory: Path, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A command that goes on until the end, and writes to a file."""
    with (
        log.open("wb") as out,
        subprocess.Popen(
            ["bash", "-c", command],
            cwd=directory,
            env=_environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVXFER_", "UCX_", "NIXL_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{inherited.get('PATH', '')}"
    return {**inherited, "PATH": path, **(more or {})}


def run(
    commands: Sequence[str], directory: Path, environment: Mapping[str, str] | None = None, timeout: float = 90
) -> list[str]:
    """Run commands in one shell; what each has written to standard output.

    :raises AssertionError: where one fails, or all take too long.
    """
    with shell(commands, directory, environment) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            errors += f"\n(not done within {timeout} s)"
    parts = re.split(r"^==> \d+\n", output, flags=re.MULTILINE)[1:]
    assert process.returncode == 0, f"{commands[max(len(parts) - 1, 0)]}\n{output}\n{errors}"
    return parts


@contextlib.contextmanager
def places(texts: Sequence[str], **words: str) -> Iterator[list[str]]:
    """Commands with places of their own: `/tmp/kvxfer`, `/run/kvxfer`, `/dev/shm/kvxfer` and the ports that they name.

    :param words: what else stands for what, in commands.
    """
    with contextlib.ExitStack() as stack:
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv", dir="/tmp")))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-test-", dir="/dev/shm")))
        changes = {"/tmp/kvxfer": f"{sockets}/t", "/run/kvxfer": f"{sockets}/r", "/dev/shm/kvxfer": f"{memory}/m"}
        for port in sorted(set(re.findall(r"\b900\d\b", " ".join(texts)))):
            changes[port] = str(free_port())
        changes |= words
        pattern = re.compile("|".join(re.escape(word) + r"\b" for word in changes))
        yield [pattern.sub(lambda found: changes[found[0]], text) for text in texts]


def free_port() -> int:
    """A TCP port that nobody listens at.

    It is bound only seconds later: none of those that the kernel hands out to whoever asks for any.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as taken, contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port
