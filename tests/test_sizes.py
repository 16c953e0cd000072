"""Bytes for people."""

from __future__ import annotations

import pytest

from kvxfer.sizes import counted, mib, short


@pytest.mark.parametrize(
    "size, told",
    [(0, "0 MiB"), (1 << 19, "512 KiB"), (64 << 20, "64 MiB"), (3 << 19, "2 MiB"), (1 << 40, "1,048,576 MiB")],
)
def test_mib(size: int, told: str) -> None:
    assert mib(size) == told


@pytest.mark.parametrize(
    "size, told",
    [
        (0, "0 B"),
        (1_023, "1023 B"),
        (2_304, "2.25 KiB"),
        (3 << 19, "1.5 MiB"),
        ((1 << 30) - 1, "1024 MiB"),
        (1 << 30, "1 GiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_short(size: int, told: str) -> None:
    assert short(size) == told


def test_counted() -> None:
    assert [counted(n, "rank") for n in (0, 1, 2_000)] == ["0 ranks", "1 rank", "2,000 ranks"]
