"""Locked memory, judged and tried."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from kvxfer.doctor import limits
from kvxfer.doctor.findings import Status
from kvxfer.doctor.limits import Locking


@pytest.mark.parametrize(
    "locking, status, says",
    [
        (Locking(0), Status.OK, "any amount"),
        (Locking(0, 65536, exempt=True), Status.OK, "CAP_IPC_LOCK"),
        (Locking(1000, 8 << 20, refused="ENOMEM"), Status.WARNING, "failed with ENOMEM"),
        (Locking(1000, 1 << 40), Status.WARNING, "and locking 16 MiB worked"),
        (Locking(1000, 8 << 20, refused="ENOMEM", rdma=("mlx5_0",)), Status.ERROR, "RDMA devices (mlx5_0)"),
        (Locking(1000, 1 << 40, rdma=("mlx5_0",)), Status.WARNING, "worked"),
        (
            Locking(0, None, exempt=True, refused="EPERM"),
            Status.WARNING,
            "no limit of memory, and locking 16 MiB failed",
        ),
        (Locking(1000, failure="only root can"), Status.UNKNOWN, "only root can"),
    ],
)
def test_judged(locking: Locking, status: Status, says: str) -> None:
    found = limits.judge(locking)
    assert found.status is status
    assert says in found.what


def test_this_process() -> None:
    found = limits.look()
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert found.uid == os.geteuid()
    assert found.soft == (None if soft == resource.RLIM_INFINITY else soft)
    assert limits.look_as(os.geteuid()) == found


def test_nobody_but_root_becomes_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "only root can become uid 1" in limits.look_as(1).failure


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_a_small_limit_is_felt_by_another_user_only() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "from kvxfer.doctor import limits; print(repr(limits.look().refused), repr(limits.look_as(1000).refused))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["''", "'ENOMEM'"], done.stderr
    assert limits.look_as(2**32 - 2).uid == 2**32 - 2
