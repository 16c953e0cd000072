"""What memory a sidecar may be asked to map: decided by whoever runs it, never by a request."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final

from kvxfer.core.errors import KvxferError, Reason

#: The one directory that a default policy allows, and where sidecar-owned files go.
DEFAULT_DIRECTORY: Final = "/run/kvxfer/memory"
#: Prefix of the shared-memory names that a default policy allows (and that the client library makes).
DEFAULT_SHM_PREFIX: Final = "/kvxfer-"


def _physical_memory() -> int:
    """Bytes of memory in this machine: nothing larger can be a cache in DRAM."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _plain_absolute(path: object) -> bool:
    return isinstance(path, str) and "\0" not in path and os.path.isabs(path) and os.path.normpath(path) == path


def _bad(field_name: str, value: object, allowed: str) -> KvxferError:
    return KvxferError(
        Reason.FIELD_INVALID,
        f"memory policy: {field_name} is {value!r}; allowed: {allowed}",
        field=field_name,
        value=value,
        allowed=allowed,
    )


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """What :func:`kvxfer.memory.api.open_region` may open.

    :param directories: absolute paths under which regular files may be mapped; none means no files.  A directory that
        is itself a symbolic link is followed (its owner chose it), nothing below it is.
    :param allow_posix_shm: whether POSIX shared memory may be mapped.
    :param shm_prefix: what the name of every shared-memory object must start with; ``/`` allows all.
    :param allow_memfd: whether sealed memfds of other processes may be mapped.
    :param allow_address: whether plain addresses are taken; only right where engine and sidecar are one process.
    :param allow_cuda: whether memory of GPUs is opened and made.
    :param max_region_bytes: largest region; by default the memory of the machine.
    :param owned_directory: where sidecar-owned files are made; by default the first of ``directories``.  Files in it
        may be mapped by path as well, so that a restarted sidecar finds them again.
    :param file_mode: permission bits of sidecar-owned files, whatever the umask.
    :param group: numeric group given to sidecar-owned files, or None to leave it.
    """

    directories: tuple[str, ...] = (DEFAULT_DIRECTORY,)
    allow_posix_shm: bool = True
    shm_prefix: str = DEFAULT_SHM_PREFIX
    allow_memfd: bool = True
    allow_address: bool = False
    allow_cuda: bool = False
    max_region_bytes: int = field(default_factory=_physical_memory)
    owned_directory: str | None = None
    file_mode: int = 0o600
    group: int | None = None

    def __post_init__(self) -> None:
        for index, directory in enumerate(self.directories):
            if not _plain_absolute(directory):
                raise _bad(
                    f"directories[{index}]",
                    directory,
                    "an absolute path without '.', '..' or '//'",
                )
        if self.owned_directory is not None and not _plain_absolute(self.owned_directory):
            raise _bad(
                "owned_directory",
                self.owned_directory,
                "an absolute path without '.', '..' or '//'",
            )
        if not self.shm_prefix.startswith("/") or "/" in self.shm_prefix[1:]:
            raise _bad(
                "shm_prefix",
                self.shm_prefix,
                "a slash, then characters other than a slash",
            )
        if self.max_region_bytes < 1:
            raise _bad("max_region_bytes", self.max_region_bytes, "at least 1")
        # Whoever may write the file may also truncate it, which kills the sidecar: never the whole world.
        if self.file_mode & ~0o770 or self.file_mode & 0o600 != 0o600:
            raise _bad(
                "file_mode",
                oct(self.file_mode),
                "0o600 to 0o770, readable and writable by the owner",
            )
        if self.group is not None and not 0 <= self.group < 2**32 - 1:
            raise _bad("group", self.group, "a group number from 0 to 4294967294")

    @property
    def owned(self) -> str | None:
        """Where sidecar-owned files go, or None where they are not possible."""
        if self.owned_directory is not None:
            return self.owned_directory
        return self.directories[0] if self.directories else None

    @property
    def searchable(self) -> tuple[str, ...]:
        """Every directory under which a file may be mapped."""
        owned = self.owned
        return self.directories if owned is None or owned in self.directories else (*self.directories, owned)

    def check_size(self, size: int) -> None:
        """:raises KvxferError: MEMORY_LIMIT where a region of ``size`` bytes is larger than allowed."""
        if size > self.max_region_bytes:
            raise KvxferError(
                Reason.MEMORY_LIMIT,
                f"a region of {size} bytes is larger than the {self.max_region_bytes} bytes that are allowed",
                field="size",
                size=size,
                limit=self.max_region_bytes,
            )
