"""The policy: its defaults, its own checks, where files may lie."""

from __future__ import annotations

import os

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory.policy import DEFAULT_DIRECTORY, MemoryPolicy


def test_the_default_allows_one_directory_our_own_names_and_no_addresses() -> None:
    policy = MemoryPolicy()
    assert policy.directories == policy.searchable == (DEFAULT_DIRECTORY,)
    assert policy.owned == DEFAULT_DIRECTORY
    assert policy.shm_prefix == "/kvxfer-"
    assert not policy.allow_address
    assert policy.file_mode == 0o600
    assert policy.max_region_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_owned_directory_may_be_searched_too() -> None:
    assert MemoryPolicy(directories=("/a",), owned_directory="/o").searchable == ("/a", "/o")
    assert MemoryPolicy(directories=("/a", "/o"), owned_directory="/o").searchable == ("/a", "/o")
    assert MemoryPolicy(directories=()).searchable == ()
    assert MemoryPolicy(directories=()).owned is None


@pytest.mark.parametrize(
    "arguments, field",
    [
        ({"directories": ("a",)}, "directories[0]"),
        ({"directories": ("/a", "/a/../b")}, "directories[1]"),
        ({"directories": ("/a/",)}, "directories[0]"),
        ({"directories": ("/a\0",)}, "directories[0]"),
        ({"owned_directory": "a"}, "owned_directory"),
        ({"shm_prefix": "kv"}, "shm_prefix"),
        ({"shm_prefix": "/a/b"}, "shm_prefix"),
        ({"max_region_bytes": 0}, "max_region_bytes"),
        ({"file_mode": 0o666}, "file_mode"),
        ({"file_mode": 0o4600}, "file_mode"),
        ({"file_mode": 0o400}, "file_mode"),
        ({"file_mode": -1}, "file_mode"),
        ({"group": -1}, "group"),
        ({"group": 2**32 - 1}, "group"),
    ],
)
def test_a_bad_policy_is_refused(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(KvxferError) as info:
        MemoryPolicy(**arguments)  # type: ignore[arg-type]
    assert info.value.reason is Reason.FIELD_INVALID
    assert info.value.field == field


def test_the_limit_is_inclusive() -> None:
    policy = MemoryPolicy(max_region_bytes=100)
    policy.check_size(100)
    with pytest.raises(KvxferError) as info:
        policy.check_size(101)
    assert info.value.reason is Reason.MEMORY_LIMIT
    assert info.value.metadata == {"size": "101", "limit": "100"}
