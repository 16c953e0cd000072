"""The least bytes of well-known models, worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks import models
from benchmarks.least import least
from benchmarks.results import Section
from kvxfer.models import EXAMPLES, example

NANO, SUPER, QWEN, DENSE, MLA = (
    "nemotron-3-nano-30b-a3b",
    "nemotron-3-super-120b-a12b",
    "qwen3-next-80b-a3b",
    "llama-3.1-70b",
    "deepseek-v3",
)


@pytest.mark.parametrize(
    "model, tp_size, tokens, expected",
    [
        # 80 layers, 8 heads of 128, K and V of 2 bytes: 320 KiB a token.
        pytest.param(DENSE, 1, 1, 80 * 8 * 128 * 2 * 2, id="dense"),
        pytest.param(DENSE, 8, 8192, 8192 * 40 * 1024, id="dense of eight ranks"),
        pytest.param(DENSE, 16, 1, 40 * 1024, id="a head for two ranks"),
        pytest.param(MLA, 1, 1, 61 * 576 * 2, id="mla"),
        pytest.param(MLA, 8, 1, 61 * 576 * 2, id="mla is the same on every rank"),
        # 6 attention layers of 2 heads of 128; 23 states of 64 x 64 x 128 float32 and 6,144 channels of 3 inputs.
        pytest.param(NANO, 1, 100, 100 * 6 * 1024 + 23 * (2**21 + 6144 * 3 * 2), id="nano"),
        pytest.param(NANO, 8, 100, 100 * 6 * 512 + 23 * (2**18 + 768 * 3 * 2), id="nano: a head for four ranks"),
        # A rank of sixteen has 4 of 64 heads and, with its neighbour, one group's B and C.
        pytest.param(NANO, 16, 100, 100 * 6 * 512 + 23 * (2**17 + (256 + 256) * 3 * 2), id="nano: a group for two"),
        pytest.param(SUPER, 1, 0, 40 * (2**22 + (8192 + 2048) * 3 * 2), id="super's states"),
        pytest.param(SUPER, 1, 1, 8 * 1024 + 40 * (2**22 + (8192 + 2048) * 3 * 2), id="super"),
        # 12 attention layers of 2 heads of 256; 36 states of 32 x 128 x 128 float32 and 8,192 channels of 3 inputs.
        pytest.param(QWEN, 1, 10, 10 * 12 * 2048 + 36 * (2**21 + 8192 * 3 * 2), id="qwen"),
        pytest.param(QWEN, 4, 10, 10 * 12 * 1024 + 36 * (2**19 + 2048 * 3 * 2), id="qwen of four ranks"),
    ],
)
def test_by_hand(model: str, tp_size: int, tokens: int, expected: int) -> None:
    assert least(example(model), tp_size, tokens) == expected


def test_every_model_that_is_measured_is_one_that_ships() -> None:
    assert {model.config for model in models.MODELS} <= set(EXAMPLES)


@pytest.mark.parametrize("model", models.MODELS, ids=lambda model: model.name)
def test_plans_move_the_least(model: models.Model) -> None:
    section = Section()
    p_tp, d_tp = model.sizes[-1]
    models.plan(section, model, p_tp, d_tp)
    rows = section.rows["models"]
    assert [row["one_block"] for row in rows] == [False, True]
    assert all(row["bytes"] == row["least"] == row["least_by_layout"] for row in rows)
    assert all(row["descriptors"] > 0 for row in rows)


def test_the_worst_case_of_a_model_is_told() -> None:
    section = Section()
    nano = models.MODELS[0]
    models.plan(section, nano, 1, 1)
    models.plan(section, nano, 1, 2)
    assert section.rows["models"][1]["descriptors"] == 29
    section.add("model_reads", model=nano.name, bytes=10, least=10)
    section.add("model_reads", model=nano.name, bytes=15, least=10)
    section.add("model_reads", model="another", bytes=10, least=10)
    told = [(line.seen, line.limit, line.holds) for line in models.promises(section.rows)]
    assert told == [(1.0, 1.0, True), (1.5, 1.0, False), (1.0, 1.0, True), (29, 40, True)]


def test_fewer_bytes_than_must_be_are_no_merit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "least", lambda config, tp_size, tokens: 1 + least(config, tp_size, tokens))
    with pytest.raises(RuntimeError, match="bytes must move"):
        models.plan(Section(), models.MODELS[3], 8, 8)
