"""Placing: groups of layers, with their blocks, into regions.  Pooled tensors or a region of its own for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, Group, GroupKind, Region, View
from kvxfer.models.options import EngineOptions
from kvxfer.models.pool import Pages, deal, group_size, pooled_pages
from kvxfer.models.shard import Block
from kvxfer.models.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class Kind:
    """All layers of one kind, as one rank sees a block of theirs.

    :param name: what the groups are called.
    :param layers: every layer of the whole model, in order; a pipeline stage places only its own.
    :param blocks: components of a kernel block (one entry, or K and V apart) or of a snapshot.
    :param state: whether a block is a snapshot.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    blocks: tuple[Block, ...]
    state: bool

    @property
    def size(self) -> int:
        """Bytes of a kernel block or snapshot."""
        return sum(block.size for block in self.blocks)


def place(kinds: Sequence[Kind], stage: range, options: EngineOptions) -> CacheLayout:
    """The layout of a rank that holds the layers whose index is in ``stage``."""
    return _pooled(kinds, stage, options) if options.pooled else _apart(kinds, stage, options)


def _pooled(kinds: Sequence[Kind], stage: range, options: EngineOptions) -> CacheLayout:
    """Groups of a common page size; the i-th layer of every group lies over the i-th region."""
    size = group_size([len(kind.layers) for kind in kinds])
    dealt = [(kind, deal(kind.layers, size)) for kind in kinds]
    if sum(len(groups) for _, groups in dealt) > 1 and any(len(kind.blocks) > 1 for kind in kinds):
        raise KvxferError(
            Reason.FIELD_INVALID,
            f"kv_packing is {options.kv_packing}; where groups share tensors, a block must be one piece: allowed are "
            "packed and block, or pooled=False",
            field="kv_packing",
            key="kv_packing",
            value=options.kv_packing,
            allowed="packed, block",
        )
    pages = pooled_pages(
        options,
        {kind.name: kind.size for kind in kinds if not kind.state},
        [kind.size for kind in kinds if kind.state],
    )
    regions: list[Region] = []
    placed: list[Group] = []
    for kind, groups in dealt:
        for number, layers in enumerate(groups):
            here = [layer for layer in layers if layer.index in stage]
            if not here:
                continue
            views: list[View] = []
            for i, layer in enumerate(here):
                views += _views(kind, layer, pages, options, regions, i)
            name = kind.name if len(groups) == 1 else f"{kind.name}.{number}"
            placed.append(_group(kind, name, views, pages, options))
    return CacheLayout(tuple(regions), tuple(placed))


def _apart(kinds: Sequence[Kind], stage: range, options: EngineOptions) -> CacheLayout:
    """One group a kind, a region of its own for every layer, nothing inflated and nothing padded."""
    ratio = (options.logical_block_tokens or options.block_tokens) // options.block_tokens
    regions: list[Region] = []
    placed: list[Group] = []
    for kind in kinds:
        views: list[View] = []
        pages = Pages(kind.size * (1 if kind.state else ratio), {kind.name: ratio})
        for layer in kind.layers:
            if layer.index in stage:
                views += _views(kind, layer, pages, options, regions, len(regions))
        if views:
            placed.append(_group(kind, kind.name, views, pages, options))
    return CacheLayout(tuple(regions), tuple(placed))


def _group(kind: Kind, name: str, views: Sequence[View], pages: Pages, options: EngineOptions) -> Group:
    if kind.state:
        return Group(name, GroupKind.STATE, tuple(views))
    return Group(name, GroupKind.ATTENTION, tuple(views), pages.kernel_blocks[kind.name] * options.block_tokens)


def _views(
    kind: Kind, layer: LayerSpec, pages: Pages, options: EngineOptions, regions: list[Region], region: int
) -> list[View]:
    """The views of one layer; adds the regions that they need.

    K and V apart are two views: in two regions, or one after the other in one.
    """
    ratio = 1 if kind.state else pages.kernel_blocks[kind.name]
    blocks = options.state_blocks if kind.state and not options.pooled and options.state_blocks else options.num_blocks
    if len(kind.blocks) == 1:
        if region == len(regions):
            regions.append(Region(pages.page * blocks, options.memory))
        return [View(layer.name, region, 0, pages.page, blocks, kind.blocks[0].components, ratio)]
    sizes = [block.size * ratio * blocks for block in kind.blocks]
    views: list[View] = []
    if options.kv_packing == "halves":
        regions.append(Region(sum(sizes), options.memory))
    for i, block in enumerate(kind.blocks):
        if options.kv_packing == "regions":
            regions.append(Region(sizes[i], options.memory))
        base = sum(sizes[:i]) if options.kv_packing == "halves" else 0
        views.append(View(layer.name, len(regions) - 1, base, block.size * ratio, blocks, block.components, ratio))
    return views
