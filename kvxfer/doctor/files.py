"""How many files a sidecar may have open: every engine that it reads from takes some."""

from __future__ import annotations

import resource
from typing import Final

from kvxfer.doctor.findings import Finding, error, ok, warning
from kvxfer.files import RESERVE

CHECK: Final = "nofile"
#: What a sidecar has open that has registered one cache and reads from nobody.
_BASE: Final = 60
#: What an engine of one rank that is read from takes: for each lane, and besides.
_LANE, _ENGINE = 13, 3


def look() -> int | None:
    """The hard limit, to which ``kvxfer serve`` raises the other one; None: there is none."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def judge(limit: int | None, lanes: int, max_peers: int) -> Finding:
    """For how many engines to read from that is enough."""
    each = lanes * _LANE + _ENGINE
    room = max_peers if limit is None else max(0, (limit - RESERVE - _BASE) // each)
    told = "any number of files" if limit is None else f"{limit:,} files"
    if room >= max_peers:
        return ok(CHECK, f"a sidecar may have {told} open: enough to read from {max_peers} engines (max_peers)")
    what = f"a sidecar may have {told} open: enough to read from about {room} engines; max_peers is {max_peers}"
    why = (
        f"Each engine that is read from takes about {each} while its link lasts (lanes is {lanes}), one of several "
        "ranks more.  A handshake with one more fails with LIMIT_EXCEEDED; links that are there go on."
    )
    todo = (
        "docker run --ulimit nofile=65536; systemd: LimitNOFILE=65536; else /etc/security/limits.d: * - nofile 65536.  "
        "Or set max_peers to what is needed: then the link that was used least recently makes room."
    )
    return (warning if room else error)(CHECK, what, why, todo)
