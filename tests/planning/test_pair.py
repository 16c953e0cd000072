"""Plans of all D ranks, and the reads of a prompt."""

from __future__ import annotations

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.core.pairing import PairingOptions
from kvxfer.planning import Pair, Refused
from kvxfer.planning.engine import MAX_PROMPT
from kvxfer.planning.pair import covered
from tests.planning.cases import LLAMA, NANO, engine, pair_of


def test_every_d_rank_has_a_plan() -> None:
    pair = Pair.of(*pair_of(NANO, 2, 4, kv_dtype="fp8"))
    found = {rank.tp_rank: [source.rank.tp_rank for source in plan.sources] for rank, plan in pair.plans.items()}
    assert found == {0: [0], 1: [0], 2: [1], 3: [1]}


def test_least_to_read_as_published() -> None:
    """Nano, TP 2 to 4, fp8: one D block of 2,096 tokens, and one whole P block of 4,176."""
    pair = Pair.of(*pair_of(NANO, 2, 4, kv_dtype="fp8"), tokens=4_176)
    for rank in pair.plans:
        assert pair.read(rank, 2_096).bytes == 15_490_048
        assert pair.read(rank, 4_176).bytes == 18_684_928


def test_whole_blocks_are_of_d() -> None:
    """D's blocks of 2,096 tokens end inside P's of 4,176, so P's lists must reach as far."""
    pair = Pair.of(*pair_of(NANO, 2, 4, kv_dtype="fp8"), tokens=4_200)
    assert covered(pair.d, 4_200) == 3 * 2_096
    states = 23 * (9_216 + 524_288)
    assert pair.read(Rank(0, 4), 4_200, whole_blocks=True).bytes == states + 6 * 3 * 2_096 * 256
    assert pair.read(Rank(0, 4), 4_200).bytes == states + 6 * 4_208 * 256


def test_a_refusal_names_the_rank() -> None:
    with pytest.raises(Refused) as caught:
        Pair.of(engine(LLAMA, 2), engine(LLAMA, 2, kv_dtype="fp8"))
    assert caught.value.reason is Reason.LAYOUT_MISMATCH
    assert caught.value.rank == Rank(0, 2)
    assert {"group", "layer", "component", "local", "remote", "d_rank"} <= caught.value.metadata.keys()


def test_what_the_caller_allows_counts() -> None:
    hnd, nhd = engine(LLAMA, 4, layers=1), engine(LLAMA, 4, layers=1, kv_layout="NHD")
    Pair.of(hnd, nhd)  # runs of 512 bytes
    with pytest.raises(Refused, match="only 512 bytes are contiguous"):
        Pair.of(hnd, nhd, options=PairingOptions(min_run_bytes=513))


def test_a_read_of_too_many_descriptors_is_refused() -> None:
    """80 layers x 8 heads... of tokens whose order differs: 80 x 16 x 2 runs a block of 16 tokens and rank."""
    pair = Pair.of(engine(LLAMA, 4), engine(LLAMA, 4, kv_layout="NHD"), tokens=60_000)
    with pytest.raises(Refused) as caught:
        pair.read(Rank(0, 4), 60_000)
    assert caught.value.reason is Reason.TOO_MANY_DESCRIPTORS


def test_engines_that_are_too_large_to_plan_are_told_so_at_once() -> None:
    """Every D rank looks at every P rank: what a sidecar does once would be done for all of them here."""
    with pytest.raises(KvxferError, match="tp_size is 65536; allowed: 1 to 204 for 80 layers") as caught:
        engine(LLAMA, 65_536)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "tp_size")
    large = engine(LLAMA, 64)
    with pytest.raises(KvxferError, match=r"64 ranks of P and 64 of D .* 327,680 times; allowed are 262,144") as caught:
        Pair.of(large, large)
    assert not isinstance(caught.value, Refused)


def test_stages_count_by_the_layers_that_they_hold() -> None:
    stages = engine(LLAMA, 1, pp_size=80)
    assert len(Pair.of(stages, stages).plans) == 80


def test_the_longest_prompt_is_one() -> None:
    """Blocks of P that D's last block would reach lie behind the longest prompt."""
    pair = Pair.of(engine(NANO, 4), engine(NANO, 4), MAX_PROMPT)
    assert pair.read(pair.d.first, MAX_PROMPT).bytes > 0
