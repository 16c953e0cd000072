"""Memfds of another process, opened through ``/proc/<pid>/fd/<fd>``.

Only a memfd that is sealed against shrinking is taken: its owner can then not take pages away under a transfer.  The
pid is looked up once; a process that died and whose number was given to another is not told apart from the new one,
but the new one would have to hold a sealed memfd, large enough, at the same descriptor number.
"""

from __future__ import annotations

import fcntl
import os
import stat
from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory.handles import Memfd
from kvxfer.memory.mapping import MappedMemory, map_file, not_regular
from kvxfer.memory.oserrors import from_os_error
from kvxfer.memory.paths import reopen
from kvxfer.memory.policy import MemoryPolicy

# The numbers are the kernel's; the fcntl module of some builds lacks the names.
F_ADD_SEALS: Final = 1033
F_GET_SEALS: Final = 1034
F_SEAL_SEAL: Final = 0x1
F_SEAL_SHRINK: Final = 0x2
F_SEAL_GROW: Final = 0x4


def open_memfd(handle: Memfd, policy: MemoryPolicy) -> MappedMemory:
    """Map part of a memfd that another process holds.

    :raises KvxferError: MEMORY_NOT_ALLOWED (also for anything that is not a memfd sealed with F_SEAL_SHRINK, and for
        processes that may not be looked into), MEMORY_LIMIT, MEMORY_HANDLE_INVALID (no such process or descriptor),
        REGION_TOO_SMALL.
    """
    what = f"descriptor {handle.fd} of process {handle.pid}"
    if not policy.allow_memfd:
        raise KvxferError(
            Reason.MEMORY_NOT_ALLOWED,
            f"{what}: memfds may not be mapped",
            field="fd",
            object=what,
        )
    policy.check_size(handle.size)
    try:
        # O_PATH first: a plain open of somebody's pipe blocks, and that of a device may do things.
        path_fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        field = "fd" if os.path.exists(f"/proc/{handle.pid}") else "pid"
        raise from_os_error(error, f"opening {what}", field=field, pid=handle.pid, fd=handle.fd) from error
    try:
        fd = _open_sealed(path_fd, what)
    finally:
        os.close(path_fd)
    try:
        return map_file(fd, handle.offset, handle.size, field="fd", what=what)
    finally:
        os.close(fd)


def _open_sealed(path_fd: int, what: str) -> int:
    mode = os.fstat(path_fd).st_mode
    if not stat.S_ISREG(mode):
        raise not_regular(mode, field="fd", what=what)
    if not os.readlink(f"/proc/self/fd/{path_fd}").startswith("/memfd:"):
        # Not opened at all: a file of somebody's FUSE file system could keep us waiting.
        raise _unsealed(what, 0)
    try:
        fd = reopen(path_fd)
    except OSError as error:
        raise from_os_error(error, f"opening {what}", field="fd") from error
    try:
        seals = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:
        # Files that cannot have seals at all answer EINVAL.
        seals = 0
    if not seals & F_SEAL_SHRINK:
        # A file may be named like a memfd, but only a real one can carry this seal.
        os.close(fd)
        raise _unsealed(what, seals)
    return fd


def _unsealed(what: str, seals: int) -> KvxferError:
    return KvxferError(
        Reason.MEMORY_NOT_ALLOWED,
        f"{what} is no memfd sealed against shrinking (F_SEAL_SHRINK); its owner could take the memory away",
        field="fd",
        object=what,
        seals=seals,
    )
