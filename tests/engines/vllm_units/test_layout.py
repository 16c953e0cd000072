"""Layouts from where vLLM's tensors lie."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import AxisKind, CacheLayout, Component, MemoryKind, Rank, View
from kvxfer.core.pairing import Member, compile_plan
from kvxfer.engines.vllm.groups import CacheGroup
from kvxfer.engines.vllm.layout import AttentionPages, Pages, StatePages, bytes_only, layout_of
from kvxfer.models import EngineOptions, build, example

ATTENTION, STATE = CacheGroup("0.attention", 32), CacheGroup("1.mamba2", 0)


def pages_of(array: np.ndarray[Any, Any], offset: int, layer: str = "l", **more: Any) -> AttentionPages:
    """As of a tensor: ``[blocks, heads, tokens, content]`` in whatever order it lies."""
    return AttentionPages(layer, offset, array.shape, array.strides, str(array.dtype), **more)  # type: ignore[arg-type]


def one(layout: CacheLayout, group: int = 0) -> tuple[View, Component]:
    view = layout.groups[group].views[0]
    return view, view.components[0]


def address(view: View, part: Component, block: int, kernel: int, **steps: int) -> int:
    """Where a cell lies in the region, as layouts are defined."""
    at = view.base + block * view.block_stride + kernel * view.kernel_stride + part.offset
    kinds = {axis.kind.value: axis for axis in part.axes}
    return at + sum(step * kinds[kind].stride for kind, step in steps.items())


@pytest.mark.parametrize("order", ["BHNC", "BNHC", "HBNC"])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("heads", [1, 3])
def test_every_cell_is_where_the_tensor_has_it(order: str, ratio: int, heads: int) -> None:
    blocks, tokens, content, start = 5, 32 // ratio, 8, 64
    sizes = {"B": blocks * ratio, "H": heads, "N": tokens, "C": content}
    memory = np.zeros([sizes[c] for c in order], dtype="float16")
    tensor = memory.transpose([order.index(c) for c in "BHNC"])
    layout = layout_of([(ATTENTION, [pages_of(tensor, start)])], blocks, start + memory.nbytes, Rank())
    view, kv = one(layout)
    assert (kv.name, kv.dtype, view.num_blocks, view.kernel_blocks) == ("kv", "float16", blocks, ratio)
    origin = tensor.__array_interface__["data"][0]
    for block, kernel, head, token, c in itertools.product(*map(range, (blocks, ratio, heads, tokens, content))):
        cell = tensor[block * ratio + kernel, head, token, c : c + 1]
        expected = start + cell.__array_interface__["data"][0] - origin
        assert address(view, kv, block, kernel, unit=head, token=token, inner=c) == expected


def test_axes_stand_in_memory_order() -> None:
    for order, expected in (((0, 1, 2, 3), "unit token inner"), ((0, 2, 1, 3), "token unit inner")):
        sizes = [(4, 3, 32, 8)[i] for i in order]
        tensor = np.zeros(sizes, dtype="float16").transpose(order)
        layout = layout_of([(ATTENTION, [pages_of(tensor, 0)])], 4, tensor.nbytes, Rank())
        assert " ".join(axis.kind.value for axis in one(layout)[1].axes) == expected


@pytest.mark.parametrize(
    "held, rank, total, units",
    [
        (2, Rank(1, 2), 4, (2, 4, 4)),
        (2, Rank(1, 2), 0, (2, 4, 4)),
        (1, Rank(5, 8), 2, (1, 2, 2)),
        (1, Rank(1, 2, 1, 2), 2, (1, 2, 2)),
    ],
)
def test_heads_that_a_rank_holds(held: int, rank: Rank, total: int, units: tuple[int, int, int]) -> None:
    tensor = np.zeros((4, held, 32, 8), dtype="float16")
    layout = layout_of([(ATTENTION, [pages_of(tensor, 0, total_heads=total)])], 4, tensor.nbytes, rank)
    found = one(layout)[1].units
    assert (found.begin, found.end, found.total) == units


def test_a_compressed_cache_is_the_same_on_every_rank() -> None:
    tensor = np.zeros((4, 1, 32, 576), dtype="float16")
    layout = layout_of([(ATTENTION, [pages_of(tensor, 0, latent=True, total_heads=128)])], 4, tensor.nbytes, Rank(3, 8))
    part = one(layout)[1]
    assert (part.name, part.units.begin, part.units.end, part.units.total) == ("mla", 0, 1, 1)


def test_an_arrangement_is_part_of_the_name() -> None:
    tensor = np.zeros((4, 2, 32, 8), dtype="float16")
    layout = layout_of([(ATTENTION, [pages_of(tensor, 0, arrangement="cpu_vec.32")])], 4, tensor.nbytes, Rank())
    assert one(layout)[1].name == "kv.cpu_vec.32"


def test_memory_of_a_gpu() -> None:
    tensor = np.zeros((4, 1, 32, 8), dtype="float16")
    layout = layout_of([(ATTENTION, [pages_of(tensor, 0)])], 4, tensor.nbytes, Rank(), MemoryKind.VRAM, 3)
    assert (layout.regions[0].memory, layout.regions[0].device) == (MemoryKind.VRAM, 3)


# -- states ----------------------------------------------------------------------------------------------------------


def states(kind: str, conv: tuple[int, int], ssm: tuple[int, ...], **more: Any) -> StatePages:
    return StatePages("l", 0, 1 << 21, kind, (conv, ssm), ("bfloat16", "float32"), **more)


def parts_of(pages: Pages, rank: Rank = Rank()) -> dict[str, Component]:  # noqa: B008
    layout = layout_of([(STATE, [pages])], 2, 1 << 22, rank)
    return {part.name: part for part in layout.groups[0].views[0].components}


@pytest.mark.parametrize(
    "model, group, pages",
    [
        ("nemotron-3-nano-30b-a3b", 0, states("mamba2", (3072, 3), (32, 64, 128), order="DS")),
        ("nemotron-3-nano-30b-a3b", 0, states("mamba2", (3, 3072), (32, 64, 128), order="SD")),
        ("qwen3-next-80b-a3b", 0, states("gdn", (4096, 3), (16, 128, 128), order="DS")),
        ("jamba-mini", 0, states("mamba1", (4096, 3), (4096, 16), order="DS")),
    ],
)
def test_states_as_the_presets_compute_them(model: str, group: int, pages: StatePages) -> None:
    options = EngineOptions(tp_size=2, conv_layout=pages.order, conv_dtype="bfloat16", ssm_dtype="float32")
    preset = build(example(model), options, Rank(1, 2)).groups[group].views[0]
    assert tuple(parts_of(pages, Rank(1, 2)).values()) == preset.components


def test_attention_as_the_presets_compute_it() -> None:
    preset = build(example("llama-3.1-70b"), EngineOptions(tp_size=4, block_tokens=32), Rank(1, 4)).groups[0].views[0]
    tensor = np.zeros((64, 2, 32, 256), dtype="u2")
    pages = AttentionPages("l", 0, tensor.shape, tensor.strides, "bfloat16", total_heads=8)  # type: ignore[arg-type]
    view, kv = one(layout_of([(ATTENTION, [pages])], 64, tensor.nbytes, Rank(1, 4)))
    assert (kv,) == preset.components
    assert (view.block_stride, view.kernel_blocks) == (preset.block_stride, preset.kernel_blocks)


def test_one_mamba_group_is_held_by_every_rank() -> None:
    # 4 heads of 16 on each of two ranks, one group of 32 states: conv [x 64 | B 32 | C 32].
    pages = states("mamba2", (128, 3), (4, 16, 32), order="DS", groups=1)
    for rank in (0, 1):
        parts = parts_of(pages, Rank(rank, 2))
        assert str(parts["conv.x"].units) == f"[{64 * rank}, {64 * rank + 64}) of 128"
        assert str(parts["conv.B"].units) == str(parts["conv.C"].units) == "[0, 32) of 32"
    assert str(parts_of(states("mamba2", (128, 3), (4, 16, 32), order="DS"), Rank(1, 2))["conv.B"].units) == (
        "[32, 64) of 64"
    )


def test_the_conv_state_may_lie_either_way() -> None:
    for pages, stride in (
        (states("mamba2", (128, 3), (4, 16, 32), order="DS"), (3 * 2, 2)),
        (states("mamba2", (3, 128), (4, 16, 32), order="SD"), (2, 128 * 2)),
    ):
        parts = parts_of(pages)
        for name, first, width in (("conv.x", 0, 64), ("conv.B", 64, 32), ("conv.C", 96, 32)):
            axes = {axis.kind: axis for axis in parts[name].axes}
            assert (axes[AxisKind.UNIT].extent, axes[AxisKind.INNER].extent) == (width, 3)
            assert (axes[AxisKind.UNIT].stride, axes[AxisKind.INNER].stride) == stride
            assert parts[name].offset == first * stride[0]
        assert parts["ssm"].offset == 128 * 3 * 2


def test_what_every_rank_holds_is_not_dealt_out() -> None:
    parts = parts_of(states("mamba2", (128, 3), (4, 16, 32), order="DS", replicated=True), Rank(1, 2))
    assert {str(part.units) for part in parts.values()} == {"[0, 64) of 64", "[0, 32) of 32", "[0, 4) of 4"}


def test_a_state_of_which_nothing_is_known_goes_to_like_ranks_only() -> None:
    pages = StatePages("l", 0, 4096, "kda", ((3, 8), (2, 4)), ("float16", "float32"))
    parts = parts_of(pages, Rank(1, 2))
    assert [(p.name, p.offset, str(p.units)) for p in parts.values()] == [
        ("state.0", 0, "[1, 2) of 2"),
        ("state.1", 48, "[1, 2) of 2"),
    ]

    def member(rank: Rank) -> Member:
        return Member(rank, layout_of([(STATE, [pages])], 1, 4096, rank))

    both = [member(Rank(i, 2)) for i in range(2)]
    assert [source.rank for source in compile_plan(both[1], both).sources] == [Rank(1, 2)]
    with pytest.raises(KvxferError) as caught:
        compile_plan(member(Rank()), both)
    assert caught.value.reason is Reason.LAYOUT_MISMATCH


# -- the whole -------------------------------------------------------------------------------------------------------


def test_groups_may_lie_over_the_same_bytes() -> None:
    tensor = np.zeros((4, 2, 32, 16), dtype="float16")
    page = tensor.strides[0]
    state = StatePages("m", 0, page, "mamba1", ((16, 3), (16, 4)), ("float16", "float32"), "DS")
    layout = layout_of([(ATTENTION, [pages_of(tensor, 0)]), (STATE, [state])], 4, tensor.nbytes, Rank())
    assert [group.block_tokens for group in layout.groups] == [32, 0]
    assert layout.pools[0] == layout.pools[1]


def test_only_bytes() -> None:
    layout = bytes_only(1000)
    assert (layout.regions[0].size, layout.groups[0].num_blocks) == (1000, 1)


@pytest.mark.parametrize(
    "group, pages, told",
    [
        (ATTENTION, AttentionPages("l", 0, (5, 2, 16, 8), (512, 256, 16, 2), "float16"), "has 5 kernel blocks"),
        (ATTENTION, AttentionPages("l", 0, (4, 2, 32, 8), (2048, 1024, 32, 4), "float16"), "2 bytes 4 bytes apart"),
        (
            ATTENTION,
            AttentionPages("l", 0, (4, 3, 32, 8), (1536, 512, 16, 2), "float16", total_heads=2),
            "holds 3 units; rank tp0 of 1 has [0, 2) of 2",
        ),
        (STATE, states("mamba2", (100, 3), (4, 16, 32), order="DS"), "100 conv channels"),
        (STATE, states("gdn", (60, 3), (4, 16, 32), order="DS"), "60 conv channels"),
    ],
)
def test_what_cannot_be(group: CacheGroup, pages: Pages, told: str) -> None:
    with pytest.raises(KvxferError) as caught:
        layout_of([(group, [pages])], 4, 1 << 23, Rank())
    assert caught.value.reason is Reason.LAYOUT_INVALID
    assert told in caught.value.message
