"""From the options of a command to settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
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
    found = {_ITEMS.get(name, name): tuple(v) if name in _ITEMS else v for name, v in given.items()}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise KvxferError(Reason.FIELD_INVALID, f"--set takes name=value, not {pair!r}", field="set")
        found[name] = value
    return found


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables that look like a setting of kvxfer's and are none, each with the setting that may be meant."""
    from kvxfer.config import Settings

    names = [f"KVXFER_{name.upper()}" for name in Settings.model_fields]
    found = []
    for variable in environment:
        if variable.upper().startswith("KVXFER_") and variable.upper() not in names:
            meant = get_close_matches(variable.upper(), names, 1, cutoff=0.8)
            found.append(f"{variable} is no setting" + (f"; is {meant[0]} meant?" if meant else ""))
    return found
