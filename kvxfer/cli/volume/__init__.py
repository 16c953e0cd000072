"""``kvxfer volume``: transfer volume against prompt length."""

from kvxfer.cli.volume.command import volume

__all__ = ["volume"]
