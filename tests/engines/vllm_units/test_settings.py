"""What ``kv_connector_extra_config`` may hold."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.engines.vllm.settings import ConnectorSettings, MemoryMode, not_in_host_memory, settings_from
from tests.support.console import ROOT

SOCKET = {"engine_socket": "/run/kvxfer/kvxfer.sock"}


def test_defaults() -> None:
    found = settings_from(SOCKET)
    assert found == ConnectorSettings(engine_socket="/run/kvxfer/kvxfer.sock")
    assert found.memory is MemoryMode.SIDECAR


def test_embedded_needs_no_socket() -> None:
    found = settings_from({"memory": "embedded", "peer_host": "10.0.0.7", "peer_port": 7000, "sidecar": {"lanes": 4}})
    assert found.memory is MemoryMode.EMBEDDED
    assert (found.peer_host, found.peer_port, found.sidecar) == ("10.0.0.7", 7000, {"lanes": 4})


@pytest.mark.parametrize(
    "template, socket",
    [
        ("/run/kvxfer/one.sock", "/run/kvxfer/one.sock"),
        ("unix:///run/kvxfer/rank{rank}.sock", "unix:///run/kvxfer/rank5.sock"),
        ("/run/{pp_rank}/{tp_rank}.sock", "/run/1/2.sock"),
        ("/run/dp{dp_rank}/", "/run/dp3/rank5.sock"),
    ],
)
def test_a_worker_finds_its_socket(template: str, socket: str) -> None:
    found = settings_from({"engine_socket": template})
    assert found.socket(Rank(2, 3, 1, 2), dp_rank=3) == socket


@pytest.mark.parametrize(
    "values, field, told",
    [
        ({**SOCKET, "memmory": "shared"}, "memmory", "compatibility_key, engine_socket, lease_ttl, memory"),
        ({**SOCKET, "memory": "cuda"}, "memory", "'cuda'; allowed: sidecar, shared, embedded"),
        ({}, "engine_socket", "is needed with memory=sidecar"),
        ({"memory": "shared"}, "engine_socket", "is needed with memory=shared"),
        ({"engine_socket": 7}, "engine_socket", "7; allowed: a string"),
        ({"engine_socket": "/run/{worker}.sock"}, "engine_socket", "{rank} {tp_rank} {pp_rank} {dp_rank}"),
        ({"engine_socket": "/run/{.sock"}, "engine_socket", "{rank} {tp_rank} {pp_rank} {dp_rank}"),
        ({**SOCKET, "lease_ttl": 0}, "lease_ttl", "0; allowed: a number of seconds"),
        ({**SOCKET, "read_timeout": "60"}, "read_timeout", "'60'"),
        ({**SOCKET, "ready_timeout": True}, "ready_timeout", "True"),
        ({**SOCKET, "peer_host": "10.0.0.7"}, "peer_host", "means nothing with memory=sidecar"),
        ({**SOCKET, "memory": "shared", "sidecar": {}}, "sidecar", "means nothing with memory=shared"),
        ({**SOCKET, "memory_directory": "/dev/shm"}, "memory_directory", "means nothing with memory=sidecar"),
        ({"memory": "embedded", "peer_port": 70_000}, "peer_port", "70000; allowed: 0 to 65535"),
        ({"memory": "embedded", "sidecar": "lanes=4"}, "sidecar", "'lanes=4'; allowed: a mapping"),
    ],
)
def test_what_is_refused(values: dict[str, Any], field: str, told: str) -> None:
    with pytest.raises(KvxferError) as caught:
        settings_from(values)
    assert caught.value.reason is Reason.FIELD_INVALID
    assert caught.value.field == f"kv_connector_extra_config.{field}"
    assert told in caught.value.message


def test_a_cache_on_a_gpu_is_told_what_to_do() -> None:
    assert "use memory=embedded" in not_in_host_memory("cuda:0").message


def test_the_guide_describes_every_setting() -> None:
    page = (ROOT / "docs" / "how-to" / "use-with-vllm.md").read_text()
    section = page.split("\n## Settings\n")[1].split("\n## ")[0]
    told = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(told) == sorted(f.name for f in fields(ConnectorSettings))
