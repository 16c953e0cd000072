"""What there is now, as gauges; looked up on the event loop when somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from kvxfer.core.transfers import State
from kvxfer.service.limits import limits
from kvxfer.service.meters import Family, Kind, Labels, Spec, gauge
from kvxfer.service.metrics import PAIR
from kvxfer.service.registrations import Registration, Registrations
from kvxfer.service.settings import ServiceSettings

ENGINE: Final = PAIR[:1]

BUILD: Final = Spec(
    "kvxfer_build_info",
    Kind.GAUGE,
    "Always 1; versions of kvxfer, of the peer protocol, of NIXL and of UCX.",
    ("version", "protocol_version", "nixl_version", "ucx_version"),
)
READY: Final = Spec(
    "kvxfer_ready",
    Kind.GAUGE,
    "1 while a cache is registered that takes work, NIXL works, and the sidecar does not stop; as /readyz says.",
)
NIXL_UP: Final = Spec("kvxfer_nixl_up", Kind.GAUGE, "1 while a registration's NIXL agent works.", ENGINE)
REGISTERED_BYTES: Final = Spec(
    "kvxfer_registered_bytes", Kind.GAUGE, "Cache memory that is registered.", ("engine", "rank")
)
ORPHANED: Final = Spec(
    "kvxfer_registration_orphaned",
    Kind.GAUGE,
    "1 while the engine of a registration is gone and its leases live on.",
    ENGINE,
)
PEERS: Final = Spec(
    "kvxfer_peers",
    Kind.GAUGE,
    "Ranks that are connected, by what they are to the engine (source: it reads from them; reader: they read from it) "
    "and, of sources, by the transport that was seen in use.",
    ("engine", "role", "transport"),
)
TRANSFERS_NOW: Final = Spec(
    "kvxfer_transfers",
    Kind.GAUGE,
    "Reads by this sidecar that have not ended: prepared, posted, or draining (decided, but the local blocks may still "
    "be written).",
    ("engine", "state"),
)
IN_FLIGHT: Final = Spec("kvxfer_in_flight_bytes", Kind.GAUGE, "Bytes posted and not quiesced.", ENGINE)
LEASES: Final = Spec("kvxfer_leases", Kind.GAUGE, "Published requests whose blocks are held.", ENGINE)
OPEN_READS: Final = Spec("kvxfer_open_reads", Kind.GAUGE, "Granted reads by peers that are open.", ENGINE)
LIMIT: Final = Spec("kvxfer_limit", Kind.GAUGE, "A limit of this sidecar, in what it counts.", ("limit",))
LIMIT_USED: Final = Spec(
    "kvxfer_limit_used",
    Kind.GAUGE,
    "How much of a limit is taken, of the engine and the peer where it is most. Limits of single calls have "
    "none; engines that nothing is read from just now do not count towards max_peers.",
    ("limit",),
)

AGE: Final = Spec(
    "kvxfer_snapshot_age_seconds",
    Kind.GAUGE,
    "How old these metrics are; more than 0 where the event loop was too busy to answer the scrape.",
)

SPECS: Final = (
    *(BUILD, READY, NIXL_UP, REGISTERED_BYTES, ORPHANED, PEERS, TRANSFERS_NOW, IN_FLIGHT, LEASES, OPEN_READS),
    *(LIMIT, LIMIT_USED, AGE),
)
_STATES: Final = {
    State.PREPARED: "prepared",
    State.POSTED: "posted",
    State.DRAINING_FAILED: "draining",
    State.DRAINING_CANCELLED: "draining",
}


def families(
    registrations: Registrations, settings: ServiceSettings, versions: tuple[str, ...], *, ready: bool
) -> list[Family]:
    """All gauges.

    :param versions: in the order of :data:`BUILD`'s labels.
    """
    known = tuple(registrations)
    counted = limits(settings, known)
    return [
        gauge(BUILD, [(versions, 1)]),
        gauge(READY, [((), float(ready))]),
        gauge(NIXL_UP, [((r.identity.engine_id,), float(not r.engine.fault)) for r in known]),
        gauge(REGISTERED_BYTES, [((r.identity.engine_id, str(r.identity.rank)), r.size) for r in known]),
        gauge(ORPHANED, [((r.identity.engine_id,), float(r.hold.over)) for r in known]),
        gauge(PEERS, _peers(known)),
        gauge(TRANSFERS_NOW, _transfers(known)),
        gauge(IN_FLIGHT, [((r.identity.engine_id,), r.transfers.bytes_in_flight) for r in known]),
        gauge(LEASES, [((r.identity.engine_id,), len(r.leases)) for r in known]),
        gauge(OPEN_READS, [((r.identity.engine_id,), r.readers.open_reads) for r in known]),
        gauge(LIMIT, [((limit.name,), limit.value) for limit in counted]),
        gauge(LIMIT_USED, [((limit.name,), limit.used) for limit in counted if limit.used is not None]),
    ]


def connected(registrations: Registrations) -> set[Labels]:
    """Pairs of engines that are connected, and each local engine alone."""
    found: set[Labels] = set()
    for registration in registrations:
        engine = registration.identity.engine_id
        found.add((engine, ""))
        found.update((engine, link.target.engine_id) for link in registration.links)
        found.update((engine, name) for name in registration.readers.engines)
    return found


def _peers(known: tuple[Registration, ...]) -> Iterator[tuple[Labels, float]]:
    for registration in known:
        engine = registration.identity.engine_id
        by_transport = Counter(link.transport.value for link in registration.links for _ in link.sources)
        yield from (((engine, "source", transport), n) for transport, n in by_transport.items())
        yield (engine, "reader", ""), len(registration.readers)


def _transfers(known: tuple[Registration, ...]) -> Iterator[tuple[Labels, float]]:
    for registration in known:
        states = Counter(_STATES.get(t.state, "") for t in registration.transfers)
        for state in sorted(set(_STATES.values())):
            yield (registration.identity.engine_id, state), states[state]
