"""From a request to the reads that it takes: resolve it, and make one read from each source."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import numpy as np

from kvxfer.core.resolve import Request, SourceRead, resolve
from kvxfer.service.link import Link, LinkSource
from kvxfer.service.telling import Telling
from kvxfer.service.transfer import Live, Part, Transfer
from kvxfer.wire.requests import TransferSpec
from kvxfer.xfer.api import Read

#: Requests that may come to more descriptors than this are resolved off the event loop.
RESOLVE_INLINE: Final = 65_536


async def make_reads(
    transfer: Transfer, spec: TransferSpec, link: Link, telling: Telling, most: int, *, now: bool
) -> None:
    """Find out what a transfer consists of.

    :param most: descriptors that it may have.
    :param now: the library makes its requests here, and not when they are posted.
    :raises KvxferError: as :func:`kvxfer.core.resolve.resolve` and
        :meth:`kvxfer.xfer.api.TransferEngine.make_read`; nothing is left of it then.
    """
    request = Request(spec.local_blocks, spec.ticket.blocks, spec.num_tokens, spec.skip_tokens)
    began = time.perf_counter()
    small = sum(np.size(b.ids) for b in spec.local_blocks) * link.plan.most_per_block <= RESOLVE_INLINE
    args = (link.plan, request, most)
    read = resolve(*args) if small else await asyncio.to_thread(resolve, *args)
    resolved = time.perf_counter()
    made: list[Part] = []
    try:
        for source, part in zip(link.sources, read.sources, strict=True):
            live = None
            if part.descriptors:
                live = Live(source, await _make(link, source, part, telling.notice(transfer, source.rank), now))
            made.append(Part(part.rank, source.facts.incarnation, part.descriptors, part.bytes_by_group, live))
    except BaseException:
        for state in made:
            if state.live is not None:
                await link.engine.release(state.live.read)
        raise
    transfer.consist(made, read.claims.tolist())
    transfer.timings.resolve = resolved - began
    transfer.timings.make = time.perf_counter() - resolved if now else None


async def _make(link: Link, source: LinkSource, part: SourceRead, notice: bytes, now: bool) -> Read:
    ours, theirs = part.local_indices, part.remote_indices
    return await link.engine.make_read(source.local, ours, source.remote, theirs, notice, now=now)
