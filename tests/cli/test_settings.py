"""From options to settings."""

from __future__ import annotations

import pytest

from kvxfer.cli.settings import flags, unknown_variables
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


def test_variables_that_are_no_setting() -> None:
    given = {"KVXFER_PEER_PROT": "1", "KVXFER_PEER_PORT": "1", "kvxfer_lanes": "2", "KVXFER_X": "", "HOME": "/"}
    assert unknown_variables(given) == [
        "KVXFER_PEER_PROT is no setting; is KVXFER_PEER_PORT meant?",
        "KVXFER_X is no setting",
    ]
