"""What ``kvxfer demo`` says to arguments that cannot work; no process is started."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvxfer.cli import main
from kvxfer.cli.main import app


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--model", "nope"), "--model nope is neither a file nor a known name; allowed: "),
        (("--skip", "5"), "--skip is 5; it must be a multiple of 16"),
        (("--skip", "24", "--p-block-tokens", "32"), "--skip is 24; it must be a multiple of 16"),
        (("--tokens", "100", "--skip", "100"), "--skip is 100; allowed are 0 to 99"),
        (("--blocks", "2"), "--blocks is 2; 5000 tokens need 7 on P"),
        (("--p-tp", "3"), "--p-tp: tp_size is 3; allowed: a divisor of 64"),
        (("--d-tp", "3"), "--d-tp: tp_size is 3; allowed: a divisor of 64"),
        (("--kv-dtype", "int3"), "--kv-dtype: kv_dtype is 'int3'; allowed: "),
        (("--tokens", "9999999", "--memory-mib", "1"), "cannot be cut to 1 MiB; the whole needs "),
        (("--flip", "sideways"), "--flip is 'sideways'; allowed: inside, outside"),
    ],
)
def test_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvxfer", "demo", *arguments])
    with pytest.raises(SystemExit) as status:
        main()
    assert status.value.code == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("kvxfer: FIELD_INVALID: ")
    assert message in told.err


@pytest.mark.parametrize("arguments", [("--p-tp", "0"), ("--d-tp", "17"), ("--tokens", "0"), ("--timeout", "0")])
def test_out_of_range(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["demo", *arguments])
    assert done.exit_code == 2
    assert arguments[0] in done.output


def test_error_for_machines(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "unheard-of"}')
    done = CliRunner().invoke(app, ["demo", "--json", "--model", str(config)])
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert (told["ok"], told["reason"]) == (False, "FIELD_INVALID")
    assert "unheard-of" in told["problems"][0]
