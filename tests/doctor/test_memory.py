"""Directories that caches lie in, judged and looked at."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvxfer.doctor import memory
from kvxfer.doctor.findings import Status
from kvxfer.doctor.memory import Place

GOOD = Place("/m", True, True, 0o700, 0, "tmpfs", 64 << 30, 32 << 30)


@pytest.mark.parametrize(
    "place, statuses, says",
    [
        (GOOD, [Status.OK], "65,536 MiB, 32,768 MiB free"),
        (replace(GOOD, size=64 << 20, free=64 << 20), [Status.ERROR], "what a container gets that asks for nothing"),
        (replace(GOOD, free=500 << 20), [Status.WARNING], "500 MiB free"),
        (replace(GOOD, free=0), [Status.ERROR], "0 MiB free"),
        (replace(GOOD, writable=False), [Status.ERROR], "cannot be written by uid 7"),
        (replace(GOOD, mode=0o777), [Status.WARNING], "written by everybody"),
        (replace(GOOD, mode=0o1777), [Status.OK], ""),
        (replace(GOOD, kind="ext4"), [Status.WARNING], "is on ext4, not in memory"),
        (replace(GOOD, kind=""), [Status.OK], ""),
        (replace(GOOD, kind="ext4", mode=0o777), [Status.WARNING, Status.WARNING], "everybody"),
        (Place("/m"), [Status.WARNING], "there is no directory /m"),
        (Place("/dev/shm"), [Status.ERROR], "there is no /dev/shm"),
    ],
)
def test_judged(place: Place, statuses: list[Status], says: str) -> None:
    found = memory.judge(place, 7)
    assert [f.status for f in found] == statuses
    assert says in found[0].what


def test_looked_at(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    found = memory.look(str(tmp_path))
    space = os.statvfs(tmp_path)
    assert (found.exists, found.writable, found.mode, found.owner) == (True, True, 0o750, os.geteuid())
    assert found.size == space.f_blocks * space.f_frsize
    file = tmp_path / "file"
    file.touch()
    assert not memory.look(str(file)).exists
    assert memory.look(str(tmp_path / "none")) == Place(str(tmp_path / "none"))
    if os.path.ismount("/dev/shm"):
        assert memory.look("/dev/shm").kind == "tmpfs"
