"""docs/engines.md has the tables that `make engines` writes; needs no engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.report import section
from tests.engines.vllm.report import Fault, Row, fact_table, fault_table, model_table

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name, least", [("models", 4), ("faults", 10), ("servers", 6)])
def test_what_was_seen_is_told(name: str, least: int) -> None:
    assert section(TEXT, name).count("\n| ") >= least + 1


def test_the_tables_have_the_heads_of_today() -> None:
    row = Row("m", "float32", 6, tokens=6, logprobs=5, noticed=["conv", "ssm"], nixl=4, read=1_234_567, seconds=9.6)
    models = model_table([row])
    faults = fault_table([Fault("cut", "PEER_LOST", "equal", 1.0)])
    facts = fact_table([("a crowd", "all equal")])
    assert models.endswith("| m | float32 | 6 of 6 | 5 of 6 | conv, ssm | 4 of 6 | 1,234,567 | 10 s |\n")
    assert faults.endswith("| cut | PEER_LOST | equal | 1.0 s |\n")
    for name, made in (("models", models), ("faults", faults), ("servers", facts)):
        assert section(TEXT, name).splitlines()[0] == made.splitlines()[0]
