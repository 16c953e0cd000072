"""The engine for Transformers, of which there is none for Python 3.10."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.processes import SidecarProcess, sidecars

collect_ignore_glob = ["test_*.py"] if sys.version_info < (3, 11) else []


@pytest.fixture(scope="package")
def pair() -> Iterator[list[SidecarProcess]]:
    """P's sidecar and D's, for all models."""
    with sidecars(["p", "d"]) as processes:
        yield processes


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small models are no quicker with more, and the sidecars need the others."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
