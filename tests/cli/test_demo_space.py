"""Where the demo's caches go."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.cli.demo import space
from kvxfer.core.errors import KvxferError, Reason


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty temporary directory with a short path, as sockets need it; pytest's own may be too long."""
    with tempfile.TemporaryDirectory(prefix="kvx-", dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


def test_shared_memory_is_preferred(tmp_path: Path, temporary: Path) -> None:
    (shared := tmp_path / "shm").mkdir()
    with space.memory_directory(1000, str(shared)) as (path, note):
        assert (path.parent, note) == (shared, "")
        (path / "file").touch()
    assert list(shared.iterdir()) == []
    assert list(temporary.iterdir()) == []


def test_falls_back_to_the_temporary_directory(tmp_path: Path, temporary: Path) -> None:
    with space.memory_directory(1000, str(tmp_path / "missing")) as (path, note):
        assert path.parent == temporary
        assert note == f"{tmp_path}/missing has 0 MiB free of the 32 MiB needed: the caches are files in {temporary}"


def test_says_what_is_needed(tmp_path: Path, temporary: Path) -> None:
    with pytest.raises(KvxferError) as told, space.memory_directory(2**60, str(tmp_path)):
        pass
    assert told.value.reason is Reason.MEMORY_LIMIT
    assert "needed" in told.value.message and str(temporary) in told.value.message
    assert list(temporary.iterdir()) == []


def test_sockets_get_a_short_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (long := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with space.run_directory() as path:
        assert len(str(path / "P15.sock")) < 100
    assert not path.exists()


def test_leftovers_are_swept_but_nothing_in_use(temporary: Path) -> None:
    old = time.time() - 1000
    with space.run_directory() as used:
        os.utime(used, (old, old))
        (left := temporary / "kvxfer-demo-left").mkdir()
        (left / "D0-0").touch()
        os.utime(left, (old, old))
        (young := temporary / "kvxfer-demo-young").mkdir()
        (other := temporary / "other").mkdir()
        os.utime(other, (old, old))
        with space.run_directory():
            assert not left.exists()
            assert used.exists() and young.exists() and other.exists()
