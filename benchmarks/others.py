"""ReadBlocks over TCP against what a user would take instead: Mooncake's transfer engine, NIXL, a plain gRPC stream.

Promised is something against Mooncake as it comes, and against a stream of one block a message, which is what people
write first.  Both are also tried in the better way: as many lasting connections as Mooncake allows, messages of 1 MiB.
NIXL is used as it comes, with UCX's own settings: with those of kvxfer it is measured elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Mapping

from benchmarks.caches import Case, Memory, largest, memory
from benchmarks.mooncake import MOST_LANES, Mooncake
from benchmarks.raw import Raw
from benchmarks.reads import BLOCK, BLOCKS, MIB, SIZE, size_of
from benchmarks.results import Effort, Line, Section, Spread, in_turn
from benchmarks.sidecars import Pair, both
from benchmarks.stream import Stream

TITLE = "ReadBlocks, Mooncake's transfer engine, NIXL as it comes, a gRPC byte stream"

#: Its rate is at least so many times that of Mooncake, and of the stream.
MOONCAKE, STREAM = 1.5, 3.0
_ROUNDS = 10


def run(effort: Effort) -> Section:
    """Measure; every byte of every read is looked at.

    :raises SystemExit: UCX may use something else than TCP, as the others do; or Mooncake is not installed.
    """
    if os.environ.get("UCX_TLS") != "tcp":
        raise SystemExit("others: what is compared are ways over TCP: UCX_TLS=tcp")
    section = Section()
    chosen = [Case.of(SIZE, block) for block in BLOCKS]
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(memory(largest(chosen)))
        engines = {
            name: stack.enter_context(Mooncake(place, lanes))
            for name, lanes in (("mooncake", 0), ("mooncake_lanes", MOST_LANES))
        }
        nixl = stack.enter_context(Raw(place, as_it_comes=True))
        stream = stack.enter_context(Stream(place))
        p, d = stack.enter_context(both(place.directory))
        for case in chosen:
            _measure(section, case, place, Pair(p, d, case, place), engines, nixl, stream, effort)
    return section


def _measure(
    section: Section,
    case: Case,
    place: Memory,
    pair: Pair,
    engines: Mapping[str, Mooncake],
    nixl: Raw,
    stream: Stream,
    effort: Effort,
) -> None:
    promised, bare = case.block == BLOCK, nixl.prepare(case)
    readers = {
        "kvxfer": lambda: pair.read()[0],
        **{name: engine.prepare(case) for name, engine in engines.items()},
        "nixl": lambda: bare.once().whole,
        "grpc_block": stream.prepare(case),
        "grpc_mib": stream.prepare(case, MIB),
    }
    rounds, warm_up = (effort.rounds(_ROUNDS), 2) if promised else (effort.rounds(_ROUNDS // 3), 1)
    seen = in_turn({name: _checked(read, place, case) for name, read in readers.items()}, rounds, warm_up)
    pair.close()
    bare.close()
    ratios = {name: Spread.ratio(seconds, seen["kvxfer"]) for name, seconds in seen.items() if name != "kvxfer"}
    section.add(
        "others",
        bytes=case.bytes,
        block=case.block,
        order=case.order,
        rounds=rounds,
        **{f"{name}_ms": round(statistics.median(seconds) * 1e3, 3) for name, seconds in seen.items()},
        **{f"{name}_gbs": round(case.bytes / statistics.median(seconds) / 1e9, 3) for name, seconds in seen.items()},
        **{f"rate_to_{name}": ratio.rounded() for name, ratio in ratios.items()},
    )
    if promised:
        promises = (("mooncake", "Mooncake", MOONCAKE), ("grpc_block", "a gRPC stream of blocks", STREAM))
        for name, told, limit in promises:
            what = f"rate of ReadBlocks / {told}, TCP, {size_of(case.bytes)} in blocks of {size_of(case.block)}"
            section.lines.append(Line.median("4", what, ratios[name], limit, least=True))


def _checked(read: Callable[[], float], place: Memory, case: Case) -> Callable[[], float]:
    def once() -> float:
        seconds = read()
        place.check(case)
        return seconds

    return once
