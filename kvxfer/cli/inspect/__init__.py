"""``kvxfer inspect``: what a sidecar holds, and with whom it deals."""

from __future__ import annotations

from kvxfer.cli.inspect.command import inspect

__all__ = ["inspect"]
