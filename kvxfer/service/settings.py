"""What the service needs to be told: limits, times and the memory policy.  Sizes are bytes, times seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxfer.memory.policy import MemoryPolicy


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """See :class:`kvxfer.config.Settings`, from which a sidecar fills these in."""

    memory: MemoryPolicy = field(default_factory=MemoryPolicy)
    max_registrations: int = 8
    max_transfers: int = 4096
    max_transfers_per_peer: int = 1024
    max_bytes_in_flight: int = 64 * 2**30
    max_bytes_in_flight_per_peer: int = 32 * 2**30
    max_peers: int = 256
    max_descriptors: int = 8_388_608
    max_leases: int = 65_536
    message_limit: int = 16 * 1024 * 1024
    kept_transfers: int = 4096
    kept_leases: int = 4096
    handshake_timeout: float = 10.0
    read_timeout: float = 60.0
    prepared_ttl: float = 60.0
    lease_ttl: float = 30.0
    max_lease_ttl: float = 3600.0
    publish_wait: float = 2.0
    read_grant: float = 15.0
    max_read: float = 600.0
    drain_timeout: float = 10.0
    drain_limit: float = 10.0
    engine_grace: float = 5.0
