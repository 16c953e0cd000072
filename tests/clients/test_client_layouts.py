"""Builders of the client against kvxfer's own presets, which know the same shapes from models' configs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.core.layout import Component, View
from kvxfer.models.options import EngineOptions
from kvxfer.models.shard import elements_of, kernel_blocks, snapshot
from kvxfer.models.spec import KvSpec, LatentSpec, ModelSpec, StateSpec, gated_delta_net, mamba1, mamba2
from kvxfer_client import CacheLayout, Group, GroupKind, KvxferError, Reason, Region, UnitRange, layouts

MODEL = ModelSpec((), 1, "bfloat16")
RANKS = [(0, 1), (0, 2), (1, 2), (3, 4), (5, 8)]


def preset(spec: KvSpec | LatentSpec, rank: int, **options: Any) -> list[tuple[tuple[Component, ...], int]]:
    chosen = EngineOptions(**options)
    return [(b.components, b.size) for b in kernel_blocks("0", spec, elements_of(MODEL, chosen), chosen, rank)]


def preset_state(spec: StateSpec, rank: int, **options: Any) -> tuple[tuple[Component, ...], int]:
    chosen = EngineOptions(**options)
    block = snapshot("0", spec, elements_of(MODEL, chosen), chosen, rank)
    return block.components, block.size


@pytest.mark.parametrize("rank, size", RANKS)
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("packing", ["packed", "block"])
def test_attention_in_one_piece(rank: int, size: int, order: Any, packing: Any) -> None:
    block = layouts.attention_block(
        layouts.share(4, rank, size), 128, 16, "bfloat16", v_dim=64, order=order, packing=packing
    )
    expected = preset(KvSpec(4, 128, 64), rank, tp_size=size, kv_layout=order, kv_packing=packing)
    assert [(block.components, block.size)] == expected


@pytest.mark.parametrize("rank, size", RANKS)
def test_attention_apart(rank: int, size: int) -> None:
    blocks = layouts.attention_apart(layouts.share(4, rank, size), 128, 16, "float8_e4m3fn")
    expected = preset(KvSpec(4, 128, 128), rank, tp_size=size, kv_packing="regions", kv_dtype="fp8")
    assert [(b.components, b.size) for b in blocks] == expected


def test_latent() -> None:
    block = layouts.latent_block(576, 64, "bfloat16")
    assert [(block.components, block.size)] == preset(LatentSpec(576), 0, block_tokens=64, kv_layout="NHD")


@pytest.mark.parametrize("rank, size", RANKS)
@pytest.mark.parametrize("order", ["DS", "SD"])
@pytest.mark.parametrize("spec_tokens", [0, 2])
def test_states(rank: int, size: int, order: Any, spec_tokens: int) -> None:
    def share(total: int) -> UnitRange:
        return layouts.share(total, rank, size)

    options: Any = {"order": order, "spec_tokens": spec_tokens}
    cases = [
        (layouts.mamba2_block(share(64), 64, share(4), 128, 4, **options), mamba2(64, 64, 4, 128, 4)),
        (layouts.mamba1_block(share(8192), 16, 4, **options), mamba1(8192, 16, 4)),
        (layouts.gdn_block(share(16), 128, share(32), 128, 4, **options), gated_delta_net(16, 128, 32, 128, 4)),
    ]
    for block, spec in cases:
        expected = preset_state(spec, rank, tp_size=size, conv_layout=order, spec_tokens=spec_tokens)
        assert (block.components, block.size) == expected


def test_published_sizes_of_nemotron_nano() -> None:
    block = layouts.mamba2_block(layouts.share(64, 0, 2), 64, layouts.share(8, 0, 2), 128, 4)
    conv = sum(c.data_bytes for c in block.components if c.name.startswith("conv"))
    assert (conv, block.size) == (18_432, 18_432 + 1_048_576)


def test_recurrent_state_is_aligned_to_its_element() -> None:
    ssm = ("ssm", UnitRange(0, 2, 2))
    block = layouts.state_block([("conv.x", UnitRange(0, 3, 3))], 3, ssm, (5,), "float16", "float32")
    assert block.components[-1].offset == 20
    assert block.size == 20 + 2 * 5 * 4


def test_halves_of_a_region_are_two_views_that_make_a_sound_layout() -> None:
    blocks = layouts.attention_apart(UnitRange(0, 2, 2), 64, 16, "float16")
    views = layouts.halves(blocks, "0", 0, 10, kernel_blocks=3)
    size = blocks[0].size * 3 * 10
    assert [(v.base, v.block_stride, v.kernel_stride) for v in views] == [
        (0, blocks[0].size * 3, blocks[0].size),
        (size, blocks[0].size * 3, blocks[0].size),
    ]
    CacheLayout((Region(2 * size),), (Group("a", GroupKind.ATTENTION, views, 48),))


def test_view_of_a_padded_page() -> None:
    block = layouts.attention_block(UnitRange(0, 1, 1), 64, 16, "float16")
    view = block.view("x", 2, 8, base=64, block_stride=3 * block.size, kernel_blocks=2)
    assert view == View("x", 2, 64, 3 * block.size, 8, block.components, 2, block.size)


def test_element_takes_names_and_types() -> None:
    torch = pytest.importorskip("torch")
    for dtype, expected in (
        ("bfloat16", ("bfloat16", 2)),
        (torch.bfloat16, ("bfloat16", 2)),
        (torch.float8_e4m3fn, ("float8_e4m3fn", 1)),
        (torch.float32, ("float32", 4)),
        (np.dtype("float16"), ("float16", 2)),
    ):
        assert layouts.element(dtype) == expected


@pytest.mark.parametrize(
    "total, size, held", [(8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]), (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)])]
)
def test_share(total: int, size: int, held: list[tuple[int, int]]) -> None:
    shares = [layouts.share(total, rank, size) for rank in range(size)]
    assert shares == [UnitRange(begin, end, total) for begin, end in held]


@pytest.mark.parametrize(
    "field, make",
    [
        ("dtype", lambda: layouts.element("complex64")),
        ("units", lambda: layouts.share(6, 0, 4)),
        ("units", lambda: layouts.share(8, 4, 4)),
        ("units", lambda: layouts.share(0, 0, 1)),
        ("order", lambda: layouts.attention_block(UnitRange(0, 1, 1), 8, 16, "int8", order="NDH")),  # type: ignore[arg-type]
        ("packing", lambda: layouts.attention_block(UnitRange(0, 1, 1), 8, 16, "int8", packing="")),  # type: ignore[arg-type]
        ("order", lambda: layouts.mamba1_block(UnitRange(0, 1, 1), 8, 4, order="XY")),  # type: ignore[arg-type]
        ("extent", lambda: layouts.mamba1_block(UnitRange(0, 1, 1), 8, 1)),
    ],
)
def test_what_cannot_be_is_refused(field: str, make: Any) -> None:
    with pytest.raises(KvxferError) as caught:
        make()
    assert (caught.value.reason, caught.value.field) == (Reason.LAYOUT_INVALID, field)
