"""One request: grouped block IDs and a token range in, paired descriptor numbers out.

Positions, not counts: each side says where its first block stands in the sequence, so nothing is ever trimmed to
match.  A range that one side does not cover is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, Group, GroupKind, Rank
from kvxfer.core.plan import Addressing, Int64, Plan, Section, SourcePlan, Tier

#: The ID of a block that is not there.  It may stand wherever nothing is read.
NULL_BLOCK: Final = -1
#: Token counts and positions must be at most this.
MAX_TOKENS: Final = 2**40
#: Most descriptors that one read may name, over all sources, unless the caller sets another limit.
DESCRIPTOR_LIMIT: Final = 8_388_608

_POOL_SHIFT: Final = 32
#: So many block IDs are looked through, or sorted, the plain way: what is faster for many takes several steps.
_FEW: Final = 256


@dataclass(frozen=True)
class BlockList:
    """The logical blocks of one group on one side.

    :param group: the group's name in its own side's layout.
    :param ids: int64, in sequence order; :data:`NULL_BLOCK` where there is no block.
    :param first_position: attention groups: the token at which ``ids[0]`` starts; a multiple of the block size.
    :param positions: state groups: for each ID the number of tokens folded into that snapshot.
    :param skip_tokens: on D's list of an attention group: where this group's read begins, instead of the request's
        ``skip_tokens`` (a sliding window needs only its last blocks).
    :param num_tokens: likewise where it ends.
    """

    group: str
    ids: ArrayLike
    first_position: int = 0
    positions: ArrayLike | None = None
    skip_tokens: int | None = None
    num_tokens: int | None = None


@dataclass(frozen=True)
class Request:
    """Read the tokens ``[skip_tokens, num_tokens)`` and the snapshots of exactly ``num_tokens`` tokens.

    With no tokens and no local lists, nothing is read.
    """

    local: Sequence[BlockList]
    remote: Sequence[BlockList]
    num_tokens: int
    skip_tokens: int = 0


@dataclass(frozen=True)
class SourceRead:
    """What to read from one P rank: descriptor ``local_indices[i]`` takes ``remote_indices[i]``; both int32."""

    rank: Rank
    local_indices: NDArray[np.int32]
    remote_indices: NDArray[np.int32]
    bytes_by_group: Mapping[str, int]

    @cached_property
    def bytes(self) -> int:
        """Bytes that will move."""
        return sum(self.bytes_by_group.values())

    @property
    def descriptors(self) -> int:
        """Descriptor pairs."""
        return len(self.local_indices)


@dataclass(frozen=True)
class Read:
    """A resolved request.

    :param claims: the local blocks that will be written, sorted; blocks of groups that share memory share a number.
    """

    sources: tuple[SourceRead, ...]
    claims: Int64

    @cached_property
    def bytes(self) -> int:
        """Bytes that will move, from all sources."""
        return sum(s.bytes for s in self.sources)

    @cached_property
    def descriptors(self) -> int:
        """Descriptor pairs, from all sources."""
        return sum(s.descriptors for s in self.sources)


@dataclass(frozen=True)
class _Side:
    """One side's checked lists by group name."""

    name: str
    lists: Mapping[str, tuple[int, BlockList, Int64, Int64 | None]]

    def error(self, reason: Reason, group: str, message: str, what: str = "block_ids", **values: object) -> KvxferError:
        where = f"{_path(self.name)}[{self.lists[group][0]}].{what}" if group in self.lists else _path(self.name)
        return KvxferError(
            reason, f"{self.name} group {group}: {message}".lstrip(), field=where, side=self.name, group=group, **values
        )


def resolve(plan: Plan, request: Request, limit: int = DESCRIPTOR_LIMIT) -> Read:
    """Turn a request into descriptor numbers.

    Cost: O(descriptors), in NumPy.

    :param limit: most descriptors.
    :raises KvxferError: GROUP_MISMATCH, BLOCK_OUT_OF_RANGE, DUPLICATE_BLOCK, NULL_BLOCK, RANGE_INVALID,
        RANGE_NOT_COVERED, STATE_POSITION_MISMATCH, TOO_MANY_DESCRIPTORS, each naming the side, the group and the value.
    """
    num_tokens = _tokens("num_tokens", request.num_tokens, 1)
    skip_tokens = _tokens("skip_tokens", request.skip_tokens, 0)
    if skip_tokens > num_tokens:
        raise _range("skip_tokens", f"skip_tokens {skip_tokens} is past num_tokens {num_tokens}", value=skip_tokens)
    local = _side("local", request.local, frozenset(plan.layout.index))
    remote = _side("remote", request.remote, plan.remote_groups)
    _check_ids(local, plan.layout)
    nothing = not local.lists and skip_tokens == num_tokens
    reads = [[] if nothing else list(_sections(plan, source, local, remote)) for source in plan.sources]
    # Everything about the range first: a null block is told of only where it really would have been read.
    ranges = [[s.range(skip_tokens, num_tokens) for s in sections] for sections in reads]
    budget = _Budget(limit, limit)
    claims = [np.zeros(0, dtype=np.int64)]
    found = []
    for source, sections, bounds in zip(plan.sources, reads, ranges, strict=True):
        pieces = [p for s, (skip, end) in zip(sections, bounds, strict=True) for p in s.pieces(skip, end, budget)]
        claims += [piece.claims(plan.layout.pools) for piece in pieces]
        found.append(_source_read(plan, source, pieces))
    return Read(tuple(found), _distinct(np.concatenate(claims)))


def _sections(plan: Plan, source: SourcePlan, local: _Side, remote: _Side) -> Iterator[_SectionRead]:
    _check_ids(remote, source.layout)
    for section in source.sections:
        yield _SectionRead(
            section,
            _End(local, plan.layout, section.local_group),
            _End(remote, source.layout, section.remote_group),
        )


def check_blocks(layout: CacheLayout, lists: Sequence[BlockList], name: str = "") -> None:
    """Whether one side's lists make sense by themselves: known groups, existing blocks, none named twice.

    :param name: the side, for error messages and field paths (``local`` gives ``local_blocks[0]...``).
    :raises KvxferError: GROUP_MISMATCH, BLOCK_OUT_OF_RANGE, DUPLICATE_BLOCK, FIELD_INVALID.
    """
    _check_ids(_side(name, lists, frozenset(layout.index)), layout)


# -- checking --------------------------------------------------------------------------------------------------------


def _path(side: str) -> str:
    return f"{side}_blocks" if side else "blocks"


def _range(where: str, message: str, **values: object) -> KvxferError:
    return KvxferError(Reason.RANGE_INVALID, message, field=where, **values)


def _tokens(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_TOKENS:
        raise _range(name, f"{name} is {value!r}; allowed are {least} to {MAX_TOKENS}", value=value)
    return value


def _side(name: str, lists: Sequence[BlockList], known: frozenset[str]) -> _Side:
    checked: dict[str, tuple[int, BlockList, Int64, Int64 | None]] = {}
    for i, blocks in enumerate(lists):
        where = f"{_path(name)}[{i}]"
        problem = ""
        if blocks.group not in known:
            problem = f"there is no group {blocks.group}; there are {', '.join(sorted(known))}"
        elif blocks.group in checked:
            problem = f"group {blocks.group} is listed twice"
        if problem:
            raise KvxferError(Reason.GROUP_MISMATCH, problem, field=f"{where}.group", side=name, group=blocks.group)
        ids = _integers(f"{where}.block_ids", blocks.ids)
        positions = None if blocks.positions is None else _integers(f"{where}.snapshot_positions", blocks.positions)
        _tokens(f"{where}.first_position", blocks.first_position, 0)
        checked[blocks.group] = (i, blocks, ids, positions)
    return _Side(name, checked)


def _integers(where: str, values: ArrayLike) -> Int64:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise KvxferError(
            Reason.FIELD_INVALID,
            f"{where} must be a list of integers; it is an array of {array.dtype} with {array.ndim} dimensions",
            field=where,
        )
    # The method of an array is a detour by way of Python.
    low, high = (int(np.minimum.reduce(array)), int(np.maximum.reduce(array))) if array.size else (0, 0)
    if high > MAX_TOKENS or low < NULL_BLOCK:
        bad = high if high > MAX_TOKENS else low
        raise KvxferError(
            Reason.BLOCK_OUT_OF_RANGE,
            f"{where} holds {bad}; allowed are {NULL_BLOCK} to {MAX_TOKENS}",
            field=where,
            value=bad,
        )
    return array.astype(np.int64, copy=False)


def _check_ids(side: _Side, layout: CacheLayout) -> None:
    """Every listed ID exists, and none is named twice in a group or in groups that share memory."""
    by_pool: dict[int, list[tuple[str, Int64]]] = {}
    for name, (_, _, ids, _) in side.lists.items():
        index = layout.index.get(name)
        if index is None:
            continue  # another P rank's group
        real = ids[ids != NULL_BLOCK]
        most = layout.groups[index].num_blocks
        if real.size and (last := int(np.maximum.reduce(real))) >= most:
            raise side.error(
                Reason.BLOCK_OUT_OF_RANGE,
                name,
                f"block {last} does not exist; allowed are 0 to {most - 1}",
                block=last,
                maximum=most - 1,
            )
        by_pool.setdefault(layout.pools[index], []).append((name, real))
    for members in by_pool.values():
        together = np.concatenate([ids for _, ids in members])
        if together.size <= _FEW and len(set(together.tolist())) == together.size:
            continue
        together = together[_order(together)]
        twice = together[1:][together[1:] == together[:-1]]
        if twice.size:
            block = int(twice[0])
            names = [name for name, ids in members for _ in range(int((ids == block).sum()))]
            shared = "" if len(set(names)) == 1 else f" (in groups {', '.join(names)}, which share their memory)"
            raise side.error(
                Reason.DUPLICATE_BLOCK, names[-1], f"block {block} is named twice{shared}", block=block, groups=names
            )


# -- one section of one source ---------------------------------------------------------------------------------------


@dataclass
class _Budget:
    """Descriptors that may still be named; spent before anything of that size is built."""

    left: int
    limit: int

    def spend(self, descriptors: int) -> None:
        self.left -= descriptors
        if self.left < 0:
            raise KvxferError(
                Reason.TOO_MANY_DESCRIPTORS,
                f"the read needs more than {self.limit} descriptors; read it in several parts",
                field="num_tokens",
                limit_name="max_descriptors",
                limit=self.limit,
            )


#: Kernel blocks and parts where every unit is a whole block.
_WHOLE: Final[Int64] = np.zeros(1, dtype=np.int64)
_WHOLE.setflags(write=False)


@dataclass(frozen=True)
class _Units:
    """Where units of a tier lie on one side.

    :param blocks: their IDs.
    :param kernels: kernel block and part of each; one 0 where every unit is a whole block.
    """

    blocks: Int64
    kernels: Int64
    parts: Int64

    def taken(self, order: NDArray[np.intp]) -> _Units:
        """The units in another order."""
        if self.kernels is _WHOLE:
            return _Units(self.blocks[order], _WHOLE, _WHOLE)
        return _Units(self.blocks[order], self.kernels[order], self.parts[order])


@dataclass(frozen=True)
class _Piece:
    """Units of one tier, paired."""

    section: Section
    tier: Tier
    local: _Units
    remote: _Units

    @property
    def descriptors(self) -> int:
        return len(self.tier.lengths) * len(self.local.blocks)

    def claims(self, pools: Sequence[int]) -> Int64:
        """The local block that each unit writes to, numbered so that groups over the same memory agree."""
        return self.local.blocks + (pools[self.section.local_group] << _POOL_SHIFT)


class _End:
    """One group on one side of a section, with the blocks that the request lists for it."""

    def __init__(self, side: _Side, layout: CacheLayout, group: int) -> None:
        self.side = side
        self.group: Final[Group] = layout.groups[group]
        if self.group.name not in side.lists:
            raise self.error(Reason.GROUP_MISMATCH, "no blocks are listed for it")
        self.index, self.blocks, self.ids, self.positions = side.lists[self.group.name]

    def error(self, reason: Reason, message: str, what: str = "block_ids", **values: object) -> KvxferError:
        return self.side.error(reason, self.group.name, message, what, **values)

    def check_cover(self, skip: int, end: int) -> None:
        """The listed blocks hold all tokens of ``[skip, end)``."""
        size, first = self.group.block_tokens, self.blocks.first_position
        if first % size:
            raise self.error(
                Reason.RANGE_INVALID,
                f"first_position {first} must be a multiple of the block size {size}",
                "first_position",
                value=first,
                block_tokens=size,
            )
        last = first + len(self.ids) * size
        if skip < end and not (first <= skip and end <= last):
            raise self.error(
                Reason.RANGE_NOT_COVERED,
                f"its {len(self.ids)} blocks hold tokens [{first}, {last}); [{skip}, {end}) is to be read",
                first=first,
                last=last,
                skip_tokens=skip,
                num_tokens=end,
            )

    def locate(self, addressing: Addressing, unit: int, tokens: Int64) -> _Units:
        """Block, kernel block and part at each token position."""
        # Not divmod, which is several times slower than both of its halves.
        size = self.group.block_tokens
        past = tokens - self.blocks.first_position
        at = past // size
        found = self.ids[at]
        if int(np.minimum.reduce(found)) == NULL_BLOCK:
            where = int(np.argmax(found == NULL_BLOCK))
            raise self.error(
                Reason.NULL_BLOCK,
                f"tokens from {int(tokens[where])} are to be read, but entry {int(at[where])} is a null block",
                index=int(at[where]),
                token=int(tokens[where]),
            )
        if unit == addressing.kernel_tokens == size:
            return _Units(found, _WHOLE, _WHOLE)
        within = past - at * size
        kernel = within // addressing.kernel_tokens
        return _Units(found, kernel, (within - kernel * addressing.kernel_tokens) // unit)

    def snapshot(self, num_tokens: int) -> _Units:
        """The one block whose snapshot has folded exactly ``num_tokens`` tokens."""
        positions = self.positions
        if positions is None or len(positions) != len(self.ids):
            raise self.error(
                Reason.STATE_POSITION_MISMATCH,
                f"{len(self.ids)} blocks need as many snapshot positions, not "
                f"{0 if positions is None else len(positions)}",
                "snapshot_positions",
                blocks=len(self.ids),
            )
        found = np.flatnonzero((self.ids != NULL_BLOCK) & (positions == num_tokens))
        if len(found) != 1:
            held = sorted({int(p) for p in positions[self.ids != NULL_BLOCK]})[:8]
            raise self.error(
                Reason.STATE_POSITION_MISMATCH,
                f"{len(found)} of its blocks are a snapshot of {num_tokens} tokens; exactly one must be (it holds "
                f"snapshots of {held})",
                "snapshot_positions",
                num_tokens=num_tokens,
                held=held,
            )
        return _Units(self.ids[found], _WHOLE, _WHOLE)


@dataclass(frozen=True)
class _SectionRead:
    section: Section
    local: _End
    remote: _End

    def pieces(self, skip: int, end: int, budget: _Budget) -> Iterator[_Piece]:
        """What to read of this section for tokens ``[skip, end)`` of :meth:`range`, or the snapshot of ``end``."""
        if self.section.kind is GroupKind.STATE:
            tier = self.section.tiers[0]
            budget.spend(len(tier.lengths))
            yield _Piece(self.section, tier, self.local.snapshot(end), self.remote.snapshot(end))
            return
        for tier, begin, stop in self._spans(skip, end):
            if begin >= stop:
                continue
            budget.spend((stop - begin) // tier.tokens * len(tier.lengths))
            tokens = np.arange(begin, stop, tier.tokens, dtype=np.int64)
            here = self.local.locate(tier.local, tier.tokens, tokens)
            there = self.remote.locate(tier.remote, tier.tokens, tokens)
            # NIXL merges neighbouring pairs, and a scheduler's free list is in any order: sort by local address, so
            # that what is contiguous on both sides stays so.
            # The units of a block are in order already.
            order = _order(here.blocks)
            yield _Piece(self.section, tier, here.taken(order), there.taken(order))

    def range(self, skip: int, end: int) -> tuple[int, int]:
        """The group's own range, checked against the granule and against what both sides' blocks hold."""
        if self.section.kind is GroupKind.STATE:
            return skip, end
        blocks, name, granule = self.local.blocks, self.local.group.name, self.section.granule
        where = "skip_tokens"
        if blocks.skip_tokens is not None:
            where = f"local_blocks[{self.local.index}].skip_tokens"
            skip = _tokens(where, blocks.skip_tokens, 0)
        if blocks.num_tokens is not None:
            end = _tokens(f"local_blocks[{self.local.index}].num_tokens", blocks.num_tokens, 0)
        if skip % granule:
            raise _range(
                where,
                f"group {name}: skip_tokens {skip} must be a multiple of {granule}, the granule at which the blocks of "
                "both sides meet; what is skipped inside a granule would be overwritten",
                group=name,
                value=skip,
                granule=granule,
            )
        if skip > end:
            raise _range(where, f"group {name}: skip_tokens {skip} is past num_tokens {end}", group=name, value=skip)
        self.local.check_cover(skip, end)
        self.remote.check_cover(skip, end)
        return skip, end

    def _spans(self, skip: int, end: int) -> list[tuple[Tier, int, int]]:
        """Cut the range, rounded up to granules, into the coarse middle and the fine ends."""
        coarse, fine = self.section.tiers[0], self.section.tiers[-1]
        end = -(-end // fine.tokens) * fine.tokens
        first, last = -(-skip // coarse.tokens) * coarse.tokens, end // coarse.tokens * coarse.tokens
        if coarse is fine or first >= last:
            return [(fine, skip, end)]
        return [(fine, skip, first), (coarse, first, last), (fine, last, end)]


def _order(blocks: Int64) -> NDArray[np.intp]:
    """What sorts existing block IDs, stably; many of them 16 bits at a time, which NumPy sorts by radix."""
    if blocks.size <= _FEW:
        return blocks.argsort(kind="stable")
    order = np.argsort(blocks.astype(np.uint16), kind="stable")
    high = (blocks >> 16).astype(np.uint16)
    return order[np.argsort(high[order], kind="stable")] if high.any() else order


def _distinct(runs: Int64) -> Int64:
    """Each value once, in order; of rising runs, which a stable sort merges in one pass (``np.unique`` hashes)."""
    values = np.sort(runs, kind="stable")
    first = np.ones(len(values), dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return values[first]


# -- descriptor numbers ----------------------------------------------------------------------------------------------


def _number(addressing: Addressing, units: _Units, numbers: NDArray[np.int32]) -> None:
    """Write runs x units descriptor numbers, run by run.

    A side's descriptors, and so all numbers and what they are sums of, fit int32.
    """
    # Where all runs step alike, as those of equal layers do, the steps are worked out once and not for every run.
    runs = slice(0, 1) if addressing.alike else slice(None)
    steps = addressing.per_block[runs, None] * units.blocks
    if units.kernels is not _WHOLE:
        steps += addressing.per_kernel[runs, None] * units.kernels
        steps += addressing.per_part[runs, None] * units.parts
    start = addressing.start.astype(np.int32)
    np.add(start[:, None], steps.astype(np.int32), out=numbers.reshape(len(start), -1))


def _source_read(plan: Plan, source: SourcePlan, pieces: Sequence[_Piece]) -> SourceRead:
    moved: dict[str, int] = {}
    local, remote = np.empty((2, sum(p.descriptors for p in pieces)), dtype=np.int32)
    at = 0
    for p in pieces:
        name = plan.layout.groups[p.section.local_group].name
        moved[name] = moved.get(name, 0) + p.tier.bytes * len(p.local.blocks)
        here = slice(at, at := at + p.descriptors)
        _number(p.tier.local, p.local, local[here])
        _number(p.tier.remote, p.remote, remote[here])
    return SourceRead(source.rank, local, remote, moved)
