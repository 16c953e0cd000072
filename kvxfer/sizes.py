"""Bytes for people."""

from __future__ import annotations


def mib(size: int) -> str:
    """In whole MiB: sizes that are compared with one another."""
    return f"{size / 2**20:,.0f} MiB"


def short(size: int) -> str:
    """In the unit that suits it, to four digits."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
