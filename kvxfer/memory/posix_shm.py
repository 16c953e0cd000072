"""POSIX shared memory, by name.  On Linux these are the files of ``/dev/shm``, and they are opened as such.

They cannot be sealed: see the hazard in :mod:`kvxfer.memory.mapping`.
"""

from __future__ import annotations

import os
from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory.handles import PosixShm
from kvxfer.memory.mapping import MappedMemory, map_file
from kvxfer.memory.paths import open_below
from kvxfer.memory.policy import MemoryPolicy

_SHM_DIRECTORY: Final = "/dev/shm"


def open_posix_shm(handle: PosixShm, policy: MemoryPolicy) -> MappedMemory:
    """Map a shared-memory object of another process.

    :raises KvxferError: MEMORY_NOT_ALLOWED, MEMORY_LIMIT, MEMORY_HANDLE_INVALID (no such object), REGION_TOO_SMALL.
    """
    if not policy.allow_posix_shm or not handle.name.startswith(policy.shm_prefix):
        allowed = f"names that start with {policy.shm_prefix!r}" if policy.allow_posix_shm else "none"
        raise KvxferError(
            Reason.MEMORY_NOT_ALLOWED,
            f"shared memory {handle.name!r} may not be mapped; allowed: {allowed}",
            field="name",
            name=handle.name,
            allowed=allowed,
        )
    policy.check_size(handle.size)
    what = f"shared memory {handle.name!r}"
    fd = open_below(_SHM_DIRECTORY, (handle.name[1:],), field="name", what=what)
    try:
        return map_file(fd, 0, handle.size, field="name", what=what)
    finally:
        os.close(fd)
