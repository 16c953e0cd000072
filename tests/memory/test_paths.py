"""Which directory a path lies below, and opening without being led away."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvxfer.core.errors import Reason
from kvxfer.memory.paths import open_below, split_below
from tests.support.usage import usage


@pytest.mark.parametrize(
    "path, directories, expected",
    [
        ("/a/f", ("/a",), ("/a", ("f",))),
        ("/a/b/f", ("/a",), ("/a", ("b", "f"))),
        ("/a/b/f", ("/a", "/a/b"), ("/a/b", ("f",))),
        ("/a/b/f", ("/a/b", "/a"), ("/a/b", ("f",))),
        ("/f", ("/",), ("/", ("f",))),
        ("/a", ("/a",), None),
        ("/ab/f", ("/a",), None),
        ("/b/f", ("/a",), None),
        ("/a/f", (), None),
    ],
)
def test_split_below(path: str, directories: tuple[str, ...], expected: object) -> None:
    assert split_below(path, directories) == expected


def test_a_file_is_opened_for_reading_and_writing_and_only_that(allowed: Path) -> None:
    (allowed / "a/b").mkdir(parents=True)
    (allowed / "a/b/f").write_bytes(b"hello")
    before = usage()
    fd = open_below(str(allowed), ("a", "b", "f"), field="path", what="it")
    os.pwrite(fd, b"J", 0)
    assert not os.get_inheritable(fd)
    os.close(fd)
    assert (allowed / "a/b/f").read_bytes() == b"Jello"
    assert usage() == before


def test_a_directory_that_is_a_link_itself_was_chosen_by_its_owner(tmp_path: Path, allowed: Path) -> None:
    (allowed / "f").touch()
    (tmp_path / "alias").symlink_to(allowed)
    os.close(open_below(str(tmp_path / "alias"), ("f",), field="path", what="it"))


def test_what_leads_away_is_refused(tmp_path: Path, allowed: Path, refused: Any) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(b"x" * 10)
    (allowed / "inside").write_bytes(b"x" * 10)
    (allowed / "link").symlink_to(tmp_path / "outside/secret")
    (allowed / "harmless").symlink_to("inside")
    (allowed / "dir").symlink_to(tmp_path / "outside")
    (allowed / "loop").symlink_to("loop")
    before = usage()
    for components in (("link",), ("harmless",), ("dir", "secret"), ("loop",), ("loop", "f"), ("inside", "f")):
        with refused(Reason.MEMORY_NOT_ALLOWED, "path"):
            open_below(str(allowed), components, field="path", what="it")
    assert usage() == before


def test_what_is_not_there(allowed: Path, refused: Any) -> None:
    for components in (("f",), ("d", "f")):
        with refused(Reason.MEMORY_HANDLE_INVALID, "path"):
            open_below(str(allowed), components, field="path", what="it")
    with refused(Reason.MEMORY_HANDLE_INVALID, "path"):
        open_below(str(allowed / "gone"), ("f",), field="path", what="it")


def test_another_file_system_below_is_refused(refused: Any) -> None:
    if os.stat("/").st_dev == os.stat("/proc/version").st_dev:
        pytest.skip("/proc is not mounted apart")
    with refused(Reason.MEMORY_NOT_ALLOWED, "path") as caught:
        open_below("/", ("proc", "version"), field="path", what="it")
    assert caught[0].metadata["component"] == "proc"
