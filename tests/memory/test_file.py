"""Regular files: across processes, and every refusal."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory.file import open_file
from kvxfer.memory.handles import FileHandle
from kvxfer.memory.policy import MemoryPolicy
from tests.support.usage import usage

SIDECAR = """
import ctypes, sys
from kvxfer.memory.file import open_file
from kvxfer.memory.handles import FileHandle
from kvxfer.memory.policy import MemoryPolicy
path, directory = sys.argv[1:]
region = open_file(FileHandle(path, 64, 5000), MemoryPolicy(directories=(directory,)))
for line in sys.stdin:
    verb, data = line.split()
    if verb == "write":
        ctypes.memmove(region.address + 4990, data.encode(), len(data))
    print(ctypes.string_at(region.address + 4990, 10).hex(), flush=True)
"""


def test_two_processes_see_each_others_writes(allowed: Path, policy: MemoryPolicy, raw: Any, child: Any) -> None:
    path = allowed / "cache"
    path.write_bytes(bytes(64 + 5000))
    region = open_file(FileHandle(str(path), 64, 5000), policy)
    other = child(SIDECAR, path, allowed)
    assert other.ask("write abcdefghij") == b"abcdefghij".hex()
    assert raw.read(region, 4990, 10) == b"abcdefghij"
    raw.write(region, 4990, b"0123456789")
    assert other.ask("read .") == b"0123456789".hex()
    region.close()


def test_outside(tmp_path: Path, allowed: Path, policy: MemoryPolicy, refused: Any) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"x" * 100)
    for path in (str(outside), "/etc/passwd", str(allowed), str(allowed) + "-not/f"):
        with refused(Reason.MEMORY_NOT_ALLOWED, "path") as caught:
            open_file(FileHandle(path, 0, 1), policy)
        assert str(allowed) in caught[0].message
    with refused(Reason.MEMORY_NOT_ALLOWED, "path"):
        open_file(FileHandle(str(outside), 0, 1), MemoryPolicy(directories=()))


def test_links_are_not_followed(tmp_path: Path, allowed: Path, policy: MemoryPolicy, refused: Any) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/f").write_bytes(b"x" * 100)
    (allowed / "link").symlink_to(tmp_path / "outside/f")
    (allowed / "dir").symlink_to(tmp_path / "outside")
    for name in ("link", "dir/f"):
        with refused(Reason.MEMORY_NOT_ALLOWED, "path"):
            open_file(FileHandle(f"{allowed}/{name}", 0, 1), policy)


def test_dots_do_not_even_make_a_handle(allowed: Path, refused: Any) -> None:
    with refused(Reason.MEMORY_HANDLE_INVALID, "path"):
        FileHandle(f"{allowed}/../outside", 0, 1)


def test_pipes_sockets_directories_and_devices(allowed: Path, policy: MemoryPolicy, refused: Any, in_time: Any) -> None:
    os.mkfifo(allowed / "pipe")
    (allowed / "directory").mkdir()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(allowed / "socket"))
    names = ["pipe", "directory", "socket"]
    try:
        os.mknod(allowed / "device", 0o20666, os.makedev(1, 5))
        names.append("device")
    except PermissionError:
        pass
    before = usage()
    for name in names:
        with in_time(), refused(Reason.MEMORY_NOT_ALLOWED, "path") as caught:
            open_file(FileHandle(str(allowed / name), 0, 1), policy)
        assert caught[0].metadata["found"].split()[-1] == name
    assert usage() == before
    listener.close()


def test_a_device_is_refused_also_where_none_can_be_made(refused: Any, in_time: Any) -> None:
    with in_time(), refused(Reason.MEMORY_NOT_ALLOWED, "path") as caught:
        open_file(FileHandle("/dev/zero", 0, 1), MemoryPolicy(directories=("/dev",)))
    assert caught[0].metadata["found"] == "a character device"


def test_sizes(allowed: Path, policy: MemoryPolicy, refused: Any) -> None:
    path = str(allowed / "f")
    Path(path).write_bytes(bytes(100))
    open_file(FileHandle(path, 99, 1), policy).close()
    for offset, size in ((0, 101), (99, 2), (100, 1), (2**62, 1)):
        with refused(Reason.REGION_TOO_SMALL, "size"):
            open_file(FileHandle(path, offset, size), policy)
    with refused(Reason.MEMORY_LIMIT, "size"):
        open_file(FileHandle(path, 0, 2**62), policy)
    os.truncate(path, 50)
    with refused(Reason.REGION_TOO_SMALL, "size"):
        open_file(FileHandle(path, 0, 100), policy)


def test_missing(allowed: Path, policy: MemoryPolicy, refused: Any) -> None:
    with refused(Reason.MEMORY_HANDLE_INVALID, "path"):
        open_file(FileHandle(str(allowed / "none"), 0, 1), policy)


def test_a_running_program_is_not_written(allowed: Path, policy: MemoryPolicy, refused: Any, child: Any) -> None:
    program = allowed / "program"
    program.write_bytes(Path("/bin/cat").read_bytes())
    program.chmod(0o700)
    # Python starts cat in its own place, which answers the line: from then on the file is busy.
    other = child("import os, sys; os.execv(sys.argv[1], ['cat'])", program)
    assert other.ask("up") == "up"
    with refused(Reason.MEMORY_NOT_ALLOWED, "path"):
        open_file(FileHandle(str(program), 0, 1), policy)


def test_five_hundred_times_leaves_nothing(allowed: Path, policy: MemoryPolicy, refused: Any) -> None:
    path = allowed / "f"
    path.write_bytes(bytes(10_000))
    before = usage()
    for _ in range(500):
        open_file(FileHandle(str(path), 64, 9000), policy).close()
        with refused(Reason.REGION_TOO_SMALL):
            open_file(FileHandle(str(path), 64, 10_000), policy)
    assert usage() == before


def test_the_mapping_outlives_the_file(allowed: Path, policy: MemoryPolicy, raw: Any) -> None:
    path = allowed / "f"
    path.write_bytes(b"hello")
    before = usage()
    region = open_file(FileHandle(str(path), 0, 5), policy)
    assert usage() != before
    path.unlink()
    assert raw.read(region, 0, 5) == b"hello"
    region.close()
    assert usage() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_a_file_that_is_somebody_elses(policy: MemoryPolicy, tmp_path_factory: Any) -> None:
    directory = Path("/dev/shm") / f"kvxfer-test-{os.getpid()}"
    directory.mkdir(mode=0o755)
    try:
        path = directory / "f"
        path.write_bytes(bytes(10))
        path.chmod(0o600)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                open_file(FileHandle(str(path), 0, 1), MemoryPolicy(directories=(str(directory),)))
            except KvxferError as error:
                status = 0 if error.reason is Reason.MEMORY_NOT_ALLOWED else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        path.unlink()
        directory.rmdir()
