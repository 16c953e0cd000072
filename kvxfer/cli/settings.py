"""From the options of a command to settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvxfer.core.errors import KvxferError, Reason

if TYPE_CHECKING:
    from pydantic import ValidationError

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


def problems(error: ValidationError) -> list[str]:
    """What is wrong with settings, one text for each."""
    return [_problem(one) for one in error.errors()]


def _problem(one: Mapping[str, Any]) -> str:
    name = ".".join(map(str, one["loc"])) or "settings"
    if one["type"] == "extra_forbidden":
        return _no_setting(name, _settings())
    if one["type"] == "value_error":  # of our own checks, which say what the value is
        return f"{name}: {one['msg'].removeprefix('Value error, ')}"
    return f"{name}: {one['msg']}, not {one['input']!r}"


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
    names = [f"KVXFER_{name.upper()}" for name in _settings()]
    return [
        _no_setting(variable, names)
        for variable in environment
        if variable.upper().startswith("KVXFER_") and variable.upper() not in names
    ]


def _settings() -> list[str]:
    from kvxfer.config import Settings

    return list(Settings.model_fields)


def _no_setting(name: str, known: list[str]) -> str:
    meant = get_close_matches(name, known, 1, cutoff=0.8)
    return f"{name} is no setting" + (f"; is {meant[0]} meant?" if meant else "")
