"""Many reads at once against the same reads one after another; a small read beside a stream of large ones."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle

from benchmarks.caches import Case, memory
from benchmarks.reads import GIB, KIB, MIB, size_of
from benchmarks.results import Effort, Line, Section, Spread
from benchmarks.sidecars import Pair, both
from kvxfer.cli.bench.case import GROUP
from kvxfer.core.resolve import BlockList
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.blocks import block_lists_to_pb

TITLE = "Many reads at once"
AT_ONCE = (1, 16, 256)
#: Requests of a round, and bytes of each.
REQUESTS, EACH = 256, 2 * MIB
BLOCK, LAYERS = 64 * KIB, 16
#: Many reads at once move at least this share of what one after another does.
LEAST_RATE = 0.95
#: The slowest of them takes at most so many times as long as the median.
SLOWEST = 3.0
#: A small read waits at most this share of a large one that is under way.
WAIT = 0.1


def run(effort: Effort) -> Section:
    """Measure on the transport that UCX is set to."""
    section = Section()
    total, large = (GIB // 2, GIB) if effort.share >= 1 else (GIB // 8, GIB // 4)
    with memory(large + 64 * MIB) as place, both(place.directory) as (p, d):
        # Every block is used, in blocks of one layer for the small reads and in 16 for the others.
        _crowds(section, Pair(p, d, Case(BLOCK, total // BLOCK // LAYERS, LAYERS, spare=1), place), effort)
        _beside(section, Pair(p, d, Case(BLOCK, large // BLOCK + 64, 1, spare=1), place, "wide"), effort)
    return section


def transport() -> str:
    """As it is printed."""
    return "TCP" if os.environ.get("UCX_TLS") == "tcp" else "CMA"


def _crowds(section: Section, pair: Pair, effort: Effort) -> None:
    """The same requests, all of one size, or some small and some large, with more and more of them at once."""
    case = pair.case
    per = EACH // BLOCK // LAYERS
    same = [per] * min(REQUESTS, case.blocks // per)
    # One large for four small ones, of 16 and of 1 block in each layer.
    mixed = [16, 1, 1, 1, 1] * (case.blocks // 20)
    for name, sizes in (("same", same), ("mixed", mixed)):
        rounds = effort.rounds(3)
        rates: dict[int, list[float]] = {n: [] for n in AT_ONCE}
        slowest: dict[int, list[float]] = {n: [] for n in AT_ONCE}
        first = -1 if name == "same" else 0  # the others find everything warm
        for number in range(first, rounds):
            for n in AT_ONCE if number % 2 else AT_ONCE[::-1]:
                began, ends, waits = _round(pair, sizes, n)
                if number >= 0:
                    rates[n].append(sum(sizes) * BLOCK * LAYERS / (max(ends) - began))
                    slowest[n].append(max(waits) / statistics.median(waits))
            if number == first:
                _check(pair, sizes)
        for n in AT_ONCE:
            ratio = Spread.ratio(rates[n], rates[1])
            section.add(
                "crowds",
                transport=transport(),
                sizes=name,
                requests=len(sizes),
                bytes=sum(sizes) * BLOCK * LAYERS,
                at_once=n,
                gb_per_s=round(statistics.median(rates[n]) / 1e9, 2),
                ratio_to_one=ratio.rounded(),
                slowest_to_median=Spread.of(slowest[n]).rounded(),
            )
            if n == AT_ONCE[-1] and name == "same":
                what = f"{transport()}, {len(sizes)} reads of {size_of(EACH)}, all at once"
                section.lines.append(
                    Line.median("7", f"rate / rate one after another, {what}", ratio, LEAST_RATE, least=True)
                )
                slow = Spread.of(slowest[n])
                section.lines.append(Line.median("7", f"slowest / median, {what}", slow, SLOWEST))
    pair.close()


def _slices(pair: Pair, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    end = 0
    for size in sizes:
        yield end, end + size
        end += size


def _requests(pair: Pair, sizes: Sequence[int]) -> list[pb.ReadBlocksRequest]:
    theirs, mine = pair.case.ids("P"), pair.case.ids("D")
    made = []
    for begin, end in _slices(pair, sizes):
        ticket = pair.ticket([BlockList(GROUP, theirs[begin:end])], (end - begin) * 16)
        made.append(pair.request(ticket, block_lists_to_pb([BlockList(GROUP, mine[begin:end])])))
    return made


def _check(pair: Pair, sizes: Sequence[int]) -> None:
    """What the reads have to leave; they cover the case's first blocks."""
    pair.memory.check(pair.case, sum(sizes))


def _round(pair: Pair, sizes: Sequence[int], at_once: int) -> tuple[float, list[float], list[float]]:
    """When it began, when each read ended, and how long each took; seconds.

    :raises RuntimeError: where a read was not done.
    """
    requests = _requests(pair, sizes)
    room = threading.Semaphore(at_once)
    ended: list[float] = []
    waits: list[float] = []
    calls = []
    began = time.perf_counter()
    for request in requests:
        room.acquire()
        start = time.perf_counter()
        call = pair.d.stub.ReadBlocks.future(request, timeout=300)

        def done(_: object, start: float = start) -> None:
            now = time.perf_counter()
            ended.append(now)
            waits.append(now - start)
            room.release()

        call.add_done_callback(done)
        calls.append(call)
    for call in calls:
        if call.result().transfer.state != pb.TRANSFER_STATE_DONE:
            raise RuntimeError(f"a read ended as {call.result().transfer}")
    for _ in range(at_once):  # callbacks may come after results
        room.acquire()
    return began, ended, waits


def _beside(section: Section, pair: Pair, effort: Effort) -> None:
    """Reads of one block while one read of all the others follows another."""
    blocks = pair.case.blocks
    large = blocks - 64
    theirs, mine = pair.case.ids("P"), pair.case.ids("D")
    rest = cycle(range(large, blocks))

    def request(begin: int, end: int) -> pb.ReadBlocksRequest:
        ticket = pair.ticket([BlockList(GROUP, theirs[begin:end])], (end - begin) * 16)
        return pair.request(ticket, block_lists_to_pb([BlockList(GROUP, mine[begin:end])]))

    def timed(asked: pb.ReadBlocksRequest) -> float:
        began = time.perf_counter()
        pair.d.stub.ReadBlocks(asked, timeout=300)
        return time.perf_counter() - began

    alone = [timed(request(at, at + 1)) for at in (next(rest) for _ in range(effort.rounds(50)))]
    timed(request(0, large))
    stream: list[float] = []
    small: list[float] = []
    with _repeated(lambda: stream.append(timed(request(0, large)))):
        pause = random.Random(1)
        until = time.monotonic() + (6.0 if effort.share >= 1 else 2.0)
        while time.monotonic() < until or len(stream) < 3:
            asked = request((at := next(rest)), at + 1)
            time.sleep(pause.uniform(0.0, 0.02))  # at any moment of the large one
            small.append(timed(asked))
    pair.memory.check(pair.case, min(blocks, large + len(alone) + len(small)))
    big = statistics.median(stream)
    shares = sorted(s / big for s in small)
    section.add(
        "beside",
        transport=transport(),
        large=large * BLOCK,
        large_ms=round(big * 1e3, 1),
        reads=len(small),
        alone_ms=round(statistics.median(alone) * 1e3, 3),
        median_ms=round(statistics.median(small) * 1e3, 3),
        p95_ms=round(shares[int(len(shares) * 0.95)] * big * 1e3, 3),
        slowest_ms=round(shares[-1] * big * 1e3, 3),
    )
    what = f"{transport()}, {size_of(BLOCK)} beside a stream of {size_of(large * BLOCK)} reads"
    section.lines.append(Line("7", f"95 % of small reads / a large one, {what}", shares[int(len(shares) * 0.95)], WAIT))
    pair.close()


@contextmanager
def _repeated(what: Callable[[], None]) -> Iterator[None]:
    """Something over and over on another thread; raises what it raised."""
    stop = threading.Event()
    failures: list[Exception] = []

    def work() -> None:
        while not stop.is_set() and not failures:
            try:
                what()
            except Exception as error:  # noqa: BLE001  raised below
                failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]
