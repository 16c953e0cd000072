"""The environment variables that steer UCX and NIXL: kvxfer's defaults, and what is in force."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NoReturn

from kvxfer.xfer import segments

#: Set where the user has set nothing, before the first agent of the process is created.
DEFAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # Over TCP larger segments than UCX's 8 KiB are faster.  UCX writes each with one call, and the kernel cuts it
        # into packets of 64 KiB at most.  A little less than one is best: with more, each block of just 64 KiB leaves a
        # packet of a few bytes behind.
        segments.SENT: "56K",
        segments.RECEIVED: "256K",
        # A peer that fell silent (link down, host gone) must be an error after seconds.  None of the three works alone.
        "UCX_TCP_USER_TIMEOUT": "3s",
        "UCX_TCP_KEEPIDLE": "1s",
        "UCX_TCP_KEEPINTVL": "1s",
        # Every agent has a thread that wakes up so often to pass on what it has measured, which nobody takes (ms).  At
        # NIXL's own 100 they cost a sidecar with 50 links 3 % of a core.
        "NIXL_TELEMETRY_RUN_INTERVAL": "60000",
        # NIXL tells of every agent on standard output, which is not its place.
        "NIXL_LOG_LEVEL": "WARN",
    }
)

_ours: dict[str, str] = {}


def apply_defaults() -> None:
    """Put :data:`DEFAULTS` into the environment, where nothing is set yet, and as far as they go with what is."""
    for name, value in segments.missing(os.environ, DEFAULTS).items():
        os.environ[name] = _ours[name] = value


def effective() -> tuple[Mapping[str, str], tuple[str, ...]]:
    """The ``UCX_*`` and ``NIXL_*`` variables in force, and the names of those that are kvxfer's defaults."""
    found = {k: v for k, v in sorted(os.environ.items()) if k.startswith(("UCX_", "NIXL_"))}
    return MappingProxyType(found), tuple(k for k in found if found[k] == _ours.get(k))


def ucx_version() -> str:
    """The version of the UCX library that this process has loaded; empty where there is none."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        path = re.search(r"\S*/libucp[-.\w]*\.so\S*", maps.read())
    if path is None:
        return ""
    version = ctypes.CDLL(path.group()).ucp_get_version_string
    version.restype = ctypes.c_char_p
    text: bytes | None = version()
    return (text or b"").decode("ascii", "replace")


def hard_exit(code: int) -> NoReturn:
    """Flush the standard streams and end the process at once, without running any library's destructors.

    On hosts with ``ibverbs-providers`` installed, a process that ever made an agent crashes with SIGSEGV in an ordinary
    exit (a destructor of a bundled libnl), so a clean shutdown would look like a failure.  Close the engine first; do
    not expect ``atexit`` handlers or ``finally`` blocks of other threads to run.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the reader is gone or the stream is closed: nothing is left to save
            continue
    os._exit(code)
