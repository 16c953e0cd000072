"""Every setting of a sidecar as a table, from kvxfer/config.py."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

from kvxfer.config import Settings
from scripts.reference.markdown import escaped, table

#: A heading of the settings' source, or a setting.
_LINE = re.compile(r"^    (?:# -- (?P<heading>.+)|(?P<name>\w+): .+)$", re.MULTILINE)


def pages() -> dict[str, str]:
    """One page: ``settings``."""
    schema = Settings.model_json_schema()["properties"]
    parts = []
    for heading, names in sections().items():
        rows = [_row(name, schema[name]) for name in names]
        parts += [f"## {heading.capitalize()}", "", table(("setting", "value", "default", "what it is"), rows), ""]
    return {"settings": "\n".join(parts)}


def sections() -> dict[str, list[str]]:
    """The names of the settings, in their order, by the headings of the source.

    :raises ValueError: where a setting stands under no heading.
    """
    found: dict[str, list[str]] = {}
    heading = ""
    for match in _LINE.finditer(inspect.getsource(Settings)):
        if match["heading"]:
            heading = match["heading"]
        elif match["name"] in Settings.model_fields:
            found.setdefault(heading, []).append(match["name"])
    listed = [name for names in found.values() for name in names]
    if listed != list(Settings.model_fields) or "" in found:
        raise ValueError(f"the headings of the settings cover {listed}, not {list(Settings.model_fields)}")
    return found


def _row(name: str, schema: dict[str, Any]) -> tuple[str, str, str, str]:
    default = schema.get("default")
    shown = "none" if default in (None, "", []) else f"`{default if isinstance(default, str) else json.dumps(default)}`"
    return f"`{name}`", _kind(schema), shown, escaped(schema["description"])


def _kind(schema: dict[str, Any]) -> str:
    """What a value may be, in words."""
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}s"
    word = {"integer": "integer", "number": "number", "boolean": "`true` or `false`", "string": "text"}[schema["type"]]
    if schema.get("format") == "path":
        word = "path"
    bounds = [
        f"{sign} {schema[key]:,}"
        for key, sign in (("exclusiveMinimum", "above"), ("minimum", "from"), ("maximum", "to"))
        if key in schema
    ]
    return ", ".join([word, " ".join(bounds)]) if bounds else word
