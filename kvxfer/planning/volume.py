"""Transfer volume against prompt length: what moves, and what would with padded pages.

Three readers of the same pair, per D rank and request:

* *padded*: every page that the prompt takes, whole;
* *whole blocks*: no padding, and attention blocks to their ends;
* *read*: what kvxfer reads, attention to the last granule.

The first is what pages are; the other two are resolved from the compiled plans, as a sidecar would.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvxfer.core.layout import GroupKind
from kvxfer.planning.engine import Engine, check_tokens
from kvxfer.planning.pair import Pair
from kvxfer.planning.report import padded_bytes

#: More steps than this cannot be told apart in a plot.
MAX_STEPS: Final = 64


@dataclass(frozen=True, slots=True)
class RankVolume:
    """What one D rank moves for one request: bytes of each reader, and the descriptors of kvxfer's read."""

    rank: str
    padded: int
    whole_blocks: int
    read: int
    descriptors: int

    @property
    def padding(self) -> int:
        """Bytes saved by leaving out padding, the same for every length where only snapshots are padded."""
        return self.padded - self.whole_blocks

    @property
    def tail(self) -> int:
        """Bytes saved by not reading the last attention block to its end."""
        return self.whole_blocks - self.read


@dataclass(frozen=True, slots=True)
class Volume:
    """All D ranks at one prompt length."""

    tokens: int
    ranks: tuple[RankVolume, ...]

    @property
    def largest(self) -> RankVolume:
        """The rank that reads most: the request has arrived when that one has."""
        return max(self.ranks, key=lambda rank: rank.read)


def volumes(p: Engine, d: Engine, lengths: Iterable[int]) -> tuple[Volume, ...]:
    """The volume at each prompt length, in ascending order.

    :raises Refused: where the pair, or a read so long, would be refused.
    :raises KvxferError: FIELD_INVALID for a length that no prompt has.
    """
    wanted = sorted({check_tokens(tokens) for tokens in lengths})
    if not wanted:
        return ()
    pair = Pair.of(p, d, wanted[-1])
    return tuple(Volume(tokens, tuple(_ranks(pair, tokens))) for tokens in wanted)


def _ranks(pair: Pair, tokens: int) -> Iterable[RankVolume]:
    for rank, layout in pair.d.layouts.items():
        read = pair.read(rank, tokens)
        whole = pair.read(rank, tokens, whole_blocks=True)
        yield RankVolume(str(rank), padded_bytes(layout, tokens), whole.bytes, read.bytes, read.descriptors)


def interesting_lengths(d: Engine, longest: int, points: int) -> list[int]:
    """Lengths to draw a curve through: evenly spaced, and both sides of every step where a block begins.

    :param points: how many are evenly spaced; block ends are left out where there are more than :data:`MAX_STEPS`.
    """
    check_tokens(longest)
    chosen = {max(1, longest * i // points) for i in range(1, points + 1)} | {1}
    sizes = {g.block_tokens for layout in d.layouts.values() for g in layout.groups if g.kind is GroupKind.ATTENTION}
    for size in sizes:
        if longest // size <= MAX_STEPS:
            chosen.update(edge for end in range(size, longest, size) for edge in (end, end + 1))
    return sorted(chosen)
