"""What stands between the processes of this host: namespaces, ptrace rules, capabilities."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvxfer.doctor.findings import Finding, error, ok, unknown, warning

CHECK: Final = "namespaces"

#: The inodes of the first namespaces of a machine, fixed by Linux (include/linux/proc_ns.h).
_FIRST: Final = {"pid": 0xEFFFFFFC, "user": 0xEFFFFFFD}
_CAP_SYS_PTRACE: Final = 19
_PTRACE_SCOPES: Final = {1: "only its children", 2: "processes of administrators only", 3: "nothing at all"}


@dataclass(frozen=True, slots=True)
class Confinement:
    """What this process may do to others.

    :param namespaces: kind -> inode; without those that could not be read.
    :param ptrace_scope: Yama's rule; None where the kernel has none.
    :param ptrace: whether this process has CAP_SYS_PTRACE.
    """

    namespaces: dict[str, int]
    uid: int
    ptrace_scope: int | None
    ptrace: bool

    def against_cma(self, transports: Sequence[str] | None) -> list[str]:
        """What may keep UCX from CMA here, and what to do about each."""
        found = []
        if self.ptrace_scope and not self.ptrace:
            whom = _PTRACE_SCOPES.get(self.ptrace_scope, "few processes")
            found.append(
                f"kernel.yama.ptrace_scope is {self.ptrace_scope}: a process may look into {whom}.  Set it to 0, or "
                "give the sidecars CAP_SYS_PTRACE (docker --cap-add SYS_PTRACE)"
            )
        if transports is not None and "cma" not in transports:
            found.append(
                "UCX says that CMA cannot be used here: a seccomp profile may forbid process_vm_readv (Docker's allows "
                "it with --cap-add SYS_PTRACE), or the module is missing"
            )
        return found


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine's process.

    :param exists: whether this process can see one of that number.
    :param namespaces: as in :class:`Confinement`; empty where they may not be read.
    """

    pid: int
    exists: bool
    namespaces: dict[str, int]
    uid: int | None


def look() -> Confinement:
    """Ask the kernel about this process."""
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = None
    return Confinement(_namespaces("self"), os.geteuid(), scope, has_capability(_CAP_SYS_PTRACE))


def look_at(pid: int) -> Engine:
    """Ask the kernel about another process."""
    place = Path("/proc") / str(pid)
    try:
        uid: int | None = place.stat().st_uid
    except OSError:
        return Engine(pid, False, {}, None)
    return Engine(pid, True, _namespaces(str(pid)), uid)


def has_capability(number: int) -> bool:
    """Whether this process has a capability in force."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def _namespaces(process: str) -> dict[str, int]:
    found = {}
    for kind in ("pid", "user"):
        try:
            found[kind] = os.stat(f"/proc/{process}/ns/{kind}").st_ino
        except OSError:
            continue
    return found


_NO_MEMFD: Final = (
    "An engine in another pid namespace cannot hand over memory as a memfd (the sidecar opens it through the engine's "
    "pid), and reads between sidecars of different pid namespaces take TCP, silently, instead of CMA."
)
_SHARE: Final = (
    "Hand over files below a shared memory_directories instead.  For memfds and CMA, share the namespace: in "
    "Kubernetes shareProcessNamespace: true, in Docker --pid container:NAME or --pid host."
)


def judge(confined: Confinement, engine: Engine | None) -> list[Finding]:
    """:param engine: the engine's process, where it was named."""
    findings = []
    mine = confined.namespaces
    if engine is None:
        findings.append(_alone(mine))
    elif not engine.exists:
        findings.append(
            error(
                CHECK,
                f"there is no process {engine.pid} in this pid namespace",
                f"Either it does not run, or it runs in a namespace that cannot be seen from here.  {_NO_MEMFD}",
                _SHARE,
            )
        )
    elif "pid" not in engine.namespaces or "pid" not in mine:
        findings.append(
            unknown(
                CHECK,
                f"the namespaces of process {engine.pid} may not be read by uid {confined.uid}",
                _NO_MEMFD,
                "Run kvxfer doctor as the engine's user, or as root.",
            )
        )
    elif engine.namespaces["pid"] != mine["pid"]:
        findings.append(
            warning(CHECK, f"process {engine.pid} is in a pid namespace of its own, not in this one", _NO_MEMFD, _SHARE)
        )
    elif engine.namespaces.get("user") != mine.get("user"):
        findings.append(
            warning(
                CHECK,
                f"process {engine.pid} is in another user namespace",
                "The kernel then lets neither look into the other: no memfd handles, no CMA.",
                "Run both in one user namespace (the same pod, the same rootless container engine).",
            )
        )
    else:
        findings.append(ok(CHECK, f"process {engine.pid} shares this process's pid and user namespaces"))
    if engine is not None and engine.uid not in (None, confined.uid) and not confined.ptrace:
        findings.append(
            warning(
                CHECK,
                f"process {engine.pid} runs as uid {engine.uid}, this one as uid {confined.uid} without CAP_SYS_PTRACE",
                "The kernel then lets this one not open the other's memfds, nor its memory files of mode 0600.",
                "Run sidecar and engine as one user, or set memory_file_group and memory_file_mode = 0660.",
            )
        )
    return findings


def _alone(mine: dict[str, int]) -> Finding:
    own = [kind for kind, inode in _FIRST.items() if kind in mine and mine[kind] != inode]
    if not own:
        return ok(
            CHECK,
            "this process is in the machine's own pid and user namespaces (--engine-pid PID compares with an engine's)",
        )
    return warning(
        CHECK,
        f"this process is in a {' and a '.join(own)} namespace of its own, as in a container",
        _NO_MEMFD,
        f"{_SHARE}  --engine-pid PID tells whether an engine shares it.",
    )
