"""What it costs to count a read: the events of one read on each side, without a read.

    python benchmarks/metrics.py --reads 20000

Told are microseconds of the event loop for each read: what D's side does when a transfer has ended, and what P's does
when it grants a read and its lease ends.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import structlog

from kvxfer.core.layout import Rank
from kvxfer.core.leases import Lease, ReadKey
from kvxfer.core.transfers import State
from kvxfer.service.events import Events
from kvxfer.service.metrics import Metrics
from kvxfer.service.transfer import Part, Timings
from kvxfer.wire.peer import Reader, ReadRef
from kvxfer.xfer.api import ReadResult, Telemetry


def transfer(sources: int) -> Any:
    """What is looked at of one that is done."""
    result = ReadResult(65_536, 1e-5, 3e-5, 1e-6, Telemetry(3e-5, 4e-5, 65_536, 4))
    parts = [Part(Rank(i, sources), "incarnation", 16, {"attn": 65_536}, None, result) for i in range(sources)]
    return SimpleNamespace(
        error=None,
        remote_engine_id="prefill-0",
        request_id="request-1",
        id="transfer-1",
        state=State.DONE,
        parts=parts,
        bytes=65_536 * sources,
        descriptors=16 * sources,
        timings=Timings(1e-5, 2e-5, 1e-5, 3e-5, 1e-6, 4e-4, 9e-4),
    )


def each(what: Callable[[], None], times: int) -> float:
    """Microseconds."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            what()
        best = min(best, time.perf_counter() - began)
    return best / times * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reads", type=int, default=20_000)
    times = parser.parse_args().reads
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO), cache_logger_on_first_use=True
    )
    events = Events(Metrics(), "decode-0", "incarnation")
    for sources in (1, 4):
        ended = cast(Any, transfer(sources))
        spent = each(partial(events.transfer_ended, ended), times)
        print(f"a transfer of {sources} sources has ended: {spent:.1f} us")
    reader = Reader("decode-0", Rank(), "incarnation")
    ref = ReadRef("prefill-0", Rank(), "incarnation", "request-1", bytes(16), reader, 1, "transfer-1")

    def other_side() -> None:
        events.lease_published()
        events.read_granted(ref)
        events.lease_ended(lease, 1.0)

    lease = Lease("request-1", bytes(16), {}, 100, published=0.0, deadline=60.0)
    lease.open(ReadKey("decode-0", Rank(), "incarnation", "transfer-1"), 1, 10.0, 0.5)
    print(f"a request is published, granted and released: {each(other_side, times):.1f} us")


if __name__ == "__main__":
    main()
