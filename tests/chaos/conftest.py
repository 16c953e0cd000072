"""The short run and the whole one, and the table that the whole one writes.

KVXFER_CHAOS=all tries every case; otherwise those that are marked for it in the tables.  KVXFER_CHAOS_REPORT names a
document whose sections `processes` and `network` are then written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.cases import SETTINGS
from tests.chaos.report import Row, fault_table, write_section
from tests.chaos.stage import Stage
from tests.support.processes import sidecars

ALL = os.environ.get("KVXFER_CHAOS", "") == "all"
REPORT = os.environ.get("KVXFER_CHAOS_REPORT", "")

Rows = dict[str, list[Row]]
_ROWS = pytest.StashKey[Rows]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if ALL:
        return
    here = Path(__file__).parent
    left_out = [i for i in items if i.path.parent == here and i.get_closest_marker("chaos_all")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [i for i in items if i not in left_out]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A table of a run that failed, or left something out, would tell half the truth."""
    if REPORT and ALL and exitstatus == 0:
        for name, rows in session.config.stash[_ROWS].items():
            write_section(Path(REPORT), name, fault_table(rows))


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> Rows:
    """What was seen so far, by section."""
    return request.config.stash[_ROWS]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """Over TCP a read needs its source's help: it can be caught in any phase."""
    with sidecars(["p", "d", "third"], SETTINGS, {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}) as processes:
        yield Stage(processes)
