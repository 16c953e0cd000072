"""``kvxfer demo``: a whole transfer on one machine, every byte of it checked.

=================== ==============================================================================================
:mod:`.command`     flags in, exit status out
:mod:`.scenario`    what is run: both engines' layouts and block IDs
:mod:`.fit`         the model, cut to a size that fits
:mod:`.space`       where the caches are put
:mod:`.truth`       what every byte must be, by definition; knows nothing of plans
:mod:`.engine`      an engine process, one per rank
:mod:`.tied`        a process that ends with its parent
:mod:`.children`    starts processes, talks to them, ends them
:mod:`.run`         the order of events
:mod:`.result`      what came of it, as data
:mod:`.report`      the same for people, and the progress bar
:mod:`.by_hand`     requests to paste into grpcurl
=================== ==============================================================================================
"""

from __future__ import annotations

from kvxfer.cli.demo.command import demo

__all__ = ["demo"]
