"""Ways to spoil a good request or a good pair of layouts, and what must be said to each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvxfer.core.errors import Reason
from kvxfer.core.layout import AxisKind, CacheLayout, Component, Group, GroupKind, Rank, View
from kvxfer.core.resolve import NULL_BLOCK, BlockList, Request
from tests.property.worlds import Choices
from tests.truth import Want

Reasons = frozenset[Reason]


def break_request(
    c: Choices,
    request: Request,
    local: CacheLayout,
    remotes: Sequence[CacheLayout],
    wants: Mapping[str, Want],
) -> tuple[Request, Reasons | None]:
    """A request with one thing wrong, and the reasons that fit; ``None`` where it may have stayed a good one."""
    return _Breaker(c, request, local, remotes, wants).broken()


class _Breaker:
    def __init__(
        self,
        c: Choices,
        request: Request,
        local: CacheLayout,
        remotes: Sequence[CacheLayout],
        wants: Mapping[str, Want],
    ) -> None:
        self.c = c
        self.request = request
        self.remotes = remotes
        self.side = c.one(("local", "remote"))
        layers = {v.layer for g in local.groups for v in g.views}
        if self.side == "local":
            holders = [(g.name, local) for g in local.groups]
        else:
            # Only groups that this rank reads from; of the others nothing need be right.
            holders = [(g.name, r) for r in remotes for g in r.groups if any(v.layer in layers for v in g.views)]
        name = c.one(sorted({n for n, _ in holders}))
        self.layouts = [layout for n, layout in holders if n == name]
        self.group: Group = self.layouts[0].groups[self.layouts[0].index[name]]
        self.lists: list[BlockList] = list(getattr(request, self.side))
        self.at = next(i for i, b in enumerate(self.lists) if b.group == name)
        self.blocks = self.lists[self.at]
        self.ids: list[int] = np.asarray(self.blocks.ids).tolist()
        self.attention = self.group.kind is GroupKind.ATTENTION
        mine = {v.layer for v in self.group.views}
        readers = [g for g in local.groups if mine & {v.layer for v in g.views}]
        self.wants = [wants[g.name] for g in readers]
        if self.attention:
            size, first = self.group.block_tokens, self.blocks.first_position
            starts = [first + i * size for i in range(len(self.ids))]
            self.read = [
                i for i, at in enumerate(starts) if any(at < w.tokens and at + size > w.skip for w in self.wants)
            ]
        else:
            positions = np.asarray(self.blocks.positions).tolist()
            self.read = [i for i, p in enumerate(positions) if p == self.wants[0].tokens and self.ids[i] != NULL_BLOCK]

    def broken(self) -> tuple[Request, Reasons | None]:
        ways: list[Callable[[], tuple[Request, Reasons | None] | None]] = [
            self.unknown_group,
            self.group_twice,
            self.no_such_list,
            self.past_the_end,
            self.negative,
            self.absent,
            self.twice,
            self.unaligned_start,
            self.later_start,
            self.negative_start,
            self.cut_short,
            self.too_many_tokens,
            self.senseless_tokens,
            self.skip_past_the_end,
            self.skip_inside_a_granule,
            self.no_positions,
            self.no_such_snapshot,
            self.two_snapshots,
            self.no_integers,
            self.anything,
        ]
        first = self.c.below(len(ways))
        # Not every way suits every group; the next one does.
        return next(found for way in ways[first:] + ways[:first] if (found := way()) is not None)

    def _with(self, *reasons: Reason, **changes: object) -> tuple[Request, Reasons]:
        lists = list(self.lists)
        lists[self.at] = replace(self.blocks, **changes)  # type: ignore[arg-type]
        return self._lists(lists, *reasons)

    def _with_id(self, index: int, value: int, *reasons: Reason) -> tuple[Request, Reasons]:
        return self._with(*reasons, ids=[*self.ids[:index], value, *self.ids[index + 1 :]])

    def _lists(self, lists: Sequence[BlockList], *reasons: Reason) -> tuple[Request, Reasons]:
        if self.side == "local":
            return replace(self.request, local=lists), frozenset(reasons)
        return replace(self.request, remote=lists), frozenset(reasons)

    def unknown_group(self) -> tuple[Request, Reasons]:
        return self._lists([*self.lists, BlockList("nobody's", [0])], Reason.GROUP_MISMATCH)

    def group_twice(self) -> tuple[Request, Reasons]:
        return self._lists([*self.lists, self.blocks], Reason.GROUP_MISMATCH)

    def no_such_list(self) -> tuple[Request, Reasons]:
        return self._lists(self.lists[: self.at] + self.lists[self.at + 1 :], Reason.GROUP_MISMATCH)

    def past_the_end(self) -> tuple[Request, Reasons]:
        most = max(x.groups[x.index[self.group.name]].num_blocks for x in self.layouts)
        value = self.c.one((most, most + 1, 2**31, 2**31 - 1, 2**32, 2**40, 2**63 - 1))
        return self._with_id(self.c.one(self.read), value, Reason.BLOCK_OUT_OF_RANGE)

    def negative(self) -> tuple[Request, Reasons]:
        value = self.c.one((-2, -3, -(2**31), -(2**63)))
        return self._with_id(self.c.below(len(self.ids)), value, Reason.BLOCK_OUT_OF_RANGE)

    def absent(self) -> tuple[Request, Reasons]:
        reason = Reason.NULL_BLOCK if self.attention else Reason.STATE_POSITION_MISMATCH
        return self._with_id(self.c.one(self.read), NULL_BLOCK, reason)

    def twice(self) -> tuple[Request, Reasons] | None:
        real = [i for i, b in enumerate(self.ids) if b != NULL_BLOCK]
        if len(real) < 2:
            return None
        one, other = self.c.shuffled(real)[:2]
        return self._with_id(one, self.ids[other], Reason.DUPLICATE_BLOCK)

    def unaligned_start(self) -> tuple[Request, Reasons] | None:
        if not self.attention or self.group.block_tokens == 1:
            return None
        by = 1 + self.c.below(self.group.block_tokens - 1)
        return self._with(Reason.RANGE_INVALID, first_position=self.blocks.first_position + by)

    def later_start(self) -> tuple[Request, Reasons] | None:
        if not self.attention:
            return None
        size = self.group.block_tokens
        past = -(-(1 + min(w.skip for w in self.wants)) // size) * size
        # Whichever token is missed first: the range is not covered, or a null block comes to lie inside it.
        return self._with(Reason.RANGE_NOT_COVERED, Reason.NULL_BLOCK, first_position=past)

    def negative_start(self) -> tuple[Request, Reasons]:
        return self._with(Reason.RANGE_INVALID, first_position=self.c.one((-1, -self.group.block_tokens - 1, 2**63)))

    def cut_short(self) -> tuple[Request, Reasons] | None:
        if not self.attention:
            return None
        return self._with(Reason.RANGE_NOT_COVERED, ids=self.ids[: max(self.read)])

    def too_many_tokens(self) -> tuple[Request, Reasons] | None:
        if self.side != "local" or not self.attention:
            return None
        end = self.blocks.first_position + len(self.ids) * self.group.block_tokens
        tokens = end + 1 + self.c.below(40)
        skip = self.wants[0].skip
        return self._with(Reason.RANGE_NOT_COVERED, Reason.NULL_BLOCK, skip_tokens=skip, num_tokens=tokens)

    def senseless_tokens(self) -> tuple[Request, Reasons]:
        value = self.c.one((0, -1, -(2**63), 2**63, 2**64))
        return replace(self.request, num_tokens=value), frozenset({Reason.RANGE_INVALID})

    def skip_past_the_end(self) -> tuple[Request, Reasons]:
        value = self.c.one((self.request.num_tokens + 1, -1, 2**63))
        return replace(self.request, skip_tokens=value), frozenset({Reason.RANGE_INVALID})

    def skip_inside_a_granule(self) -> tuple[Request, Reasons] | None:
        if self.side != "local" or not self.attention:
            return None
        theirs = {(v.layer, x.name): x.tokens for r in self.remotes for g in r.groups for v, x in g.parts()}
        granules = [math.gcd(x.tokens, theirs[v.layer, x.name]) for v, x in self.group.parts()]
        skip = 1 + self.c.below(max(granules) - 1)
        if all(skip % g == 0 for g in granules):
            return None
        return self._with(Reason.RANGE_INVALID, skip_tokens=skip, num_tokens=skip + self.c.below(3))

    def no_positions(self) -> tuple[Request, Reasons] | None:
        if self.attention:
            return None
        positions = np.asarray(self.blocks.positions).tolist()
        wrong = self.c.one((None, [], positions[1:], [*positions, 0]))
        return self._with(Reason.STATE_POSITION_MISMATCH, positions=wrong)

    def no_such_snapshot(self) -> tuple[Request, Reasons] | None:
        if self.attention:
            return None
        positions = np.asarray(self.blocks.positions).tolist()
        positions[self.read[0]] += self.c.one((1, 2, 1_000))
        return self._with(Reason.STATE_POSITION_MISMATCH, positions=positions)

    def two_snapshots(self) -> tuple[Request, Reasons] | None:
        real = [i for i, b in enumerate(self.ids) if b != NULL_BLOCK and i not in self.read]
        if self.attention or not real:
            return None
        positions = np.asarray(self.blocks.positions).tolist()
        positions[self.c.one(real)] = positions[self.read[0]]
        return self._with(Reason.STATE_POSITION_MISMATCH, positions=positions)

    def no_integers(self) -> tuple[Request, Reasons]:
        wrong: object = self.c.one(([0.5] * len(self.ids), [[b] for b in self.ids], ["a"] * len(self.ids)))
        return self._with(Reason.FIELD_INVALID, ids=wrong)

    def anything(self) -> tuple[Request, Reasons | None]:
        ids = [self.c.below(12) - 1 for _ in range(self.c.below(12))]
        changed, _ = self._with(ids=ids, first_position=self.c.below(30))
        return replace(changed, num_tokens=1 + self.c.below(60), skip_tokens=self.c.below(30)), None


# -- layouts ---------------------------------------------------------------------------------------------------------


def break_layout(
    c: Choices, local: CacheLayout, remotes: Sequence[tuple[Rank, CacheLayout]]
) -> list[tuple[Rank, CacheLayout]]:
    """P's ranks, changed so that a component of ``local`` can not be read any more."""
    group = c.one(local.groups)
    view = c.one(group.views)
    component = c.one(view.components)
    units = component.units
    way = c.one(("dtype", "name", "layer", "total", "inner", "nobody", "unit"))
    if way == "unit":
        # One unit that D holds is on no rank that is left.
        lost = units.begin + c.below(len(units))
        return [m for m in remotes if lost not in _held(m[1], view.layer, component.name)]
    if way == "nobody":
        return []

    def change(layer: View, part: Component) -> tuple[View, Component]:
        if (layer.layer, part.name) != (view.layer, component.name):
            return layer, part
        if way == "dtype":
            return layer, replace(part, dtype="other")
        if way == "name":
            return layer, replace(part, name="other")
        if way == "layer":
            return replace(layer, layer="other"), part
        if way == "total":
            return layer, replace(part, units=replace(part.units, total=part.units.total + 1))
        at = next(
            (i for i, a in enumerate(part.axes) if a.kind is AxisKind.INNER and a.extent > 1),
            None,
        )
        if at is None:
            return layer, replace(part, dtype="other")
        shorter = replace(part.axes[at], extent=part.axes[at].extent - 1)
        return layer, replace(part, axes=(*part.axes[:at], shorter, *part.axes[at + 1 :]))

    return [(rank, _changed(layout, change)) for rank, layout in remotes]


def _held(layout: CacheLayout, layer: str, name: str) -> range:
    for group in layout.groups:
        for view, component in group.parts():
            if (view.layer, component.name) == (layer, name):
                return range(component.units.begin, component.units.end)
    return range(0)


def _changed(layout: CacheLayout, change: Callable[[View, Component], tuple[View, Component]]) -> CacheLayout:
    groups = []
    for group in layout.groups:
        views = []
        for old in group.views:
            view, components = old, []
            for component in old.components:
                view, new = change(view, component)
                components.append(new)
            views.append(replace(view, components=tuple(components)))
        groups.append(replace(group, views=tuple(views)))
    return replace(layout, groups=tuple(groups))
