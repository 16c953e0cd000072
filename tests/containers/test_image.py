"""The image: what is in it, what is not, and how it behaves as a container."""

from __future__ import annotations

import json
import re

import pytest

from kvxfer import __version__
from tests.containers.conftest import ROOT
from tests.containers.containers import Containers
from tests.containers.pods import LOCKED
from tests.support.processes import until

RUN = ("run", "--rm", "--no-healthcheck", "--network", "none")
#: Megabytes on top of the base; without torch it is well below, with it far above.
LARGEST = 350


def canonical(requirement: str) -> str:
    """A pin with its distribution's name as an index has it."""
    name, _, version = requirement.strip().partition("==")
    return f"{re.sub('[-_.]+', '-', name).lower()}=={version}"


def run(containers: Containers, image: str, *command: str) -> str:
    """A command in the image instead of the sidecar."""
    name, *arguments = command
    return containers(*RUN, "--entrypoint", name, image, *arguments, check=False)


def test_it_is_small(containers: Containers, image: str) -> None:
    inside = containers(*RUN, "--entrypoint", "du", image, "--bytes", "--summarize", "/opt/kvxfer")
    assert int(inside.split()[0]) / 1e6 < LARGEST


def test_it_says_how_it_is_run(containers: Containers, image: str) -> None:
    about = containers.inspect(image)
    assert about["Config"]["User"] == "10001:10001"
    assert about["Config"]["Entrypoint"] == ["kvxfer"]
    assert about["Config"]["Cmd"] == ["serve"]
    check = about["Config"].get("Healthcheck") or about.get("HealthCheck") or about["Healthcheck"]
    assert check["Test"] == ["CMD", "kvxfer", "health"]


def test_the_command_works(containers: Containers, image: str) -> None:
    assert run(containers, image, "kvxfer", "--version").split() == ["kvxfer", __version__]


@pytest.mark.parametrize("absent", ["cc", "gcc", "g++", "clang", "make", "pip", "pip3", "git"])
def test_no_tool_of_the_build_is_in_it(containers: Containers, image: str, absent: str) -> None:
    assert run(containers, image, "sh", "-c", f"command -v {absent} || echo none").strip() == "none"


def test_nixl_is_in_it_and_torch_is_not(containers: Containers, image: str) -> None:
    program = """
import importlib.util, json
from kvxfer.xfer.nixl import NixlDriver, nixl_version, ucx_version
driver = NixlDriver()
driver.open("image")
print(json.dumps([nixl_version(), ucx_version(), importlib.util.find_spec("torch") is not None]), flush=True)
import os; os._exit(0)
"""
    nixl, ucx, torch = json.loads(run(containers, image, "python3", "-c", program).splitlines()[-1])
    assert nixl.startswith("1.")
    assert ucx.startswith("1.")
    assert not torch


def test_it_has_the_pinned_versions_and_nothing_else(containers: Containers, image: str) -> None:
    program = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()), sep='\\n')"
    installed = {canonical(line) for line in run(containers, image, "python3", "-c", program).splitlines()}
    pins = {canonical(line.partition(";")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert f"kvxfer=={__version__}" in installed
    assert installed - pins == {f"kvxfer=={__version__}"}


def test_a_plaintext_port_is_not_open_to_others_unless_somebody_says_so(containers: Containers, image: str) -> None:
    said = containers(*RUN, "--env", "KVXFER_PEER_HOST=0.0.0.0", image, check=False, errors=True)
    assert "insecure_peer" in said


def test_it_ends_by_sigterm_as_process_1_and_its_health_is_told(containers: Containers, image: str) -> None:
    volume = containers.volume("alone", 16)
    name = containers.start("alone", *LOCKED, "--network", "none", "--volume", f"{volume}:/run/kvxfer", image)
    try:
        until(lambda: containers("exec", name, "kvxfer", "health", check=False).strip() == "SERVING", 30, "health")
        not_ready = ("exec", name, "kvxfer", "health", "--service", "kvxfer.v1.KvTransfer")
        assert containers(*not_ready, check=False).strip().startswith("NOT_SERVING")
        assert containers("exec", name, "cat", "/proc/1/comm").strip() == "kvxfer"
        containers("stop", "--time", "20", name)
        state = containers.inspect(name)["State"]
        assert state["ExitCode"] == 0, containers.logs(name)
        lines = [json.loads(line) for line in containers.logs(name).splitlines() if line.startswith("{")]
        assert [line["event"] for line in lines][-1] == "stopped"
    finally:
        containers.remove(name)
        containers("volume", "rm", "--force", volume)
