"""How one process names a piece of memory to another: frozen, validated, pure data.

Every number is in bytes unless it is a pid or a file descriptor.  A handle that cannot mean anything raises
:class:`KvxferError` MEMORY_HANDLE_INVALID when it is built; whether the memory exists, is large enough and may be used
is found out by :func:`kvxfer.memory.api.open_region`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import MAX_BYTES, MemoryKind

#: Longest name of one file or shared-memory object, and longest path, in bytes (NAME_MAX and PATH_MAX of Linux).
MAX_NAME: Final = 255
MAX_PATH: Final = 4095
#: pids and file descriptors are C ints.
MAX_INT: Final = 2**31 - 1


def _invalid(field: str, value: object, allowed: str) -> KvxferError:
    shown = repr(value)
    if len(shown) > 200:
        shown = shown[:200] + "..."
    return KvxferError(
        Reason.MEMORY_HANDLE_INVALID,
        f"{field} is {shown}; allowed: {allowed}",
        field=field,
        value=shown,
        allowed=allowed,
    )


def _check_int(field: str, value: object, low: int, high: int) -> None:
    # bool is an int to Python, and never what a caller meant.
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _invalid(field, value, f"an integer from {low} to {high}")


def _check_extent(first_field: str, first: int, size: int) -> None:
    """Both numbers are good and their sum does not leave 63 bits."""
    _check_int(first_field, first, 0, MAX_BYTES)
    _check_int("size", size, 1, MAX_BYTES)
    if first > MAX_BYTES - size:
        raise _invalid(
            "size",
            size,
            f"{first_field} + size of at most {MAX_BYTES} ({first_field} is {first})",
        )


def _check_text(field: str, value: object, longest: int) -> str:
    allowed = f"text of 1 to {longest} bytes without NUL"
    if not isinstance(value, str) or not value or "\0" in value:
        raise _invalid(field, value, allowed)
    try:
        # The file system's encoding lets undecodable names round trip; a surrogate that came from elsewhere does not.
        raw = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise _invalid(field, value, allowed) from None
    if len(raw) > longest:
        raise _invalid(field, value, allowed)
    return value


@dataclass(frozen=True, slots=True)
class PosixShm:
    """A POSIX shared-memory object, from its first byte on.

    :param name: as given to ``shm_open``: a slash, then a name without one (``/kvxfer-7``).
    :param size: bytes to map.
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        name = _check_text("name", self.name, MAX_NAME + 1)
        if not name.startswith("/") or "/" in name[1:] or name[1:] in ("", ".", ".."):
            raise _invalid(
                "name",
                name,
                "a slash followed by a name without one, other than '.' and '..'",
            )
        _check_extent("offset", 0, self.size)


@dataclass(frozen=True, slots=True)
class FileHandle:
    """Part of a regular file, usually on a memory-backed volume.

    :param path: absolute, with no ``.``, ``..`` or empty component, so that it says where it leads.
    :param offset: first byte; need not be page aligned (torch puts a header of 64 bytes before its data).
    :param size: bytes to map.
    """

    path: str
    offset: int
    size: int

    def __post_init__(self) -> None:
        path = _check_text("path", self.path, MAX_PATH)
        parts = path.split("/")
        if parts[0] or any(part in ("", ".", "..") for part in parts[1:]):
            raise _invalid(
                "path",
                path,
                "an absolute path to a file without '.', '..' or empty components",
            )
        _check_extent("offset", self.offset, self.size)


@dataclass(frozen=True, slots=True)
class Memfd:
    """Part of a memfd that another process of the same pid namespace holds open.

    :param pid: of the process that holds it, as the *opening* side numbers it.
    :param fd: its descriptor there; must stay open until the memory has been mapped.
    :param offset: first byte; need not be page aligned.
    :param size: bytes to map.
    """

    pid: int
    fd: int
    offset: int
    size: int

    def __post_init__(self) -> None:
        _check_int("pid", self.pid, 1, MAX_INT)
        _check_int("fd", self.fd, 0, MAX_INT)
        _check_extent("offset", self.offset, self.size)


class OwnedBacking(str, Enum):
    """What a sidecar-owned region is made of."""

    FILE = "file"
    MEMFD = "memfd"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Owned:
    """A request: the sidecar creates the memory, and its answer names what the engine maps.

    :param size: bytes to create.
    :param backing: ``FILE`` (the default) reaches engines in other pid namespaces through a shared volume; ``MEMFD``
        needs a common pid namespace and cannot be shrunk by anybody; ``CUDA`` is memory of a GPU.
    :param device: number of the GPU, as the sidecar counts; 0 for host memory.
    """

    size: int
    backing: OwnedBacking = OwnedBacking.FILE
    device: int = 0

    def __post_init__(self) -> None:
        _check_extent("offset", 0, self.size)
        if not isinstance(self.backing, OwnedBacking):
            raise _invalid(
                "backing",
                self.backing,
                ", ".join(backing.value for backing in OwnedBacking),
            )
        _check_int("device", self.device, 0, MAX_INT if self.backing is OwnedBacking.CUDA else 0)


@dataclass(frozen=True, slots=True)
class CudaIpc:
    """Part of an allocation on a GPU, exported by CUDA IPC from the process that made it.

    :param handle: the 64 bytes of ``cuIpcGetMemHandle``; of the whole allocation, not of a pointer into it.
    :param offset: first byte.
    :param size: bytes.
    :param device: number of the GPU where ``uuid`` is not told, as the opening side counts.
    :param uuid: 16 bytes that name the GPU, whatever its number; or empty.
    """

    handle: bytes
    offset: int
    size: int
    device: int = 0
    uuid: bytes = b""

    def __post_init__(self) -> None:
        for name, value, lengths in (("handle", self.handle, (64,)), ("device_uuid", self.uuid, (0, 16))):
            if not isinstance(value, bytes) or len(value) not in lengths:
                found = f"{len(value)} bytes" if isinstance(value, bytes) else value
                raise _invalid(name, found, " or ".join(f"{length} bytes" for length in lengths))
        _check_extent("offset", self.offset, self.size)
        _check_int("device", self.device, 0, MAX_INT)


@dataclass(frozen=True, slots=True)
class Address:
    """Memory of this very process, for a sidecar embedded in its engine.

    :param address: of the first byte; not zero.
    :param size: in bytes.
    :param kind: ``VRAM`` addresses are taken as they are, only host memory can be checked.
    :param device: number of the GPU; 0 for host memory.
    """

    address: int
    size: int
    kind: MemoryKind = MemoryKind.DRAM
    device: int = 0

    def __post_init__(self) -> None:
        _check_int("address", self.address, 1, MAX_BYTES)
        _check_extent("address", self.address, self.size)
        if not isinstance(self.kind, MemoryKind):
            raise _invalid("kind", self.kind, ", ".join(kind.value for kind in MemoryKind))
        _check_int("device", self.device, 0, 0 if self.kind is MemoryKind.DRAM else MAX_INT)


#: Everything that :func:`kvxfer.memory.api.open_region` takes.
Handle: TypeAlias = PosixShm | FileHandle | Memfd | Owned | Address | CudaIpc
#: What a sidecar-owned region exports for the engine to map.
Mappable: TypeAlias = PosixShm | FileHandle | Memfd | CudaIpc
