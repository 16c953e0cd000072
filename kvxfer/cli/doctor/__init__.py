"""``kvxfer doctor``: flags in, findings out; the checks are in :mod:`kvxfer.doctor`."""

from __future__ import annotations

from kvxfer.cli.doctor.command import doctor

__all__ = ["doctor"]
