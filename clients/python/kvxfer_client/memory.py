"""Memory that an engine allocates for its cache so that its sidecar can map it too.

Which kind to take:

======================== =================================================================================
:meth:`create_file`      **The default.**  Works wherever both processes see one directory: the same host, or
                         two containers that mount one memory-backed volume.  Nothing else works between
                         containers with pid namespaces of their own.
:meth:`create_shm`       The same, for two processes with a common ``/dev/shm``.
:meth:`create_memfd`     No name, gone with its processes, and cannot be shrunk by accident.  Both must be in
                         one pid namespace, and the sidecar must be allowed to look into this process.
:meth:`map`              What a sidecar created: the cache then outlives the engine.
======================== =================================================================================

All sizes and offsets are bytes.  Failures are :class:`kvxfer.core.errors.KvxferError`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import math
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory.handles import FileHandle, Handle, Mappable, Memfd, PosixShm

if TYPE_CHECKING:
    import torch

_SHM_DIRECTORY: Final = "/dev/shm"
#: Names made up by :meth:`SharedRegion.create_shm` start so; a sidecar's default policy allows this prefix.
SHM_PREFIX: Final = "/kvxfer-"

# The numbers are the kernel's; the fcntl module of some builds lacks the names.
_F_ADD_SEALS: Final = 1033
_F_SEAL_SEAL: Final = 0x1
_F_SEAL_SHRINK: Final = 0x2
_F_SEAL_GROW: Final = 0x4

_REASONS: Final = {
    errno.EACCES: Reason.MEMORY_NOT_ALLOWED,
    errno.EPERM: Reason.MEMORY_NOT_ALLOWED,
    errno.EROFS: Reason.MEMORY_NOT_ALLOWED,
    errno.ELOOP: Reason.MEMORY_NOT_ALLOWED,
    errno.ENOMEM: Reason.MEMORY_LIMIT,
    errno.ENOSPC: Reason.MEMORY_LIMIT,
    errno.EDQUOT: Reason.MEMORY_LIMIT,
    errno.EFBIG: Reason.MEMORY_LIMIT,
    errno.EMFILE: Reason.LIMIT_EXCEEDED,
    errno.ENFILE: Reason.LIMIT_EXCEEDED,
}


def _from_os_error(error: OSError, action: str, field: str) -> KvxferError:
    number = error.errno or 0
    reason = _REASONS.get(number, Reason.MEMORY_HANDLE_INVALID)
    name = errno.errorcode.get(number, str(number))
    return KvxferError(reason, f"{action} failed: {error.strerror} ({name})", field=field, action=action, errno=name)


class SharedRegion:
    """A piece of shared memory, mapped into this process for reading and writing.

    Use a constructor below, give :attr:`handle` to the sidecar, and build the cache on :meth:`numpy` or :meth:`torch`.
    As a context manager it closes at the end, and removes the name that it created.

    The memory stays mapped until the last array or tensor made from it is gone, even after :meth:`close`; an array can
    never point to nothing.
    """

    def __init__(
        self,
        mapped: mmap.mmap,
        skip: int,
        size: int,
        handle: Mappable,
        fd: int | None,
        remove: Callable[[], None] | None,
    ) -> None:
        """Not for callers; see the constructors."""
        self._mapped: mmap.mmap | None = mapped
        self._skip: Final = skip
        self._size: Final = size
        self._handle: Final = handle
        self._fd = fd
        self._remove = remove

    # -- constructors ------------------------------------------------------------------------------------------------

    @classmethod
    def create_shm(cls, size: int, name: str | None = None) -> SharedRegion:
        """New POSIX shared memory of ``size`` bytes, zeroed and fully allocated, mode 0600.

        :param name: as for ``shm_open``, ``/something``; by default one that cannot be guessed and that a sidecar's
            default policy allows.
        :raises KvxferError: MEMORY_HANDLE_INVALID (bad size or name, or it exists), MEMORY_LIMIT, MEMORY_NOT_ALLOWED.
        """
        handle = PosixShm(f"{SHM_PREFIX}{secrets.token_hex(16)}" if name is None else name, size)
        return cls._create(f"{_SHM_DIRECTORY}{handle.name}", size, 0o600, None, handle, "name")

    @classmethod
    def create_file(
        cls, path: str | os.PathLike[str], size: int, mode: int = 0o600, group: int | str | None = None
    ) -> SharedRegion:
        """A new file of ``size`` bytes, zeroed and fully allocated.  The file must not exist.

        Put it on a memory-backed file system (tmpfs), below a directory that the sidecar's policy allows.  Whoever may
        write the file may also truncate it, and the next access would then kill engine and sidecar: keep ``mode`` as
        narrow as it can be.

        :param mode: permission bits, whatever the umask.  0o660 with ``group`` where the sidecar is another user.
        :param group: number or name of the group that the file is given to.
        :raises KvxferError: MEMORY_HANDLE_INVALID (bad path or size, or it exists), FIELD_INVALID (mode, group),
            MEMORY_LIMIT, MEMORY_NOT_ALLOWED.
        """
        handle = FileHandle(os.fspath(path), 0, size)
        if not 0 <= mode <= 0o777:
            raise _bad_argument("mode", oct(mode), "0o000 to 0o777")
        return cls._create(handle.path, size, mode, _group_number(group), handle, "path")

    @classmethod
    def create_memfd(cls, size: int) -> SharedRegion:
        """A new memfd of ``size`` bytes, zeroed, fully allocated and sealed: its size can never change.

        The handle names this process and a descriptor of it, so the region has to stay open until the sidecar has
        mapped it.  A child that this process forks later does not own the handle's descriptor.

        :raises KvxferError: MEMORY_HANDLE_INVALID (bad size), MEMORY_LIMIT.
        """
        Memfd(1, 0, 0, size)  # Checks the size before anything is made.
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if size > memory:
            # No file system sets a limit here: the kernel would go on until it has to kill somebody.
            raise KvxferError(
                Reason.MEMORY_LIMIT,
                f"a memfd of {size} bytes does not fit into the {memory} bytes of this machine",
                field="size",
                size=size,
                limit=memory,
            )
        with contextlib.ExitStack() as undo:
            try:
                fd = os.memfd_create("kvxfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                undo.callback(os.close, fd)
                os.ftruncate(fd, size)
                os.posix_fallocate(fd, 0, size)
                fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
                mapped = mmap.mmap(fd, size)
            except OSError as error:
                raise _from_os_error(error, f"creating a memfd of {size} bytes", "size") from error
            undo.pop_all()
        return cls(mapped, 0, size, Memfd(os.getpid(), fd, 0, size), fd, None)

    @classmethod
    def map(cls, handle: Handle) -> SharedRegion:
        """Map memory that exists, usually what a sidecar created and named in its answer.

        :raises KvxferError: UNSUPPORTED for handles that name nothing to map; MEMORY_HANDLE_INVALID where there is no
            such memory; REGION_TOO_SMALL; MEMORY_NOT_ALLOWED; MEMORY_LIMIT.
        """
        match handle:
            case PosixShm():
                path, offset, flags, field = f"{_SHM_DIRECTORY}{handle.name}", 0, os.O_NOFOLLOW, "name"
            case FileHandle():
                path, offset, flags, field = handle.path, handle.offset, os.O_NOFOLLOW, "path"
            case Memfd():
                path, offset, flags, field = f"/proc/{handle.pid}/fd/{handle.fd}", handle.offset, 0, "fd"
            case _:
                raise KvxferError(
                    Reason.UNSUPPORTED,
                    f"a handle of type {type(handle).__name__} names nothing that can be mapped",
                    type=type(handle).__name__,
                )
        try:
            # Never waits, not even if somebody put a pipe there.
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | flags)
        except OSError as error:
            raise _from_os_error(error, f"opening {path!r}", field) from error
        try:
            mapped, skip = _map(fd, offset, handle.size, path, field)
        finally:
            os.close(fd)
        return cls(mapped, skip, handle.size, handle, None, None)

    @classmethod
    def _create(cls, path: str, size: int, mode: int, group: int | None, handle: Mappable, field: str) -> SharedRegion:
        with contextlib.ExitStack() as undo:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    undo.callback(_unlink, path)
                    if group is not None:
                        os.fchown(fd, -1, group)
                    # After the group, so that no member of the old one gets in; the umask does not apply to it.
                    os.fchmod(fd, mode)
                    os.ftruncate(fd, size)
                    # A page that is first touched when the tmpfs is full would be a SIGBUS; here it is an error.
                    os.posix_fallocate(fd, 0, size)
                    mapped = mmap.mmap(fd, size)
                finally:
                    os.close(fd)
            except OSError as error:
                raise _from_os_error(error, f"creating {path!r} with {size} bytes", field) from error
            undo.pop_all()
        return cls(mapped, 0, size, handle, None, lambda: _unlink(path))

    # -- use ---------------------------------------------------------------------------------------------------------

    @property
    def handle(self) -> Mappable:
        """What the sidecar maps."""
        return self._handle

    @property
    def size(self) -> int:
        """Bytes."""
        return self._size

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._mapped is None

    def numpy(self, dtype: npt.DTypeLike, shape: Sequence[int], offset: int = 0) -> npt.NDArray[Any]:
        """A C-contiguous, writable array on the region's bytes from ``offset`` on.

        :param dtype: any NumPy type of fixed size without Python objects.
        :raises KvxferError: REGION_TOO_SMALL where the array does not fit; FIELD_INVALID for a bad offset or shape, or
            a closed region.
        """
        kind = np.dtype(dtype)
        if kind.hasobject or kind.itemsize == 0:
            raise _bad_argument("dtype", kind, "a type of fixed size without Python objects")
        buffer, _ = self._part(kind.itemsize, shape, offset)
        return np.frombuffer(buffer, dtype=kind).reshape(tuple(shape))

    def torch(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        """A contiguous CPU tensor on the region's bytes from ``offset`` on, also of types that NumPy lacks.

        :raises KvxferError: as :meth:`numpy`.
        """
        import torch

        buffer, count = self._part(dtype.itemsize, shape, offset)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(buffer, dtype=dtype).reshape(tuple(shape))

    def _part(self, itemsize: int, shape: Sequence[int], offset: int) -> tuple[memoryview, int]:
        """The bytes of one array, and its number of elements."""
        if self._mapped is None:
            raise _bad_argument("region", "closed", "a region that is open")
        if offset < 0:
            raise _bad_argument("offset", offset, "0 or more")
        if any(extent < 0 for extent in shape):
            raise _bad_argument("shape", tuple(shape), "extents of 0 or more")
        count = math.prod(shape)
        if offset + count * itemsize > self._size:
            raise KvxferError(
                Reason.REGION_TOO_SMALL,
                f"{count} elements of {itemsize} bytes from offset {offset} need {offset + count * itemsize} bytes; "
                f"the region has {self._size}",
                field="shape",
                offset=offset,
                needed=offset + count * itemsize,
                actual=self._size,
            )
        start = self._skip + offset
        # An array on the memoryview keeps the mapping alive; on the mmap itself it would not.
        return memoryview(self._mapped)[start : start + count * itemsize], count

    # -- end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the memory; closing again does nothing.

        It is unmapped at once, or with the last array or tensor on it.  A name, if there is one, stays: see
        :meth:`unlink`.  A memfd can no longer be opened by the sidecar, one that has mapped it keeps it.
        """
        mapped, self._mapped = self._mapped, None
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        if mapped is not None:
            # Arrays still use it: the mapping then goes with the last of them.
            with contextlib.suppress(BufferError):
                mapped.close()

    def unlink(self) -> None:
        """Remove the name that this object created; whoever has the memory mapped keeps it.

        Does nothing for memfds, for memory that was mapped only, and when called again.
        """
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()

    def __enter__(self) -> SharedRegion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self.unlink()

    def __repr__(self) -> str:
        return f"<SharedRegion {self._handle!r}{' closed' if self.closed else ''}>"


def _bad_argument(field: str, value: object, allowed: str) -> KvxferError:
    return KvxferError(
        Reason.FIELD_INVALID, f"{field} is {value}; allowed: {allowed}", field=field, value=value, allowed=allowed
    )


def _group_number(group: int | str | None) -> int | None:
    if isinstance(group, str):
        try:
            return grp.getgrnam(group).gr_gid
        except KeyError:
            raise _bad_argument("group", repr(group), "a group of this system") from None
    if group is not None and not 0 <= group < 2**32 - 1:
        raise _bad_argument("group", group, "a group number from 0 to 4294967294")
    return group


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _from_os_error(error, f"removing {path!r}", "path") from error


def _map(fd: int, offset: int, size: int, what: str, field: str) -> tuple[mmap.mmap, int]:
    """Map part of a file from the page below; also tells how many bytes that is below."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise KvxferError(Reason.MEMORY_NOT_ALLOWED, f"{what!r} is no regular file", field=field, object=what)
    too_small = KvxferError(
        Reason.REGION_TOO_SMALL,
        f"{what!r} has {status.st_size} bytes; offset {offset} + size {size} needs {offset + size}",
        field="size",
        object=what,
        actual=status.st_size,
        offset=offset,
        size=size,
    )
    if offset + size > status.st_size:
        raise too_small
    skip = offset % mmap.ALLOCATIONGRANULARITY
    try:
        return mmap.mmap(fd, skip + size, offset=offset - skip), skip
    except ValueError as error:
        # mmap looks at the size again, and meanwhile somebody has cut the file.
        raise too_small from error
    except OSError as error:
        raise _from_os_error(error, f"mapping {size} bytes of {what!r}", field) from error
