"""What the tests of the vLLM integration share: models, engines, and the tables of what was seen.

They need vLLM and are skipped where it is missing; `make engines` sets KVXFER_ENGINES, with which a missing vLLM is an
error.  KVXFER_ENGINES_REPORT names a document into which the tables are written when all has passed.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.report import write_section
from tests.engines.vllm.baselines import Baselines
from tests.engines.vllm.models import MODELS, Model
from tests.engines.vllm.pairs import Pair, Workshop, pair
from tests.engines.vllm.processes import Answer, Forks
from tests.engines.vllm.report import Fault, Row, fact_table, fault_table, model_table
from tests.support.processes import SidecarProcess, sidecars

REQUIRED = bool(os.environ.get("KVXFER_ENGINES"))
REPORT = os.environ.get("KVXFER_ENGINES_REPORT", "")
MISSING = importlib.util.find_spec("vllm") is None


class Seen:
    """What was seen, by table."""

    def __init__(self) -> None:
        self.models: dict[str, Row] = {}
        self.faults: list[Fault] = []
        self.facts: list[tuple[str, str]] = []

    def tables(self) -> dict[str, str]:
        """Those that have something in them."""
        found = {}
        if self.models:
            found["models"] = model_table(list(self.models.values()))
        if self.faults:
            found["faults"] = fault_table(self.faults)
        if self.facts:
            found["servers"] = fact_table(self.facts)
        return found


_SEEN = pytest.StashKey[Seen]()
_FORKS = pytest.StashKey[Forks]()


def pytest_configure(config: pytest.Config) -> None:
    if REQUIRED and MISSING:
        raise pytest.UsageError("vLLM is not installed in this environment; `make engines` makes one that has it")
    config.stash[_SEEN] = Seen()
    if REQUIRED and not config.option.collectonly:
        config.stash[_FORKS] = Forks()  # gets ready while tests are collected, which takes as long


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if MISSING and item.path.parent == here:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: run `make engines`"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, text in config.stash[_SEEN].tables().items():
        terminalreporter.section(name)
        terminalreporter.write(text)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A table of a run that failed would tell half the truth."""
    if REPORT and exitstatus == 0:
        for name, text in session.config.stash[_SEEN].tables().items():
            write_section(Path(REPORT), name, text)


@pytest.fixture
def seen(request: pytest.FixtureRequest) -> Seen:
    """For the tables."""
    return request.config.stash[_SEEN]


@pytest.fixture(scope="session")
def workshop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Where engines are made.  Models and logs are kept for a while, as everything that pytest keeps."""
    found = Workshop(request.config.stash.get(_FORKS, None) or Forks(), tmp_path_factory.mktemp("engines"))
    found.forks.make_models(found.directory)
    return found


@pytest.fixture(scope="session")
def baselines(request: pytest.FixtureRequest, workshop: Workshop) -> Iterator[Baselines]:
    """What will be compared with."""
    wanted = models_of(request.session, "truth")
    with Baselines(workshop, wanted, models_of(request.session, "nixl")) as found:
        yield found


def models_of(session: pytest.Session, fixture: str) -> list[str]:
    """With which models tests ask for a fixture, in the order of the tests."""
    items = [item for item in session.items if isinstance(item, pytest.Function)]
    names = [item.callspec.params["model"] for item in items if fixture in item.fixturenames]
    return list(dict.fromkeys(names))


@pytest.fixture(scope="session", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Model:
    """Each model; one of them where a test says so."""
    return MODELS[request.param]


@pytest.fixture(scope="session")
def truth(model: Model, baselines: Baselines) -> list[Answer]:
    """The monolithic engine's answers to the prompts."""
    return baselines.truth(model.name)


@pytest.fixture(scope="session")
def nixl(model: Model, baselines: Baselines) -> list[Answer]:
    """The answers of two engines with vLLM's own connector."""
    return baselines.nixl(model.name)


@pytest.fixture(scope="session")
def plain() -> Iterator[list[SidecarProcess]]:
    """Two sidecars on loopback."""
    with sidecars(["p", "d"], {"drain_timeout": 2}, {"UCX_NET_DEVICES": "lo"}) as processes:
        yield processes


@pytest.fixture(scope="session")
def engines(workshop: Workshop, model: Model, plain: list[SidecarProcess]) -> Iterator[Pair]:
    """P and D of a model."""
    began = time.monotonic()
    with pair(workshop, model, plain) as found:
        print(f"{model.name}: two engines up after {time.monotonic() - began:.1f} s")
        yield found
