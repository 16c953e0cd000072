"""The engines of docs/tutorials/from-the-demo-to-two-machines.md, as it prints and starts them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import console
from tests.support.console import ROOT

PAGE = ROOT / "docs" / "tutorials" / "from-the-demo-to-two-machines.md"
MARK = "run by tests/integration/test_tutorial.py"
COMMANDS = [c.text for c in console.commands(PAGE) if c.mark == MARK]
TWO_MACHINES = [text for text in COMMANDS if "--advertise" in text]
ONE_MACHINE = [text for text in COMMANDS if text not in TWO_MACHINES]
#: What the page prints as the answer of the command above it.
TOLD = [line for line in re.findall(r"^\$ python .*\n((?!\$|`).*)$", PAGE.read_text(), re.MULTILINE) if line]
PROGRAMS = dict(re.findall(r"^`(\w+\.py)`:\n\n```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def on_two_machines() -> list[str]:
    """The commands of one machine, with the sidecars of two."""
    sidecars = iter(TWO_MACHINES)
    return [next(sidecars) if text.startswith("kvxfer serve ") else text for text in ONE_MACHINE]


def test_the_tutorial_has_two_sidecars_each_time() -> None:
    assert set(PROGRAMS) == {"cache.py", "prefill.py", "decode.py"}
    assert len(TWO_MACHINES) == 2
    assert [line.split(":")[0] for line in TOLD] == ["NOT_REGISTERED", "LAYOUT_MISMATCH", "every byte is right"]
    assert sum(text.startswith("kvxfer serve ") for text in ONE_MACHINE) == 2


@pytest.mark.parametrize("commands", [ONE_MACHINE, on_two_machines()], ids=["one machine", "two machines"])
def test_the_engines_of_the_tutorial(commands: list[str], tmp_path: Path) -> None:
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    # The next command finds nothing of an engine only once that has ended, which is a moment after it says so.
    waiting = [f"{text}; wait $!" if "grep freed" in text else text for text in commands]
    with console.places([*waiting, *TOLD], **{"p.example": "127.0.0.1", "d.example": "127.0.0.1"}) as texts:
        told = texts[len(commands) :]
        outputs = console.run(texts[: len(commands)], tmp_path)
        assert not any(Path(text.split()[-1]).exists() for text in texts if text.startswith("rm -r "))
    for part in ("every byte is right", "1 source rank(s)", "request-1 was released: its blocks may be freed"):
        assert part in "".join(outputs)
    assert [o.strip() for c, o in zip(commands, outputs, strict=True) if c.endswith("| tail -1")] == told
