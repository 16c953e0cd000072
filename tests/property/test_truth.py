"""The core against the truth by definition, over random pairs of engines."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import (
    Axis,
    AxisKind,
    CacheLayout,
    Component,
    Group,
    GroupKind,
    Rank,
    Region,
    UnitRange,
    View,
)
from kvxfer.core.pairing import Member, PairingOptions, compile_plan
from kvxfer.core.plan import Plan
from kvxfer.core.resolve import BlockList, Read, Request, resolve
from tests.property.mutations import break_layout, break_request
from tests.property.worlds import CHOICES, Choices, Recipe, World, make_world
from tests.truth import Blocks, Labels, RankMemory, Want, fewest_sources, verify

#: Any order on either side, whatever it costs: the worlds have one-byte elements in all orders.
ANY_ORDER = PairingOptions(min_run_bytes=1)

#: For the truth itself: more examples than the profile has for other tests.
MORE = settings(max_examples=4 * settings().max_examples)

recipes = st.binary(min_size=CHOICES, max_size=CHOICES).map(Recipe)


def block_list(name: str, kind: GroupKind, blocks: Blocks, want: Want | None = None) -> BlockList:
    """A list of a request, from truth's; with ``want`` it has a range of its own."""
    ids = np.array(blocks.ids, dtype=np.int64)
    if kind is GroupKind.STATE:
        return BlockList(name, ids, positions=blocks.positions)
    skip, tokens = (want.skip, want.tokens) if want else (None, None)
    return BlockList(name, ids, blocks.positions[0], skip_tokens=skip, num_tokens=tokens)


def request_of(world: World, number: int) -> Request:
    """The request that D rank ``number`` makes."""
    plain = Want(world.skip_tokens, world.num_tokens)
    local = []
    for group in world.d[number][1].groups:
        want = world.wants[group.name]
        # A range of a group's own is given only where it differs, so that both ways of giving one are used.
        local.append(block_list(group.name, group.kind, world.d_lists[group.name], want if want != plain else None))
    theirs = {g.name: g.kind for _, layout in world.p for g in layout.groups}
    remote = [block_list(name, kind, world.p_lists[name]) for name, kind in theirs.items()]
    return Request(local, remote, world.num_tokens, world.skip_tokens)


def plan_of(world: World, number: int, options: PairingOptions = ANY_ORDER) -> Plan:
    """The plan of D rank ``number``."""
    return compile_plan(Member(*world.d[number]), [Member(*m) for m in world.p], options)


def check_rank(world: World, number: int, remotes: Mapping[Rank, RankMemory], labels: Labels) -> tuple[Plan, Read]:
    """Compile, resolve, copy, and compare every byte of a D rank."""
    layout = world.d[number][1]
    plan = plan_of(world, number)
    read = resolve(plan, request_of(world, number))
    memory = RankMemory(layout, labels)
    verify(memory, remotes, plan, read, world.d_lists, {g.name: world.wants[g.name] for g in layout.groups})
    check_sources(plan, world.d[number][0], memory, remotes)
    return plan, read


def check_sources(plan: Plan, reader: Rank, memory: RankMemory, remotes: Mapping[Rank, RankMemory]) -> None:
    """No other choice has fewer sources; where the aligned ranks do with as few, it is they."""
    chosen = {s.rank for s in plan.sources}
    fewest = fewest_sources(memory, list(remotes.values()))
    assert len(chosen) == fewest
    aligned = [r for r in remotes if r.tp_rank == reader.tp_rank * r.tp_size // reader.tp_size]
    if fewest_sources(memory, [remotes[r] for r in aligned]) == fewest:
        assert chosen <= set(aligned)


def check_world(recipe: bytes) -> None:
    """Every D rank of the world that ``recipe`` spells."""
    world = make_world(recipe)
    labels = Labels()
    remotes = {rank: RankMemory(layout, labels) for rank, layout in world.p}
    for memory in remotes.values():
        memory.hold(world.p_lists)
    for number in range(len(world.d)):
        check_rank(world, number, remotes, labels)


@MORE
@given(recipes)
@example(Recipe())
def test_every_byte_is_what_it_must_be(recipe: Recipe) -> None:
    """All of D's memory after the read: what had to arrive did, nothing else was touched, not a byte too many moved."""
    check_world(recipe)


@given(recipes)
def test_a_bad_request_is_refused_with_a_reason(recipe: Recipe) -> None:
    """One thing of a good request is broken: a :class:`KvxferError` of the right reason, and never anything else."""
    choices = Choices(recipe)
    world = make_world(choices)
    number = choices.below(len(world.d))
    good = request_of(world, number)
    theirs = [layout for _, layout in world.p]
    broken, reasons = break_request(choices, good, world.d[number][1], theirs, world.wants)
    plan = plan_of(world, number)
    if reasons is None:
        # It may still be a good one; what matters is that nothing else comes out.
        with contextlib.suppress(KvxferError):
            resolve(plan, broken)
        return
    with pytest.raises(KvxferError) as caught:
        resolve(plan, broken)
    assert caught.value.reason in reasons, (caught.value, reasons)


@given(recipes)
def test_what_can_not_be_paired_is_refused(recipe: Recipe) -> None:
    """One thing of P's layouts no longer fits D's: LAYOUT_MISMATCH, and never anything else."""
    choices = Choices(recipe)
    world = make_world(choices)
    rank, layout = world.d[choices.below(len(world.d))]
    remotes = break_layout(choices, layout, world.p)
    with pytest.raises(KvxferError) as caught:
        compile_plan(Member(rank, layout), [Member(*m) for m in remotes], ANY_ORDER)
    assert caught.value.reason is Reason.LAYOUT_MISMATCH


@given(recipes)
def test_short_runs_are_refused_or_not_made(recipe: Recipe) -> None:
    """With a minimum either the plan is refused, or it is the same as without."""
    world = make_world(recipe)
    plain = plan_of(world, 0)
    refused: list[KvxferError] = []
    try:
        strict = plan_of(world, 0, PairingOptions(min_run_bytes=8))
    except KvxferError as error:
        refused.append(error)
    if refused:
        assert refused[0].reason is Reason.LAYOUT_MISMATCH
        return
    for one, other in zip(plain.sources, strict.sources, strict=True):
        assert one.rank == other.rank
        for a, b in ((one.local, other.local), (one.remote, other.remote)):
            assert all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("region", "offset", "length", "count"))


@pytest.mark.parametrize("inner, refused", [(63, True), (64, False)])
def test_orders_that_share_only_short_runs_are_refused(inner: int, refused: bool) -> None:
    """HND against NHD: what is contiguous on both sides is one head of one token."""
    members = []
    for kinds in ((AxisKind.UNIT, AxisKind.TOKEN), (AxisKind.TOKEN, AxisKind.UNIT)):
        axes = (*(Axis(kind, 4) for kind in kinds), Axis(AxisKind.INNER, inner))
        view = View("0", 0, 0, 16 * inner, 1, (Component("kv", "uint8", 1, axes, UnitRange(0, 4, 4)),))
        layout = CacheLayout((Region(16 * inner),), (Group("g", GroupKind.ATTENTION, (view,), 4),))
        members.append(Member(Rank(), layout))
    if not refused:
        assert len(compile_plan(members[0], members[1:]).sources) == 1
        return
    with pytest.raises(KvxferError) as caught:
        compile_plan(members[0], members[1:])
    assert caught.value.reason is Reason.LAYOUT_MISMATCH
    assert caught.value.metadata["component"] == "kv"
    assert all(order in caught.value.message for order in ("unit, token, inner", "token, unit, inner", "63", "64"))


# -- which ranks to read from ----------------------------------------------------------------------------------------


def halves(held: list[int]) -> CacheLayout:
    """A layer for each of ``held``, of which this rank has one of two units."""
    views = []
    for i, unit in enumerate(held):
        axes = (Axis(AxisKind.UNIT, 1), Axis(AxisKind.INNER, 4))
        component = Component("ssm", "uint8", 1, axes, UnitRange(unit, unit + 1, 2))
        views.append(View(str(i), 0, 4 * i, 4 * len(held), 1, (component,)))
    return CacheLayout((Region(4 * len(held)),), (Group("g", GroupKind.STATE, tuple(views)),))


@given(st.integers(1, 6).flatmap(lambda ranks: st.lists(st.integers(0, 63), min_size=ranks, max_size=ranks)))
# Rank 0 has most, four of six layers; ranks 1 and 2 have three each and together all.  Taking the most at every step
# would come to three ranks.
@example([0b001111, 0b010101, 0b101010, 0b010000, 0b100000])
def test_no_choice_of_ranks_is_smaller(holdings: list[int]) -> None:
    """D needs unit 0 of six layers; bit ``i`` of a rank's number says that it has it of layer ``i``."""
    every = 0
    for holding in holdings:
        every |= holding
    holdings[-1] |= 63 & ~every
    reader = halves([0] * 6)
    p = [Member(Rank(i, len(holdings)), halves([1 - (h >> k & 1) for k in range(6)])) for i, h in enumerate(holdings)]
    plan = compile_plan(Member(Rank(), reader), p, ANY_ORDER)
    labels = Labels()
    fewest = fewest_sources(RankMemory(reader, labels), [RankMemory(m.layout, labels) for m in p])
    assert len(plan.sources) == fewest


# -- blocks of 400 and 528 tokens ------------------------------------------------------------------------------------


def one_layer(tokens: int, ratio: int, blocks: int) -> CacheLayout:
    """One MLA layer in one region."""
    axes = (Axis(AxisKind.TOKEN, tokens), Axis(AxisKind.UNIT, 1), Axis(AxisKind.INNER, 3))
    component = Component("mla", "uint8", 1, axes, UnitRange(0, 1, 1))
    view = View("0", 0, 0, 3 * tokens * ratio, blocks, (component,), ratio)
    group = Group("g", GroupKind.ATTENTION, (view,), tokens * ratio)
    return CacheLayout((Region(3 * tokens * ratio * blocks),), (group,))


@pytest.mark.parametrize("ours", [400, 528])
@pytest.mark.parametrize("skip, tokens", [(0, 2000), (16, 1999), (1600, 1616), (528, 1585)])
def test_blocks_that_do_not_nest_meet_at_their_greatest_common_divisor(ours: int, skip: int, tokens: int) -> None:
    d, p = one_layer(ours, 1, 7), one_layer(928 - ours, 1, 7)
    labels = Labels()
    remote = RankMemory(p, labels)
    lists = []
    for size, ids in ((ours, (6, 0, 3, 5, 1)), (928 - ours, (2, 5, 4, 0, 6))):
        blocks = ids[: -(-tokens // size)]
        lists.append(Blocks(blocks, tuple(size * i for i in range(len(blocks)))))
    remote.hold({"g": lists[1]})
    plan = compile_plan(Member(Rank(), d), [Member(Rank(), p)])
    local, other = (block_list("g", GroupKind.ATTENTION, blocks) for blocks in lists)
    read = resolve(plan, Request([local], [other], tokens, skip))
    verify(RankMemory(d, labels), {Rank(): remote}, plan, read, {"g": lists[0]}, {"g": Want(skip, tokens)})
    # A row for each granule of a block on each side, not one for each pair of them; here blocks follow on from one
    # another, and one row does.
    (source,) = plan.sources
    assert math.gcd(400, 528) == 16
    assert len(source.local) + len(source.remote) <= 400 // 16 + 528 // 16
    with pytest.raises(KvxferError) as caught:
        resolve(plan, replace(Request([local], [other], tokens), skip_tokens=skip + 8))
    assert caught.value.reason is Reason.RANGE_INVALID
