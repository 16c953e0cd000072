"""The commands that operators are told: README.md, docs/how-to/read-the-metrics.md and docs/operations.md."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import console
from tests.support.console import ROOT, free_port

MARK = "run by tests/integration/test_operator_pages.py"
PAGES = ("README.md", "docs/how-to/read-the-metrics.md", "docs/operations.md")
COMMANDS = [c.text for page in PAGES for c in console.commands(ROOT / page) if c.mark == MARK]


def test_all_of_them_are_known() -> None:
    assert sorted({" ".join(text.split()[:2]) for text in COMMANDS}) == ["curl -s", "kvxfer inspect", "kvxfer serve"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_they_work(tmp_path: Path) -> None:
    (serve,) = (text for text in COMMANDS if text.startswith("kvxfer serve"))
    # One that watches goes on until nobody reads on.
    others = [f"timeout 60 {c} | sed '/^  none/q'" if "--watch" in c else c for c in COMMANDS if c != serve]
    before = ["export KVXFER_MEMORY_DIRECTORIES='[\"/dev/shm/kvxfer\"]'", "mkdir -m 700 /dev/shm/kvxfer"]
    after = ["until curl -sf http://127.0.0.1:9100/healthz; do kill -0 $!; sleep 0.1; done"]
    with console.places(
        [*before, f"{serve} &", *after, *others, "kill $!", "wait $!"], **{"9100": str(free_port())}
    ) as texts:
        output = dict(zip(others, console.run(texts, tmp_path)[4 : 4 + len(others)], strict=True))
    assert len(output) == len(others) == 4
    for command, told in output.items():
        if "/metrics" in command:
            assert "\nkvxfer_ready 0.0\n" in told
        elif "/readyz" in command:
            assert told == "not ready: no cache is registered\n"
        else:
            assert "Registrations\n  none" in told
