"""The limits of a sidecar: what each is, and how much of it is taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvxfer import files
from kvxfer.core.leases import MAX_ENGINES, MAX_GRANTS
from kvxfer.service.readers import MAX_READERS, MAX_READS
from kvxfer.service.settings import ServiceSettings

if TYPE_CHECKING:
    from kvxfer.service.registrations import Registration

#: Those that are settings.
SETTINGS: Final = (
    *("max_registrations", "max_transfers", "max_transfers_per_peer", "max_bytes_in_flight"),
    *("max_bytes_in_flight_per_peer", "max_peers", "max_descriptors", "max_leases", "message_limit"),
)
#: Those that are not.
FIXED: Final[Mapping[str, int]] = {
    "max_readers": MAX_READERS,
    "max_reads": MAX_READS,
    "max_grants": MAX_GRANTS,
    "max_reading_engines": MAX_ENGINES,
}
#: Every name that a LIMIT_EXCEEDED error of this sidecar may tell as ``limit_name``; the last is the process's own.
NAMES: Final = frozenset({*SETTINGS, *FIXED, files.NAME})


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit now.

    :param used: how much is taken, of the registration and the peer where it is most; ``None``: it is about one call.
    """

    name: str
    value: int
    used: int | None


def limits(settings: ServiceSettings, registrations: Iterable[Registration]) -> list[Limit]:
    """All of them."""
    known = tuple(registrations)

    def most(values: Iterable[int]) -> int:
        return max(values, default=0)

    used = {
        "max_registrations": len(known),
        "max_transfers": most(r.transfers.room.taken for r in known),
        "max_transfers_per_peer": most(r.transfers.room.most for r in known),
        "max_bytes_in_flight": most(r.transfers.bytes_room.taken for r in known),
        "max_bytes_in_flight_per_peer": most(r.transfers.bytes_room.most for r in known),
        # An idle link makes room for another.
        "max_peers": most(sum(not link.idle for link in r.links) for r in known),
        "max_leases": most(len(r.leases) for r in known),
        "max_readers": most(len(r.readers) for r in known),
        "max_reads": most(r.readers.most_reads for r in known),
        files.NAME: files.used(),
    }
    values = {**{name: int(getattr(settings, name)) for name in SETTINGS}, **FIXED, files.NAME: files.limit()}
    return [Limit(name, value, used.get(name)) for name, value in values.items()]
