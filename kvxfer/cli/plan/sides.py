"""From what the user said of a side to an engine: a preset of a model, or layouts from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from kvxfer.cli.model import find
from kvxfer.cli.plan.options import Chosen, bad
from kvxfer.core.errors import KvxferError
from kvxfer.core.layout import CacheLayout
from kvxfer.models import EXAMPLES
from kvxfer.planning import Engine

#: Most bytes of a layout file that are read.
MAX_LAYOUT_BYTES: Final = 64 * 2**20


def preset(chosen: Chosen) -> Engine:
    """The engine of ``--model`` and the options.

    :raises KvxferError: FIELD_INVALID, LAYOUT_INVALID or UNSUPPORTED, naming the flag and what is allowed.
    """
    flag = chosen.flags["model"]
    if not chosen.model:
        side = chosen.side.lower()
        raise bad(
            "model",
            f"nothing says what {chosen.side} is; allowed: --model or --{side}-model (a config.json, or one of "
            f"{', '.join(EXAMPLES)})",
        )
    options = chosen.engine_options()
    name, config = find(chosen.model, flag)
    with chosen.naming_flags():
        return Engine.preset(name, config, options)


def given(chosen: Chosen, paths: list[str]) -> Engine:
    """The engine of layout files, one for each rank.

    :raises KvxferError: FIELD_INVALID or LAYOUT_INVALID, naming the file and the field in it.
    """
    side = chosen.side.lower()
    others = [flag for flag in chosen.own if flag != f"--{side}-pp"]
    if others:
        raise bad(
            "layout",
            f"--{side}-layout says all about {chosen.side} already; {', '.join(others)} cannot be given with it",
            flags=others,
        )
    layouts = [_layout(f"--{side}-layout", Path(path)) for path in paths]
    pp_size = int(chosen.options.get("pp_size", 1))
    if pp_size < 1 or len(layouts) % pp_size:
        raise bad(
            "pp_size",
            f"{chosen.flags['pp_size']} is {pp_size}; allowed: what divides the {len(layouts)} layouts of "
            f"--{side}-layout (--{side}-pp is for {chosen.side} alone)",
            value=pp_size,
            layouts=len(layouts),
        )
    with chosen.naming_flags():
        return Engine.given(Path(paths[0]).stem, layouts, pp_size)


def _layout(flag: str, path: Path) -> CacheLayout:
    """A layout in the JSON form of ``kvxfer.v1.Layout``, alone or as the ``layout`` of a RegisterCache request."""
    from google.protobuf import json_format

    from kvxfer.pb import layout_pb2
    from kvxfer.wire.layouts import layout_from_pb

    try:
        if path.stat().st_size > MAX_LAYOUT_BYTES:
            raise bad("layout", f"{flag} {path} is too large; allowed are {MAX_LAYOUT_BYTES} bytes")
        parsed: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise bad(
            "layout", f"{flag} {path} cannot be read; allowed: a JSON file ({type(error).__name__}: {error})"
        ) from error
    if isinstance(parsed, dict) and isinstance(parsed.get("layout"), dict):
        parsed = parsed["layout"]
    if not isinstance(parsed, dict):
        raise bad("layout", f"{flag} {path} is no JSON object; allowed: the JSON form of kvxfer.v1.Layout")
    try:
        message = json_format.ParseDict(parsed, layout_pb2.Layout())
    except json_format.ParseError as error:
        told = " ".join(str(error).split())
        raise bad("layout", f"{flag} {path} is no kvxfer.v1.Layout in JSON: {told}") from error
    try:
        return layout_from_pb(message)
    except KvxferError as error:
        raise KvxferError(
            error.reason, f"{flag} {path}: {error.message}", field=error.field, **error.metadata
        ) from None
