"""GPUs, judged."""

from __future__ import annotations

import pytest

from kvxfer.doctor import gpu
from kvxfer.doctor.findings import Status
from kvxfer.doctor.gpu import Gpu

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07"


@pytest.mark.parametrize(
    "found, rdma, modules, warned",
    [
        (Gpu(), (), None, []),
        (Gpu(OPEN, True, 8, False, (6, 1)), (), None, []),
        (Gpu(OPEN, True, 8, False, (6, 1)), ("mlx5_0",), ("cuda",), []),
        (Gpu(CLOSED, True, 8, True, (6, 1)), ("mlx5_0",), ("cuda",), []),
        (Gpu(CLOSED, True, 8, False, (6, 1)), (), ("cuda",), []),
        (Gpu(CLOSED, True, 8, False, (6, 1)), ("mlx5_0",), ("cuda",), ["nvidia-peermem"]),
        (Gpu(OPEN, True, 8, False, (5, 4)), ("mlx5_0",), ("cuda",), ["nvidia-peermem"]),
        (Gpu(OPEN, True, 8, False, (6, 1)), (), ("ib",), ["no module cuda"]),
        (Gpu("", True, 0), (), ("cuda",), ["only partly here"]),
    ],
)
def test_judged(found: Gpu, rdma: tuple[str, ...], modules: tuple[str, ...] | None, warned: list[str]) -> None:
    told = [f.what for f in gpu.judge(found, rdma, modules) if f.status is not Status.OK]
    assert len(told) == len(warned)
    assert all(part in what for part, what in zip(warned, told, strict=True))


def test_this_machine_can_be_looked_at() -> None:
    assert gpu.look().kernel > (3, 0)
