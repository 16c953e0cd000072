"""``kvxfer bench`` as a user runs it, and what it counts on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvxfer.cli.bench.case import Case, size
from kvxfer.cli.bench.report import Outcome, quartiles, show
from kvxfer.cli.main import app
from kvxfer.core.errors import KvxferError
from tests.support.places import abandoned, shared_places
from tests.support.processes import until

KVXFER = (sys.executable, "-m", "kvxfer", "bench")
SMALL = ("--size", "4MiB", "--rounds", "3", "--timeout", "60")


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The temporary directory of a benchmark, which must be empty at its end."""
    path = tmp_path_factory.mktemp("b")
    before = shared_places()
    yield path
    assert list(path.iterdir()) == []
    until(lambda: not abandoned(before))  # another test may be about to remove what a demo that was killed has left


def bench(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(place), "KVXFER_PEER_PORT": "1"}
    command = [*KVXFER, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=90, env=environment)


@pytest.mark.nixl
def test_it_measures_and_verifies(place: Path) -> None:
    done = bench(place, *SMALL, "--order", "contiguous", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["ok"] is True
    assert (told["bytes"], told["block"], told["descriptors"], told["rounds"]) == (4 << 20, 64 << 10, 64, 3)
    assert told["order"] == "contiguous"
    assert told["verified_rounds"] == [0, 2]
    assert told["wrong_blocks"] == 0
    seconds = told["seconds"]
    assert 0 < seconds["lower_quartile"] <= seconds["median"] <= seconds["upper_quartile"]
    assert told["bytes_per_s"] == pytest.approx((4 << 20) / seconds["median"])
    assert {"resolve", "make", "post", "total"} <= told["phases"].keys()


@pytest.mark.nixl
def test_for_people(place: Path) -> None:
    done = bench(place, "--size", "1MiB", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert "1,048,576 bytes a read: 16 blocks of 65,536 bytes, scrambled" in done.stdout
    assert "1 rounds; every byte verified in rounds 1" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("--size", "1MB"), "--size is 1000000; it takes a multiple of --block, 65536 bytes"),
        (("--size", "much"), "--size is 'much'; it takes bytes up to 64GiB, such as 65536, 64KiB, 64MiB or 1GiB"),
        (("--block", "0"), "--block is '0'"),
        (("--block", "100"), "--block is 100; it takes a multiple of 32"),
        (("--order", "random"), "--order is 'random'; allowed: contiguous, scrambled"),
    ],
)
def test_bad_usage(arguments: tuple[str, ...], says: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(done.exception, KvxferError)
    assert says in str(done.exception)


@pytest.mark.parametrize(
    "text, found",
    [("65536", 65536), ("64KiB", 65536), ("64 kib", 65536), ("1GiB", 2**30), ("2MB", 2_000_000), ("64M", 64 * 2**20)],
)
def test_sizes(text: str, found: int) -> None:
    assert size(text, "size") == found


@pytest.mark.parametrize("text", ["", "-1", "1.5MiB", "0", "65GiB", "9" * 30, "MiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(KvxferError, match="--size is"):
        size(text, "size")


@pytest.mark.parametrize("scrambled", [False, True])
def test_a_case_knows_every_wrong_block(scrambled: bool) -> None:
    case = Case.of(96 * 64, 64, scrambled)
    assert case.bytes == 96 * 64 == case.block * case.blocks * case.layers
    assert len(case.layout.regions) == case.layers == 16
    pages = case.layout.regions[0].size // case.block
    source = np.zeros(pages * case.block, dtype=np.uint8)
    case.fill(0, source)
    target = np.zeros_like(source)
    assert case.wrong(source, target) == case.blocks
    target.reshape(pages, -1)[case.ids("D")] = source.reshape(pages, -1)[case.ids("P")]
    assert case.wrong(source, target) == 0
    free = sorted(set(range(pages)) - set(case.ids("D").tolist()))
    target.reshape(pages, -1)[free[0], 7] = 1  # nobody asked for this one
    assert case.wrong(source, target) == 1


def test_quartiles() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def test_wrong_blocks_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case.of(2**20, 2**16, True)
    outcome = Outcome(case, ["UCX"], {"nixl": "1", "ucx": "2"}, 16, [0.1], [{"post": 0.1}], [0], 3, ["a cost"])
    assert outcome.json()["ok"] is False
    show(outcome)
    told = capsys.readouterr().out
    assert "3 blocks are WRONG (rounds 1 of 1)" in told
    assert "warning: a cost" in told
