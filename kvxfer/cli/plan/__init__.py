"""``kvxfer plan``: what a pair of engines would do, without any of them."""

from kvxfer.cli.plan.command import plan

__all__ = ["plan"]
