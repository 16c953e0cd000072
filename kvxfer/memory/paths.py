"""Opening a regular file below a directory without being led anywhere else.

Every component is opened relative to the one before with O_NOFOLLOW, as O_PATH, which has no effect on what it opens:
a pipe does not block and a device is not touched.  Only what turned out to be a regular file on the directory's own
file system is then opened for real, through the very descriptor that was looked at, so that nothing can be swapped in
between.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory.mapping import not_regular
from kvxfer.memory.oserrors import from_os_error


def split_below(path: str, directories: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """The longest of ``directories`` that ``path`` lies below and the components after it, or None."""
    parts = tuple(path.split("/")[1:])
    best: tuple[str, tuple[str, ...]] | None = None
    for directory in directories:
        head = tuple(part for part in directory.split("/") if part)
        tail = parts[len(head) :]
        if tail and parts[: len(head)] == head and (best is None or len(tail) < len(best[1])):
            best = directory, tail
    return best


def reopen(path_fd: int) -> int:
    """Open for reading and writing what an O_PATH descriptor stands for; the caller closes both.

    :raises OSError: as ``open`` does.
    """
    return os.open(f"/proc/self/fd/{path_fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)


def open_below(directory: str, components: Sequence[str], *, field: str, what: str) -> int:
    """Open ``directory/component/.../component`` for reading and writing, following no symbolic link below it.

    :param directory: trusted; may itself be or contain symbolic links.
    :param components: at least one, none of them ``.`` or ``..`` or with a slash.
    :returns: a file descriptor of a regular file, which the caller closes.
    :raises KvxferError: MEMORY_NOT_ALLOWED for links, other file systems, anything that is no regular file and missing
        permissions; MEMORY_HANDLE_INVALID where there is no such file.
    """
    with ExitStack() as stack:

        def step(name: str, flags: int, parent: int | None) -> tuple[int, os.stat_result]:
            fd = os.open(name, os.O_PATH | os.O_CLOEXEC | flags, dir_fd=parent)
            stack.callback(os.close, fd)
            return fd, os.fstat(fd)

        try:
            here, top = step(directory, os.O_DIRECTORY, None)
            for component in components[:-1]:
                here, status = step(component, os.O_NOFOLLOW, here)
                if not stat.S_ISDIR(status.st_mode):
                    raise _leads_away(component, status, field=field, what=what)
                _check_same_device(component, status, top, field=field, what=what)
            here, status = step(components[-1], os.O_NOFOLLOW, here)
            if not stat.S_ISREG(status.st_mode):
                raise not_regular(status.st_mode, field=field, what=what)
            _check_same_device(components[-1], status, top, field=field, what=what)
            return reopen(here)
        except OSError as error:
            raise from_os_error(error, f"opening {what}", field=field) from error


def _leads_away(component: str, status: os.stat_result, *, field: str, what: str) -> KvxferError:
    found = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no directory"
    return KvxferError(
        Reason.MEMORY_NOT_ALLOWED,
        f"{what} cannot be reached: {component!r} is {found}; "
        "symbolic links are not followed below an allowed directory",
        field=field,
        object=what,
        component=component,
        found=found,
    )


def _check_same_device(
    component: str,
    status: os.stat_result,
    top: os.stat_result,
    *,
    field: str,
    what: str,
) -> None:
    # A mount below an allowed directory may be a FUSE file system of the peer's own, whose pages never come.
    if status.st_dev != top.st_dev:
        raise KvxferError(
            Reason.MEMORY_NOT_ALLOWED,
            f"{what} is not on the file system of the allowed directory ({component!r} is a mount point); "
            "allow the mounted directory itself",
            field=field,
            object=what,
            component=component,
        )
