"""``kvxfer demo``: placeholder until the command lands."""

from __future__ import annotations


def demo() -> None:
    """Show a whole transfer."""
