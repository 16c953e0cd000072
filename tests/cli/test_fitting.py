"""Tables on terminals of several widths: nothing is cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvxfer.cli.doctor import report as doctor_report
from kvxfer.cli.fitting import put
from kvxfer.cli.plan import output as plan_output
from kvxfer.cli.tables import new_table
from kvxfer.cli.volume import output as volume_output
from kvxfer.doctor.findings import ok
from kvxfer.planning import report, volumes
from tests.planning.cases import NANO, pair_of

_CUT = "\N{HORIZONTAL ELLIPSIS}"


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width, highlight=False)


def shown(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_plan_cuts_no_number(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out = terminal(width)
    monkeypatch.setattr(plan_output, "console", lambda: out)
    found = report(*pair_of(NANO, 2, 4), tokens=5_000)
    plan_output.show(found)
    text = shown(out)
    assert _CUT not in text
    for rank in found.ranks:
        for number in (rank.read.bytes, rank.read.least, rank.read.padded, rank.read.descriptors):
            assert f"{number:,}" in text
    assert ("rounding" in text) == (width != 80)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_volume_cuts_no_number(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out = terminal(width)
    monkeypatch.setattr(volume_output, "console", lambda: out)
    p, d = pair_of(NANO, 2, 4)
    found = volumes(p, d, [32_768])
    volume_output.show([volume_output.Series("auto", p, d, found, found)])
    assert _CUT not in shown(out)
    assert f"{found[0].largest.read:,}" in shown(out)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_numbers_are_whole_and_columns_go_in_their_order(width: int) -> None:
    out = terminal(width)
    titles = [f"column {i}" for i in range(8)]
    table = new_table(out, "Many", "name", *titles)
    table.add_row("a name of some words [b]here[/b]", *(f"{i}{i:012,}" for i in range(8)))
    put(out, table, titles[::-1])
    text = shown(out)
    assert _CUT not in text
    assert "here[/b]" in text and f"0{0:012,}" in text
    assert f"7{7:012,}" not in text
    assert all(len(line) <= width for line in text.splitlines())


def test_what_fits_in_no_way_is_printed_as_elsewhere() -> None:
    out = terminal(20)
    table = new_table(out, "T", "name", "one", "two")
    table.add_row("a-name", "1,234,567,890", "9,876,543,210")
    put(out, table)
    assert shown(out).splitlines()[-1].split() == ["a-name", "1,234,567,890", "9,876,543,210"]
    assert out.width == 20


def test_doctor_breaks_long_words(monkeypatch: pytest.MonkeyPatch) -> None:
    out = terminal(80)
    monkeypatch.setattr(doctor_report, "Console", lambda **_: out)
    doctor_report.show([ok("memory", "/a" * 100)])
    assert _CUT not in shown(out)
    assert shown(out).count("/a") == 100
