"""Documents with sections that programs write."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.generated import main, written

TEXT = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n"
NEW = TEXT.replace("old", "new")


def test_a_section_is_replaced_and_nothing_else() -> None:
    assert written(TEXT, {"x": "new\n"}) == NEW


@pytest.mark.parametrize("text", ["a\n", TEXT.partition("old")[0], TEXT + TEXT])
def test_a_section_must_be_there_once(text: str) -> None:
    with pytest.raises(ValueError, match="no section x, or more than one"):
        written(text, {"x": "new\n"})


def test_check_only_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "page.md"
    document.write_text(TEXT)
    monkeypatch.setattr("sys.argv", ["gen_page.py", "--check"])
    assert main(document, {"x": "new\n"}, None) == 1
    assert capsys.readouterr().err == "page.md is not what gen_page.py writes\n"
    assert document.read_text() == TEXT
    monkeypatch.setattr("sys.argv", ["gen_page.py"])
    assert main(document, {"x": "new\n"}, None) == 0
    assert document.read_text() == NEW
    monkeypatch.setattr("sys.argv", ["gen_page.py", "--check"])
    assert main(document, {"x": "new\n"}, None) == 0
