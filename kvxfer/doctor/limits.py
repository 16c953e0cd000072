"""How much memory a process may lock, which registering memory with an RDMA NIC does.

    python -m kvxfer.doctor.limits 1000

tells what a process of that user may do; it must be started by root.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kvxfer.doctor.findings import Finding, error, ok, unknown, warning
from kvxfer.doctor.processes import has_capability

CHECK: Final = "memlock"
_CAP_IPC_LOCK: Final = 14
#: What is tried: more than distributions allow by default (64 KiB to 8 MiB), little enough to have at hand.
TRIED: Final = 16 * 2**20
#: Below this no cache worth the name can be registered.
_LEAST: Final = 2**30
_TIMEOUT: Final = 20.0


@dataclass(frozen=True, slots=True)
class Locking:
    """What a user's process may lock.

    :param soft: RLIMIT_MEMLOCK in bytes; None: no limit.
    :param exempt: whether CAP_IPC_LOCK makes the limit void.
    :param refused: the error of an attempt to lock :data:`TRIED` bytes; empty where it worked.
    :param rdma: RDMA devices of this machine.
    :param failure: why there are no facts; empty where there are.
    """

    uid: int
    soft: int | None = None
    exempt: bool = False
    refused: str = ""
    rdma: tuple[str, ...] = ()
    failure: str = ""


def look() -> Locking:
    """Ask for this process, and try."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = None if soft == resource.RLIM_INFINITY else soft
    try:
        devices = tuple(sorted(path.name for path in Path("/sys/class/infiniband").iterdir()))
    except OSError:
        devices = ()
    return Locking(os.geteuid(), limit, has_capability(_CAP_IPC_LOCK), _try(), devices)


def look_as(uid: int) -> Locking:
    """The same for a process of another user that this one starts: limits are inherited, capabilities are not."""
    if uid == os.geteuid():
        return look()
    if os.geteuid() != 0:
        return Locking(uid, failure=f"only root can become uid {uid}, and this is uid {os.geteuid()}")
    command = [sys.executable, "-m", "kvxfer.doctor.limits", str(uid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return Locking(uid, failure=f"the process that was to become uid {uid} did not answer")
    if done.returncode:
        return Locking(uid, failure=f"no process could become uid {uid}: {done.stderr.strip().splitlines()[-1:]}")
    told = json.loads(done.stdout)
    return Locking(**{**told, "rdma": tuple(told["rdma"])})


def _try() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, TRIED) as memory:
        view = ctypes.c_char.from_buffer(memory)
        try:
            if libc.mlock(ctypes.byref(view), ctypes.c_size_t(TRIED)) == 0:
                libc.munlock(ctypes.byref(view), ctypes.c_size_t(TRIED))
                return ""
            return errno.errorcode.get(ctypes.get_errno(), str(ctypes.get_errno()))
        finally:
            del view  # the mapping cannot be closed while it is looked at


def judge(locking: Locking) -> Finding:
    """What a user may lock, and whether that is enough."""
    who = f"uid {locking.uid}"
    if locking.failure:
        return unknown(CHECK, f"what {who} may lock could not be tried: {locking.failure}", todo="Run it as root.")
    if locking.soft is None and not locking.refused:
        return ok(CHECK, f"{who} may lock any amount of memory")
    limit = "no limit" if locking.soft is None else f"{locking.soft:,} bytes"
    if locking.exempt and not locking.refused:
        return ok(CHECK, f"{who} has CAP_IPC_LOCK, so its memlock limit ({limit}) does not matter")
    seen = f"locking {TRIED // 2**20} MiB {'failed with ' + locking.refused if locking.refused else 'worked'}"
    what = f"{who} may lock {limit} of memory, and {seen}"
    if locking.rdma:
        what += f"; this machine has RDMA devices ({', '.join(locking.rdma)})"
    small = bool(locking.refused) or (locking.soft is not None and locking.soft < _LEAST)
    told = error if locking.rdma and small else warning
    return told(
        CHECK,
        what,
        "Registering a cache with an RDMA NIC locks all of it: RegisterCache then fails.  TCP and CMA lock nothing.",
        "docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity; Kubernetes: capability IPC_LOCK; else "
        "/etc/security/limits.d: * - memlock unlimited.",
    )


def main(uid: int) -> None:
    """Become the user, for good, and tell."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    sys.stdout.write(json.dumps(asdict(look())) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
