"""One side of a pair: the layouts of all ranks of an engine, and which of its blocks a prompt would take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, Group, GroupKind, Rank
from kvxfer.core.resolve import BlockList
from kvxfer.models import EngineOptions, layout_of, model_spec
from kvxfer.models.fields import Config, field_error
from kvxfer.models.spec import ModelSpec

#: A region of a single block has rows that no real cache has, so presets have at least two.
FEWEST_BLOCKS: Final = 2
#: Layers of all ranks of a preset, together; that many take seconds.
MAX_RANK_LAYERS: Final = 2**14
#: The longest prompt that may be asked about.
MAX_PROMPT: Final = 2**24


@dataclass(frozen=True)
class Engine:
    """All ranks of an engine.

    :param name: the model's, or what else a person calls it.
    :param layouts: every rank's layout.
    :param options: of a preset; ``None`` where the layouts were given, and have the blocks that they have.
    :param spec: of a preset: the model.
    """

    name: str
    layouts: Mapping[Rank, CacheLayout]
    options: EngineOptions | None = None
    spec: ModelSpec | None = None

    @classmethod
    def preset(cls, name: str, config: Config | ModelSpec, options: EngineOptions) -> Engine:
        """The engine of a model.

        :param config: a Hugging Face config, or what was read from one.
        :param options: what the engine decides; its number of blocks does not matter.
        :raises KvxferError: FIELD_INVALID, LAYOUT_INVALID or UNSUPPORTED where no engine can be like that.
        """
        spec = config if isinstance(config, ModelSpec) else model_spec(config)
        options = replace(options, num_blocks=max(options.num_blocks, FEWEST_BLOCKS))
        if options.tp_size * spec.depth > MAX_RANK_LAYERS:
            most = max(1, MAX_RANK_LAYERS // spec.depth)
            allowed = f"1 to {most} for {spec.depth} layers: more would take too long to plan"
            raise field_error("tp_size", options.tp_size, allowed)
        ranks = (
            Rank(tp, options.tp_size, pp, options.pp_size)
            for pp in range(options.pp_size)
            for tp in range(options.tp_size)
        )
        return cls(name, {rank: layout_of(spec, options, rank) for rank in ranks}, options, spec)

    @classmethod
    def given(cls, name: str, layouts: Sequence[CacheLayout], pp_size: int = 1) -> Engine:
        """The engine of layouts that somebody else has made.

        :param layouts: one for each rank, in order; pipeline stages outermost.
        :raises KvxferError: FIELD_INVALID where they do not divide over ``pp_size`` stages.
        """
        if not layouts or len(layouts) % pp_size:
            raise KvxferError(
                Reason.FIELD_INVALID,
                f"{len(layouts)} layouts do not divide over {pp_size} pipeline stages; allowed: one layout for each "
                "rank, stages outermost",
                field="layouts",
                value=len(layouts),
                pp_size=pp_size,
            )
        tp_size = len(layouts) // pp_size
        ranks = (Rank(i % tp_size, tp_size, i // tp_size, pp_size) for i in range(len(layouts)))
        return cls(name, dict(zip(ranks, layouts, strict=True)))

    @cached_property
    def first(self) -> Rank:
        """The first rank."""
        return next(iter(self.layouts))

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return self.first.tp_size

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return self.first.pp_size

    def blocks(self, tokens: int, snapshot: int, rank: Rank | None = None) -> tuple[BlockList, ...]:
        """The blocks of a prompt: numbered from 0 on, no number twice among groups that share memory.

        :param tokens: attention blocks cover so many tokens.
        :param snapshot: tokens folded into the snapshots.
        :param rank: of one rank's groups only; ``None``: of all groups of the engine.
        """
        layouts = self.layouts.values() if rank is None else (self.layouts[rank],)
        taken: dict[str, int] = {}
        lists = []
        for name, group, pool in _groups(layouts):
            first = taken.get(pool, 0)
            state = group.kind is GroupKind.STATE
            count = 1 if state else -(-tokens // group.block_tokens)
            ids = np.arange(first, first + count, dtype=np.int64)
            lists.append(BlockList(name, ids, positions=[snapshot] if state else None))
            taken[pool] = first + count
        return tuple(lists)

    def holding(self, tokens: int) -> Engine:
        """The same engine with room for a prompt of so many tokens.

        :raises KvxferError: FIELD_INVALID where ``tokens`` is none that a prompt can have, or more than given layouts
            have blocks for, or than a preset can.
        """
        check_tokens(tokens)
        return self.reaching(tokens)

    def reaching(self, tokens: int) -> Engine:
        """The same for so many tokens, which may be more than a prompt has: the blocks of another engine end later.

        :raises KvxferError: as :meth:`holding`.
        """
        ends = {b.group: int(np.max(b.ids)) + 1 for b in self.blocks(tokens, tokens)}
        if self.options is not None and self.spec is not None:
            most = max(FEWEST_BLOCKS, *ends.values())
            return Engine.preset(self.name, self.spec, replace(self.options, num_blocks=most))
        for rank, layout in self.layouts.items():
            for group in layout.groups:
                if group.num_blocks < ends[group.name]:
                    raise KvxferError(
                        Reason.FIELD_INVALID,
                        f"{tokens} tokens take {ends[group.name]} blocks up to the end of group {group.name}; rank "
                        f"{rank} of {self.name} has {group.num_blocks}",
                        field="tokens",
                        value=tokens,
                        group=group.name,
                        needed=ends[group.name],
                        blocks=group.num_blocks,
                    )
        return self


def check_tokens(tokens: int) -> int:
    """``tokens`` if a prompt can have so many.

    :raises KvxferError: FIELD_INVALID.
    """
    if not 1 <= tokens <= MAX_PROMPT:
        message = f"tokens is {tokens}; allowed are 1 to {MAX_PROMPT}"
        raise KvxferError(Reason.FIELD_INVALID, message, field="tokens", value=tokens, maximum=MAX_PROMPT)
    return tokens


def _groups(layouts: Iterable[CacheLayout]) -> list[tuple[str, Group, str]]:
    """Every group of all ranks once: its name, itself (with the smallest blocks), and the name of its pool.

    Stages have groups of their own; two groups are of one pool where they share memory on any rank, also through
    others.
    """
    found: dict[str, Group] = {}
    pools: dict[str, str] = {}
    for layout in layouts:
        for group, pool in zip(layout.groups, layout.pools, strict=True):
            known = found.get(group.name)
            if known is None or group.block_tokens < known.block_tokens:
                found[group.name] = group
            pools.setdefault(group.name, group.name)
            mine, first = pools[group.name], pools[layout.groups[pool].name]
            if mine != first:
                pools = {name: first if of == mine else of for name, of in pools.items()}
    return [(name, group, pools[name]) for name, group in found.items()]
