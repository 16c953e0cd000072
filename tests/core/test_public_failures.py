"""Failures that other systems have shown in public, each as a case with the right answer.

Most were silent: the transfer succeeded and the model went on with someone else's heads, tokens or state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

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
from kvxfer.core.resolve import NULL_BLOCK, BlockList, Read, Request, resolve
from tests.truth import Blocks, Labels, RankMemory, Spans, Want, spans, verify

HEAD_BYTES = 32
"""Bytes of one token of one KV head (K and V packed)."""


def kv(begin: int, end: int, total: int, tokens: int = 16) -> Component:
    """Heads ``[begin, end)``, HND."""
    axes = (
        Axis(AxisKind.UNIT, end - begin),
        Axis(AxisKind.TOKEN, tokens),
        Axis(AxisKind.INNER, HEAD_BYTES // 2),
    )
    return Component("kv", "bfloat16", 2, axes, UnitRange(begin, end, total))


def attention(component: Component, ratio: int = 1, blocks: int = 8, name: str = "full", layers: int = 2) -> Group:
    """A group of ``layers`` layers, each in a region of its own, from region 0 on."""
    kernel = component.data_bytes
    views = tuple(
        View(f"{name}.{i}", i, 0, kernel * ratio, blocks, (component,), kernel_blocks=ratio) for i in range(layers)
    )
    return Group(name, GroupKind.ATTENTION, views, component.tokens * ratio)


def state(
    tp_rank: int,
    tp: int,
    blocks: int = 8,
    region: int = 2,
    conv: str = "bfloat16",
    ssm: tuple[str, int] = ("float32", 4),
) -> Group:
    """One Mamba2 layer: a conv state in three parts (16 channels of x, 8 of B, 8 of C, 3 rows) and 8 SSM heads."""
    components = []
    at = 0
    for name, total, inner, (dtype, size) in (
        ("conv.x", 16, 3, (conv, 2)),
        ("conv.B", 8, 3, (conv, 2)),
        ("conv.C", 8, 3, (conv, 2)),
        ("ssm", 8, 6, ssm),
    ):
        units = UnitRange(tp_rank * total // tp, (tp_rank + 1) * total // tp, total)
        axes = (Axis(AxisKind.UNIT, len(units)), Axis(AxisKind.INNER, inner))
        components.append(Component(name, dtype, size, axes, units, at))
        at += components[-1].data_bytes
    return Group("mamba", GroupKind.STATE, (View("mamba.0", region, 0, at, blocks, tuple(components)),))


def layout(*groups: Group) -> CacheLayout:
    """The groups, and regions just large enough for them."""
    sizes: dict[int, int] = {}
    for group in groups:
        for view in group.views:
            sizes[view.region] = max(sizes.get(view.region, 0), view.block_stride * view.num_blocks)
    return CacheLayout(tuple(Region(sizes[i]) for i in range(len(sizes))), groups)


def engine(layouts: Sequence[CacheLayout]) -> list[Member]:
    return [Member(Rank(i, len(layouts)), one) for i, one in enumerate(layouts)]


def block_lists(layout: CacheLayout, lists: Mapping[str, Blocks]) -> list[BlockList]:
    found = []
    for group in layout.groups:
        if (blocks := lists.get(group.name)) is None:
            continue
        if group.kind is GroupKind.STATE:
            found.append(BlockList(group.name, blocks.ids, positions=blocks.positions))
        else:
            found.append(BlockList(group.name, blocks.ids, first_position=blocks.positions[0]))
    return found


def tokens_from(first: int, block_tokens: int, ids: Sequence[int]) -> Blocks:
    """Attention blocks, the first of which starts at token ``first``."""
    return Blocks(tuple(ids), tuple(first + i * block_tokens for i in range(len(ids))))


def read_and_verify(
    d: Member,
    p: Sequence[Member],
    d_lists: Mapping[str, Blocks],
    p_lists: Mapping[str, Blocks],
    num_tokens: int,
    skip_tokens: int = 0,
    options: PairingOptions | None = None,
) -> tuple[Plan, Read]:
    """Compile, resolve, copy, and compare every byte of D's memory."""
    plan = compile_plan(d, p, options)
    theirs = {b.group: b for m in p for b in block_lists(m.layout, p_lists)}
    request = Request(block_lists(d.layout, d_lists), list(theirs.values()), num_tokens, skip_tokens)
    read = resolve(plan, request)
    labels = Labels()
    remotes = {m.rank: RankMemory(m.layout, labels) for m in p}
    for memory in remotes.values():
        memory.hold(p_lists)
    wants = {
        g.name: Want(0 if g.kind is GroupKind.STATE else skip_tokens, num_tokens)
        for g in d.layout.groups
        if g.name in d_lists
    }
    verify(RankMemory(d.layout, labels), remotes, plan, read, d_lists, wants)
    return plan, read


def remote_spans(plan: Plan, read: Read, source: int) -> Spans:
    """Which bytes of a source are read."""
    return spans(plan.sources[source].remote, read.sources[source].remote_indices)


# -- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_rank, head", [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_two_kv_heads_read_by_four_ranks_come_in_halves_not_by_modulo(d_rank: int, head: int) -> None:
    # By modulo, rank 1 would read head 1 and rank 2 head 0: both silently wrong.
    p = engine([layout(attention(kv(0, 2, 2)), state(0, 1))])
    d = layout(attention(kv(head, head + 1, 2)), state(d_rank, 4))
    p_lists = {"full": tokens_from(0, 16, [5, 2]), "mamba": Blocks((7,), (32,))}
    d_lists = {"full": tokens_from(0, 16, [1, 4]), "mamba": Blocks((3,), (32,))}
    plan, read = read_and_verify(Member(Rank(d_rank, 4), d), p, d_lists, p_lists, 32)
    found = remote_spans(plan, read, 0)
    kernel = 2 * 16 * HEAD_BYTES
    kv_reads = {(r, o) for r, o, n in zip(*found_lists(found), strict=True) if r < 2}
    assert kv_reads == {(region, block * kernel + head * 16 * HEAD_BYTES) for region in (0, 1) for block in (5, 2)}
    # x, B and C are each a quarter of their own, not a quarter of the conv state.
    snapshot = 7 * p[0].layout.groups[1].views[0].block_stride
    conv_reads = sorted((o - snapshot, n) for r, o, n in zip(*found_lists(found), strict=True) if r == 2)
    assert conv_reads == [
        (d_rank * 24, 24),
        (96 + d_rank * 12, 12),
        (144 + d_rank * 12, 12),
        (192 + d_rank * 48, 48),
    ]


def found_lists(found: Spans) -> tuple[list[int], list[int], list[int]]:
    return found.region.tolist(), found.offset.tolist(), found.length.tolist()


@pytest.mark.parametrize("d_rank", range(16))
def test_eight_kv_heads_at_tp_8_are_each_read_by_two_of_sixteen_ranks(d_rank: int) -> None:
    p = engine([layout(attention(kv(h, h + 1, 8))) for h in range(8)])
    head = d_rank // 2
    d = Member(Rank(d_rank, 16), layout(attention(kv(head, head + 1, 8))))
    plan, _ = read_and_verify(
        d, p, {"full": tokens_from(0, 16, [1, 4])}, {"full": tokens_from(0, 16, [6, 3])}, num_tokens=32
    )
    assert [s.rank.tp_rank for s in plan.sources] == [head]


@pytest.mark.parametrize("d_rank", range(4))
def test_a_replicated_head_comes_from_a_rank_that_the_state_needs_anyway(d_rank: int) -> None:
    # 2 KV heads at P TP 8: four ranks hold each head.  D rank r needs the state of P ranks 2r and 2r + 1, and its head
    # is on both of them; reading it from any other rank would be one more connection.
    p = engine([layout(attention(kv(i // 4, i // 4 + 1, 2)), state(i, 8)) for i in range(8)])
    head = d_rank // 2
    d = Member(Rank(d_rank, 4), layout(attention(kv(head, head + 1, 2)), state(d_rank, 4)))
    p_lists = {"full": tokens_from(0, 16, [6, 3]), "mamba": Blocks((2,), (25,))}
    d_lists = {"full": tokens_from(0, 16, [1, 4]), "mamba": Blocks((5,), (25,))}
    plan, read = read_and_verify(d, p, d_lists, p_lists, num_tokens=25)
    assert [s.rank.tp_rank for s in plan.sources] == [2 * d_rank, 2 * d_rank + 1]
    # The aligned one of the two holds the head: floor(r * 8 / 4).
    assert ["full" in s.bytes_by_group for s in read.sources] == [True, False]


# -- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip, tokens", [(0, 192), (16, 192), (0, 177), (80, 112)])
def test_ratios_of_four_here_and_three_there(skip: int, tokens: int) -> None:
    # Blocks of 64 and 48 tokens over kernel blocks of 16: logical block n here is not logical block n there.
    d = Member(Rank(), layout(attention(kv(0, 2, 2), ratio=4)))
    p = engine([layout(attention(kv(0, 2, 2), ratio=3))])
    _, read = read_and_verify(
        d,
        p,
        {"full": tokens_from(0, 64, [5, 0, 6])},
        {"full": tokens_from(0, 48, [7, 1, 4, 2])},
        num_tokens=tokens,
        skip_tokens=skip,
    )
    whole_kernel_blocks = -(-tokens // 16) - skip // 16
    assert read.bytes == 2 * whole_kernel_blocks * 16 * 2 * HEAD_BYTES


@pytest.mark.parametrize("listed", ["all", "missing only", "null for the cached"])
def test_a_prompt_of_2048_where_d_holds_2049_and_31_blocks_are_cached(listed: str) -> None:
    # D has 33 blocks (the next token has its slot already), P has 32; "the last n of the longer list" pairs D's block
    # 32 with P's block 31 and shifts everything by one.
    p = engine([layout(attention(kv(0, 1, 1, tokens=64), blocks=40))])
    d = Member(Rank(), layout(attention(kv(0, 1, 1, tokens=64), blocks=40)))
    p_ids = list(range(32, 0, -1))
    d_ids = list(range(3, 36))
    d_lists = {
        "all": {"full": tokens_from(0, 64, d_ids)},
        "missing only": {"full": tokens_from(31 * 64, 64, d_ids[31:])},
        "null for the cached": {"full": tokens_from(0, 64, [NULL_BLOCK] * 31 + d_ids[31:])},
    }[listed]
    p_lists = {"full": tokens_from(0, 64, p_ids)}
    plan, read = read_and_verify(d, p, d_lists, p_lists, num_tokens=2048, skip_tokens=31 * 64)
    block = 64 * HEAD_BYTES
    here, there = plan.sources[0].local, plan.sources[0].remote
    (source,) = read.sources
    assert found_lists(spans(here, source.local_indices)) == ([0, 1], [d_ids[31] * block] * 2, [block] * 2)
    assert found_lists(spans(there, source.remote_indices)) == ([0, 1], [p_ids[31] * block] * 2, [block] * 2)
    # Token 2049 is nobody's: asking for it is an error, not a shift.
    request = Request(block_lists(d.layout, d_lists), block_lists(p[0].layout, p_lists), 2049, 31 * 64)
    with pytest.raises(KvxferError) as caught:
        resolve(plan, request)
    assert caught.value.reason is Reason.RANGE_NOT_COVERED
    assert caught.value.metadata["group"] == "full"
    assert caught.value.metadata["side"] == "remote"
    assert "2049" in caught.value.message


# -- snapshots -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("wanted", [2047, 2048])
def test_of_two_snapshots_the_one_of_as_many_tokens_is_read(wanted: int, order: tuple[int, int]) -> None:
    # First or last in the list says nothing: the number of tokens folded in does.
    blocks, positions = (4, 6), (2047, 2048)
    p_lists = {"mamba": Blocks(tuple(blocks[i] for i in order), tuple(positions[i] for i in order))}
    d_lists = {"mamba": Blocks((NULL_BLOCK, 1, 2), (0, wanted, 4096))}
    p = engine([layout(state(0, 1, region=0))])
    plan, read = read_and_verify(Member(Rank(), layout(state(0, 1, region=0))), p, d_lists, p_lists, wanted)
    stride = p[0].layout.groups[0].views[0].block_stride
    # Equal layouts: the whole snapshot is one run.
    assert found_lists(remote_spans(plan, read, 0)) == ([0], [(4 if wanted == 2047 else 6) * stride], [stride])


@pytest.mark.parametrize("positions", [(2048, 2048), (2046, 2047), (2049, 4096)])
def test_two_snapshots_of_which_none_or_both_fit_are_refused(positions: tuple[int, int]) -> None:
    both = layout(state(0, 1, region=0))
    plan = compile_plan(Member(Rank(), both), engine([both]))
    for side in ("local", "remote"):
        one, two = BlockList("mamba", (1,), positions=(2048,)), BlockList("mamba", (4, 6), positions=positions)
        lists = (two, one) if side == "local" else (one, two)
        with pytest.raises(KvxferError) as caught:
            resolve(plan, Request([lists[0]], [lists[1]], 2048))
        assert caught.value.reason is Reason.STATE_POSITION_MISMATCH
        assert caught.value.metadata["side"] == side
        assert caught.value.metadata["group"] == "mamba"


@pytest.mark.parametrize(
    "here, there, component, attribute, values",
    [
        ({"conv": "bfloat16"}, {"conv": "float16"}, "conv.x", "dtype", ("bfloat16", "float16")),
        ({"ssm": ("float32", 4)}, {"ssm": ("bfloat16", 2)}, "ssm", "dtype", ("float32", "bfloat16")),
        ({"ssm": ("float32", 4)}, {"ssm": ("int32", 4)}, "ssm", "dtype", ("float32", "int32")),
    ],
)
def test_states_of_different_types_are_refused_and_both_are_named(
    here: dict[str, str], there: dict[str, str], component: str, attribute: str, values: tuple[str, str]
) -> None:
    # Of one size too: the bytes would fit and mean something else.
    d = Member(Rank(), layout(state(0, 1, region=0, **here)))  # type: ignore[arg-type]
    with pytest.raises(KvxferError) as caught:
        compile_plan(d, engine([layout(state(0, 1, region=0, **there))]))  # type: ignore[arg-type]
    error = caught.value
    assert error.reason is Reason.LAYOUT_MISMATCH
    assert error.metadata["group"] == "mamba"
    assert error.metadata["component"] == component
    assert error.metadata["attribute"] == attribute
    assert (error.metadata["local"], error.metadata["remote"]) == values
    assert all(v in error.message for v in (*values, "mamba", component))


# -- groups ----------------------------------------------------------------------------------------------------------


def draft(region: int) -> Group:
    """A draft model's own attention group."""
    component = kv(0, 1, 1)
    view = View("draft.0", region, 0, component.data_bytes, 8, (component,))
    return Group("draft", GroupKind.ATTENTION, (view,), 16)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("side", ["local", "remote"])
def test_a_draft_group_on_one_side_only(side: str, first: bool) -> None:
    # Paired by index, the draft's blocks would be taken for the model's.
    plain = layout(attention(kv(0, 2, 2)))
    groups = [attention(kv(0, 2, 2)), draft(2)]
    more = layout(*(reversed(groups) if first else groups))
    d, p = (more, plain) if side == "local" else (plain, more)
    with pytest.raises(KvxferError) as caught:
        compile_plan(Member(Rank(), d), engine([p]))
    assert caught.value.reason is Reason.LAYOUT_MISMATCH
    assert "draft" in caught.value.message
    only = frozenset({"draft"})
    options = PairingOptions(ignore_local_groups=only) if side == "local" else PairingOptions(ignore_remote_groups=only)
    lists = {"full": tokens_from(0, 16, [2, 5])}
    _, read = read_and_verify(
        Member(Rank(), d), engine([p]), lists, {"full": tokens_from(0, 16, [3, 1])}, 32, options=options
    )
    assert {g for s in read.sources for g in s.bytes_by_group} == {"full"}


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_ranks_of_one_engine_with_1000_and_998_blocks() -> None:
    # Descriptor numbers are region * blocks + block with each rank's own number of blocks.
    p = engine([layout(attention(kv(r, r + 1, 2, tokens=1), blocks=blocks)) for r, blocks in ((0, 1000), (1, 998))])
    d = Member(Rank(), layout(attention(kv(0, 2, 2, tokens=1), blocks=4)))
    lists = {"full": tokens_from(0, 1, [1, 2])}
    plan, read = read_and_verify(d, p, lists, {"full": tokens_from(0, 1, [997, 0])}, num_tokens=2)
    assert [sorted(s.remote_indices.tolist()) for s in read.sources] == [[0, 997, 1000, 1997], [0, 997, 998, 1995]]
    for block, rank in ((998, "998 blocks"), (999, "998 blocks"), (1000, "both")):
        with pytest.raises(KvxferError) as caught:
            resolve(plan, Request([BlockList("full", [1])], [BlockList("full", [block])], 1))
        assert caught.value.reason is Reason.BLOCK_OUT_OF_RANGE, rank
        assert str(block) in caught.value.message


@pytest.mark.parametrize("count", [15_000, 200_000])
def test_very_many_ids_in_one_call(count: int) -> None:
    blocks = count + 1_000
    both = layout(attention(kv(0, 1, 1, tokens=16), blocks=blocks))
    plan = compile_plan(Member(Rank(), both), engine([both]))
    random = np.random.default_rng(count)
    here, there = (random.permutation(blocks)[:count] for _ in range(2))
    tokens = count * 16
    read = resolve(plan, Request([BlockList("full", here)], [BlockList("full", there)], tokens))
    (source,) = read.sources
    assert read.bytes == 2 * tokens * HEAD_BYTES
    # Any order of the pairs will do; the pairs must be these.
    pair = dict(zip(source.local_indices.tolist(), source.remote_indices.tolist(), strict=True))
    assert len(pair) == len(source.local_indices)
    want = {
        layer * blocks + int(d): layer * blocks + int(p) for layer in (0, 1) for d, p in zip(here, there, strict=True)
    }
    assert pair == want
    twice = np.append(here[:-1], here[0])
    with pytest.raises(KvxferError) as caught:
        resolve(plan, Request([BlockList("full", twice)], [BlockList("full", there)], tokens))
    assert caught.value.reason is Reason.DUPLICATE_BLOCK
