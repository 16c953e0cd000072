"""Regular files under the directories that the policy allows.

They cannot be sealed: see the hazard in :mod:`kvxfer.memory.mapping`.
"""

from __future__ import annotations

import os

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory.handles import FileHandle
from kvxfer.memory.mapping import MappedMemory, map_file
from kvxfer.memory.paths import open_below, split_below
from kvxfer.memory.policy import MemoryPolicy


def open_file(handle: FileHandle, policy: MemoryPolicy) -> MappedMemory:
    """Map part of a file.

    :raises KvxferError: MEMORY_NOT_ALLOWED, MEMORY_LIMIT, MEMORY_HANDLE_INVALID (no such file), REGION_TOO_SMALL.
    """
    found = split_below(handle.path, policy.searchable)
    if found is None:
        allowed = ", ".join(policy.searchable) or "none"
        raise KvxferError(
            Reason.MEMORY_NOT_ALLOWED,
            f"file {handle.path!r} may not be mapped; allowed directories: {allowed}",
            field="path",
            path=handle.path,
            allowed=allowed,
        )
    policy.check_size(handle.size)
    what = f"file {handle.path!r}"
    directory, components = found
    fd = open_below(directory, components, field="path", what=what)
    try:
        return map_file(fd, handle.offset, handle.size, field="path", what=what)
    finally:
        os.close(fd)
