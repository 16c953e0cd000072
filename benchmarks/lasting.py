"""What is left when nothing happens, and after much has: processor time with 50 peers, memory, 100,000 reads."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from benchmarks.caches import Case, Memory, largest, memory
from benchmarks.results import Effort, Line, Section
from benchmarks.sidecars import Pair, Sidecar, both
from kvxfer.cli.bench.case import GROUP, TOKENS
from kvxfer.core.resolve import BlockList
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.pb import transfer_pb2_grpc
from kvxfer.wire.blocks import block_lists_to_pb
from kvxfer.wire.requests import PublishBlocks, publish_to_pb

TITLE = "Idle, and after 100,000 reads"

#: An idle sidecar takes less than so much of a core.
IDLE = 0.01
#: A hundred thousand reads leave less than so much more memory than the first ten thousand of them.
GROWTH = 0.01
PEERS, READS, WINDOW = 50, 100_000, 15.0
#: One in so many reads belongs to the warm-up; what is held is looked at as often.
STEPS = 10
#: Reads under way at once, each in blocks of its own.
AT_ONCE = 32
#: The ends of the last reads are told, and their leases are over, after so long, seconds.
SETTLED = 0.25
#: gRPC's own pool of threads, which grows and shrinks with what there is to do: they do not count.
POOL = "event_engine"
#: 64 KiB a read.
BLOCK, BLOCKS, LAYERS = 4096, 8, 2
#: P polls for ten seconds after the last read; nothing is idle before.
ATTENTIVE = 12.0
_SETTINGS = ("--set", f"max_registrations={PEERS + 1}")


def run(effort: Effort) -> Section:
    """Measure on the transport that UCX is set to."""
    section = Section()
    one, many = (Case(BLOCK, BLOCKS * times, LAYERS) for times in (1, AT_ONCE))
    with memory(largest([one, many])) as place:
        more = [_like(place, f"engine{i}") for i in range(1, effort.rounds(PEERS))]
        _handshakes(section, one, place, more[:5], effort)
        with _sidecars(place) as sidecars:
            _idle(section, one, place, more, sidecars, effort)
        with _sidecars(place) as sidecars:
            _reads(section, many, place, sidecars, effort)
    return section


def _like(place: Memory, name: str) -> Memory:
    """Memory for another engine, with the same content on P's side."""
    directory = place.directory / name
    directory.mkdir()
    return Memory(directory, place.bytes["D"].size)


@contextlib.contextmanager
def _sidecars(place: Memory) -> Iterator[dict[str, Sidecar]]:
    with both(place.directory, _SETTINGS) as (p, d):
        yield {"P": p, "D": d}


# -- handshakes -------------------------------------------------------------------------------------------------------


def _handshakes(section: Section, case: Case, place: Memory, more: Sequence[Memory], effort: Effort) -> None:
    """Of sidecars that know nobody; of engines that know each other; of another engine of a sidecar that knows P's."""
    found: dict[str, list[float]] = {"first": [], "known": [], "further engine": []}
    for _ in range(effort.rounds(3)):
        with _sidecars(place) as sidecars:
            pair = Pair(sidecars["P"], sidecars["D"], case, place)
            found["first"].append(pair.handshake_seconds)
            found["known"] += [pair.handshake() for _ in range(5)]
            found["further engine"] += [pair.beside(other.directory.name, other).handshake() for other in more]
    for what, seconds in found.items():
        median, most = statistics.median(seconds), max(seconds)
        section.add("handshakes", what=what, ms=round(median * 1e3, 3), most_ms=round(most * 1e3, 3))


# -- nothing to do ----------------------------------------------------------------------------------------------------


def _idle(
    section: Section,
    case: Case,
    place: Memory,
    more: Sequence[Memory],
    sidecars: dict[str, Sidecar],
    effort: Effort,
) -> None:
    """Engines at D that read once each; memory on the way; then nothing."""
    peers = len(more) + 1
    pair = Pair(sidecars["P"], sidecars["D"], case, place)
    pair.read()
    held = [_anonymous(sidecars)]
    readers = [pair.beside(other.directory.name, other) for other in more]
    held.append(_anonymous(sidecars))
    for reader, other in zip(readers, more, strict=True):
        reader.handshake()
        reader.read()
        other.check(case)
    held.append(_anonymous(sidecars))
    for what, before, after in (("registration", held[0], held[1]), ("peer", held[1], held[2])):
        each = {f"{side}_kib": round((after[side] - before[side]) / len(readers) / 1024, 1) for side in "PD"}
        section.add("memory", what=what, count=len(readers), **each)
    time.sleep(ATTENTIVE)  # the time is what it depends on
    so_far, began = _processor(sidecars), time.monotonic()
    time.sleep(max(2.0, WINDOW * effort.share))  # the time is what is measured, nothing is waited for
    seconds = time.monotonic() - began
    for side, taken in _processor(sidecars).items():
        share = (taken - so_far[side]) / seconds
        section.add("idle", side=side, peers=peers, seconds=round(seconds, 1), share=round(share, 5))
        what = f"{side} with {peers} peers connected, nothing to do"
        section.lines.append(Line("6", what, share, IDLE, unit="of a core"))
    readers[-1].read()  # they are connected still
    more[-1].check(case)


def _anonymous(sidecars: dict[str, Sidecar]) -> dict[str, int]:
    return {side: sidecar.memory() for side, sidecar in sidecars.items()}


def _processor(sidecars: dict[str, Sidecar]) -> dict[str, float]:
    return {side: sidecar.cpu_seconds() for side, sidecar in sidecars.items()}


# -- many reads -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Held:
    """What a process has of things that it should give back."""

    memory: int
    files: int
    threads: int

    @classmethod
    def by(cls, sidecar: Sidecar) -> _Held:
        process = Path("/proc") / str(sidecar.pid)
        names = [(task / "comm").read_text().strip() for task in (process / "task").iterdir()]
        files = len(list((process / "fd").iterdir()))
        return cls(sidecar.memory(), files, sum(name != POOL for name in names))


def _reads(section: Section, case: Case, place: Memory, sidecars: dict[str, Sidecar], effort: Effort) -> None:
    pair = Pair(sidecars["P"], sidecars["D"], case, place)
    pair.read()
    reads = effort.rounds(READS, 10 * STEPS)
    held = asyncio.run(_in_steps(section, pair, place, reads // STEPS))
    for side in sidecars:
        first, last = held[0][side], held[-1][side]
        since = f"{reads:,} reads, since the first {reads // STEPS:,}"
        rate = growth([look[side].memory for look in held])
        section.lines.append(Line("6", f"{side}: growth of memory after {since}", round(rate, 5), GROWTH))
        for what in ("files", "threads"):
            more = getattr(last, what) - getattr(first, what)
            section.lines.append(Line("6", f"{side}: more {what} after {since}", more, 0))


def growth(looks: Sequence[float]) -> float:
    """Share by which a straight line through what was seen, at equal distances, rises from its first to its last.

    What glibc keeps in the arenas of a dozen threads goes up and down by half a percent from one look to the next, so
    that two looks alone tell little.
    """
    slope, start = np.polyfit(np.arange(len(looks)), looks, 1)
    return float(slope * (len(looks) - 1) / start)


async def _in_steps(section: Section, pair: Pair, place: Memory, step: int) -> list[dict[str, _Held]]:
    """What is held after each step, with nothing under way."""
    places = [range(BLOCKS * i, BLOCKS * (i + 1)) for i in range(AT_ONCE)]
    seen: list[dict[str, _Held]] = []
    p, d = (grpc.aio.insecure_channel(f"unix:{sidecar.socket}") for sidecar in (pair.p, pair.d))
    async with p, d:
        slots = [_Slot(pair, place, chosen, p, d) for chosen in places]
        for number in range(STEPS):
            began = time.monotonic()
            left = iter(range(number * step + 1, (number + 1) * step + 1))
            await asyncio.gather(*(slot.take(left) for slot in slots))
            seconds = time.monotonic() - began
            await asyncio.sleep(SETTLED)
            seen.append({side: _Held.by(sidecar) for side, sidecar in (("P", pair.p), ("D", pair.d))})
            for side, held in seen[-1].items():
                row = {"memory_kib": held.memory // 1024, "files": held.files, "threads": held.threads}
                section.add("lasting", side=side, reads=(number + 1) * step, rate=round(step / seconds, 1), **row)
    return seen


class _Slot:
    """Some blocks of either side, for one read at a time: each of a request of its own, which ends with it."""

    def __init__(self, pair: Pair, place: Memory, positions: range, p: grpc.aio.Channel, d: grpc.aio.Channel) -> None:
        ids = {side: pair.case.ids(side)[positions.start : positions.stop] for side in "PD"}
        blocks, tokens = (BlockList(GROUP, ids["P"]),), len(positions) * TOKENS
        record = PublishBlocks(pair.engines["P"], "", "template", blocks, tokens, bytes(16), 60.0, 1)
        self._publication = publish_to_pb(record)
        ticket = pair.ticket(blocks, tokens)
        self._request = pair.request(ticket, block_lists_to_pb([BlockList(GROUP, ids["D"])]))
        self._publish = transfer_pb2_grpc.KvTransferStub(p).PublishBlocks
        self._read = transfer_pb2_grpc.KvTransferStub(d).ReadBlocks
        words = BLOCK // 8
        self._layers = [
            {side: place.bytes[side][o : o + pair.case.region].view(np.uint64).reshape(-1, words) for side in "PD"}
            for o in place.offsets(pair.case)
        ]
        self._ids = ids

    async def take(self, numbers: Iterator[int]) -> None:
        """Read as long as there are numbers, which nobody else has taken."""
        for number in numbers:
            await self._once(number)

    async def _once(self, number: int) -> None:
        """One read of what was never there before.

        :raises RuntimeError: it brought anything else.
        """
        for layer in self._layers:
            layer["P"][self._ids["P"]] = number
        request_id, token = f"lasting-{number}", secrets.token_bytes(16)
        for message in (self._publication, self._request.spec.ticket):
            message.request_id, message.lease_token = request_id, token
        await self._publish(self._publication, timeout=60)
        answer = await self._read(self._request, timeout=60)
        if answer.transfer.state != pb.TRANSFER_STATE_DONE:
            raise RuntimeError(f"read {number} ended as {answer.transfer}")
        if any((layer["D"][self._ids["D"]] != number).any() for layer in self._layers):
            raise RuntimeError(f"wrong bytes in read {number}")
