"""The image under test, built once; `make containers` runs these, and nothing else does.

KVXFER_CONTAINERS names the directory with the root filesystem and the wheels that the image is built from
(`scripts/containers.sh`); with Docker it may be empty: the image is then built over the network, as a user would.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.containers import Containers, found

DIRECTORY = os.environ.get("KVXFER_CONTAINERS", "")
ROOT = Path(__file__).parents[2]
SUBNET = "10.214.7.0/24"

collect_ignore_glob = [] if DIRECTORY else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.container)
            item.add_marker(pytest.mark.timeout(400))  # the first one builds the image


@pytest.fixture(scope="session")
def containers() -> Iterator[Containers]:
    """The container engine, clean before and after."""
    with found() as engine:
        yield engine
        assert not engine.leftovers()


@pytest.fixture(scope="session")
def image(containers: Containers) -> Iterator[str]:
    """deploy/Dockerfile, built; from a local root filesystem and prefetched wheels where they are."""
    directory = Path(DIRECTORY).resolve()
    base, name = f"localhost/{containers.name('base')}", f"localhost/{containers.name('image')}"
    arguments: list[str | Path] = ["--file", ROOT / "deploy/Dockerfile", "--tag", name]
    if containers.podman:
        arguments += ["--format", "docker"]
    if (directory / "base.tar").exists():
        containers("import", directory / "base.tar", base, timeout=120)
        arguments += ["--build-arg", f"BASE={base}", "--build-arg", "PIP_NO_INDEX=1", "--network", "none"]
        arguments += ["--build-context", f"wheels={directory / 'wheels'}"]
    containers("build", *arguments, ROOT, timeout=300)
    yield name
    containers("rmi", "--force", name, check=False)


@pytest.fixture
def network(containers: Containers) -> Iterator[str]:
    """A bridge with names."""
    with containers.network("peers", SUBNET) as name:
        yield name
