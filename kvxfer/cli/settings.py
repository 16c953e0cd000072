"""From the options of a command to settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from kvxfer.core.errors import KvxferError, Reason

#: Options that may be repeated, each with one item of a setting.
_ITEMS: Final[Mapping[str, str]] = {
    "peer_allowed_san": "peer_allowed_sans",
    "memory_directory": "memory_directories",
}


def flags(options: Mapping[str, Any], pairs: Iterable[str]) -> dict[str, Any]:
    """Settings by name, from those options that were given.

    :param pairs: what was given with ``--set``: ``name=value``.
    :raises KvxferError: FIELD_INVALID where one is not of that form.
    """
    given = {name: value for name, value in options.items() if value is not None and value != []}
    if "memory_directory" in given:  # seen from here, as every path on a command line
        given["memory_directory"] = [
            v if ".." in Path(v).parts else str(Path(v).absolute()) for v in given["memory_directory"]
        ]
    found = {_ITEMS.get(name, name): tuple(v) if name in _ITEMS else v for name, v in given.items()}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise KvxferError(Reason.FIELD_INVALID, f"--set takes name=value, not {pair!r}", field="set")
        found[name] = value
    return found


def as_toml(settings: Mapping[str, Any]) -> str:
    """Settings as a file that ``--config`` reads; what is not set, for which TOML has no word, is a comment."""
    lines = [
        f"# {name} is not set" if value is None else f"{name} = {_toml(value)}" for name, value in settings.items()
    ]
    return "\n".join(lines)


def _toml(value: bool | float | str | Path | tuple[str, ...]) -> str:
    # Text, numbers and lists are written as in JSON, but for a character that TOML wants escaped, too.
    told = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
    return json.dumps(told, ensure_ascii=False).replace("\x7f", "\\u007f")


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables that look like a setting of kvxfer's and are none, each with the setting that may be meant."""
    from kvxfer.config import Settings, no_setting

    names = [f"KVXFER_{name.upper()}" for name in Settings.model_fields]
    return [
        no_setting(variable, names)
        for variable in environment
        if variable.upper().startswith("KVXFER_") and variable.upper() not in names
    ]
