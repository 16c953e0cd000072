"""Open files, judged."""

from __future__ import annotations

import resource

import pytest

from kvxfer.doctor import files
from kvxfer.doctor.findings import Status


@pytest.mark.parametrize(
    "limit, lanes, peers, status, says",
    [
        (None, 2, 256, Status.OK, "any number of files open: enough to read from 256 engines"),
        (1_048_576, 2, 256, Status.OK, "1,048,576 files open: enough to read from 256 engines"),
        (1_024, 2, 256, Status.WARNING, "enough to read from about 28 engines; max_peers is 256"),
        (1_024, 1, 256, Status.WARNING, "enough to read from about 52 engines"),
        (1_024, 2, 28, Status.OK, "enough to read from 28 engines"),
        (1_024, 2, 29, Status.WARNING, "about 28 engines; max_peers is 29"),
        (200, 2, 256, Status.ERROR, "about 0 engines"),
    ],
)
def test_judged(limit: int | None, lanes: int, peers: int, status: Status, says: str) -> None:
    found = files.judge(limit, lanes, peers)
    assert found.status is status
    assert says in found.what


def test_the_hard_limit_counts() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert files.look() == (None if hard == resource.RLIM_INFINITY else hard)
