"""The directories that caches lie in."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvxfer.doctor.findings import Finding, error, ok, warning
from kvxfer.sizes import mib

CHECK: Final = "memory"
#: Where POSIX shared memory is; UCX puts its own there as well.
SHARED: Final = "/dev/shm"
#: What Docker and Kubernetes give a container that asks for nothing.
DOCKER: Final = 64 * 2**20
_LITTLE: Final = 2**30
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})


@dataclass(frozen=True, slots=True)
class Place:
    """A directory.

    :param exists: whether it is there, and a directory.
    :param writable: whether this process may make files in it.
    :param mode: permission bits, the sticky bit among them.
    :param kind: of its file system; empty where unknown.
    :param size: of its file system, bytes; ``free``: what this user may still take.
    """

    path: str
    exists: bool = False
    writable: bool = False
    mode: int = 0
    owner: int = 0
    kind: str = ""
    size: int = 0
    free: int = 0


def look(path: str) -> Place:
    """Ask the file system."""
    try:
        found = os.stat(path)
        space = os.statvfs(path)
    except OSError:
        return Place(path)
    return Place(
        path,
        stat.S_ISDIR(found.st_mode),
        os.access(path, os.W_OK | os.X_OK),
        stat.S_IMODE(found.st_mode),
        found.st_uid,
        _kind(found.st_dev),
        space.f_blocks * space.f_frsize,
        space.f_bavail * space.f_frsize,
    )


def _kind(device: int) -> str:
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return after.split()[0]
    return ""


_LARGER: Final = (
    "docker run --shm-size=32g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory and a sizeLimit, mounted "
    "in both containers; else mount -o remount,size=32g "
)


def judge(place: Place, uid: int) -> list[Finding]:
    """:param uid: the user that the sidecar runs as."""
    path = place.path
    if not place.exists:
        if path == SHARED:
            return [
                error(
                    CHECK,
                    f"there is no {path}",
                    "POSIX shared memory lies there, and so does what UCX shares between processes.",
                    f"mount -t tmpfs tmpfs {path}",
                )
            ]
        return [
            warning(
                CHECK,
                f"there is no directory {path}, which memory_directories names",
                "Engines cannot hand over files there, and the sidecar cannot make its own.",
                f"mkdir -p -m 700 {path} (on a memory-backed file system), or name another with --memory-directory.",
            )
        ]
    findings = []
    what = f"{path}: {mib(place.size)}, {mib(place.free)} free"
    small = "A cache that does not fit fails when it is made, or kills its engine (SIGBUS) when it is first used."
    if place.free < _LITTLE:
        told = error if place.free <= DOCKER else warning
        default = " (64 MiB is what a container gets that asks for nothing)" if place.size == DOCKER else ""
        findings.append(told(CHECK, what + default, small, _LARGER + path))
    if not place.writable:
        findings.append(
            error(
                CHECK,
                f"{path} (mode {place.mode:04o}, of uid {place.owner}) cannot be written by uid {uid}",
                "The sidecar cannot make memory there, and engines of this user cannot either.",
                f"chown {uid} {path}, or run the sidecar as uid {place.owner}.",
            )
        )
    if place.mode & 0o002 and not place.mode & stat.S_ISVTX:
        findings.append(
            warning(
                CHECK,
                f"{path} may be written by everybody (mode {place.mode:04o})",
                "Others can replace the files of a cache.",
                f"chmod 700 {path}",
            )
        )
    if place.kind and place.kind not in _IN_MEMORY:
        findings.append(
            warning(
                CHECK,
                f"{path} is on {place.kind}, not in memory",
                "Pages of the cache are written to a disk, again and again.",
                "Use a directory below /dev/shm, or mount a tmpfs.",
            )
        )
    return findings or [ok(CHECK, what)]
