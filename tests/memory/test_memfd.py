"""Memfds of other processes: only sealed ones, and nothing that merely looks like one."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory.handles import Memfd
from kvxfer.memory.memfd import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, open_memfd
from kvxfer.memory.policy import MemoryPolicy
from tests.support.usage import usage

ENGINE = """
import fcntl, mmap, os, sys
fd = os.memfd_create("cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 8192)
fcntl.fcntl(fd, 1033, 2)
memory = mmap.mmap(fd, 8192)
print(fd, flush=True)
for line in sys.stdin:
    verb, data = line.split()
    if verb == "write":
        memory[100:100 + len(data)] = data.encode()
    if verb == "cut":
        try:
            os.ftruncate(fd, 0)
        except PermissionError:
            print("sealed", flush=True)
            continue
    print(memory[100:110].hex(), flush=True)
"""


def sealed(size: int, seals: int = F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


def test_two_processes_see_each_others_writes(policy: MemoryPolicy, raw: Any, child: Any) -> None:
    engine = child(ENGINE)
    region = open_memfd(Memfd(engine.pid, int(engine.hear()), 64, 8000), policy)
    assert engine.ask("write abcdefghij") == b"abcdefghij".hex()
    assert raw.read(region, 36, 10) == b"abcdefghij"
    raw.write(region, 36, b"0123456789")
    assert engine.ask("read .") == b"0123456789".hex()
    assert engine.ask("cut .") == "sealed"
    engine.end()
    assert raw.read(region, 36, 10) == b"0123456789"
    region.close()


def test_unsealed(policy: MemoryPolicy, refused: Any) -> None:
    plain = os.memfd_create("test")
    growing = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    grow_only = sealed(100, F_SEAL_GROW)
    before = usage()
    for fd in (plain, growing, grow_only):
        os.ftruncate(fd, 100)
        with refused(Reason.MEMORY_NOT_ALLOWED, "fd") as caught:
            open_memfd(Memfd(os.getpid(), fd, 0, 1), policy)
        assert "F_SEAL_SHRINK" in caught[0].message
    assert usage() == before
    for fd in (plain, growing, grow_only):
        os.close(fd)


def test_pipes_devices_directories_and_sockets(policy: MemoryPolicy, refused: Any, in_time: Any) -> None:
    reading, writing = os.pipe()
    zero, directory = os.open("/dev/zero", os.O_RDWR), os.open("/", os.O_RDONLY)
    before = usage()
    for fd in (reading, writing, zero, directory):
        with in_time(), refused(Reason.MEMORY_NOT_ALLOWED, "fd") as caught:
            open_memfd(Memfd(os.getpid(), fd, 0, 1), policy)
        assert "found" in caught[0].metadata
    assert usage() == before
    for fd in (reading, writing, zero, directory):
        os.close(fd)


@pytest.mark.parametrize("place", ["disk", "/dev/shm"])
def test_files_are_no_memfds_whatever_their_name(
    place: str, tmp_path: Path, policy: MemoryPolicy, refused: Any
) -> None:
    directory = tmp_path if place == "disk" else Path(place)
    path = directory / "memfd:kvxfer (deleted)"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.ftruncate(fd, 100)
        with refused(Reason.MEMORY_NOT_ALLOWED, "fd"):
            open_memfd(Memfd(os.getpid(), fd, 0, 1), policy)
        path.unlink()
        with refused(Reason.MEMORY_NOT_ALLOWED, "fd"):
            open_memfd(Memfd(os.getpid(), fd, 0, 1), policy)
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def test_a_file_is_not_even_opened(policy: MemoryPolicy, refused: Any) -> None:
    # A running program cannot be opened for writing: had it been tried, the error would tell of that.
    fd = os.open("/proc/self/exe", os.O_RDONLY)
    with refused(Reason.MEMORY_NOT_ALLOWED, "fd") as caught:
        open_memfd(Memfd(os.getpid(), fd, 0, 1), policy)
    assert "F_SEAL_SHRINK" in caught[0].message
    os.close(fd)


@pytest.mark.skipif(not os.access("/", os.W_OK), reason="only root may write to /")
def test_a_file_with_the_very_name_of_a_memfd_fails_at_the_seals(policy: MemoryPolicy, refused: Any) -> None:
    fd = os.open("/memfd:kvxfer-test", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.ftruncate(fd, 100)
        with refused(Reason.MEMORY_NOT_ALLOWED, "fd"):
            open_memfd(Memfd(os.getpid(), fd, 0, 1), policy)
    finally:
        os.unlink("/memfd:kvxfer-test")
        os.close(fd)


def test_who_is_not_there(policy: MemoryPolicy, refused: Any, child: Any) -> None:
    fd = sealed(100)
    os.close(fd)
    with refused(Reason.MEMORY_HANDLE_INVALID, "fd"):
        open_memfd(Memfd(os.getpid(), fd, 0, 1), policy)
    other = child("")
    other.process.wait()
    with refused(Reason.MEMORY_HANDLE_INVALID, "pid"):
        open_memfd(Memfd(other.pid, 0, 0, 1), policy)


def test_sizes(policy: MemoryPolicy, refused: Any) -> None:
    fd = sealed(5000)
    me = os.getpid()
    open_memfd(Memfd(me, fd, 4999, 1), policy).close()
    for offset, size in ((0, 5001), (4999, 2), (2**62, 1)):
        with refused(Reason.REGION_TOO_SMALL, "size"):
            open_memfd(Memfd(me, fd, offset, size), policy)
    with refused(Reason.MEMORY_LIMIT, "size"):
        open_memfd(Memfd(me, fd, 0, 2**62), policy)
    os.close(fd)


def test_a_memfd_sealed_against_writing_cannot_be_mapped(policy: MemoryPolicy, refused: Any) -> None:
    fd = sealed(5000, F_SEAL_SHRINK | 0x8)
    with refused(Reason.MEMORY_NOT_ALLOWED, "fd"):
        open_memfd(Memfd(os.getpid(), fd, 0, 1), policy)
    os.close(fd)


def test_the_policy(refused: Any) -> None:
    fd = sealed(100)
    with refused(Reason.MEMORY_NOT_ALLOWED, "fd"):
        open_memfd(Memfd(os.getpid(), fd, 0, 1), MemoryPolicy(allow_memfd=False))
    os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_a_process_that_may_not_be_looked_into(policy: MemoryPolicy) -> None:
    fd, parent = sealed(100), os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            open_memfd(Memfd(parent, fd, 0, 1), policy)
        except KvxferError as error:
            status = 0 if error.reason is Reason.MEMORY_NOT_ALLOWED else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(fd)


def test_five_hundred_times_leaves_nothing(policy: MemoryPolicy, refused: Any) -> None:
    fd = sealed(5000)
    before = usage()
    for _ in range(500):
        open_memfd(Memfd(os.getpid(), fd, 64, 4000), policy).close()
        with refused(Reason.REGION_TOO_SMALL):
            open_memfd(Memfd(os.getpid(), fd, 64, 5000), policy)
    assert usage() == before
    os.close(fd)
