"""What may happen to a process, when, and what everybody else must see: written down before it is tried.

The phases of a read, and how each is reached without guessing at times:

- HANDSHAKE: D has connected to P's peer port, and P, which is stopped, does not answer.
- OPEN: P has OpenRead before it, and waits for the request's publication.
- POSTED: the transfer is POSTED, and P, which is stopped, has not granted it.  (A fault of D's sidecar needs no stopped
  P: it comes as soon as ReadBlocks says POSTED.)
- HALF: some bytes have arrived, not all.
- CLOSING: D's sidecar has just said DONE; whether P was told as well is a race, and must not matter.

Times are the bounds of the settings below, and what a busy machine of two cores needs on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tests.chaos.engines import NO_ANSWER, SIDECAR_GONE


class Who(str, Enum):
    P_ENGINE = "P's engine"
    P_SIDECAR = "P's sidecar"
    D_ENGINE = "D's engine"
    D_SIDECAR = "D's sidecar"


class Fault(str, Enum):
    KILL = "kill -9"
    STOP = "SIGSTOP"


class Phase(str, Enum):
    HANDSHAKE = "handshake"
    OPEN = "open"
    POSTED = "posted"
    HALF = "half done"
    CLOSING = "closing"


#: Seconds.  Of the sidecars under test; those of production are longer.
HANDSHAKE_TIMEOUT = 3.0
PUBLISH_WAIT = 2.0
READ_GRANT = 3.0
DRAIN_LIMIT = 2.0
#: A read's own deadline, where P is stopped; and where nothing shall end it but its end.
SHORT_READ = 3.0
LONG_READ = 60.0
#: How long P holds a request: until its readers are done, or so short that the hold ends by itself.
LONG_HOLD = 60.0
SHORT_HOLD = 4.0
#: What a busy machine may add to any of these.
SLACK = 4.0

SETTINGS = {
    "handshake_timeout": HANDSHAKE_TIMEOUT,
    "publish_wait": PUBLISH_WAIT,
    "read_grant": READ_GRANT,
    "drain_limit": DRAIN_LIMIT,
    "drain_timeout": 2,
}

DONE = "DONE"
#: The lease is gone with the sidecar that kept it.
GONE = "GONE"
#: The transfer was never begun.
UNKNOWN = "TRANSFER_UNKNOWN"


def outcomes(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class Case:
    """One fault.

    :param d: the outcome of the read: DONE, or the reason it failed with.  Bytes of DONE are compared, every one.
    :param within: seconds from the fault (or, where it lasts, from its end, if the outcome must wait for that) until
        D's engine has that outcome.
    :param caller: what the call of D's engine was answered, where that is not the outcome: D's sidecar is gone or
        stopped itself.
    :param lease: how P's lease ends.
    :param hold: seconds for which P holds the request.
    :param read: the read's own deadline, seconds.
    :param ci: whether it is in the short run.
    """

    who: Who
    fault: Fault
    phase: Phase
    d: frozenset[str]
    within: float
    lease: frozenset[str]
    caller: frozenset[str] = frozenset()
    hold: float = LONG_HOLD
    read: float = LONG_READ
    ci: bool = False

    def __str__(self) -> str:
        return f"{self.who.name}-{self.fault.name}-{self.phase.name}".lower()


LOST = outcomes("PEER_LOST PEER_UNREACHABLE TRANSFER_FAILED")
LATE = outcomes("DEADLINE_EXCEEDED PEER_UNREACHABLE")
#: D's sidecar slept while P's hold ended.
MISSED = outcomes("LEASE_EXPIRED DEADLINE_EXCEEDED PEER_LOST PEER_UNREACHABLE TRANSFER_FAILED")
OK = outcomes(DONE)
RELEASED, EXPIRED = outcomes("RELEASED"), outcomes("EXPIRED")
GONE_TOO = outcomes(GONE)
#: UCX may abort a stopped process when it wakes: then the lease has gone with it, and that process must be restarted.
EXPIRED_OR_GONE = EXPIRED | GONE_TOO
EITHER = RELEASED | EXPIRED

CASES: tuple[Case, ...] = (
    # P's engine: its memory and its promises are its sidecar's by now, and nobody notices.  What it has not published
    # by then nobody gets.
    Case(Who.P_ENGINE, Fault.KILL, Phase.HANDSHAKE, OK, 10, RELEASED),
    Case(
        Who.P_ENGINE, Fault.KILL, Phase.OPEN, outcomes("LEASE_UNKNOWN"), PUBLISH_WAIT + SLACK, outcomes("UNPUBLISHED")
    ),
    Case(Who.P_ENGINE, Fault.KILL, Phase.POSTED, OK, 10, RELEASED),
    Case(Who.P_ENGINE, Fault.KILL, Phase.HALF, OK, 10, RELEASED, ci=True),
    Case(Who.P_ENGINE, Fault.KILL, Phase.CLOSING, OK, 1, RELEASED),
    Case(Who.P_ENGINE, Fault.STOP, Phase.HANDSHAKE, OK, 10, RELEASED),
    Case(
        *(Who.P_ENGINE, Fault.STOP, Phase.OPEN, outcomes("LEASE_UNKNOWN"), PUBLISH_WAIT + SLACK),
        lease=outcomes("UNPUBLISHED"),
        ci=True,
    ),
    Case(Who.P_ENGINE, Fault.STOP, Phase.POSTED, OK, 10, RELEASED),
    Case(Who.P_ENGINE, Fault.STOP, Phase.HALF, OK, 10, RELEASED),
    Case(Who.P_ENGINE, Fault.STOP, Phase.CLOSING, OK, 1, RELEASED),
    # P's sidecar, killed: the connection breaks, which D sees at once.
    Case(Who.P_SIDECAR, Fault.KILL, Phase.HANDSHAKE, LOST, SLACK, GONE_TOO),
    Case(Who.P_SIDECAR, Fault.KILL, Phase.OPEN, LOST, SLACK, GONE_TOO),
    Case(Who.P_SIDECAR, Fault.KILL, Phase.POSTED, LOST, SLACK, GONE_TOO),
    Case(Who.P_SIDECAR, Fault.KILL, Phase.HALF, LOST, SLACK, GONE_TOO, ci=True),
    Case(Who.P_SIDECAR, Fault.KILL, Phase.CLOSING, OK, 1, GONE_TOO),
    # P's sidecar, stopped: nothing breaks and nothing moves, so that only deadlines help.  Where a READ
    # is under way D's blocks are free again after the drain limit, with P still stopped.
    Case(Who.P_SIDECAR, Fault.STOP, Phase.HANDSHAKE, LATE, HANDSHAKE_TIMEOUT + SLACK, EXPIRED, hold=SHORT_HOLD),
    Case(
        *(Who.P_SIDECAR, Fault.STOP, Phase.OPEN, LATE, SHORT_READ + SLACK),
        lease=EXPIRED_OR_GONE | outcomes("UNPUBLISHED"),  # it may live on, and nobody has published
        hold=SHORT_HOLD,
        read=SHORT_READ,
    ),
    Case(
        *(Who.P_SIDECAR, Fault.STOP, Phase.POSTED, LATE, SHORT_READ + SLACK),
        lease=EXPIRED_OR_GONE,
        hold=SHORT_HOLD,
        read=SHORT_READ,
    ),
    Case(
        *(Who.P_SIDECAR, Fault.STOP, Phase.HALF, LATE, SHORT_READ + SLACK),
        lease=EXPIRED_OR_GONE,
        hold=SHORT_HOLD,
        read=SHORT_READ,
        ci=True,
    ),
    Case(Who.P_SIDECAR, Fault.STOP, Phase.CLOSING, OK, 1, RELEASED, ci=True),
    # D's engine: the transfer is its sidecar's, and goes on; one that was not begun never is.
    Case(Who.D_ENGINE, Fault.KILL, Phase.HANDSHAKE, outcomes(UNKNOWN), 10, EXPIRED, hold=SHORT_HOLD),
    Case(Who.D_ENGINE, Fault.KILL, Phase.OPEN, OK, 10, RELEASED),
    Case(Who.D_ENGINE, Fault.KILL, Phase.POSTED, OK, 10, RELEASED),
    Case(Who.D_ENGINE, Fault.KILL, Phase.HALF, OK, 10, RELEASED, ci=True),
    Case(Who.D_ENGINE, Fault.KILL, Phase.CLOSING, OK, 1, RELEASED),
    Case(Who.D_ENGINE, Fault.STOP, Phase.HANDSHAKE, OK, 10, RELEASED),
    Case(Who.D_ENGINE, Fault.STOP, Phase.OPEN, OK, 10, RELEASED),
    Case(Who.D_ENGINE, Fault.STOP, Phase.POSTED, OK, 10, RELEASED),
    Case(Who.D_ENGINE, Fault.STOP, Phase.HALF, OK, 10, RELEASED),
    Case(Who.D_ENGINE, Fault.STOP, Phase.CLOSING, OK, 1, RELEASED),
    # D's sidecar, killed: P holds the blocks until the time it gave is over, and serves others all the while.  While a
    # read is under way UCX may abort P over it (seen in a few of a hundred): then P restarts.
    Case(
        *(Who.D_SIDECAR, Fault.KILL, Phase.HANDSHAKE, outcomes(SIDECAR_GONE), SLACK, EXPIRED),
        hold=SHORT_HOLD,
    ),
    Case(Who.D_SIDECAR, Fault.KILL, Phase.OPEN, outcomes(SIDECAR_GONE), SLACK, EXPIRED_OR_GONE, hold=SHORT_HOLD),
    Case(Who.D_SIDECAR, Fault.KILL, Phase.POSTED, outcomes(SIDECAR_GONE), SLACK, EXPIRED_OR_GONE, hold=SHORT_HOLD),
    Case(
        Who.D_SIDECAR, Fault.KILL, Phase.HALF, outcomes(SIDECAR_GONE), SLACK, EXPIRED_OR_GONE, hold=SHORT_HOLD, ci=True
    ),
    Case(Who.D_SIDECAR, Fault.KILL, Phase.CLOSING, OK, 1, EITHER, hold=SHORT_HOLD),
    # D's sidecar, stopped until P's hold has ended and P has put something else into the blocks: what D finds when it
    # wakes must not count.
    Case(
        *(Who.D_SIDECAR, Fault.STOP, Phase.HANDSHAKE, MISSED | outcomes(UNKNOWN), SLACK, EXPIRED),
        caller=outcomes(NO_ANSWER),
        hold=SHORT_HOLD,
    ),
    Case(
        *(Who.D_SIDECAR, Fault.STOP, Phase.OPEN, MISSED, SLACK, EXPIRED),
        caller=outcomes(NO_ANSWER),
        hold=SHORT_HOLD,
    ),
    Case(
        *(Who.D_SIDECAR, Fault.STOP, Phase.POSTED, MISSED, SLACK, EXPIRED),
        caller=outcomes(NO_ANSWER),
        hold=SHORT_HOLD,
    ),
    Case(
        *(Who.D_SIDECAR, Fault.STOP, Phase.HALF, MISSED, SLACK, EXPIRED),
        caller=outcomes(NO_ANSWER),
        hold=SHORT_HOLD,
        ci=True,
    ),
    Case(Who.D_SIDECAR, Fault.STOP, Phase.CLOSING, OK, 1, EITHER, hold=SHORT_HOLD),
)
