"""``kvxfer bench``: how fast reads between two sidecars of this machine are.

============== =========================================================
:mod:`.command` flags in, exit status out
:mod:`.case`    what is read: layout, blocks, and what the bytes must be
:mod:`.run`     the sidecars, the rounds
:mod:`.report`  what came of it, for people and machines
============== =========================================================
"""

from __future__ import annotations

from kvxfer.cli.bench.command import bench

__all__ = ["bench"]
