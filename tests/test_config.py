"""Settings that cannot work are refused when they are built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from pydantic import ValidationError

from kvxfer.config import SOCKET_PATH_LIMIT, Settings, problems
from kvxfer.core.errors import KvxferError
from tests.support.certificates import Authority, Identity, write


def test_the_defaults_can_be_built() -> None:
    settings = Settings()
    assert settings.memory_policy() == settings.service().memory


@pytest.mark.parametrize(
    "flags, says",
    [
        ({"memory_directories": ("relative",)}, r" memory_directories\[0\] is 'relative'"),
        ({"memory_directories": ("/a", "/b/../c")}, r"directories\[1\]"),
        ({"memory_directories": ("/a//b",)}, r"directories\[0\]"),
        ({"memory_file_mode": "0666"}, " memory_file_mode is '0o666'"),
        ({"memory_file_mode": "0400"}, "file_mode"),
        ({"memory_file_group": str(2**32 - 1)}, "group is 4294967295"),
        ({"shm_prefix": ""}, ", shm_prefix is ''"),
        ({"shm_prefix": "kvxfer-"}, "shm_prefix"),
        ({"shm_prefix": "/a/b"}, "shm_prefix"),
        ({"engine_socket": "/" + "x" * SOCKET_PATH_LIMIT}, "108 bytes"),
        ({"engine_socket": "/" + "ü" * 54}, "109 bytes"),
        ({"advertise": "1.2.3:80"}, "advertise"),
        ({"peer_host": "0.0.0.0"}, "not loopback"),
        ({"peer_tls_cert": Path("/x")}, "peer_tls_key and peer_tls_ca is not set"),
        ({"peer_tls_cert": Path("/x"), "peer_tls_key": Path("/y"), "peer_host": "0.0.0.0"}, "peer_tls_ca is not set"),
        ({"peer_allowed_sans": ("*",)}, "peer_allowed_sans means nothing without"),
        ({"peer_allowed_sans": ("a", "")}, "empty pattern"),
        ({"peer_server_name": "p"}, "peer_server_name means nothing without"),
    ],
)
def test_what_cannot_work_is_refused(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Settings(**flags)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("ca")


def test_tls_opens_the_peer_port_to_others(authority: Authority, tmp_path: Path) -> None:
    files = write(tmp_path, Identity(authority, "p.example"))
    settings = Settings(peer_host="0.0.0.0", peer_allowed_sans=("*.example",), **files)
    found = settings.peer_tls()
    assert found is not None
    assert (found.cert, found.key, found.ca) == tuple(files.values())
    assert Settings().peer_tls() is None


@pytest.mark.parametrize("name", ["peer_tls_cert", "peer_tls_key", "peer_tls_ca"])
@pytest.mark.parametrize("how", ["gone", "a directory", "half", "empty", "something else"])
def test_tls_files_that_cannot_be_used(authority: Authority, tmp_path: Path, name: str, how: str) -> None:
    files = write(tmp_path, Identity(authority, "p.example"))
    content = files[name].read_bytes()
    if how == "gone":
        files[name].unlink()
    elif how == "a directory":
        files[name] = tmp_path
    else:
        files[name].write_bytes({"half": content[: len(content) // 2], "empty": b"", "something else": b"\xff\0"}[how])
    with pytest.raises(ValidationError, match=rf"{name}: {files[name]} ") as caught:
        Settings(**files)
    assert ("cannot be read" in str(caught.value)) is (how in ("gone", "a directory"))


def test_a_key_must_be_that_of_the_certificate_and_have_no_password(authority: Authority, tmp_path: Path) -> None:
    files = write(tmp_path, Identity(authority, "p.example"))
    key = files["peer_tls_key"].read_bytes()
    files["peer_tls_key"].write_bytes(Identity(authority, "p.example").key)
    with pytest.raises(ValidationError, match=f"peer_tls_key: .* is not the key of .*{files['peer_tls_cert']}"):
        Settings(**files)
    locked = load_pem_private_key(key, None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    files["peer_tls_key"].write_bytes(locked)
    with pytest.raises(ValidationError, match="no PEM key without a password"):
        Settings(**files)


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


@pytest.mark.parametrize(
    "content, says",
    [
        (None, "there is no such file"),
        (b"engine_socket = PosixPath('/x')", r"Invalid value \(at line 1, column 17\)"),
        (b"\xff\xfe", "'utf-8' codec can't decode"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "kvxfer.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(KvxferError, match=rf"the settings file {file} cannot be read: {says}") as caught:
        Settings.load(file)
    assert caught.value.field == "config"


def test_a_shell_completes_directories_with_a_slash() -> None:
    assert Settings(memory_directories=("/dev/shm/a/", "/")).memory_directories == ("/dev/shm/a", "/")


def test_problems_name_the_setting() -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(peer_port=-1, lanes=0)
    assert [text.split(":")[0] for text in problems(caught.value)] == ["peer_port", "lanes"]
    assert problems(caught.value)[0].endswith("greater than or equal to 0, not -1")
    with pytest.raises(ValidationError) as caught:
        Settings(peer_prt=1, x=2)
    assert problems(caught.value) == ["peer_prt is no setting; is peer_port meant?", "x is no setting"]
    with pytest.raises(ValidationError) as caught:
        Settings(peer_host="0.0.0.0")
    assert problems(caught.value)[0].startswith("settings: peer_host '0.0.0.0' is not loopback")
