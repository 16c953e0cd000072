"""Settings for the whole suite.

HYPOTHESIS_PROFILE chooses how long the property tests look: ``dev`` (the default), ``ci`` or ``soak``.  The test
of what matters most, that every byte of a read is right, looks at four times as many examples as the others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

settings.register_profile("dev", max_examples=100, deadline=None)
settings.register_profile(
    "ci",
    max_examples=500,
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("soak", settings.get_profile("ci"), max_examples=25_000)

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")
settings.load_profile(PROFILE)

# Seconds for one property test that sets no timeout of its own; 0 is no limit.
PROPERTY_TIMEOUT = {"ci": 300, "soak": 0}

# What uses the real NIXL.  It spins while it transfers: these run after the rest, a file on each core.
NIXL = (
    "benchmarks/test_sections.py",
    "engines/transformers/test_page.py",
    "engines/transformers/test_sequence.py",
    "gpu/",
    "integration/",
    "xfer/test_nixl.py",
)
# Of these, what watches the clock, or counts what the machine has open: they run last, with nothing beside them.
ALONE = (
    "chaos/test_network.py",
    "integration/test_idle.py",
    "integration/test_three_things.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        of_hypothesis = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if of_hypothesis and PROFILE in PROPERTY_TIMEOUT and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PROPERTY_TIMEOUT[PROFILE]))
        if item.path.is_relative_to(here):
            path = item.path.relative_to(here).as_posix()
            if path.startswith(NIXL):
                item.add_marker(pytest.mark.nixl)
            if path.startswith(ALONE):
                item.add_marker(pytest.mark.alone)


@pytest.fixture(autouse=True)
def no_logging_of_another_test() -> Iterator[None]:
    """How structlog is set up belongs to the process; a sidecar in this one may have changed it."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def no_threads_for_another_test() -> Iterator[None]:
    """What a test has started ends with it; else a later test pays, or is blamed."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 10
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("kvxfer"):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                pytest.fail(f"the test has left a thread: {thread.name}")
