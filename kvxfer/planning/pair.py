"""Two engines and the plans of all D ranks: what both handshakes and reads are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, GroupKind, Rank
from kvxfer.core.pairing import Member, PairingOptions, compile_plan
from kvxfer.core.plan import Plan
from kvxfer.core.resolve import BlockList, Read, Request, resolve
from kvxfer.planning.engine import Engine

#: Times that a layer of a P rank may be compared with the same layer of a D rank; that many take seconds.
MAX_COMPARED: Final = 2**18


class Refused(KvxferError):
    """Two engines that a sidecar would refuse to pair, or a read that it would refuse.

    :param rank: the first D rank that it is refused to.
    """

    def __init__(self, rank: Rank, error: KvxferError) -> None:
        values = {k: v for k, v in error.metadata.items() if k != "d_rank"}
        super().__init__(error.reason, error.message, field=error.field, **values, d_rank=str(rank))
        self.rank = rank


@dataclass(frozen=True)
class Pair:
    """A prefill engine, a decode engine, and what each D rank reads from P.

    :param plans: by D rank.
    """

    p: Engine
    d: Engine
    plans: Mapping[Rank, Plan]

    @classmethod
    def of(cls, p: Engine, d: Engine, tokens: int | None = None, options: PairingOptions | None = None) -> Pair:
        """Compile the plan of every D rank, as each does at its handshake.

        :param tokens: the longest prompt that will be asked about.
        :param options: what the D sidecars allow.
        :raises Refused: where a sidecar would refuse: LAYOUT_MISMATCH or TOO_MANY_DESCRIPTORS.
        :raises KvxferError: FIELD_INVALID where the engines have no room for ``tokens``, or are too large.
        """
        _check_size(p, d)
        if tokens is not None:
            d = d.holding(tokens)
            p = p.reaching(covered(d, tokens)) if p.options is not None else p.holding(tokens)
        remotes = [Member(rank, layout) for rank, layout in p.layouts.items()]
        plans = {}
        for rank, layout in d.layouts.items():
            try:
                plans[rank] = compile_plan(Member(rank, layout), remotes, options)
            except KvxferError as error:
                raise Refused(rank, error) from error
        return cls(p, d, plans)

    def read(self, rank: Rank, tokens: int, whole_blocks: bool = False) -> Read:
        """The read of a prompt by one D rank.

        :param tokens: its length; the snapshots are of exactly so many.
        :param whole_blocks: read every attention block to its end, as a reader does that knows only blocks.
        :raises Refused: TOO_MANY_DESCRIPTORS.
        """
        local = self.d.blocks(tokens, tokens, rank)
        reach = tokens
        if whole_blocks:
            reach = covered(self.d, tokens)
            local = tuple(_to_block_ends(self.d.layouts[rank], local, tokens))
        try:
            return resolve(self.plans[rank], Request(local, self.p.blocks(reach, tokens), tokens))
        except KvxferError as error:
            raise Refused(rank, error) from error


def _check_size(p: Engine, d: Engine) -> None:
    """:raises KvxferError: FIELD_INVALID where compiling the plans would take minutes."""
    on_p, on_d = _holders(p), _holders(d)
    compared = sum(ranks * on_d[layer] for layer, ranks in on_p.items())
    if compared > MAX_COMPARED:
        sizes = f"{len(p.layouts)} ranks of P and {len(d.layouts)} of D"
        raise KvxferError(
            Reason.FIELD_INVALID,
            f"{sizes} hold layers that would be compared {compared:,} times; allowed are {MAX_COMPARED:,}: give one of "
            "them a smaller TP",
            field="tp_size",
            compared=compared,
            maximum=MAX_COMPARED,
        )


def _holders(engine: Engine) -> Counter[str]:
    """How many ranks hold each layer."""
    return Counter(
        layer
        for layout in engine.layouts.values()
        for layer in {view.layer for group in layout.groups for view in group.views}
    )


def covered(d: Engine, tokens: int) -> int:
    """Tokens to the end of the last block that D needs for so many, of any group."""
    sizes = {g.block_tokens for layout in d.layouts.values() for g in layout.groups if g.kind is GroupKind.ATTENTION}
    return max((-(-tokens // size) * size for size in sizes), default=tokens)


def _to_block_ends(layout: CacheLayout, lists: tuple[BlockList, ...], tokens: int) -> Iterator[BlockList]:
    for blocks in lists:
        size = layout.groups[layout.index[blocks.group]].block_tokens
        yield replace(blocks, num_tokens=-(-tokens // size) * size) if size else blocks
