"""The segments of UCX's TCP transport: how much it sends at once, and how much it has room for.

UCX does not compare them with the other side's: what comes in larger than it has room for is written past the end of
its buffer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

#: UCX's variables.
SENT: Final = "UCX_TCP_TX_SEG_SIZE"
RECEIVED: Final = "UCX_TCP_RX_SEG_SIZE"

#: UCX's own values where nobody has set any.
_OWN: Final[Mapping[str, str]] = {SENT: "8K", RECEIVED: "64K"}
_UNITS: Final = {None: 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
#: UCX reads a number of this type.
_MOST: Final = 2**63 - 1


class Segments(NamedTuple):
    """What UCX sends at once over TCP at most, and how much it has room for, bytes; 0 where it takes no such value."""

    sent: int
    received: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Segments:
        """As the environment of UCX says."""
        return cls(*(size_of(environment.get(name, own)) for name, own in _OWN.items()))


def missing(environment: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """The defaults of what the environment does not set, as far as they go with what it does.

    UCX does not start where it sends more than it has room for.  So where one of the two is set, the default of the
    other is at most, or at least, as large; none is given where UCX will not take the one that is set.
    """
    found = {name: value for name, value in defaults.items() if name not in environment}
    for name, other, choose in ((SENT, RECEIVED, min), (RECEIVED, SENT, max)):
        if name in found and other not in found:
            size = size_of(environment[other])
            found[name] = str(choose(size, size_of(found[name])))
            if not size:
                del found[name]
    return found


def size_of(text: str) -> int:
    """A size as UCX reads it, bytes, or 0: a number, a unit, a B; what follows that does not count."""
    found = re.match(r"\s*\+?(\d+)(?:\Z|([BKMGT])(?:\Z|B))", text.upper(), re.ASCII)
    size = int(found[1]) * _UNITS[found[2]] if found else 0
    return size if size <= _MOST else 0
