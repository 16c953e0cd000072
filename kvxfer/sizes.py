"""Bytes for people."""

from __future__ import annotations


def mib(size: int) -> str:
    """In whole MiB, or whole KiB where that would be none: sizes that are compared with one another."""
    return f"{size / 2**20:,.0f} MiB" if size >= 2**20 or not size else f"{size / 2**10:,.0f} KiB"


def short(size: int) -> str:
    """In the unit that suits it, to four digits."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def counted(number: int, what: str) -> str:
    """So many of something, in the singular where it is one."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
