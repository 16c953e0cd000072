"""Every command of clients/grpcurl/README.md, as it is written there, with the real grpcurl against real sidecars."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from kvxfer.pb import transfer_pb2 as pb
from tests.support import console
from tests.support.console import ROOT

RECIPES = ROOT / "clients" / "grpcurl"
COMMANDS = [c.text for c in console.commands(RECIPES / "README.md") if not c.text.startswith("make ")]
OF_THE_DEMO = [text for text in COMMANDS if "$DIR" in text]
WALK = [text for text in COMMANDS if text not in OF_THE_DEMO]
INCARNATION = "INCARNATION"


def message(recipe: Path) -> Any:
    """The request that a recipe is, parsed: every name in it must be known."""
    call = recipe.name.split(".")[0]
    return ParseDict(json.loads(recipe.read_text()), getattr(pb, f"{call}Request")())


# -- the walk ----------------------------------------------------------------------------------


def test_the_walk_takes_every_call_and_every_recipe() -> None:
    text = "\n".join(WALK)
    calls = {method.name for method in pb.DESCRIPTOR.services_by_name["KvTransfer"].methods}
    assert {f"kvxfer.v1.KvTransfer/{call}" for call in calls} == set(re.findall(r"kvxfer\.v1\.KvTransfer/\w+", text))
    for word in (" list", " describe ", "Health/Check", *(recipe.name for recipe in RECIPES.glob("*.json"))):
        assert word in text, word


@pytest.mark.parametrize("recipe", [r for r in RECIPES.glob("*.json") if r.name != "Health.json"], ids=lambda r: r.name)
def test_a_recipe_is_a_request(recipe: Path) -> None:
    request = message(recipe)
    assert request.ByteSize() > 0
    assert recipe.read_text().count(INCARNATION) == str(request).count(INCARNATION)


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The output of every command of the walk, by the command."""
    directory = tmp_path_factory.mktemp("walk")
    recipes = {path.name: path.read_text() for path in RECIPES.glob("*.json")}
    with console.places([*WALK, *recipes.values()]) as texts:
        (directory / "clients" / "grpcurl").mkdir(parents=True)
        for name, text in zip(recipes, texts[len(WALK) :], strict=True):
            (directory / "clients" / "grpcurl" / name).write_text(text)
        outputs = console.run(texts[: len(WALK)], directory)
    return dict(zip(WALK, outputs, strict=True))


def told(walked: dict[str, str], part: str) -> str:
    return next(output for command, output in walked.items() if part in command)


def test_the_bytes_arrive(walked: dict[str, str]) -> None:
    assert told(walked, "tr -d") == "The first sixteen tokens, and sixteen more.\n"


def test_the_read_counts(walked: dict[str, str]) -> None:
    transfer = json.loads(told(walked, "/ReadBlocks"))["transfer"]
    assert (transfer["state"], transfer["bytes"]) == ("TRANSFER_STATE_DONE", str(2 * 1024 + 512))
    assert [s["reported_bytes"] for s in transfer["sources"]] == [transfer["bytes"]]


def test_the_dry_run_moves_nothing(walked: dict[str, str]) -> None:
    for call, state in {"Prepare": "PREPARED", "Get": "PREPARED", "Cancel": "CANCELLED"}.items():
        transfer = json.loads(told(walked, f"/{call}Transfer"))["transfer"]
        assert (transfer["state"], transfer["bytes"]) == (f"TRANSFER_STATE_{state}", str(2 * 1024 + 512))


def test_the_answers_of_the_walk(walked: dict[str, str]) -> None:
    assert json.loads(told(walked, "Health.json")) == {"status": "SERVING"}
    assert "kvxfer.v1.KvPeer.OpenRead" in told(walked, "list kvxfer.v1.KvPeer")
    assert [r["engine_id"] for r in json.loads(told(walked, "/GetStatus"))["registrations"]] == ["prefill"]
    assert [one["state"] for one in json.loads(told(walked, "/ListLeases"))["leases"]] == ["LEASE_STATE_HELD"]
    listed = {t["transfer_id"]: t["state"] for t in json.loads(told(walked, "/ListTransfers"))["transfers"]}
    assert listed == {"by-hand": "TRANSFER_STATE_DONE", "dry-run": "TRANSFER_STATE_CANCELLED"}
    assert float(json.loads(told(walked, "/RenewLease"))["expires_in"].removesuffix("s")) > 600
    assert json.loads(told(walked, "/Handshake"))["plan"]["sources"][0]["address"].startswith("127.0.0.1:")


def test_the_broken_read_is_answered_as_the_page_says(walked: dict[str, str]) -> None:
    answer = told(walked, "grep Message")
    assert "block 99 does not exist; allowed are 0 to 7" in answer
    assert answer in (RECIPES / "README.md").read_text()


def test_the_streams_tell_it_all(walked: dict[str, str]) -> None:
    text = told(walked, "cat /tmp/kvxfer/leases.txt")
    for word in ("HELD", "RELEASED", "WITHDRAWN"):
        assert f"LEASE_STATE_{word}" in text
    for word in ("PREPARED", "CANCELLED", "POSTED", "DONE"):
        assert f"TRANSFER_STATE_{word}" in text
    assert text.count("NOT_REGISTERED") == 2


# -- the demo's caches ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """The directory of a demo that has been left running."""
    command = [sys.executable, "-m", "kvxfer", "demo", "--keep", "--p-tp", "1", "--d-tp", "1", "--tokens", "500"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None
            found = next((m for line in demo.stdout if (m := re.search(r"< (\S+)/ReadBlocks\.json", line))), None)
            assert found, "the demo ended without telling its commands"
            yield Path(found[1])
        finally:
            demo.send_signal(signal.SIGINT)
            demo.communicate(timeout=30)


def run(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """A command of the walk-through."""
    beside = Path(sys.executable).with_name("grpcurl")
    program = str(beside) if beside.exists() else shutil.which("grpcurl")
    assert program, "grpcurl is among the developer tools"
    line = re.sub(r"^grpcurl", program, command).replace("$DIR", str(directory))
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", OF_THE_DEMO)
def test_the_command_works(command: str, directory: Path) -> None:
    done = run(command, directory)
    assert done.returncode == 0, done.stderr
    if command.endswith("ReadBlocks.json"):
        transfer = json.loads(done.stdout)["transfer"]
        assert transfer["state"] == "TRANSFER_STATE_DONE"
        assert [s["reported_bytes"] for s in transfer["sources"]] == [transfer["bytes"]]


def test_a_wrong_block_is_explained(directory: Path, tmp_path: Path) -> None:
    request = json.loads((directory / "ReadBlocks.json").read_text())
    blocks = next(b for b in request["spec"]["local_blocks"] if "snapshot_positions" not in b)
    blocks["block_ids"][0] = 99_999
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(request))
    done = run(f"grpcurl -plaintext -unix -d @ $DIR/D0.sock kvxfer.v1.KvTransfer/ReadBlocks < {broken}", directory)
    assert done.returncode != 0
    for part in ("BLOCK_OUT_OF_RANGE", "spec.local_blocks[", "99999", "allowed are 0 to"):
        assert part in done.stderr
