"""NVIDIA's driver, and how a NIC gets at the memory of a GPU."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvxfer.doctor.findings import Finding, ok, warning

CHECK: Final = "gpu"


@dataclass(frozen=True, slots=True)
class Gpu:
    """What is there.

    :param driver: what the kernel's driver says of itself; empty where there is none.
    :param tool: whether there is an ``nvidia-smi``.
    :param devices: device files of GPUs.
    :param peermem: whether nvidia-peermem is loaded.
    :param kernel: version of the kernel.
    """

    driver: str = ""
    tool: bool = False
    devices: int = 0
    peermem: bool = False
    kernel: tuple[int, int] = (0, 0)

    @property
    def present(self) -> bool:
        """Whether there is any sign of a GPU."""
        return bool(self.driver) or self.tool or self.devices > 0


def look() -> Gpu:
    """Look at /proc, /sys and /dev; nothing of CUDA is loaded."""
    try:
        driver = Path("/proc/driver/nvidia/version").read_text(errors="replace").splitlines()[0]
    except (OSError, IndexError):
        driver = ""
    devices = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir("/dev"))
    numbers = re.match(r"(\d+)\.(\d+)", os.uname().release)
    kernel = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    peermem = Path("/sys/module/nvidia_peermem").is_dir()
    return Gpu(driver, shutil.which("nvidia-smi") is not None, devices, peermem, kernel)


def judge(gpu: Gpu, rdma: Sequence[str], modules: Sequence[str] | None) -> list[Finding]:
    """:param rdma: RDMA devices of this machine.

    :param modules: UCX modules that lie beside those loaded; None where there is no UCX to ask.
    """
    if not gpu.present:
        return [ok(CHECK, "no NVIDIA GPU: caches lie in the memory of the host")]
    findings = []
    if not gpu.driver or not gpu.devices:
        findings.append(
            warning(
                CHECK,
                f"NVIDIA's driver is only partly here: {gpu.devices} GPU devices, "
                f"{'a' if gpu.driver else 'no'} kernel driver, {'an' if gpu.tool else 'no'} nvidia-smi",
                "A container was probably started without its GPUs.",
                "docker run --gpus all; Kubernetes: resources.limits nvidia.com/gpu.",
            )
        )
    else:
        findings.append(ok(CHECK, f"{gpu.devices} GPUs; {gpu.driver}"))
    if modules is not None and "cuda" not in modules:
        findings.append(
            warning(
                CHECK,
                "UCX has no module cuda",
                "It cannot tell a GPU's memory from the host's.",
                "Install the NIXL wheel of this CUDA version: nixl-cu12 or nixl-cu13.",
            )
        )
    open_driver = "Open Kernel Module" in gpu.driver
    if rdma and not gpu.peermem and not (open_driver and gpu.kernel >= (5, 12)):
        findings.append(
            warning(
                CHECK,
                "neither nvidia-peermem is loaded, nor can this driver and kernel do dma-buf",
                "The NIC cannot read a GPU's memory by itself: registering it fails, or all goes through the host.",
                "modprobe nvidia-peermem, or use the open kernel modules on Linux 5.12 or newer.",
            )
        )
    elif rdma:
        findings.append(ok(CHECK, f"the NIC gets at GPU memory by {'nvidia-peermem' if gpu.peermem else 'dma-buf'}"))
    findings.append(ok(CHECK, "caches lie in the memory of the host: that of GPUs is untested, and off (allow_cuda)"))
    return findings
