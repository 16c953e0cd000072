"""From the options of a command to settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    found = {_ITEMS.get(name, name): tuple(v) if name in _ITEMS else v for name, v in given.items()}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise KvxferError(Reason.FIELD_INVALID, f"--set takes name=value, not {pair!r}", field="set")
        found[name] = value
    return found


def problems(error: ValidationError) -> list[str]:
    """What is wrong with settings, one text for each."""
    return [f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors()]
