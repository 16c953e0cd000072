"""What the guides to planning print is what the commands print."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Each with the file that it draws to, and the one that is kept of it.
GUIDES = (
    ("plan-a-pair.md", "page", "nemotron-nano-page.svg"),
    ("transfer-volume.md", "volume", "nemotron-super-volume.svg"),
)


def commands(guide: str) -> Iterator[tuple[str, str]]:
    """Every command of the guide's console blocks, and what is printed below it."""
    text = (ROOT / "docs" / "how-to" / guide).read_text(encoding="utf-8")
    for block in re.findall(r"^```console\n(.*?)^```", text, re.M | re.S):
        for told in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, printed = told.partition("\n")
            yield command, printed


def snippets(guide: str) -> list[str]:
    text = (ROOT / "docs" / "how-to" / guide).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@pytest.mark.parametrize("guide, target, image", GUIDES)
def test_the_guide_prints_what_is_printed(
    guide: str, target: str, image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for snippet in snippets(guide):
        exec(compile(snippet, guide, "exec"), {})  # noqa: S102
    # One shell for all of a guide, as a reader has it; a mark tells where a command's output ends.
    told = [(command, printed) for command, printed in commands(guide) if not command.startswith("pip install")]
    script = f'kvxfer() {{ "{sys.executable}" -m kvxfer "$@"; }}\npython3() {{ "{sys.executable}" "$@"; }}\n'
    script += "".join(f"{command}\nstatus=$?\necho @@@\n(exit $status)\n" for command, _ in told)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=90)
    assert done.stderr == ""
    printed = done.stdout.split("@@@\n")
    assert len(printed) == len(told) + 1
    for (command, expected), found in zip(told, printed, strict=False):
        assert lines(found) == lines(expected), command
    # The picture that is kept is the one that was drawn, in every word; lines may differ with matplotlib's version.
    kept, drawn = (
        path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "images" / image, tmp_path / f"{target}.svg")
    )
    assert re.findall(">.+</text>", kept) == re.findall(">.+</text>", drawn) != []
    assert len(kept) < 100_000
