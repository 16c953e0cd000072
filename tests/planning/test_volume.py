"""Transfer volume: the published figure, by hand, and against the truth model."""

from __future__ import annotations

import pytest

from kvxfer.core.errors import KvxferError
from kvxfer.planning import Engine, Refused, Volume, volumes
from kvxfer.planning.volume import interesting_lengths
from tests.planning.cases import JAMBA, LLAMA, NANO, SUPER, engine, pair_of
from tests.truth import Part

LENGTHS = (1, 512, 4_096, 4_224, 4_225, 12_672, 50_000)
SNAPSHOT, BF16_PAGE, FP8_PAGE = 1_063_936, 2_162_688, 1_081_344


def published(**options: object) -> tuple[Engine, Engine]:
    return pair_of(SUPER, 4, 4, logical_block_tokens=4_224, **options)


def pages(tokens: int) -> int:
    return -(-tokens // 4_224)


@pytest.mark.parametrize(
    "dtype, page, token_bytes, saved", [("bf16", BF16_PAGE, 512, 43_950_080), ("fp8", FP8_PAGE, 256, 696_320)]
)
def test_the_published_figure(dtype: str, page: int, token_bytes: int, saved: int) -> None:
    """Nemotron Super at TP 4: 40 x (2,162,688 - 1,063,936) bytes less in bf16, next to nothing in fp8."""
    found = volumes(*published(kv_dtype=dtype), LENGTHS)
    assert [volume.tokens for volume in found] == list(LENGTHS)
    assert saved == 40 * (page - SNAPSHOT)
    for volume in found:
        assert [rank.rank for rank in volume.ranks] == ["tp0", "tp1", "tp2", "tp3"]
        assert len({(r.padded, r.whole_blocks, r.read, r.descriptors) for r in volume.ranks}) == 1
        rank, tokens = volume.largest, volume.tokens
        assert rank.padded == (40 + 8 * pages(tokens)) * page
        assert rank.whole_blocks == 40 * SNAPSHOT + 8 * pages(tokens) * 4_224 * token_bytes
        assert rank.read == 40 * SNAPSHOT + 8 * -(-tokens // 16) * 16 * token_bytes
        assert rank.padding == saved
        assert rank.padding + rank.tail == rank.padded - rank.read
    # At the end of a block nothing else is saved.
    assert [volume.largest.tail for volume in found if volume.tokens % 4_224 == 0] == [0, 0]


def test_fp8_saves_two_per_cent_of_a_snapshot() -> None:
    assert 40 * (FP8_PAGE - SNAPSHOT) == 696_320
    assert (FP8_PAGE - SNAPSHOT) / FP8_PAGE < 0.02


def truth(found: Engine, tokens: int) -> list[int]:
    """Bytes that each rank must hold of a prompt, counted address by address by the truth model's own parts."""
    totals = []
    for layout in found.layouts.values():
        total = 0
        for group in layout.groups:
            for view, component in group.parts():
                part = Part(group.name, group.block_tokens, view, component, 0)
                each = len(part.token_offsets)
                total += each * (1 if part.is_state else -(-tokens // part.kernel_tokens) * part.kernel_tokens)
        totals.append(total)
    return totals


@pytest.mark.parametrize("name, p_tp, d_tp", [(SUPER, 4, 4), (SUPER, 2, 4), (NANO, 4, 2), (JAMBA, 2, 4), (LLAMA, 4, 8)])
def test_the_read_is_what_the_truth_model_counts(name: str, p_tp: int, d_tp: int) -> None:
    p, d = pair_of(name, p_tp, d_tp)
    for volume in volumes(p, d, (1, 100, 9_999)):
        assert [rank.read for rank in volume.ranks] == truth(d, volume.tokens)


def test_ranks_that_read_unequally() -> None:
    """Two stages of D share three layers: two and one."""
    p, d = engine(LLAMA, 1, layers=3), engine(LLAMA, 1, layers=3, pp_size=2)
    (found,) = volumes(p, d, [16])
    assert [rank.rank for rank in found.ranks] == ["pp0.tp0", "pp1.tp0"]
    assert [rank.read for rank in found.ranks] == [2 * 16 * 4_096, 16 * 4_096]
    assert found.largest is found.ranks[0]


def test_lengths_are_sorted_and_told_once() -> None:
    assert [v.tokens for v in volumes(*pair_of(LLAMA, 1, 1, layers=1), [32, 16, 32])] == [16, 32]
    assert volumes(*pair_of(LLAMA, 1, 1, layers=1), []) == ()


def test_what_cannot_be() -> None:
    with pytest.raises(KvxferError, match="tokens is 0"):
        volumes(*pair_of(LLAMA, 1, 1, layers=1), [16, 0])
    with pytest.raises(Refused):
        volumes(engine(LLAMA, 1, layers=1), engine(LLAMA, 1, layers=2), [16])


def test_lengths_of_a_curve() -> None:
    """Both sides of every step, and the ends."""
    _, d = published(kv_dtype="fp8")
    found = interesting_lengths(d, 10_000, 10)
    assert found == sorted({1, *range(1_000, 10_001, 1_000), 4_224, 4_225, 8_448, 8_449})
    # Steps that nobody would see are left out.
    assert len(interesting_lengths(engine(LLAMA, 1, layers=1), 10_000, 10)) == 11
    assert len(interesting_lengths(engine(LLAMA, 1, layers=1), 64 * 16, 1)) == 2 + 2 * 63


def test_a_curve_between_its_points_is_straight() -> None:
    p, d = published(kv_dtype="fp8")
    lengths = interesting_lengths(d, 9_000, 6)
    found: dict[int, Volume] = {v.tokens: v for v in volumes(p, d, range(1, 9_001, 500))}
    curve = volumes(p, d, lengths)
    for tokens, volume in found.items():
        after = next(v for v in curve if v.tokens >= tokens)
        before = max((v for v in curve if v.tokens <= tokens), key=lambda v: v.tokens, default=after)
        assert before.largest.padded <= volume.largest.padded <= after.largest.padded
        if pages(before.tokens) == pages(after.tokens):
            assert volume.largest.padded == before.largest.padded
