"""Memory that the sidecar creates and the engine maps.  It outlives the engine.

A file lives in the policy's owned directory until the region is closed (or for good, if told to keep it), so that a
sidecar that was restarted takes the very same memory again by its path: see :func:`adopt_owned`.  A memfd lives as
long as one of the two processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import threading
from collections.abc import Callable
from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import MemoryKind
from kvxfer.memory.file import open_file
from kvxfer.memory.handles import FileHandle, Mappable, Memfd, Owned, OwnedBacking
from kvxfer.memory.mapping import MappedMemory, map_file
from kvxfer.memory.memfd import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK
from kvxfer.memory.oserrors import from_os_error
from kvxfer.memory.policy import MemoryPolicy

#: Names of owned files: prefix, 128 random bits, suffix.
OWNED_PREFIX: Final = "kvxfer-"
OWNED_SUFFIX: Final = ".kv"
_OWNED_NAME: Final = re.compile(rf"{re.escape(OWNED_PREFIX)}[0-9a-f]{{32}}{re.escape(OWNED_SUFFIX)}")


class OwnedRegion:
    """A mapping of memory that this sidecar made, and what the engine needs to map it too."""

    kind: Final = MemoryKind.DRAM
    device: Final = 0

    def __init__(
        self,
        mapped: MappedMemory,
        handle: FileHandle | Memfd,
        remove: Callable[[], None] | None,
    ) -> None:
        self.identity: Final = mapped.identity
        self.address: Final = mapped.address
        self.size: Final = mapped.size
        self._mapped: Final = mapped
        self._handle: Final = handle
        self._remove = remove
        self._lock: Final = threading.Lock()

    def export(self) -> Mappable | None:
        """What the engine maps."""
        return self._handle

    def close(self, *, keep: bool = False) -> None:
        """Unmap, and let go of what was created: the file is removed, the memfd's descriptor closed.

        Whoever has it mapped keeps the memory.  Closing again does nothing.

        :param keep: leave the file where it is, for the next sidecar.  Without meaning for a memfd.
        """
        with self._lock:
            remove, self._remove = self._remove, None
        try:
            self._mapped.close()
        finally:
            if remove is not None and not (keep and isinstance(self._handle, FileHandle)):
                remove()


def create_owned(handle: Owned, policy: MemoryPolicy) -> OwnedRegion:
    """Create memory as ``handle`` asks, filled with zeros, all its pages allocated.

    Takes as long as the kernel needs to clear the pages; not for an event loop.

    :raises KvxferError: MEMORY_LIMIT (the policy's, or no space), MEMORY_NOT_ALLOWED (no owned directory, or no
        permission there).
    """
    policy.check_size(handle.size)
    return _create_memfd(handle, policy) if handle.backing is OwnedBacking.MEMFD else _create_file(handle, policy)


def adopt_owned(handle: FileHandle, policy: MemoryPolicy) -> OwnedRegion:
    """Take over a file that an earlier sidecar made: as :func:`create_owned`, but it exists.

    :raises KvxferError: MEMORY_NOT_ALLOWED where it does not lie, named as owned files are, in the owned directory;
        otherwise as for a file.
    """
    if not is_owned(handle, policy):
        raise KvxferError(
            Reason.MEMORY_NOT_ALLOWED,
            f"file {handle.path!r} is none that a sidecar made in {policy.owned!r}",
            field="path",
            path=handle.path,
            directory=policy.owned,
        )
    return OwnedRegion(open_file(handle, policy), handle, _remover(handle.path))


def is_owned(handle: FileHandle, policy: MemoryPolicy) -> bool:
    """Whether a file lies where sidecars make theirs, and is named as those are."""
    directory, _, name = handle.path.rpartition("/")
    return directory == policy.owned and _OWNED_NAME.fullmatch(name) is not None


def list_owned(policy: MemoryPolicy) -> tuple[FileHandle, ...]:
    """Files that sidecars made and nobody removed: leftovers, or memory of a sidecar that still runs.

    Sorted by path.  Empty where this process may not look.
    """
    directory = policy.owned
    found: list[FileHandle] = []
    if directory is not None:
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError),
            os.scandir(directory) as entries,
        ):
            for entry in entries:
                if entry.name.startswith(OWNED_PREFIX) and entry.name.endswith(OWNED_SUFFIX):
                    # Another sidecar may remove its file at this very moment.
                    with contextlib.suppress(FileNotFoundError):
                        size = entry.stat(follow_symlinks=False).st_size
                        if entry.is_file(follow_symlinks=False) and size > 0:
                            found.append(FileHandle(entry.path, 0, size))
    return tuple(sorted(found, key=lambda handle: handle.path))


def _remover(path: str) -> Callable[[], None]:
    def remove() -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise from_os_error(error, f"removing file {path!r}", field="", path=path) from error

    return remove


def _allocate(fd: int, size: int) -> None:
    os.ftruncate(fd, size)
    # Not sparse: a page that is first touched when the tmpfs is full would be a SIGBUS.
    os.posix_fallocate(fd, 0, size)


def _ensure_directory(policy: MemoryPolicy) -> str:
    directory = policy.owned
    if directory is None:
        raise KvxferError(
            Reason.MEMORY_NOT_ALLOWED,
            "no directory for sidecar-owned files is set",
            field="backing",
        )
    try:
        os.mkdir(directory, 0o700)
        if policy.group is not None:
            os.chown(directory, -1, policy.group)
            os.chmod(directory, 0o710)
    except FileExistsError:
        return directory
    except OSError as error:
        raise from_os_error(
            error,
            f"making directory {directory!r}",
            field="backing",
            directory=directory,
        ) from error
    return directory


def _create_file(handle: Owned, policy: MemoryPolicy) -> OwnedRegion:
    path = os.path.join(
        _ensure_directory(policy),
        f"{OWNED_PREFIX}{secrets.token_hex(16)}{OWNED_SUFFIX}",
    )
    what = f"file {path!r}"
    with contextlib.ExitStack() as undo:
        try:
            fd = os.open(
                path,
                os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )
            try:
                undo.callback(_remover(path))
                if policy.group is not None:
                    os.fchown(fd, -1, policy.group)
                # After the group, or its old members could get in; and chmod because the umask does not apply to it.
                os.fchmod(fd, policy.file_mode)
                _allocate(fd, handle.size)
                mapped = map_file(fd, 0, handle.size, field="size", what=what)
            finally:
                os.close(fd)
        except OSError as error:
            raise from_os_error(error, f"creating {what}", field="size", path=path, size=handle.size) from error
        undo.pop_all()
    return OwnedRegion(mapped, FileHandle(path, 0, handle.size), _remover(path))


def _create_memfd(handle: Owned, policy: MemoryPolicy) -> OwnedRegion:
    with contextlib.ExitStack() as undo:
        try:
            fd = os.memfd_create("kvxfer-owned", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, fd)
            _allocate(fd, handle.size)
            fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
            mapped = map_file(fd, 0, handle.size, field="size", what="a memfd of this sidecar")
        except OSError as error:
            raise from_os_error(error, "creating a memfd", field="size", size=handle.size) from error
        undo.pop_all()
    return OwnedRegion(mapped, Memfd(os.getpid(), fd, 0, handle.size), lambda: os.close(fd))
