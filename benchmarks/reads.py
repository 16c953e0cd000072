"""ReadBlocks against the raw NIXL READ of the same descriptors, over the same memory, in turn."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Sequence

from benchmarks.bare import Bare
from benchmarks.caches import Case, Memory, Order, largest, memory
from benchmarks.raw import Raw, Sample
from benchmarks.results import Effort, Line, Section, Spread, in_turn
from benchmarks.sidecars import Pair, Sidecar, both, phases

TITLE = "ReadBlocks against a raw NIXL READ"
KIB, MIB, GIB = 2**10, 2**20, 2**30

SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
BLOCKS = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)
ORDERS: tuple[Order, ...] = ("contiguous", "scattered", "scrambled")
SIZE, BLOCK = 64 * MIB, 64 * KIB

#: ReadBlocks takes at most so many times as long as the raw read, from 64 MiB on.
MOST = 1.05
#: At 1 MiB it takes at most so many empty calls longer.
CALLS = 2.5


def cases() -> Iterator[Case]:
    """All sizes in blocks of 64 KiB, and 64 MiB in all blocks."""
    yield from (Case.of(size, BLOCK) for size in SIZES)
    for block in BLOCKS:
        yield from (Case.of(SIZE, block, o) for o in ORDERS if (block, o) != (BLOCK, "scrambled"))


def run(effort: Effort) -> Section:
    """Measure on the transport that UCX is set to."""
    section = Section()
    chosen = list(cases())
    if effort.share < 1:
        chosen = [c for c in chosen if c.bytes <= 64 * MIB]
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(memory(largest(chosen)))
        p, d = stack.enter_context(both(place.directory))
        raw = stack.enter_context(Raw(place))
        for case in chosen:
            with Bare(place, case) if case.bytes == MIB else contextlib.nullcontext() as handler:
                _measure(section, case, place, p, d, raw, handler, effort)
    return section


def _measure(
    section: Section,
    case: Case,
    place: Memory,
    p: Sidecar,
    d: Sidecar,
    raw: Raw,
    handler: Bare | None,
    effort: Effort,
) -> None:
    transport = "TCP" if os.environ.get("UCX_TLS") == "tcp" else "CMA"
    pair, bare = Pair(p, d, case, place), raw.prepare(case)
    orders = ["by_remote", "by_local"] if case.order == "scrambled" else []
    if orders and case.bytes <= SIZE:
        orders.append("as_listed")  # larger ones are not drawn
    others = {order: getattr(bare, order)() for order in orders}
    first, _ = pair.read()
    place.check(case)
    # Small reads are cheap, and their ratios vary most; of large ones the whole suite could wait for.
    rounds = effort.rounds(40 if case.bytes < SIZE else 16 if case.block >= BLOCK else 8, 3)
    if case.bytes > SIZE:
        rounds = effort.rounds(8 if case.bytes < GIB else 4, 3)
    ours: list[tuple[float, dict[str, float]]] = []

    def read() -> Sample:
        seconds, transfer = pair.read()
        ours.append((seconds, phases(transfer)))
        return Sample(0.0, seconds)

    seen = in_turn(
        {"kvxfer": read, "raw": bare.once, "empty": lambda: Sample(0.0, d.empty())}
        | {name: other.once for name, other in others.items()},
        rounds,
        warm_up=2 if case.bytes <= SIZE else 1,
    )
    ours = ours[-rounds:]
    place.check(case)
    if handler is not None:
        _beside_bare(section, transport, case, place, handler, pair, rounds)
    pair.close()
    bare.close()
    whole = {name: [s.whole for s in samples] for name, samples in seen.items()}
    ratio = Spread.ratio(whole["kvxfer"], whole["raw"])
    extra = Spread.of([a - b for a, b in zip(whole["kvxfer"], whole["raw"], strict=True)])
    empty = statistics.median(whole["empty"])
    section.add(
        "reads",
        transport=transport,
        bytes=case.bytes,
        block=case.block,
        order=case.order,
        descriptors=bare.descriptors,
        rounds=rounds,
        kvxfer_ms=_ms(whole["kvxfer"]),
        raw_ms=_ms(whole["raw"]),
        raw_make_ms=_ms([s.make for s in seen["raw"]]),
        first_ms=round(first * 1e3, 3),
        empty_ms=round(empty * 1e3, 3),
        ratio=ratio.rounded(),
        ratio_to_move=Spread.ratio(whole["kvxfer"], [s.move for s in seen["raw"]]).rounded(),
        extra_calls=round(extra.median / empty, 2),
        phases_ms={name: _ms([p[name] for _, p in ours]) for name in ours[0][1]},
        **{f"raw_{name}_ms": _ms(whole[name]) for name in others},
    )
    what = f"{transport}, {size_of(case.bytes)} in blocks of {size_of(case.block)}, {case.order}"
    if case.bytes >= SIZE:
        section.lines.append(Line.median("1", f"ReadBlocks / raw, {what}", ratio, MOST))
    if case.bytes == MIB:
        longer = Spread.of([x / empty for x in (extra.low, extra.median, extra.high)])
        section.lines.append(Line.median("1", f"ReadBlocks - raw, {what}", longer, CALLS, unit="empty calls"))
    if others and case.bytes >= SIZE:
        best = min(("by_remote", "by_local"), key=lambda name: statistics.median(whole[name]))
        against = Spread.ratio(whole["kvxfer"], whole[best])
        name = f"ReadBlocks / raw sorted the best way ({best.replace('_', ' ')}), {what}"
        section.lines.append(Line.median("3", name, against, MOST))


def _beside_bare(
    section: Section, transport: str, case: Case, place: Memory, handler: Bare, pair: Pair, rounds: int
) -> None:
    """A handler that does the least, and ReadBlocks: what either takes around its own READ.

    Of neither two calls follow each other, so that none finds warmer caches.
    """
    handler.call("Read")
    place.check(case)

    def read() -> tuple[float, float]:
        seconds, transfer = pair.read()
        own = phases(transfer)
        return seconds, own["post"] + own["move"]

    what: dict[str, Callable[[], tuple[float, float]]] = {
        "Empty": lambda: handler.call("Empty"),
        "kvxfer": read,
        "Nested": lambda: handler.call("Nested"),
        "empty": lambda: (pair.d.empty(), 0.0),
        "Read": lambda: handler.call("Read"),
    }
    seen = in_turn(what, rounds)
    place.check(case)

    def around(call: str, empty: str) -> list[float]:
        one = statistics.median(whole for whole, _ in seen[empty])
        return Spread.of([(whole - inside) / one for whole, inside in seen[call]]).rounded()

    section.add(
        "bare",
        transport=transport,
        bytes=case.bytes,
        empty_ms=_ms([whole for whole, _ in seen["Empty"]]),
        nested_calls=around("Nested", "Empty"),
        bare_ms=_ms([whole for whole, _ in seen["Read"]]),
        bare_read_ms=_ms([inside for _, inside in seen["Read"]]),
        bare_calls=around("Read", "Empty"),
        kvxfer_empty_ms=_ms([whole for whole, _ in seen["empty"]]),
        kvxfer_ms=_ms([whole for whole, _ in seen["kvxfer"]]),
        kvxfer_read_ms=_ms([inside for _, inside in seen["kvxfer"]]),
        kvxfer_calls=around("kvxfer", "empty"),
    )


def _ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def size_of(count: int) -> str:
    """Bytes as people write them."""
    for unit, one in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= one and count % one == 0:
            return f"{count // one} {unit}"
    return f"{count} B"
