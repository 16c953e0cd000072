"""The page map as a figure: every part is there, nothing overlaps, and what cannot be drawn is told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvxfer.cli.main import app
from kvxfer.cli.plan.picture import MAX_LANES, draw
from kvxfer.planning import Pair, page_map
from tests.planning.cases import DEEPSEEK, JAMBA, LLAMA, NANO, QWEN, SUPER, pair_of

PAIR = ("--model", NANO, "--kv-dtype", "fp8", "--p-tp", "2", "--d-tp", "4")

CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "nano 2 to 4": (NANO, 2, 4, {"kv_dtype": "fp8"}),
    "super 4 to 4, bf16": (SUPER, 4, 4, {"logical_block_tokens": 4_224}),
    "qwen 4 to 1": (QWEN, 4, 1, {}),
    "jamba 1 to 4": (JAMBA, 1, 4, {}),
    "nano, SD": (NANO, 2, 4, {"conv_layout": "SD"}),
    "nano, not pooled": (NANO, 2, 4, {"pooled": False}),
    "llama 2 to 8": (LLAMA, 2, 8, {}),
    "llama 16 to 16": (LLAMA, 16, 16, {}),
    "llama, NHD": (LLAMA, 1, 4, {"kv_layout": "NHD"}),
    "llama, regions": (LLAMA, 2, 4, {"kv_packing": "regions"}),
    "deepseek 1 to 4": (DEEPSEEK, 1, 4, {}),
}


def drawn(name: str) -> Any:
    model, p_tp, d_tp, options = CASES[name]
    pair = Pair.of(*pair_of(model, p_tp, d_tp, **options))
    return draw(page_map(pair), pair)


@pytest.mark.parametrize("name", ["nano 2 to 4", "llama 2 to 8"])
def test_lines_of_a_closer_look_keep_clear_of_ticks_and_scales(name: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.patches import ConnectionPatch

    figure = drawn(name)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = [t for axes in figure.axes for t in (*axes.get_xticklabels(), *axes.texts)]
    lines = figure.findobj(ConnectionPatch)
    assert lines
    for line in lines:
        path = line.get_transform().transform_path(line.get_path())
        for text in texts:
            assert not path.intersects_bbox(text.get_window_extent(renderer), filled=False), text.get_text()


@pytest.mark.parametrize("name", CASES)
def test_no_label_lies_on_another_or_outside(name: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    figure = drawn(name)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = [t for t in figure.findobj(Text) if t.get_text() and t.get_visible()]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts]
    width, height = canvas.get_width_height()
    for text, box in boxes:
        assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height, f"{text!r} is cut off"
    for i, (text, box) in enumerate(boxes):
        for other, theirs in boxes[i + 1 :]:
            across = min(box.x1, theirs.x1) - max(box.x0, theirs.x0)
            along = min(box.y1, theirs.y1) - max(box.y0, theirs.y0)
            assert across <= 1 or along <= 1, f"{text!r} lies on {other!r}"


def labels(svg: Path) -> list[str]:
    return re.findall(r">([^<]+)</text>", svg.read_text())


def test_every_part_is_named(tmp_path: Path) -> None:
    svg = tmp_path / "page.svg"
    done = CliRunner().invoke(app, ["plan", *PAIR, "--picture", str(svg)])
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"page map: {svg}"
    found = labels(svg)
    for text in (
        "nemotron-3-nano-30b-a3b: P TP 2 to D TP 4, page of 1,069,056 bytes",
        "the page as group attention sees it: 4,176 tokens = 261 kernel blocks of 16",
        "the page as groups mamba2.0 ... mamba2.3 see it: one snapshot",
        "SSM state, 1,048,576 B",
        "conv x, 12,288 B",
        "conv B, 3,072 B",
        "conv C, 3,072 B",
        "padding, 2,048 B",
        "K",
        "V",
        "128 KiB (131,072 bytes)",
        "D tp0  from P tp0",
        "D tp3  from P tp1",
        "D tp3",
        "1,069,056",
    ):
        assert text in found, text
    assert svg.stat().st_size < 100_000


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_same_pair_gives_the_same_file(tmp_path: Path, suffix: str) -> None:
    paths = [tmp_path / f"{i}.{suffix}" for i in range(2)]
    for path in paths:
        assert CliRunner().invoke(app, ["plan", "--model", DEEPSEEK, "--picture", str(path)]).exit_code == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_bytes().startswith(b"\x89PNG") == (suffix == "png")


def test_many_ranks_are_cut(tmp_path: Path) -> None:
    figure = drawn("llama 16 to 16")
    found = [t.get_text() for axes in figure.axes for t in axes.get_yticklabels()]
    assert len([text for text in found if text.startswith("D ")]) == 8 * 2
    svg = tmp_path / "page.svg"
    done = CliRunner().invoke(app, ["plan", "--model", LLAMA, "--tp", "16", "--picture", str(svg)])
    assert done.exit_code == 0
    assert f"the page as group attention sees it: 16 tokens ({16 - MAX_LANES} more D bars are not shown)" in labels(svg)
    assert f"D tp{MAX_LANES - 1}  from P tp{MAX_LANES - 1}" in labels(svg)
    assert f"D tp{MAX_LANES}  from P tp{MAX_LANES}" not in labels(svg)


def test_nothing_is_drawn_of_a_refused_pair(tmp_path: Path) -> None:
    svg = tmp_path / "page.svg"
    done = CliRunner().invoke(app, ["plan", *PAIR, "--d-kv-dtype", "bf16", "--picture", str(svg)])
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1] == "page map: none is drawn of a pair that is refused"
    assert not svg.exists()


def test_a_picture_beside_json(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", *PAIR, "--json", "--picture", str(tmp_path / "page.PNG")])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["verdict"] == "works_with_cost"
    assert (tmp_path / "page.PNG").exists()


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    link = tmp_path / "page.svg"
    link.symlink_to("/dev/full")
    done = CliRunner().invoke(app, ["plan", *PAIR, "--picture", str(link)])
    assert done.exit_code == 2
    assert f"--picture {link} cannot be written: No space left on device; allowed: a writable file" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("plan", "--picture"), ("volume", "--plot")])
def test_without_matplotlib_the_error_says_what_to_install(command: tuple[str, str], tmp_path: Path) -> None:
    program = (
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'matplotlib' else found(name, *rest)\n"
        "from kvxfer.cli import main\n"
        f"sys.argv = ['kvxfer', {command[0]!r}, '--model', 'jamba-mini', {command[1]!r}, 'page.svg']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvxfer: UNSUPPORTED: {command[1]} needs matplotlib, which is not installed: pip ")
    assert "pip install matplotlib" in done.stderr
