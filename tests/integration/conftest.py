"""Sidecar processes that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes import SidecarProcess, sidecars


@pytest.fixture(scope="package")
def eight() -> Iterator[list[SidecarProcess]]:
    """Eight sidecars; at the end every one of them must stop cleanly, with nothing strange in its log."""
    with sidecars([f"sidecar{i}" for i in range(8)]) as processes:
        yield processes
