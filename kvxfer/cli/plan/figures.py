"""Figures to files: where matplotlib is found, and what may go wrong on the way."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvxfer.cli.plan.options import bad
from kvxfer.core.errors import KvxferError, Reason

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

SUFFIXES: Final = (".svg", ".png")
_DPI: Final = 150
#: The same figure gives the same file: no date, and names in an SVG that do not depend on chance.  Text in an SVG stays
#: text, laid out for a wide font: another one takes less room.
_STYLE: Final = {"svg.hashsalt": "kvxfer", "svg.fonttype": "none", "font.family": ["DejaVu Sans", "sans-serif"]}


def check_target(flag: str, target: str) -> None:
    """Whether a figure can be drawn to this file.

    :raises KvxferError: FIELD_INVALID for a wrong suffix or a place where nothing can be written; UNSUPPORTED without
        matplotlib.
    """
    path = Path(target)
    field = flag.strip("-")
    if path.suffix.lower() not in SUFFIXES:
        raise bad(field, f"{flag} {target} is no figure's name; allowed: a file ending in {' or '.join(SUFFIXES)}")
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise bad(
            field, f"{flag} {target} cannot be written; allowed: a file in a directory that is there and writable"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise KvxferError(
            Reason.UNSUPPORTED,
            f"{flag} needs matplotlib, which is not installed: pip install matplotlib",
            field=field,
        )


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches; of no window system."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        return Figure(figsize=(width, height), facecolor="white")


def fit_text(figure: Figure, text: Text) -> None:
    """Make a text smaller where it would leave the figure at its right."""
    left, right = text.get_window_extent().intervalx
    if right > figure.bbox.x1:
        text.set_fontsize(text.get_fontsize() * (figure.bbox.x1 - left) / (right - left) * 0.98)


def save(flag: str, target: str, figure: Figure) -> None:
    """Write a figure.

    :raises KvxferError: FIELD_INVALID where it cannot be written.
    """
    import matplotlib

    metadata = {"Date": None} if target.lower().endswith(".svg") else {"Software": None}
    try:
        with matplotlib.rc_context(_STYLE):
            figure.savefig(target, dpi=_DPI, metadata=metadata)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise bad(flag.strip("-"), f"{flag} {target} cannot be written: {reason}; allowed: a writable file") from error
