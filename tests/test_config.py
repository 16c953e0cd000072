"""Settings that cannot work are refused when they are built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvxfer.config import SOCKET_PATH_LIMIT, Settings


def test_the_defaults_can_be_built() -> None:
    settings = Settings()
    assert settings.memory_policy() == settings.service().memory


@pytest.mark.parametrize(
    "flags, says",
    [
        ({"memory_directories": ("relative",)}, r"directories\[0\] is 'relative'"),
        ({"memory_directories": ("/a", "/b/../c")}, r"directories\[1\]"),
        ({"memory_directories": ("/a//b",)}, r"directories\[0\]"),
        ({"memory_file_mode": "0666"}, "file_mode is '0o666'"),
        ({"memory_file_mode": "0400"}, "file_mode"),
        ({"memory_file_group": str(2**32 - 1)}, "group is 4294967295"),
        ({"shm_prefix": ""}, "shm_prefix is ''"),
        ({"shm_prefix": "kvxfer-"}, "shm_prefix"),
        ({"shm_prefix": "/a/b"}, "shm_prefix"),
        ({"engine_socket": "/" + "x" * SOCKET_PATH_LIMIT}, "108 bytes"),
        ({"engine_socket": "/" + "ü" * 54}, "109 bytes"),
        ({"advertise": "1.2.3:80"}, "advertise"),
        ({"peer_host": "0.0.0.0"}, "not loopback"),
    ],
)
def test_what_cannot_work_is_refused(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Settings(**flags)


def test_what_can_work_is_taken() -> None:
    longest = "/" + "x" * (SOCKET_PATH_LIMIT - 1)
    settings = Settings(
        engine_socket=Path(longest), memory_directories=("/dev/shm/a", "/b"), memory_file_mode="0660", shm_prefix="/"
    )
    assert str(settings.engine_socket) == longest
    assert settings.memory_policy().file_mode == 0o660
    assert Settings(memory_directories=()).memory_policy().directories == ()


def test_a_file_is_checked_as_well(tmp_path: Path) -> None:
    file = tmp_path / "kvxfer.toml"
    file.write_text('memory_file_mode = "0666"\n')
    with pytest.raises(ValidationError, match="file_mode"):
        Settings.load(file)
