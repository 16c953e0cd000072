"""The transport that two agents on this host really get."""

from __future__ import annotations

from typing import Final

from kvxfer.doctor.findings import Finding, error, ok, unknown, warning
from kvxfer.doctor.probe import Pair, Survey
from kvxfer.doctor.processes import Confinement

CHECK: Final = "transport"
#: Transports that copy within a host: memory of another process by CMA, or shared memory.
_WITHIN: Final = frozenset({"cma", "knem", "xpmem", "posix", "sysv", "self", "cuda_ipc"})


def judge(pair: Pair | None, survey: Survey | None, confined: Confinement) -> list[Finding]:
    """One finding.

    :param pair: what two agents got; None where there is no NIXL to try.
    :param confined: what may hold CMA back.
    """
    if pair is None or survey is None:
        return [unknown(CHECK, "no transport was tried: there is no NIXL")]
    if pair.failure:
        said = f"; UCX says: {'; '.join(pair.problems)}" if pair.problems else ""
        return [
            error(
                CHECK,
                f"two agents on this host cannot read from each other: {pair.failure}{said}",
                "A sidecar in this environment would fail in the same way.",
                "See what is said of the UCX variables and interfaces; UCX_LOG_LEVEL=info tells more.",
            )
        ]
    if not pair.right:
        return [
            error(
                CHECK,
                "a read between two agents on this host completed with wrong bytes",
                "Nothing that is read here can be trusted.",
                "Report it, with the output of kvxfer doctor --json.",
            )
        ]
    rate = (
        f"{pair.bytes / pair.seconds / 1e9:.1f} GB/s (best of a few reads of {pair.bytes // 2**20} MiB, bytes compared)"
    )
    if not pair.paths:
        return [unknown(CHECK, f"two agents on this host read at {rate}; UCX does not say over which transport")]
    path = pair.paths[-1]
    lanes = ", ".join(path.lanes) or "a transport that it does not name"
    what = f"two agents on this host read over {lanes} ({path.method}) at {rate}"
    if any(lane.partition("/")[0] in _WITHIN for lane in path.lanes):
        return [ok(CHECK, what)]
    if not all(lane.startswith("tcp/") for lane in path.lanes):
        return [ok(CHECK, what)]
    causes = confined.against_cma(survey.transports)
    because = "; ".join(causes) if causes else "UCX has CMA and did not use it: is it left out of UCX_TLS?"
    return [
        warning(
            CHECK,
            what,
            "Nothing fails, and nobody is told: reads within the host take TCP instead of CMA (process_vm_readv), "
            "which copies each byte once.  It does not matter between hosts.",
            because,
        )
    ]
