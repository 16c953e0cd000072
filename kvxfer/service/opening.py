"""Asking a source for a read (OpenRead), and what it grants.

No clock of one machine is compared with that of another: granted time counts from before the call that asked for it,
which is earlier than the moment of granting.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.service.link import LinkSource
from kvxfer.wire.peer import OpenRead


def clock() -> float:
    """Seconds on a clock that also runs while this machine is suspended: the other one's may not have been."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


#: How much of a second of the other side's is counted on: clocks of two machines do not run alike.
SURE: Final = 0.999


@dataclass
class Grant:
    """The blocks stay as they are until ``until`` on :func:`clock`; it was given for ``seconds``.

    :param unheard: why the source was not heard when it was last asked for more.
    """

    seconds: float
    until: float
    unheard: KvxferError | None = None

    def check(self, ended: float) -> None:
        """Whether what was read by ``ended`` counts.

        :raises KvxferError: LEASE_EXPIRED; PEER_UNREACHABLE where the source could not be asked for more time.
        """
        if ended > self.until and self.unheard is not None:
            raise self.unheard
        if ended > self.until:
            late = ended - self.until
            raise KvxferError(
                Reason.LEASE_EXPIRED,
                f"the read ended {late:.3f} s after the time that the source had granted",
                granted_s=self.seconds,
                late_s=round(late, 6),
            )


#: A source that does not answer is told of by the read's own deadline: the call's, and what is asked for, end so much
#: later, seconds.
LATER: Final = 5.0

#: Who has not answered for so long, seconds, may have been cut off.  UCX gives a connection up after 3 s, and tells of
#: it only where it is used next; a source that waits for a publication answers after ``publish_wait``, 2 s.
SILENT: Final = 2.5

#: OpenRead under way.
Opening: TypeAlias = "asyncio.Future[Grant]"


def announce(source: LinkSource, record: OpenRead, timeout: float) -> Opening:
    """Have a source asked, now."""
    asked = clock()
    answer = source.client.open_read(record, timeout + LATER)

    async def granted() -> Grant:
        try:
            seconds = await answer * SURE
        except asyncio.CancelledError:  # it was waited for in vain
            source.rank.silent |= clock() - asked >= SILENT
            raise
        source.rank.heard()
        return Grant(seconds, asked + seconds)

    return asyncio.ensure_future(granted())


def looked_at(ended: asyncio.Future[Any]) -> None:
    """A done callback: asyncio complains about failures that nobody has looked at."""
    if not ended.cancelled():
        ended.exception()
