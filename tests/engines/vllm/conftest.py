"""What the tests of the vLLM integration share: the models, and where engines are forked from.

They need vLLM and are skipped where it is missing; `make engines` sets KVXFER_ENGINES, with which a missing vLLM is an
error.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.processes import Forks

REQUIRED = bool(os.environ.get("KVXFER_ENGINES"))
MISSING = importlib.util.find_spec("vllm") is None


def pytest_configure(config: pytest.Config) -> None:
    if REQUIRED and MISSING:
        raise pytest.UsageError("vLLM is not installed in this environment; `make engines` makes one that has it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if MISSING and item.path.is_relative_to(here):
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: run `make engines`"))


@pytest.fixture(scope="session")
def forks() -> Forks:
    """Where engines are forked from."""
    return Forks()


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and logs; pytest keeps it for a while."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def models(forks: Forks, directory: Path) -> Path:
    """Where the models are, each in a directory of its name."""
    forks.make_models(directory)
    return directory
