"""What this process has open."""

from __future__ import annotations

import contextlib
import os
from collections import Counter


def usage() -> tuple[int, Counter[str]]:
    """Number of descriptors of files, memfds, directories and pipes, and shared mappings by name.

    Sockets and event counters are left out: gRPC's threads, of tests that ran before, open and close them.
    So are mappings that libraries share with nobody by name, which come and go with a pool of theirs.
    """
    with open("/proc/self/maps", encoding="utf-8") as maps:
        shared = [line.split(None, 5)[-1].strip() for line in maps if line.split()[1][3] == "s"]
    mapped = Counter(name for name in shared if name != "/dev/zero (deleted)")
    held = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            held += not os.readlink(f"/proc/self/fd/{fd}").startswith(("socket:", "anon_inode:"))
    return held, mapped
