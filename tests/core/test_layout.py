"""Layouts that must not be built, and what sound ones tell."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
    TokenPartition,
    UnitRange,
    View,
)

UNIT, TOKEN, INNER = AxisKind.UNIT, AxisKind.TOKEN, AxisKind.INNER


def kv(**changes: Any) -> Component:
    """2 heads x 16 tokens x 8 elements of 2 bytes: 512 bytes."""
    base = Component("kv", "bfloat16", 2, (Axis(UNIT, 2), Axis(TOKEN, 16), Axis(INNER, 8)), UnitRange(0, 2, 2))
    return replace(base, **changes)


def ssm(**changes: Any) -> Component:
    """2 heads x 32 elements of 4 bytes: 256 bytes."""
    return replace(Component("ssm", "float32", 4, (Axis(UNIT, 2), Axis(INNER, 32)), UnitRange(0, 2, 2)), **changes)


def attention(view: View, name: str = "attention", tokens: int = 16) -> Group:
    return Group(name, GroupKind.ATTENTION, (view,), tokens)


def layout(*groups: Group, size: int = 512 * 8, regions: int = 1) -> CacheLayout:
    return CacheLayout(tuple(Region(size) for _ in range(regions)), groups)


VIEW = View("l0", 0, 0, 512, 8, (kv(),))
STATE = View("m0", 0, 0, 512, 8, (ssm(),))


def test_dense_strides_are_filled_in() -> None:
    assert [a.stride for a in kv().axes] == [256, 16, 2]
    assert kv().data_bytes == 512
    assert VIEW.kernel_stride == 512


def test_given_strides_stay_and_outer_ones_follow() -> None:
    padded = kv(axes=(Axis(UNIT, 2), Axis(TOKEN, 16, 32), Axis(INNER, 8)))
    assert [a.stride for a in padded.axes] == [512, 32, 2]


def test_inner_axes_merge_where_they_are_dense() -> None:
    split = ssm(axes=(Axis(UNIT, 2), Axis(INNER, 4), Axis(INNER, 8)))
    assert [a.extent for a in split.inner] == [32]
    apart = ssm(axes=(Axis(UNIT, 2), Axis(INNER, 4, 64), Axis(INNER, 8)))
    assert [a.extent for a in apart.inner] == [4, 8]


@pytest.mark.parametrize(
    "build, field, says",
    [
        (lambda: Region(0), "size", "size is 0"),
        (lambda: Region(2**63), "size", "allowed are 1 to"),
        (lambda: Region(True), "size", "must be an integer, not bool"),
        (lambda: Region(1.5), "size", "must be an integer, not float"),
        (lambda: Axis(UNIT, 0), "extent", "extent is 0"),
        (lambda: Axis(UNIT, 2, -1), "stride", "stride is -1"),
        (lambda: UnitRange(2, 2, 4), "begin", "allowed are 0 to 1"),
        (lambda: UnitRange(0, 5, 4), "end", "allowed are 1 to 4"),
        (lambda: kv(name=""), "name", "printable ASCII"),
        (lambda: kv(name="x" * 257), "name", "1 to 256"),
        (lambda: kv(dtype="b\n"), "dtype", "printable ASCII"),
        (lambda: kv(element_bytes=0), "element_bytes", "element_bytes is 0"),
        (lambda: kv(axes=()), "axes", "0 axes"),
        (lambda: kv(axes=(Axis(TOKEN, 16), Axis(INNER, 8))), "axes", "needs a unit axis"),
        (lambda: kv(axes=(Axis(UNIT, 3), Axis(TOKEN, 16))), "axes", "one of extent 3"),
        (lambda: kv(axes=(Axis(UNIT, 2), Axis(UNIT, 2), Axis(TOKEN, 16))), "axes", "more than one unit axis"),
        (lambda: kv(axes=(Axis(UNIT, 2, 8), Axis(TOKEN, 16), Axis(INNER, 8))), "axes", "steps by 8 bytes"),
        (lambda: kv(axes=(Axis(UNIT, 2), Axis(TOKEN, 2**62), Axis(INNER, 8))), "axes", "spans more than"),
        (lambda: replace(VIEW, num_blocks=2**31), "num_blocks", "num_blocks is 2147483648"),
        (lambda: replace(VIEW, components=()), "components", "no components"),
        (lambda: replace(VIEW, block_stride=511), "components[0]", "blocks overlap one another"),
        (lambda: replace(VIEW, kernel_blocks=3, kernel_stride=0), "kernel_stride", "no multiple"),
        (lambda: replace(VIEW, base=2**63 - 100), "components[0]", "ends past"),
        (lambda: Group("g", GroupKind.ATTENTION, (VIEW,), 0), "block_tokens", "attention needs at least 1"),
        (lambda: Group("g", GroupKind.STATE, (STATE,), 16), "block_tokens", "state takes 0"),
        (lambda: Group("g", GroupKind.ATTENTION, (VIEW,), 32), "views[0]", "1 kernel blocks of 16 tokens"),
        (lambda: Group("g", GroupKind.STATE, (VIEW,)), "views[0]", "may not have a token axis"),
        (
            lambda: Group("g", GroupKind.STATE, (replace(STATE, kernel_blocks=2, kernel_stride=256),)),
            "views[0]",
            "kernel_blocks must be 1",
        ),
        (lambda: Group("g", GroupKind.STATE, ()), "views", "has no views"),
        (lambda: CacheLayout((), (attention(VIEW),)), "regions", "this one 0"),
        (lambda: CacheLayout((Region(4096),), ()), "groups", "this one 0"),
        (lambda: layout(attention(VIEW), attention(replace(VIEW, layer="l1", base=0))), "groups[1].name", "two groups"),
        (
            lambda: layout(attention(VIEW), attention(VIEW, "again")),
            "groups[1].views",
            "is in group attention and again in group again",
        ),
        (lambda: layout(attention(replace(VIEW, region=1))), "groups[0].views[0].region", "allowed are 0 to 0"),
        (
            lambda: layout(attention(VIEW), size=4095),
            "groups[0].views[0]",
            "ends at byte 4096 of region 0, which has 4095",
        ),
        (lambda: TokenPartition(2, 2), "rank", "allowed are 0 to 1"),
    ],
)
def test_what_must_not_be_built(build: Callable[[], object], field: str, says: str) -> None:
    with pytest.raises(KvxferError) as caught:
        build()
    assert caught.value.reason is Reason.LAYOUT_INVALID
    assert caught.value.field == field
    assert says in caught.value.message


@pytest.mark.parametrize(
    "rank, field",
    [
        ((1, 1), "tp_rank"),
        ((0, 0), "tp_size"),
        ((0, 1, 2, 2), "pp_rank"),
        ((0, 65_537), "tp_size"),
        ((True, 2), "tp_rank"),
    ],
)
def test_ranks_that_do_not_exist(rank: tuple[int, ...], field: str) -> None:
    with pytest.raises(KvxferError) as caught:
        Rank(*rank)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, field)


def state_group(**changes: Any) -> Group:
    return Group("state", GroupKind.STATE, (replace(STATE, **changes),))


def test_groups_over_the_same_pages_share_a_pool() -> None:
    both = layout(attention(VIEW), state_group())
    assert both.pools == (0, 0)


def test_groups_side_by_side_in_one_region_do_not() -> None:
    assert layout(attention(VIEW), state_group(base=4096), size=8192).pools == (0, 1)


def test_three_groups_share_through_the_middle_one() -> None:
    """a and c do not meet; b meets both."""
    first = attention(View("a", 0, 0, 1024, 4, (kv(),)), "a")
    middle = Group("b", GroupKind.STATE, (View("b", 0, 256, 1024, 4, (ssm(axes=(Axis(UNIT, 2), Axis(INNER, 64))),)),))
    last = Group("c", GroupKind.STATE, (View("c", 0, 640, 1024, 4, (ssm(),)),))
    assert layout(first, middle, last).pools == (0, 0, 0)
    assert layout(first, last).pools == (0, 1)


@pytest.mark.parametrize(
    "second",
    [
        pytest.param({"base": 256}, id="half a page further on: meets two blocks"),
        pytest.param({"block_stride": 256}, id="blocks of another size"),
        pytest.param({"base": 512, "num_blocks": 7}, id="one block further on"),
    ],
)
def test_groups_that_share_bytes_must_number_their_blocks_alike(second: dict[str, Any]) -> None:
    wide = ssm(axes=(Axis(UNIT, 2), Axis(INNER, 64))) if "base" in second else ssm()
    with pytest.raises(KvxferError, match="number it alike") as caught:
        layout(attention(VIEW), state_group(**{"components": (wide,), "num_blocks": 7, **second}))
    assert caught.value.metadata["group"] == "attention"
    assert caught.value.metadata["other_group"] == "state"


def test_views_of_one_group_may_not_share_a_byte() -> None:
    other = replace(VIEW, layer="l1", base=0, components=(kv(offset=0),))
    with pytest.raises(KvxferError, match="overlap in region 0"):
        layout(Group("g", GroupKind.ATTENTION, (VIEW, other), 16))


def test_k_and_v_interleaved_by_token_are_no_overlap() -> None:
    k = kv(name="k", axes=(Axis(TOKEN, 16, 64), Axis(UNIT, 2, 16), Axis(INNER, 8)))
    v = replace(k, name="v", offset=32)
    assert layout(attention(View("l0", 0, 0, 1024, 4, (k, v)))).pools == (0,)
    with pytest.raises(KvxferError, match="overlap"):
        layout(attention(View("l0", 0, 0, 1024, 4, (k, replace(v, offset=30)))))


def test_the_fingerprint_tells_layouts_apart() -> None:
    one, two = layout(attention(VIEW)), layout(attention(replace(VIEW, num_blocks=7)))
    assert one.fingerprint == layout(attention(VIEW)).fingerprint
    assert one.fingerprint != two.fingerprint


def test_a_layout_too_intricate_to_check_is_refused_in_time() -> None:
    """Every component of every view spans the whole region: pairs are counted before they are compared."""
    tiny = Component("c", "uint8", 1, (Axis(UNIT, 1),), UnitRange(0, 1, 1))
    views = tuple(View(f"l{i}", 0, i, 4096, 64, (tiny,)) for i in range(1_000))
    with pytest.raises(KvxferError, match="lie interleaved"):
        CacheLayout((Region(4096 * 64),), (Group("g", GroupKind.STATE, views),))


def combed(layer: str, base: int, block_stride: int, unit_stride: int, blocks: int = 3_000) -> View:
    """Single bytes, 1,000 of them a block."""
    teeth = Component("c", "uint8", 1, (Axis(UNIT, 1_000, unit_stride),), UnitRange(0, 1_000, 1_000))
    return View(layer, 0, base, block_stride, blocks, (teeth,))


@pytest.mark.parametrize("groups", [1, 2], ids=["in one group", "in two"])
@pytest.mark.parametrize("stride", [4_000_000, 4_000_002], ids=["one block stride", "two"])
def test_two_components_like_combs_are_compared_or_refused_in_time(groups: int, stride: int) -> None:
    """Even bytes and odd ones."""
    views = (combed("a", 0, 4_000_000, 3_800), combed("b", 1, stride, 3_802))
    split = (views,) if groups == 1 else tuple((v,) for v in views)
    begun = time.process_time()
    try:
        CacheLayout((Region(2**40),), tuple(Group(f"g{i}", GroupKind.STATE, v) for i, v in enumerate(split)))
    except KvxferError as error:
        assert "too intricate" in error.message and stride != 4_000_000
    assert time.process_time() - begun < 2


def test_many_pairs_that_each_take_a_while_are_refused_in_time() -> None:
    """Each view has another byte of 64; each pair takes far less than one pair may."""
    views = tuple(combed(f"l{i}", i, 4_000_000, 64 * (40 + i % 22), blocks=40) for i in range(64))
    begun = time.process_time()
    with pytest.raises(KvxferError, match="too intricate") as caught:
        CacheLayout((Region(2**40),), (Group("g", GroupKind.STATE, views),))
    assert time.process_time() - begun < 6
    assert caught.value.reason is Reason.LAYOUT_INVALID
    CacheLayout((Region(2**40),), (Group("g", GroupKind.STATE, views[:20]),))


def test_an_ordinary_large_layout_is_built_in_time() -> None:
    """40 state layers of four components in block-major pages, which 40 attention layers share."""
    layers, part, blocks = 40, 512, 20_000
    page = layers * 4 * part
    states = tuple(
        View(f"m{i}", 0, (4 * i) * part, page, blocks, tuple(ssm(name=f"s{j}", offset=j * part) for j in range(4)))
        for i in range(layers)
    )
    attended = tuple(
        View(f"l{i}", 0, 4 * i * part, page, blocks, (kv(), kv(name="v", offset=part))) for i in range(layers)
    )
    begun = time.process_time()
    built = layout(
        Group("state", GroupKind.STATE, states),
        Group("attention", GroupKind.ATTENTION, attended, 16),
        size=page * blocks,
    )
    assert built.pools == (0, 0)
    assert time.process_time() - begun < 4
