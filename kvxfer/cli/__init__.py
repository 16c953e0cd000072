"""The ``kvxfer`` command.  One module a subcommand; each imports what it needs only when it runs."""

from __future__ import annotations

from kvxfer.cli.main import main

__all__ = ["main"]
