"""Mapping part of an open file into this process, by plain ``mmap`` and ``munmap``.

``mmap.mmap`` is not used: it keeps a duplicate of the file descriptor for as long as the mapping lives, hides the
address, and refuses to unmap while a buffer is exported.  A region's address is handed to the transfer engine as a
number, so nobody could count its users here anyway.

**Hazard.** A regular file cannot be sealed.  Whoever may write it may also truncate it later, and the first access
past its new end, also by the NIC's driver or a peer's copy, kills this process with SIGBUS.  Give such files to
nobody who is not trusted with the sidecar's life, or use a sealed memfd.
"""

from __future__ import annotations

import ctypes
import errno
import mmap as _mmap
import os
import stat
import threading
from dataclasses import dataclass
from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import MemoryKind
from kvxfer.memory.handles import Mappable
from kvxfer.memory.oserrors import from_os_error

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fallocate.restype = ctypes.c_int
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_FALLOC_FL_KEEP_SIZE: Final = 1
#: fallocate is interrupted by signals and then starts over; small steps make sure that it gets on.
_RESERVE_STEP: Final = 1 << 30


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


@dataclass(frozen=True, slots=True)
class MemoryIdentity:
    """Which bytes a region really is, however it was named: an object of the kernel, and the range in it.

    Names and numbers are used again: a file that was removed and made anew has its old name and is another object.
    """

    object: tuple[int | str, ...]
    offset: int
    size: int

    def meets(self, other: MemoryIdentity) -> bool:
        """Whether the two share a byte."""
        apart = self.offset >= other.offset + other.size or other.offset >= self.offset + self.size
        return self.object == other.object and not apart


class MappedMemory:
    """A mapping of host memory that :meth:`close` undoes.

    ``address`` is that of the first byte asked for, ``size`` the bytes asked for; the pages around them that had to be
    mapped as well are not told.  Nothing unmaps it but :meth:`close`: a transfer engine may be using the address
    without holding this object.
    """

    kind: Final = MemoryKind.DRAM
    device: Final = 0

    def __init__(self, base: int, length: int, skip: int, size: int, identity: MemoryIdentity) -> None:
        self.identity: Final = identity
        self.address: Final = base + skip
        self.size: Final = size
        self._base: Final = base
        self._length: Final = length
        self._open = True
        self._lock: Final = threading.Lock()

    def export(self) -> Mappable | None:
        """None: the other side knows this memory already."""
        return None

    def close(self, *, keep: bool = False) -> None:
        """Unmap; every address inside is invalid afterwards.  Closing again does nothing.

        :param keep: without meaning here, nothing was created.
        """
        with self._lock:
            if not self._open:
                return
            self._open = False
        if _libc.munmap(self._base, self._length) != 0:
            raise from_os_error(
                _os_error(),
                "unmapping a region",
                field="",
                address=self.address,
                size=self.size,
            )


def granularity(status: os.stat_result) -> int:
    """What offset and length of a mapping of this file must be a multiple of, in bytes.

    The page size, except on hugetlbfs, whose block size is its (larger) page size.  Other file systems also tell block
    sizes above a page; to map from further below then costs address space and nothing else.
    """
    page = _mmap.PAGESIZE
    block = status.st_blksize
    return block if block > page and block % page == 0 and block & (block - 1) == 0 else page


def _reserve(fd: int, offset: int, size: int) -> None:
    """Give the range its pages now.

    A hole filled later could meet a full tmpfs, which is a SIGBUS instead of an error.  The file does not grow and no
    byte changes.  A file system that cannot do it is left alone.
    """
    end = offset + size
    while offset < end:
        step = min(_RESERVE_STEP, end - offset)
        if _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE, offset, step) == 0:
            offset += step
            continue
        error = _os_error()
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return
        if error.errno != errno.EINTR:
            raise error


def map_file(fd: int, offset: int, size: int, *, field: str, what: str) -> MappedMemory:
    """Map ``size`` bytes from ``offset`` of an open regular file, shared, for reading and writing.

    :param fd: stays open and belongs to the caller; the mapping does not need it.
    :param field: the handle's field that named the file, for errors.
    :param what: the file in words, for errors.
    :raises KvxferError: REGION_TOO_SMALL where the file ends before the region does; MEMORY_LIMIT, MEMORY_NOT_ALLOWED,
        UNSUPPORTED or MEMORY_HANDLE_INVALID where the kernel refuses.
    """
    try:
        status = os.fstat(fd)
    except OSError as error:
        raise from_os_error(error, f"looking at {what}", field=field) from error
    if not stat.S_ISREG(status.st_mode):
        raise not_regular(status.st_mode, field=field, what=what)
    if offset + size > status.st_size:
        raise KvxferError(
            Reason.REGION_TOO_SMALL,
            f"{what} has {status.st_size} bytes; offset {offset} + size {size} needs {offset + size}",
            field="size",
            object=what,
            actual=status.st_size,
            offset=offset,
            size=size,
        )
    unit = granularity(status)
    skip = offset % unit
    length = (skip + size + unit - 1) // unit * unit
    try:
        _reserve(fd, offset, size)
        base = _libc.mmap(
            None,
            length,
            _mmap.PROT_READ | _mmap.PROT_WRITE,
            _mmap.MAP_SHARED,
            fd,
            offset - skip,
        )
        if base is None or base == _MAP_FAILED:
            raise _os_error()
    except OSError as error:
        raise from_os_error(
            error,
            f"mapping {size} bytes of {what}",
            field=field,
            offset=offset,
            size=size,
        ) from error
    identity = MemoryIdentity((status.st_dev, status.st_ino), offset, size)
    return MappedMemory(base, length, skip, size, identity)


_FILE_TYPES: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def not_regular(mode: int, *, field: str, what: str) -> KvxferError:
    """The error for an object that is anything but a regular file."""
    found = _FILE_TYPES.get(stat.S_IFMT(mode), "no file")
    return KvxferError(
        Reason.MEMORY_NOT_ALLOWED,
        f"{what} is {found}; only regular files are mapped",
        field=field,
        object=what,
        found=found,
    )
