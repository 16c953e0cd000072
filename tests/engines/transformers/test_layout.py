"""Where the tensors of a sequence lie, and that copies are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import GroupKind
from kvxfer.engines.transformers import Held, SequenceLayout


def template(tokens: int, seed: int = 0) -> tuple[Held, ...]:
    """Attention with K and V of unlike widths, states of two types, both in one layer."""
    made = torch.Generator().manual_seed(seed)

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=made).to(dtype)

    return (
        Held(0, "k", tensor(2, tokens, 3)),
        Held(0, "v", tensor(2, tokens, 5)),
        Held(2, "k", tensor(2, tokens, 3)),
        Held(2, "v", tensor(2, tokens, 5)),
        Held(2, "conv.0", tensor(7, 4)),
        Held(2, "conv.1", tensor(7, 3)),
        Held(2, "recurrent.0", tensor(3, 2, 5, dtype=torch.float32)),
    )


class Memory:
    """A region of noise."""

    def __init__(self, size: int) -> None:
        self.bytes = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(9))

    def at(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> torch.Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[offset : offset + count].view(dtype).reshape(tuple(shape))


def test_the_layout_of_a_small_cache() -> None:
    layout = SequenceLayout(template(1), max_tokens=10, block_tokens=4)
    assert [(part.name, part.shape, part.blocks, part.offset) for part in layout.parts] == [
        ("k", (2, 4, 3), 3, 0),
        ("v", (2, 4, 5), 3, 192),
        ("k", (2, 4, 3), 3, 448),
        ("v", (2, 4, 5), 3, 640),
        ("conv.0", (7, 4), 1, 896),
        ("conv.1", (7, 3), 1, 960),
        ("recurrent.0", (3, 2, 5), 1, 1024),
    ]
    assert layout.size == 1024 + 120
    attention, state = layout.cache_layout.groups
    assert (attention.name, attention.kind, attention.block_tokens) == ("attention", GroupKind.ATTENTION, 4)
    assert (state.name, state.kind, state.block_tokens) == ("state", GroupKind.STATE, 0)
    assert {view.layer for view in attention.views} == {"layers.0", "layers.2"}
    assert {view.layer for view in state.views} == {"layers.2"}
    (recurrent,) = state.views[-1].components
    assert (recurrent.dtype, recurrent.data_bytes, len(recurrent.units)) == ("float32", 120, 3)


@pytest.mark.parametrize(
    "kept, kind", [(("k", "v"), GroupKind.ATTENTION), (("conv.0", "recurrent.0"), GroupKind.STATE)]
)
def test_caches_of_one_kind_have_one_group(kept: tuple[str, ...], kind: GroupKind) -> None:
    layout = SequenceLayout([item for item in template(1) if item.name in kept], 8)
    assert [group.kind for group in layout.cache_layout.groups] == [kind]
    assert [block.group for block in layout.blocks(8)] == ["attention" if kind is GroupKind.ATTENTION else "state"]


def test_block_lists_name_the_blocks_that_are_filled() -> None:
    layout = SequenceLayout(template(1), max_tokens=10, block_tokens=4)
    for tokens, ids in ((1, [0]), (4, [0]), (5, [0, 1]), (10, [0, 1, 2])):
        attention, state = layout.blocks(tokens)
        assert list(attention.ids) == ids  # type: ignore[call-overload]
        assert (list(state.ids), list(state.positions)) == ([0], [tokens])  # type: ignore[call-overload]


@given(st.integers(1, 23), st.integers(1, 9), st.integers(0, 5))
def test_a_copy_is_the_same_and_touches_nothing_else(tokens: int, block_tokens: int, seed: int) -> None:
    layout = SequenceLayout(template(1), 23, block_tokens)
    items, memory = template(tokens, seed), Memory(layout.size)
    before = memory.bytes.clone()
    layout.save(items, memory.at, tokens)
    loaded = layout.load(memory.at, tokens, torch.device("cpu"))
    for mine, other in zip(loaded, items, strict=True):
        assert (mine.layer, mine.name) == (other.layer, other.name)
        assert torch.equal(mine.tensor, other.tensor)
    # What is loaded is not the memory itself.
    for item in loaded:
        item.tensor.zero_()
    assert all(item.tensor.any() for item in layout.load(memory.at, tokens, torch.device("cpu")))
    whole = -(-tokens // block_tokens)
    for part in layout.parts:
        used = part.stride * (whole if part.per_token else 1)
        assert torch.equal(
            memory.bytes[part.offset + used : part.offset + part.stride * part.blocks],
            before[part.offset + used : part.offset + part.stride * part.blocks],
        )


@pytest.mark.parametrize(
    "options, field",
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 8, "block_tokens": 0}, "block_tokens"),
        ({"max_tokens": 8, "block_tokens": "16"}, "block_tokens"),
    ],
)
def test_bad_sizes(options: dict[str, Any], field: str) -> None:
    with pytest.raises(KvxferError) as caught:
        SequenceLayout(template(1), **options)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, field)


def test_a_cache_that_holds_nothing() -> None:
    with pytest.raises(KvxferError, match="has the model a cache"):
        SequenceLayout([], 8)


@pytest.mark.parametrize("tokens", [0, -1, 11, True, 2.5])
def test_tokens_that_do_not_fit(tokens: Any) -> None:
    layout = SequenceLayout(template(1), 10)
    for call in (layout.check, layout.blocks):
        with pytest.raises(KvxferError, match="allowed: 1 to 10") as caught:
            call(tokens)
        assert caught.value.field == "num_tokens"


def test_what_is_not_as_in_the_template_is_named() -> None:
    layout, memory = SequenceLayout(template(1), 10), Memory(4096)
    items = template(5)
    for bad, told in (
        (items[:-1], "the cache holds nothing; expected was layer 2, recurrent.0: (3, 2, 5) of float32"),
        ((*items, items[-1]), "the cache holds layer 2, recurrent.0: (3, 2, 5) of float32; expected was nothing"),
        (
            template(6),
            "the cache holds layer 0, k: (2, 6, 3) of bfloat16; expected was layer 0, k: (2, 5, 3) of bfloat16",
        ),
    ):
        with pytest.raises(KvxferError) as caught:
            layout.save(bad, memory.at, 5)
        assert caught.value.message == told
