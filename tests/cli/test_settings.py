"""From options to settings."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvxfer.cli.settings import flags, problems, unknown_variables
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


def test_problems_name_the_setting() -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(peer_port=-1, lanes=0)
    assert [text.split(":")[0] for text in problems(caught.value)] == ["peer_port", "lanes"]
    with pytest.raises(ValidationError) as caught:
        Settings(peer_host="0.0.0.0")
    assert problems(caught.value)[0].startswith("settings: peer_host '0.0.0.0' is not loopback")


def test_variables_that_are_no_setting() -> None:
    given = {"KVXFER_PEER_PROT": "1", "KVXFER_PEER_PORT": "1", "kvxfer_lanes": "2", "KVXFER_X": "", "HOME": "/"}
    assert unknown_variables(given) == [
        "KVXFER_PEER_PROT is no setting; is KVXFER_PEER_PORT meant?",
        "KVXFER_X is no setting",
    ]
