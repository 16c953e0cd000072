"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

from kvxfer import __version__


def facts() -> dict[str, str]:
    """Names and values that a reader of figures asks for."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    total = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return {
        "processor": cpu,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{int(total) / 2**20:.0f} GiB",
        "Python": platform.python_version(),
        "kvxfer": __version__,
        **{name: _version(name) for name in ("nixl", "grpcio", "protobuf", "numpy", "uvloop")},
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
