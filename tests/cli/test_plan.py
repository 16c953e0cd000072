"""``kvxfer plan``: what it prints, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from typer.testing import CliRunner

from kvxfer.cli.main import app
from kvxfer.core.layout import Rank
from kvxfer.models import EngineOptions, build_all, example
from kvxfer.wire.layouts import layout_to_pb

NANO = ("--model", "nemotron-3-nano-30b-a3b", "--kv-dtype", "fp8")
JAMBA = ("--model", "jamba-mini", "--kv-dtype", "fp8")
PAIR = (*NANO, "--p-tp", "2", "--d-tp", "4")


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["plan", *arguments])
    return done.exit_code, done.stdout, done.stderr


def told(*arguments: str, status: int = 0) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (status, "")
    found: dict[str, Any] = json.loads(out)
    return found


# -- for people ------------------------------------------------------------------------------------------------------


def test_a_pair_for_people() -> None:
    code, out, err = run(*PAIR, "--tokens", "2096")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    lines = out.splitlines()
    assert "verdict: works, at a cost" in lines
    assert "  group attention of P: each byte is read 2 times, by D ranks that hold the same units" in lines
    rows = [line.split() for line in lines]
    assert ["tp3", "P", "tp1", "98", "98", "878", *["15,490,048"] * 2, "0", "15,560,704", "70,656"] in rows
    assert any(row[:2] == ["P", "attention"] and "(261" in row and "4,176" in row for row in rows)
    assert "mamba2.0 ... mamba2.3 (4)" in out
    assert lines[-1].startswith("all D ranks: 61,960,192 bytes in 3,512 descriptors (17,642 bytes each), the least")


def test_works() -> None:
    code, out, _ = run(*NANO, "--tp", "2")
    assert code == 0
    assert "verdict: works" in out.splitlines()
    assert "A prompt of" not in out and "all D ranks" not in out
    _, out, _ = run("--model", "llama-3.1-70b", "--tokens", "1000")
    assert out.splitlines()[-1].endswith("the least possible; as many as in whole pages, which have no padding")


def test_refused_for_people() -> None:
    code, out, err = run(*NANO, "--p-kv-dtype", "bf16")
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert "verdict: refused" in lines
    assert any(line.startswith("  LAYOUT_MISMATCH: group attention, layer ") for line in lines)
    for line in ("on D: float8_e4m3fn", "on P: bfloat16", "group: attention", "component: kv", "D rank: tp0"):
        assert f"  {line}" in lines
    assert "Pages (bytes" in out and "Units" not in out


def test_many_costs_are_cut_for_people_only() -> None:
    sides = ("--model", "llama-3.1-70b", "--tp", "4", "--pp", "2", "--d-kv-layout", "NHD")
    code, out, _ = run(*sides)
    costs = told(*sides)["costs"]
    assert code == 0
    assert len(costs) == 8
    assert "... and 3 more like these" in out


# -- for machines ----------------------------------------------------------------------------------------------------


def test_json() -> None:
    found = told(*PAIR, "--tokens", "2096")
    assert list(found) == ["verdict", "refusal", "costs", "tokens", "p", "d", "ranks"]
    assert (found["verdict"], found["refusal"], found["tokens"]) == ("works_with_cost", None, 2096)
    assert [cost["kind"] for cost in found["costs"]] == ["repeated_reads"]
    assert (found["p"]["tp_size"], found["d"]["tp_size"]) == (2, 4)
    assert found["p"]["options"]["kv_dtype"] == "fp8"
    assert found["d"]["groups"][4] == {
        "name": "attention",
        "kind": "attention",
        "layers": 6,
        "block_tokens": 2096,
        "kernel_blocks": 131,
        "page": 536_576,
        "data": 536_576,
    }
    rank = found["ranks"][2]
    assert (rank["rank"], rank["tp_rank"], rank["pp_rank"]) == ("tp2", 2, 0)
    assert rank["prompt"] == {
        "descriptors": 878,
        "bytes": 15_490_048,
        "least": 15_490_048,
        "rounding": 0,
        "padded": 15_560_704,
    }
    (source,) = rank["sources"]
    assert {k: source[k] for k in ("rank", "local_rows", "remote_rows", "descriptors", "bytes")} == {
        "rank": "tp1",
        "local_rows": 98,
        "remote_rows": 98,
        "descriptors": 878,
        "bytes": 15_490_048,
    }
    assert source["groups"][0] == {
        "group": "attention",
        "kind": "attention",
        "layers": 6,
        "granule_tokens": 16,
        "granule_bytes": 24_576,
        "granule_descriptors": 6,
        "block_tokens": 2096,
        "block_bytes": 3_219_456,
        "block_descriptors": 786,
        "bytes": 3_219_456,
    }


def test_json_of_a_refusal() -> None:
    found = told(*NANO, "--d-spec-tokens", "1", status=1)
    assert (found["verdict"], found["ranks"]) == ("refused", [])
    refusal = found["refusal"]
    assert refusal["reason"] == "LAYOUT_MISMATCH"
    assert (refusal["metadata"]["local"], refusal["metadata"]["remote"]) == ("4", "3")
    assert refusal["metadata"]["d_rank"] == "tp0"


def test_json_of_bad_input() -> None:
    code, out, err = run(*NANO, "--tokens", "0", "--json")
    assert code == 2
    assert err.startswith("kvxfer: FIELD_INVALID: --tokens is 0")
    found = json.loads(out)
    assert (found["verdict"], found["refusal"]["field"]) == ("bad_input", "tokens")


# -- options ---------------------------------------------------------------------------------------------------------


def test_an_option_of_one_side_wins() -> None:
    found = told(*NANO, "--tp", "2", "--d-tp", "1", "--block-tokens", "32", "--p-block-tokens", "64", "--no-pooled")
    assert [(found[s]["tp_size"], found[s]["options"]["block_tokens"]) for s in "pd"] == [(2, 64), (1, 32)]
    assert {found[s]["options"]["pooled"] for s in "pd"} == {False}


@pytest.mark.parametrize(
    "arguments, field, value",
    [
        (("--pp", "2"), "pp_size", 2),
        (("--logical-block-tokens", "4224"), "logical_block_tokens", 4224),
        (("--state-align-tokens", "128"), "state_align_tokens", 128),
        (("--conv-dtype", "fp16"), "conv_dtype", "fp16"),
        (("--state-dtype", "bf16"), "ssm_dtype", "bf16"),
        (("--conv-layout", "SD"), "conv_layout", "SD"),
        (("--kv-layout", "NHD"), "kv_layout", "NHD"),
        (("--kv-packing", "block"), "kv_packing", "block"),
        (("--no-pooled",), "pooled", False),
        (("--spec-tokens", "2"), "spec_tokens", 2),
    ],
)
def test_every_option_reaches_both_engines(arguments: tuple[str, ...], field: str, value: object) -> None:
    found = told(*JAMBA, *arguments)
    assert [found[side]["options"][field] for side in "pd"] == [value, value]
    flag, *rest = arguments
    for side, other in ("pd", "dp"):
        own = flag.replace("--", f"--{side}-", 1)
        code, out, _ = run(*JAMBA, own, *rest, "--json")
        found = json.loads(out)
        assert code in (0, 1)
        assert found[side]["options"][field] == value != found[other]["options"][field]


def test_a_config_of_the_users(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(example("llama-3.1-70b")))
    for path in (folder, folder / "config.json"):
        assert told("--model", str(path), "--tp", "8")["p"]["name"] == "my-model"
    two = told("--model", "llama-3.1-70b", "--d-model", str(folder))
    assert (two["p"]["name"], two["d"]["name"]) == ("llama-3.1-70b", "my-model")


def layouts(folder: Path, tp: int, name: str = "llama-3.1-70b", wrap: bool = False, **options: Any) -> list[str]:
    """Layout files of all ranks, as messages or as requests."""
    paths = []
    made = build_all(example(name), EngineOptions(tp_size=tp, num_blocks=8, **options))
    for i, layout in enumerate(made.values()):
        message = json_format.MessageToDict(layout_to_pb(layout), preserving_proto_field_name=bool(i % 2))
        path = folder / f"{tp}-{i}.json"
        path.write_text(json.dumps({"engine_id": "p", "layout": message} if wrap else message))
        paths.append(str(path))
    return paths


def flags(flag: str, paths: list[str]) -> list[str]:
    return [word for path in paths for word in (flag, path)]


def test_layout_files(tmp_path: Path) -> None:
    p, d = layouts(tmp_path, 2), layouts(tmp_path, 4, wrap=True)
    given = told(*flags("--p-layout", p), *flags("--d-layout", d), "--tokens", "100")
    preset = told("--model", "llama-3.1-70b", "--p-tp", "2", "--d-tp", "4", "--tokens", "100")
    assert given["ranks"] == preset["ranks"]
    assert given["p"]["options"] is None
    assert given["p"]["name"] == "2-0"
    half = told("--model", "llama-3.1-70b", "--p-tp", "2", *flags("--d-layout", d))
    assert [rank["rank"] for rank in half["ranks"]] == ["tp0", "tp1", "tp2", "tp3"]
    code, out, _ = run(*flags("--p-layout", p), *flags("--d-layout", d))
    assert code == 0
    assert out.startswith("P: 2-0, TP 2, layouts as given\n")


def test_layout_files_of_stages(tmp_path: Path) -> None:
    files = layouts(tmp_path, 2, pp_size=2)
    found = told(*flags("--p-layout", files), "--p-pp", "2", "--model", "llama-3.1-70b", "--tp", "2")
    assert [source["rank"] for source in found["ranks"][0]["sources"]] == ["pp0.tp0", "pp1.tp0"]
    assert Rank(0, 2, 1, 2).number == 2


def test_pp_of_both_sides_is_of_layout_files_too(tmp_path: Path) -> None:
    files = layouts(tmp_path, 2, pp_size=2)
    both = told(*flags("--p-layout", files), *flags("--d-layout", files), "--pp", "2")
    assert [rank["rank"] for rank in both["ranks"]] == ["pp0.tp0", "pp0.tp1", "pp1.tp0", "pp1.tp1"]
    assert [[s["rank"] for s in rank["sources"]] for rank in both["ranks"]] == [
        [rank["rank"]] for rank in both["ranks"]
    ]
    one = told(*flags("--p-layout", files), "--model", "llama-3.1-70b", "--tp", "2", "--pp", "2", "--d-pp", "1")
    assert [source["rank"] for source in one["ranks"][0]["sources"]] == ["pp0.tp0", "pp1.tp0"]


def test_min_run_bytes() -> None:
    sides = ("--model", "llama-3.1-70b", "--d-kv-layout", "NHD")
    assert told(*sides)["verdict"] == "works_with_cost"
    assert told(*sides, "--min-run-bytes", "513", status=1)["refusal"]["metadata"]["run_bytes"] == "512"


# -- bad input: one line, what was allowed, status 2 -----------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "nothing says what P is; allowed: --model or --p-model (a config.json, or one of nemotron-3-nano"),
        (("--p-model", "jamba-mini"), "nothing says what D is; allowed: --model or --d-model"),
        (("--model", "nope"), "--model nope is neither a file nor a known name; allowed: a config.json, its directory"),
        (("--model", "jamba-mini", "--d-model", "nope"), "--d-model nope is neither a file nor a known name"),
        ((*NANO, "--tp", "3"), "--tp: tp_size is 3; allowed: a divisor of 64, the parts of conv.x in layer "),
        ((*NANO, "--d-tp", "3"), "--d-tp: tp_size is 3; allowed: a divisor of 64, the parts of conv.x in layer "),
        ((*NANO, "--p-tp", "0"), "--p-tp: tp_size is 0; allowed: an integer from 1 to 65536"),
        ((*NANO, "--tokens", "-5"), "--tokens is -5; allowed are 1 to 16777216"),
        ((*NANO, "--tokens", "99999999999999999999"), "allowed are 1 to 16777216"),
        ((*NANO, "--d-kv-dtype", "int3"), "--d-kv-dtype: kv_dtype is 'int3'; allowed: auto, float32, "),
        ((*NANO, "--state-dtype", "x"), "--state-dtype: ssm_dtype is 'x'; allowed: auto, float32, "),
        ((*NANO, "--conv-layout", "XY"), "--conv-layout: conv_layout is 'XY'; allowed: DS, SD"),
        ((*NANO, "--kv-packing", "regions"), "--kv-packing: kv_packing is regions; where groups share tensors"),
        ((*NANO, "--block-tokens", "16", "--p-logical-block-tokens", "17"), "--p-logical-block-tokens: logical_block_"),
        ((*NANO, "--pp", "99"), "--pp: pp_size is 99; allowed: at most the model's 52 layers"),
        ((*NANO, "--min-run-bytes", "0"), "--min-run-bytes is 0; allowed is 1 or more"),
        ((*NANO, "--picture", "page.pdf"), "--picture page.pdf is no figure's name; allowed: a file ending in .svg or"),
        (
            (*NANO, "--picture", "no/such/page.svg"),
            "--picture no/such/page.svg cannot be written; allowed: a file in a",
        ),
        (
            (*NANO, "--p-layout", "no.json"),
            "--p-layout no.json cannot be read; allowed: a JSON file (FileNotFoundError",
        ),
        (
            (*NANO, "--p-layout", "no.json", "--p-tp", "2"),
            "--p-layout says all about P already; --p-tp cannot be given",
        ),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("kvxfer: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "cannot be read; allowed: a JSON file (JSONDecodeError"),
        ("[]", "is no JSON object; allowed: the JSON form of kvxfer.v1.Layout"),
        ('{"region": []}', "is no kvxfer.v1.Layout in JSON: "),
        ('{"regions": [{"size": -1}]}', "is no kvxfer.v1.Layout in JSON: "),
        ("{}", "a layout has 1 to 65536 regions, this one 0"),
        ('{"regions": [{"size": 5, "memory": 1}]}', "a layout has 1 to 1024 groups, this one 0"),
    ],
)
def test_bad_layout_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    code, out, err = run(*NANO, "--p-layout", str(path))
    assert (code, out) == (2, "")
    assert f"--p-layout {path}" in err and message in err
    assert err.count("\n") == 1


def test_bad_configs(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, message in (
        ("nonsense", "--p-model: config is "),
        ('{"model_type": "unheard-of"}', "--p-model: model_type is 'unheard-of'; allowed: "),
        ('{"model_type": "unheard-of"}', "the layouts that its engine registers (--p-layout, --d-layout)"),
        ('{"model_type": "llama"}', "--p-model: num_hidden_layers"),
    ):
        path.write_text(text)
        code, out, err = run("--p-model", str(path), "--d-model", "jamba-mini")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_layout_files_that_are_too_small(tmp_path: Path) -> None:
    files = layouts(tmp_path, 1)
    code, _, err = run(*flags("--p-layout", files), *flags("--d-layout", files), "--tokens", "129")
    assert code == 2
    assert "129 tokens take 9 blocks up to the end of group attention; rank tp0 of 1-0 has 8" in err
    code, _, err = run(*flags("--p-layout", files), *flags("--d-layout", files), "--p-pp", "3")
    assert code == 2
    assert "--p-pp is 3; allowed: what divides the 1 layouts of --p-layout" in err
    for pp in ("3", "0"):
        code, _, err = run(*flags("--p-layout", files), *flags("--d-layout", files), "--pp", pp)
        assert code == 2
        assert f"--pp is {pp}; allowed: what divides the 1 layouts of --p-layout (--p-pp is for P alone)" in err


# -- with nothing but what a user has --------------------------------------------------------------------------------

BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is not there")

sys.meta_path.insert(0, Block())
from kvxfer.cli import main
sys.argv = ["kvxfer", *{arguments!r}]
main()
"""


def blocked(blocked: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    program = BLOCKED.format(blocked=blocked, arguments=arguments)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)


def test_needs_neither_nixl_nor_torch_nor_matplotlib() -> None:
    without = ["nixl", "nixl_cu12", "nixl_cu13", "torch", "matplotlib"]
    done = blocked(without, "plan", *PAIR, "--tokens", "2096")
    assert (done.returncode, done.stderr) == (0, "")
    assert "15,490,048" in done.stdout
    done = blocked(["torch"], "-c", "import torch")
    assert done.returncode != 0


def test_help_tells_of_status_and_examples() -> None:
    done = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    for text in ("Status 0:", "Status 1:", "Status 2:", "kvxfer plan --model nemotron-3-nano-30b-a3b --kv-dtype fp8"):
        assert text in done.stdout
