"""The command line as a page: what `kvxfer COMMAND --help` says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from kvxfer.cli.main import app
from scripts.reference.markdown import escaped, table

#: How a command's help begins its examples; indented lines follow.
_EXAMPLES = re.compile(r"^Examples?:\s*$", re.MULTILINE)


def commands() -> dict[str, Any]:
    """Every command by its name, those of groups as ``group command``."""
    return dict(_below("", get_command(app)))


def _below(prefix: str, group: Any) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _below(f"{prefix}{name} ", command)
        else:
            yield f"{prefix}{name}", command


def examples(command: Any) -> list[str]:
    """The command lines that its help gives as examples."""
    parts = _EXAMPLES.split(command.help or "", maxsplit=1)
    lines = parts[1].replace("\\\n", " ").splitlines() if len(parts) > 1 else []
    return [" ".join(line.split()) for line in lines if line.strip().startswith("kvxfer ")]


def pages() -> dict[str, str]:
    """One page: ``cli``."""
    return {"cli": "\n".join(_section(name, command) for name, command in commands().items())}


def _section(name: str, command: Any) -> str:
    context = command.context_class(command, info_name=f"kvxfer {name}")
    usage = " ".join(["kvxfer", name, *command.collect_usage_pieces(context)])
    prose = _EXAMPLES.split(command.help or "", maxsplit=1)[0]
    lines = [f"## kvxfer {name}", "", f"```text\n{usage}\n```", "", escaped(prose).strip(), ""]
    if shown := examples(command):
        lines += ["Examples:", "", "```text", *shown, "```", ""]
    records = [record for parameter in command.params if (record := parameter.get_help_record(context))]
    if records:
        rows = [(f"`{names}`", escaped(" ".join(told.split()))) for names, told in records]
        lines += [table(("parameter", "what it says"), rows), ""]
    return "\n".join(lines)
