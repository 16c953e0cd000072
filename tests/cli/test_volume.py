"""``kvxfer volume``: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvxfer.cli.main import app
from kvxfer.cli.volume.output import doubling

SUPER = ("--model", "nemotron-3-super-120b-a12b", "--tp", "4", "--logical-block-tokens", "4224")
BOTH = ("--kv-dtype", "bf16", "--kv-dtype", "fp8")


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["volume", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_the_published_figure_for_people() -> None:
    code, out, err = run(*SUPER, *BOTH, "--tokens", "4224", "--tokens", "8448")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    page, snapshot = 2_162_688, 1_063_936
    padded, read = 48 * page, 40 * snapshot + 8 * page
    numbers = [4_224, padded, read, read, 43_950_080, 43_950_080, 0]
    assert [f"{n:,}" for n in numbers] + ["57.7%"] in rows
    assert [row[5] for row in rows if row[:1] == ["8,448"]] == ["43,950,080", "696,320"]
    assert "Bytes per rank and request, of each D rank" in out


def test_json() -> None:
    code, out, _ = run(*SUPER, *BOTH, "--tokens", "4225", "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    assert [series["kv_dtype"] for series in found["series"]] == ["bf16", "fp8"]
    bf16 = found["series"][0]
    assert bf16["p"]["options"]["logical_block_tokens"] == 4224
    (volume,) = bf16["volumes"]
    assert volume["tokens"] == 4225
    assert [rank["rank"] for rank in volume["ranks"]] == ["tp0", "tp1", "tp2", "tp3"]
    assert volume["ranks"][0] == {
        "rank": "tp0",
        "padded": 56 * 2_162_688,
        "whole_blocks": 40 * 1_063_936 + 16 * 2_162_688,
        "read": 40 * 1_063_936 + 8 * 4_240 * 512,
        "descriptors": volume["ranks"][0]["descriptors"],
        "saved_padding": 43_950_080,
        "saved_tail": 8 * (8_448 - 4_240) * 512,
    }
    assert found["series"][1]["volumes"][0]["ranks"][3]["saved_padding"] == 696_320


def test_default_lengths() -> None:
    assert doubling(32_768) == [512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768]
    assert doubling(100) == [100]
    code, out, _ = run("--model", "jamba-mini", "--up-to", "3000", "--json")
    assert code == 0
    assert [v["tokens"] for v in json.loads(out)["series"][0]["volumes"]] == [375, 750, 1_500, 3_000]


def test_ranks_that_differ() -> None:
    code, out, _ = run("--model", "llama-3.1-70b", "--d-pp", "3", "--tokens", "16")
    assert code == 0
    assert "of the D rank that reads most" in out
    assert f"{27 * 16 * 4_096:,}" in out


def test_refused() -> None:
    pair = ("--p-model", "llama-3.1-70b", "--d-model", "deepseek-v3")
    code, out, err = run(*pair)
    assert (code, out) == (1, "")
    assert err.startswith("kvxfer: refused: LAYOUT_MISMATCH: ")
    code, out, _ = run(*pair, "--json")
    assert code == 1
    assert json.loads(out)["refusal"]["reason"] == "LAYOUT_MISMATCH"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "nothing says what P is"),
        (("--model", "jamba-mini", "--tokens", "-1"), "--tokens is -1; allowed are 1 to 16777216"),
        (("--model", "jamba-mini", "--up-to", "0"), "--up-to is 0; allowed are 1 to 16777216"),
        (("--model", "jamba-mini", "--kv-dtype", "int3"), "--kv-dtype: kv_dtype is 'int3'; allowed: auto, "),
        (("--model", "jamba-mini", "--p-tp", "7"), "--p-tp: tp_size is 7; allowed: a divisor"),
        (("--model", "jamba-mini", "--plot", "x.txt"), "--plot x.txt is no figure's name; allowed: a file ending in"),
        (("--model", "jamba-mini", "--plot", "no/x.svg"), "--plot no/x.svg cannot be written; allowed: "),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("kvxfer: ") and err.count("\n") == 1


def test_nothing_to_save_is_said_once() -> None:
    code, out, err = run("--model", "llama-3.1-70b", "--tp", "8", "--tokens", "512", "--tokens", "1024")
    assert (code, err) == (0, "")
    assert out.splitlines()[2:-1] == [
        "",
        "Bytes per rank and request, of each D rank",
        "prompt  kvxfer reads",
        "   512    20,971,520",
        " 1,024    41,943,040",
        "nothing to save: pages have no padding, and no block is longer than what is read at a time",
    ]


def test_the_title_of_a_plot_stays_inside(tmp_path: Path) -> None:
    from kvxfer.cli.plan.figures import fit_text, new_figure

    figure = new_figure(6.6, 4.9)
    long, short = (figure.text(0.13, y, "w" * n, fontsize=13) for y, n in ((0.9, 200), (0.8, 5)))
    for text in (long, short):
        fit_text(figure, text)
        assert text.get_window_extent().x1 <= figure.bbox.x1
    assert (long.get_fontsize() < 6, short.get_fontsize()) == (True, 13)


def test_plot(tmp_path: Path) -> None:
    svg = tmp_path / "volume.svg"
    code, out, err = run(*SUPER, *BOTH, "--up-to", "9000", "--plot", str(svg))
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"plot: {svg}"
    text = svg.read_text()
    for label in (
        "nemotron-3-super-120b-a12b: P TP 4 to D TP 4, transfer volume",
        "KV bfloat16, blocks of 4,224 tokens",
        "padding not read: 43,950,080 bytes at every length",
        "padding not read: 696,320 bytes at every length",
        "whole padded pages",
        "what kvxfer reads",
    ):
        assert f">{label}</text>" in text
