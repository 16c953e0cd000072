"""The programs of docs/how-to/use-with-transformers.md, as it prints and starts them: P and D, a process each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvxfer.engines.transformers.caches import _REASONS
from tests.support import console
from tests.support.console import ROOT
from tests.support.tiny_models import CONFIGS

PAGE = ROOT / "docs" / "how-to" / "use-with-transformers.md"
TEXT = PAGE.read_text()
PROGRAMS = dict(re.findall(r"^`(\w+\.py)`:\n\n```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
COMMANDS = [c.text for c in console.commands(PAGE) if "test_page.py" in c.mark]


@pytest.mark.timeout(300)  # three programs that load Transformers, beside other tests
def test_the_programs_of_the_page(tmp_path: Path) -> None:
    assert set(PROGRAMS) == {"model.py", "prefill.py", "decode.py"}
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    with console.places(COMMANDS) as texts:
        outputs = console.run(texts, tmp_path, timeout=250)
    told = "".join(outputs).splitlines()
    # As the page says, but for the tokens themselves: another processor may round otherwise.
    for line in re.findall(r"^\d.* tokens$|^it was .*$", TEXT, re.MULTILINE):
        assert line in told
    assert [len(re.findall(r"\d+", line)) for line in told if re.fullmatch(r"\[.*\] as alone", line)] == [8]


def test_the_programs_are_short() -> None:
    for text in PROGRAMS.values():
        assert len(text.splitlines()) <= 20


def test_the_page_names_what_is_tried_and_what_is_refused() -> None:
    table = TEXT[TEXT.index("## What can be moved") :]
    assert set(re.findall(r"`(\w+)`", table[: table.index("Refused")])) - {"DynamicCache"} == (
        set(CONFIGS) - {"gemma2"} | {"qwen3_5"}
    )
    refused = table[table.index("Refused") :]
    for word in {
        "SlidingWindow": "sliding",
        "Static": "static",
        "Quantized": "quantised",
        "Indexed": "indexers",
    }.items():
        assert word[0] in _REASONS
        assert word[1] in refused
