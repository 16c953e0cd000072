"""The guide's example family works as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvxfer.models import EngineOptions, build, registry

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "add-a-model.md"


def test_the_guide_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FAMILIES", list(registry.families()))
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), {})  # noqa: S102
    config = {
        "model_type": "example",
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "ssm_heads": 4,
        "ssm_head_dim": 8,
        "ssm_state": 16,
        "conv_kernel": 4,
    }
    layout = build(config, EngineOptions(tp_size=2))
    assert [(g.name, len(g.views)) for g in layout.groups] == [("mamba2.0", 2), ("mamba2.1", 2), ("attention", 2)]


def test_a_plan_can_be_looked_at_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = GUIDE.with_name("debug-a-wrong-plan.md")
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, str(page), "exec"), {})  # noqa: S102
    assert capsys.readouterr().out.startswith("plan of D rank tp1: 1 source rank(s)\n")
