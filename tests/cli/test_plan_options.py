"""The options of both engines: one table, three of each, all of them shown by an example."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from google.protobuf import json_format
from typer.main import get_command
from typer.testing import CliRunner

from kvxfer.cli.main import app
from kvxfer.cli.plan import plan
from kvxfer.cli.plan.options import KNOBS, chosen
from kvxfer.cli.volume import volume
from kvxfer.core.layout import Rank
from kvxfer.models import EngineOptions, build, example
from kvxfer.wire.layouts import layout_to_pb

#: What an engine has and planning does not ask for: how many blocks, and where memory lies.
NOT_ASKED = {"num_blocks", "state_blocks", "memory"}


def options_of(command: str) -> list[str]:
    found = getattr(get_command(app), "commands")[command]  # noqa: B009 - click's Group, of whichever click Typer brings
    return [option.opts[0] for option in found.params if option.opts[0] != "--help"]


def examples(text: str | None, command: str) -> list[list[str]]:
    lines = [line.strip() for line in (text or "").splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith(f"kvxfer {command}")]


def test_every_option_of_an_engine_is_a_knob() -> None:
    assert {knob.field for knob in KNOBS} == {f.name for f in fields(EngineOptions)} - NOT_ASKED | {"model"}


def test_defaults_in_the_help_are_those_of_the_engine() -> None:
    for knob in KNOBS:
        if knob.kind is int and knob.default.isdigit():
            assert int(knob.default) == getattr(EngineOptions(), knob.field)
    own = EngineOptions()
    assert (own.conv_layout, own.kv_layout, own.kv_packing, own.pooled) == ("DS", "HND", "packed", True)


@pytest.mark.parametrize("command, text", [("plan", plan.__doc__), ("volume", volume.__doc__)])
def test_every_option_is_in_an_example(command: str, text: str | None) -> None:
    """In any of its three forms: for both sides, for P or for D."""
    used = {word for line in examples(text, command) for word in line if word.startswith("--")}
    shown = {word.replace("--p-", "--").replace("--d-", "--").replace("--no-", "--") for word in used}
    if command == "volume":
        shown |= {f"--{knob.flag}" for knob in KNOBS}  # kvxfer plan shows them
    wanted = {option.replace("--p-", "--").replace("--d-", "--") for option in options_of(command)}
    assert wanted <= shown
    assert used <= {*options_of(command), "--p-no-pooled", "--d-no-pooled", "--no-pooled"}


@pytest.mark.parametrize(
    "words", [*examples(plan.__doc__, "plan"), *examples(volume.__doc__, "volume")], ids=lambda words: " ".join(words)
)
def test_every_example_works(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (".", "p", "d"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "config.json").write_text(json.dumps(example("nemotron-3-nano-30b-a3b")))
    for name, rank in (("p0", Rank(0, 2)), ("p1", Rank(1, 2)), ("d0", Rank(0, 1))):
        layout = build(example("llama-3.1-70b"), EngineOptions(tp_size=rank.tp_size), rank)
        (tmp_path / f"{name}.json").write_text(json_format.MessageToJson(layout_to_pb(layout)))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


def test_what_was_said_of_a_side() -> None:
    found = chosen(
        "D", {"tp": 2, "d_tp": None, "p_tp": 4, "d_pooled": False, "pooled": True, "model": "x"}, kv_dtype="fp8"
    )
    assert (found.model, dict(found.options)) == ("x", {"kv_dtype": "fp8", "tp_size": 2, "pooled": False})
    assert (found.flags["tp_size"], found.flags["pooled"]) == ("--tp", "--d-pooled")
    assert found.own == ("--d-pooled",)
