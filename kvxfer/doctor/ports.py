"""What the sidecar wants to listen at, and whether somebody does so already."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvxfer.doctor.findings import Finding, error, ok, warning
from kvxfer.web import places

CHECK: Final = "ports"
_LISTEN: Final = "0A"
#: The listener that takes the first address of a name; gRPC takes them all.
_HTTP: Final = "http_port"


@dataclass(frozen=True, slots=True)
class Port:
    """A TCP address that is to be bound.

    :param setting: which setting says so.
    :param problem: name of the error when it was tried (``EADDRINUSE``); empty where it worked.
    :param holder: who listens there, as far as can be seen.
    """

    setting: str
    host: str
    port: int
    problem: str = ""
    holder: str = ""


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """A path that is to be bound.

    :param state: ``free``, ``stale`` (a socket that nobody listens on), ``taken``, ``other`` (no socket), ``denied``.
    """

    path: str
    state: str
    holder: str = ""


def look_at_port(setting: str, host: str, port: int) -> Port:
    """Try to bind it, and let go of it at once.  Port 0 takes any."""
    try:
        found = places(host, port)
    except OSError as problem:
        return Port(setting, host, port, f"cannot be resolved: {problem.strerror or problem}")
    for family, address in found[:1] if setting == _HTTP else found:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            try:
                tried.bind(address)
                tried.listen(1)
            except OSError as problem:
                name = errno.errorcode.get(problem.errno or 0, str(problem))
                return Port(setting, host, port, name, _listener(port) if problem.errno == errno.EADDRINUSE else "")
    return Port(setting, host, port)


def look_at_socket(path: Path) -> UnixSocket:
    """See what is there, and whether somebody answers."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        above = next((p for p in path.parents if p.exists()), Path("/"))
        return UnixSocket(str(path), "free" if os.access(above, os.W_OK | os.X_OK) else "denied", str(above))
    except OSError:
        return UnixSocket(str(path), "denied", str(path.parent))
    if not stat.S_ISSOCK(kind):
        return UnixSocket(str(path), "other")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        refused = probe.connect_ex(str(path))
        if refused in (0, errno.EAGAIN):
            pid = (
                struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
                if not refused
                else 0
            )
            return UnixSocket(str(path), "taken", _process(pid) if pid else "")
    return UnixSocket(str(path), "denied" if refused == errno.EACCES else "stale", str(path.parent))


def _listener(port: int) -> str:
    """The process that listens on a TCP port of this network namespace; empty where it may not be seen."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _holds(process, inodes):
            return _process(int(process.name))
    return ""


def _holds(process: Path, inodes: set[str]) -> bool:
    try:
        open_files = list((process / "fd").iterdir())
    except OSError:  # of another user, or gone
        return False
    for file in open_files:
        try:
            if os.readlink(file) in inodes:
                return True
        except OSError:
            continue
    return False


def _process(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        words = []
    command = " ".join(word for word in words if word)
    return f"process {pid}" + (f" ({command[:80]})" if command else "")


def judge_port(port: Port) -> Finding:
    """One finding."""
    what = f"{port.setting}: {port.host}:{port.port}"
    if not port.problem:
        return ok(CHECK, f"{what} can be bound" + ("" if port.port else " (0: any port that is free)"))
    why = "The sidecar does not start."
    if port.problem == "EADDRINUSE":
        who = port.holder or "a process that cannot be seen from here (another user's, or another namespace's)"
        return error(
            CHECK, f"{what} is taken by {who}", why, f"End it, or choose another {port.setting} (0 takes a free one)."
        )
    if port.problem == "EADDRNOTAVAIL":
        return error(
            CHECK, f"{what}: this machine has no such address", why, "Use an address of an interface, or 0.0.0.0."
        )
    if port.problem == "EACCES":
        return error(CHECK, f"{what} may not be bound by uid {os.geteuid()}", why, "Use a port of 1024 or more.")
    return error(CHECK, f"{what}: {port.problem}", why, "Correct the setting.")


def judge_socket(found: UnixSocket) -> Finding:
    """One finding."""
    what, why = f"engine_socket: {found.path}", "The sidecar does not start."
    if found.state == "taken":
        who = found.holder or "a process that cannot be named"
        return error(CHECK, f"{what} is served by {who}", why, "End it, or give each sidecar a path of its own.")
    if found.state == "other":
        return error(CHECK, f"{what} is there and is no socket", why, "Remove it, or choose another path.")
    if found.state == "denied":
        return error(
            CHECK,
            f"{what}: uid {os.geteuid()} may not make it in {found.holder}",
            why,
            f"Make its directory beforehand: install -d -m 700 -o {os.geteuid()} {Path(found.path).parent}",
        )
    if found.state == "stale":
        return warning(
            CHECK,
            f"{what} is there, and nobody listens",
            "A sidecar was killed here; the next one removes it.",
            "Nothing; or see why it was killed.",
        )
    return ok(CHECK, f"{what} can be bound")
