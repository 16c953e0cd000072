"""From options to settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.cli.settings import as_toml, flags, unknown_variables
from kvxfer.config import Settings
from kvxfer.core.errors import KvxferError


def test_options_that_were_given() -> None:
    options = {"peer_port": 0, "peer_host": None, "memory_directory": ["/a", "/b"], "peer_allowed_san": []}
    assert flags(options, ["lanes=3", "advertise=a=b"]) == {
        "peer_port": 0,
        "memory_directories": ("/a", "/b"),
        "lanes": "3",
        "advertise": "a=b",
    }
    with pytest.raises(KvxferError, match="--set takes name=value, not 'lanes'"):
        flags({}, ["lanes"])


def test_directories_are_seen_from_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = flags({"memory_directory": ["mem", "./a/", "/b/", "../c"]}, [])["memory_directories"]
    assert found == (f"{tmp_path}/mem", f"{tmp_path}/a", "/b", "../c")


def test_what_is_printed_can_be_read(tmp_path: Path) -> None:
    settings = Settings(
        http_port=9100,
        advertise="p.example:9000",
        memory_directories=("/a b", '/"ü"\x7f\\'),
        engine_socket=Path("/x/y.sock"),
        lease_ttl=0.00001,
        allow_memfd=False,
    )
    file = tmp_path / "kvxfer.toml"
    file.write_text(as_toml(settings.model_dump()))
    assert Settings.load(file).model_dump() == settings.model_dump()
    assert "# peer_tls_cert is not set" in file.read_text()


def test_variables_that_are_no_setting() -> None:
    given = {"KVXFER_PEER_PROT": "1", "KVXFER_PEER_PORT": "1", "kvxfer_lanes": "2", "KVXFER_X": "", "HOME": "/"}
    assert unknown_variables(given) == [
        "KVXFER_PEER_PROT is no setting; is KVXFER_PEER_PORT meant?",
        "KVXFER_X is no setting",
    ]
