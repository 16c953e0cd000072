"""The truth by definition: what a read must do, worked out without pairing, rows or descriptors.

Memory is modelled one number per byte.  Every byte of a cache has a label that says which byte it is (layer, component,
token or snapshot, unit, inner element, byte of the element), every other byte a label that occurs nowhere else.  A read
is then a copy of labels, and two images are equal exactly where every byte came from where it had to come from.

Only the *types* of :mod:`kvxfer.core.layout` are used, to be told where things lie; addresses are worked out here, from
the definition of a view ("kernel block k of logical block b starts at base + b * block_stride + k * kernel_stride").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvxfer.core.layout import AxisKind, CacheLayout, Component, GroupKind, Rank, View

Ints = npt.NDArray[np.int64]
Key = tuple[str, str]
"""A layer's name and a component's name: what the two sides share."""

NULL = -1
_KEY_SHIFT = 40


@dataclass(frozen=True)
class Blocks:
    """The blocks of one group on one side, as truth sees them.

    ``positions`` holds one number a block: the first token of an attention block, the tokens folded into a snapshot.
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Want:
    """What is read of one group of the reading side: tokens ``[skip, tokens)``, or the snapshot after ``tokens``."""

    skip: int
    tokens: int


class Labels:
    """One number for every byte that means anything, the same for all ranks of both engines."""

    def __init__(self) -> None:
        self._keys: dict[Key, int] = {}
        self._noise = 0

    def base(self, key: Key) -> int:
        """The first label of a component of a layer."""
        return self._keys.setdefault(key, len(self._keys) + 1) << _KEY_SHIFT

    def key(self, number: int) -> Key:
        """The component whose labels start at ``number << 40``."""
        return next(k for k, n in self._keys.items() if n == number)

    def noise(self, count: int) -> Ints:
        """Labels that occur nowhere else."""
        first, self._noise = self._noise, self._noise + count
        return -1 - np.arange(first, first + count, dtype=np.int64)


@lru_cache(maxsize=4096)
def _token_bytes(unit_stride: int, begin: int, end: int, inner: tuple[tuple[int, int], ...]) -> tuple[Ints, Ints]:
    """The bytes of one token (or of a whole snapshot): their offsets, and what they are.

    The offset comes from the strides; the meaning does not: unit, then the inner axes in memory order, then the byte.
    """
    offsets: Ints = np.arange(end - begin, dtype=np.int64) * unit_stride
    meanings: Ints = np.arange(begin, end, dtype=np.int64)
    for extent, stride in inner:
        steps: Ints = np.arange(extent, dtype=np.int64)
        offsets = (offsets[:, None] + steps * stride).reshape(-1)
        meanings = (meanings[:, None] * extent + steps).reshape(-1)
    return offsets, meanings


class Part:
    """One component of one layer on one rank: where each of its bytes lies."""

    def __init__(self, group: str, block_tokens: int, view: View, component: Component, region_start: int) -> None:
        self.key: Key = (view.layer, component.name)
        self.group = group
        self.block_tokens = block_tokens
        self.num_blocks = view.num_blocks
        self.block_stride = view.block_stride
        self.kernel_stride = view.kernel_stride
        self.kernel_tokens = 0
        self.units = (component.units.begin, component.units.end)
        self.total_units = component.units.total
        self._start = region_start + view.base + component.offset
        self._token_stride = 0
        for axis in component.axes:
            if axis.kind is AxisKind.TOKEN:
                self.kernel_tokens, self._token_stride = axis.extent, axis.stride
        unit = next(a for a in component.axes if a.kind is AxisKind.UNIT)
        inner = [(a.extent, a.stride) for a in component.axes if a.kind is AxisKind.INNER]
        inner.append((component.element_bytes, 1))
        self.token_offsets, self.token_meanings = _token_bytes(unit.stride, *self.units, tuple(inner))
        self.unit_bytes = math.prod(extent for extent, _ in inner)

    @property
    def is_state(self) -> bool:
        return self.block_tokens == 0

    def snapshot(self, block: int) -> Ints:
        """The addresses of a snapshot's bytes."""
        return self._start + block * self.block_stride + self.token_offsets

    def tokens(self, blocks: Blocks) -> tuple[Ints, Ints]:
        """The tokens that ``blocks`` hold (null blocks do not), and the address of each one's bytes, a row a token."""
        ids = np.array(blocks.ids, dtype=np.int64)
        firsts = np.array(blocks.positions, dtype=np.int64)[ids != NULL]
        inside = np.arange(self.block_tokens, dtype=np.int64)
        kernel, token = np.divmod(inside, self.kernel_tokens)
        starts = self._start + ids[ids != NULL] * self.block_stride
        addresses = starts[:, None] + (kernel * self.kernel_stride + token * self._token_stride)
        positions = (firsts[:, None] + inside).reshape(-1)
        return positions, addresses.reshape(-1)[:, None] + self.token_offsets

    def labels(self, labels: Labels, positions: Ints) -> Ints:
        """What the bytes of these tokens (or of the snapshots after so many tokens) are called, a row each."""
        per_token = self.total_units * self.unit_bytes
        return labels.base(self.key) + positions[:, None] * per_token + self.token_meanings


class RankMemory:
    """The memory of one rank: noise, and what it has been given to hold."""

    def __init__(self, layout: CacheLayout, labels: Labels) -> None:
        sizes = [r.size for r in layout.regions]
        self.region_starts: Ints = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.labels = labels
        self.image = labels.noise(int(self.region_starts[-1]))
        starts = self.region_starts.tolist()
        self.parts = [
            Part(g.name, g.block_tokens if g.kind is GroupKind.ATTENTION else 0, v, c, starts[v.region])
            for g in layout.groups
            for v in g.views
            for c in v.components
        ]
        self.by_key: dict[Key, Part] = {p.key: p for p in self.parts}

    def hold(self, lists: Mapping[str, Blocks]) -> None:
        """Fill the blocks that a request names with what a prefill would have written there."""
        for part in self.parts:
            if (blocks := lists.get(part.group)) is None:
                continue
            if part.is_state:
                for block, position in zip(blocks.ids, blocks.positions, strict=True):
                    if block != NULL:
                        self.image[part.snapshot(block)] = part.labels(self.labels, np.array([position]))[0]
            else:
                positions, addresses = part.tokens(blocks)
                self.image[addresses] = part.labels(self.labels, positions)

    def expect(
        self, lists: Mapping[str, Blocks], wants: Mapping[str, Want], granules: Mapping[Key, int]
    ) -> tuple[Ints, npt.NDArray[np.bool_], dict[str, int]]:
        """What this memory must be after the read.

        :param lists: the reading side's own blocks.
        :param wants: what to read of each group; a group that is not named stays as it is.
        :param granules: for each attention component the tokens of the greatest common divisor of both kernel blocks.
        :returns: the image; where it is unspecified (after the last token, in the same granule); and the least number
            of bytes that must move, by group, rounded up to granules.
        """
        image = self.image.copy()
        unspecified = np.zeros(len(image), dtype=np.bool_)
        least = dict.fromkeys(wants, 0)
        for part in self.parts:
            if (want := wants.get(part.group)) is None:
                continue
            blocks = lists[part.group]
            if part.is_state:
                at = next(i for i, p in enumerate(blocks.positions) if p == want.tokens and blocks.ids[i] != NULL)
                addresses = part.snapshot(blocks.ids[at])
                image[addresses] = part.labels(self.labels, np.array([want.tokens]))[0]
                least[part.group] += addresses.size
                continue
            granule = granules[part.key]
            stop = -(-want.tokens // granule) * granule
            positions, addresses = part.tokens(blocks)
            read = (positions >= want.skip) & (positions < want.tokens)
            image[addresses[read]] = part.labels(self.labels, positions[read])
            unspecified[addresses[(positions >= want.tokens) & (positions < stop)]] = True
            least[part.group] += (stop - want.skip) * len(part.token_offsets)
        return image, unspecified, least


def granules(local: RankMemory, remotes: Iterable[RankMemory]) -> dict[Key, int]:
    """The tokens at which both sides' kernel blocks meet, for each attention component of ``local``."""
    found: dict[Key, int] = {}
    for remote in remotes:
        for part in local.parts:
            other = remote.by_key.get(part.key)
            if other is not None and not part.is_state:
                found[part.key] = math.gcd(part.kernel_tokens, other.kernel_tokens)
    return found


def fewest_sources(local: RankMemory, remotes: Sequence[RankMemory]) -> int | None:
    """The least number of ``remotes`` that together hold everything that ``local`` has, by trying all subsets."""
    needed = {(p.key, u) for p in local.parts for u in range(*p.units)}
    held = [{(p.key, u) for p in r.parts for u in range(*p.units)} & needed for r in remotes]
    for size in range(1, len(remotes) + 1):
        if any(set().union(*some) == needed for some in combinations(held, size)):
            return size
    return None


# -- running a plan over the images ----------------------------------------------------------------------------------


class Rows(Protocol):
    """One side's rows, as a plan gives them."""

    @property
    def region(self) -> Ints: ...
    @property
    def offset(self) -> Ints: ...
    @property
    def length(self) -> Ints: ...
    @property
    def stride(self) -> Ints: ...
    @property
    def count(self) -> Ints: ...
    @property
    def start(self) -> Ints: ...


@dataclass(frozen=True)
class Spans:
    """Byte ranges of one rank's memory."""

    region: Ints
    offset: Ints
    length: Ints

    def bytes(self, memory: RankMemory) -> Ints:
        """The address of every byte of every range, one after the other."""
        firsts = memory.region_starts[self.region] + self.offset
        before = np.cumsum(self.length) - self.length
        addresses: Ints = np.repeat(firsts - before, self.length) + np.arange(int(self.length.sum()), dtype=np.int64)
        return addresses


def spans(rows: Rows, indices: npt.NDArray[np.int32], memory: RankMemory | None = None) -> Spans:
    """What descriptors ``indices`` of ``rows`` are: number ``start[r] + i`` is ``length[r]`` bytes at ``offset[r] + i *
    stride[r]``.  With ``memory``, every descriptor must exist and lie inside its region."""
    total = int(rows.count.sum())
    assert indices.dtype == np.int32
    assert ((indices >= 0) & (indices < total)).all(), "no such descriptor"
    numbers = indices.astype(np.int64)
    starts: Ints = np.cumsum(rows.count) - rows.count
    assert np.array_equal(starts, rows.start)
    row = np.searchsorted(starts, numbers, side="right") - 1
    offset: Ints = rows.offset[row] + (numbers - starts[row]) * rows.stride[row]
    found = Spans(rows.region[row], offset, rows.length[row])
    if memory is not None:
        sizes = np.diff(memory.region_starts)
        for region, first, last in (
            (rows.region, rows.offset, rows.offset + (rows.count - 1) * rows.stride + rows.length),
            (found.region, found.offset, found.offset + found.length),
        ):
            assert ((region >= 0) & (region < len(sizes))).all(), "no such region"
            assert ((first >= 0) & (last <= sizes[region])).all(), "outside its region"
    return found


class SourceRows(Protocol):
    """The rows of one source, as a plan gives them."""

    @property
    def rank(self) -> Rank: ...
    @property
    def local(self) -> Rows: ...
    @property
    def remote(self) -> Rows: ...


class SourceRead(Protocol):
    """What to read from one rank."""

    @property
    def rank(self) -> Rank: ...
    @property
    def bytes_by_group(self) -> Mapping[str, int]: ...
    @property
    def local_indices(self) -> npt.NDArray[np.int32]: ...
    @property
    def remote_indices(self) -> npt.NDArray[np.int32]: ...
    @property
    def bytes(self) -> int: ...


class AnyPlan(Protocol):
    @property
    def sources(self) -> Sequence[SourceRows]: ...


class AnyRead(Protocol):
    @property
    def sources(self) -> Sequence[SourceRead]: ...
    @property
    def bytes(self) -> int: ...


def copy(local: RankMemory, sources: Iterable[tuple[RankMemory, Rows, Rows, SourceRead]]) -> tuple[Ints, int]:
    """The local image after the reads from all sources, and the bytes moved.

    Each source is its memory, the plan's local and remote rows for it, and what to read.  Pairs must agree in length,
    and no local byte may be written twice: NIXL promises no order.
    """
    image = local.image.copy()
    written = np.zeros(len(image), dtype=np.bool_)
    moved = 0
    for memory, local_rows, remote_rows, read in sources:
        assert len(read.local_indices) == len(read.remote_indices)
        here = spans(local_rows, read.local_indices, local)
        there = spans(remote_rows, read.remote_indices, memory)
        assert np.array_equal(here.length, there.length), "a pair of descriptors of different lengths"
        to = here.bytes(local)
        image[to] = memory.image[there.bytes(memory)]
        written[to] = True
        assert read.bytes == len(to), "the bytes that a read announces are not what it moves"
        moved += len(to)
    assert int(written.sum()) == moved, "a local byte is written twice"
    return image, moved


def explain_difference(memory: RankMemory, got: Ints, want: Ints, unspecified: npt.NDArray[np.bool_]) -> str:
    """The first byte that differs, in words; empty where none does."""
    wrong = np.flatnonzero((got != want) & ~unspecified)
    if not wrong.size:
        return ""
    at = int(wrong[0])
    region = int(np.searchsorted(memory.region_starts, at, side="right")) - 1

    def name(label: int) -> str:
        if label < 0:
            return "noise"
        key = memory.labels.key(label >> _KEY_SHIFT)
        return f"{key[0]}/{key[1]} byte {label & ((1 << _KEY_SHIFT) - 1)}"

    place = f"region {region}, byte {at - int(memory.region_starts[region])}"
    return f"{wrong.size} wrong bytes, first {place}: {name(int(got[at]))} instead of {name(int(want[at]))}"


def verify(
    local: RankMemory,
    remotes: Mapping[Rank, RankMemory],
    plan: AnyPlan,
    read: AnyRead,
    lists: Mapping[str, Blocks],
    wants: Mapping[str, Want],
) -> None:
    """Copy what ``read`` says, compare every byte of the reading rank, and the bytes moved with the least possible.

    :param lists: the reading rank's own blocks; the remote memories hold theirs already.
    :param wants: what is to be read of each of the reading rank's groups.
    """
    assert [s.rank for s in plan.sources] == [r.rank for r in read.sources]
    pairs = zip(plan.sources, read.sources, strict=True)
    got, moved = copy(local, [(remotes[s.rank], s.local, s.remote, r) for s, r in pairs])
    want, unspecified, least = local.expect(lists, wants, granules(local, remotes.values()))
    assert not (message := explain_difference(local, got, want, unspecified)), message
    by_group = dict.fromkeys(least, 0)
    for source in read.sources:
        for group, size in source.bytes_by_group.items():
            by_group[group] += size
    assert by_group == least
    assert moved == read.bytes == sum(least.values())
