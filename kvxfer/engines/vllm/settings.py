"""What ``kv_connector_extra_config`` may hold, checked when the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank

#: Where errors say that a setting stands.
WHERE: Final = "kv_connector_extra_config"

#: What ``engine_socket`` may name in braces.
PLACES: Final = ("rank", "tp_rank", "pp_rank", "dp_rank")


class MemoryMode(str, Enum):
    """Whose memory the cache lies in, and who reads it for peers."""

    #: The sidecar makes it, the engine borrows it: it outlives the engine.
    SIDECAR = "sidecar"
    #: The engine makes it, the sidecar maps it.
    SHARED = "shared"
    #: The engine's own, read by a sidecar in the engine's process.
    EMBEDDED = "embedded"


@dataclass(frozen=True)
class ConnectorSettings:
    """The connector's settings.

    :param engine_socket: the sidecar's engine listener: a path or ``unix:`` target, in which ``{rank}``, ``{tp_rank}``,
        ``{pp_rank}`` and ``{dp_rank}`` stand for this worker's; one that ends in ``/`` is a directory that holds
        ``rank{rank}.sock``.  Needed, but in embedded mode, where it may name the place of the socket.
    :param memory: see :class:`MemoryMode`.
    :param memory_directory: shared mode: where the cache's file is made, below a directory that the sidecar allows;
        empty: a memfd, which needs no name but a common pid namespace.
    :param compatibility_key: what must be equal on both sides; empty: made from model, revision, data types.
    :param lease_ttl: how long P holds a request's blocks for D, seconds.
    :param read_timeout: how long one read may take, seconds.
    :param ready_timeout: how long to wait at the start for the sidecar and for a former registration to end, seconds.
    :param peer_host: embedded mode: the address at which peers reach this worker.
    :param peer_port: embedded mode: its port, to which the worker's rank is added; 0 takes a free one.
    :param sidecar: embedded mode: more settings of the sidecar, by name.
    """

    engine_socket: str = ""
    memory: MemoryMode = MemoryMode.SIDECAR
    memory_directory: str = ""
    compatibility_key: str = ""
    lease_ttl: float = 60.0
    read_timeout: float = 60.0
    ready_timeout: float = 120.0
    peer_host: str = "127.0.0.1"
    peer_port: int = 0
    sidecar: Mapping[str, Any] = field(default_factory=dict)

    def socket(self, rank: Rank, dp_rank: int = 0) -> str:
        """This worker's socket; empty where none is set."""
        template = self.engine_socket
        if template.endswith("/"):
            template += "rank{rank}.sock"
        return template.format(rank=rank.number, tp_rank=rank.tp_rank, pp_rank=rank.pp_rank, dp_rank=dp_rank)


def settings_from(values: Mapping[str, Any]) -> ConnectorSettings:
    """Check and take over what the user wrote.

    :raises KvxferError: FIELD_INVALID for a key that is not known, or a value that cannot be.
    """
    known = {f.name for f in fields(ConnectorSettings)}
    for key in values:
        if key not in known:
            raise refuse(key, "is not known", ", ".join(sorted(known)))
    found = dict(values)
    found["memory"] = _mode(values.get("memory", MemoryMode.SIDECAR))
    for key in ("engine_socket", "memory_directory", "compatibility_key", "peer_host"):
        if key in found and not isinstance(found[key], str):
            raise refuse(key, f"is {found[key]!r}", "a string")
    for key in ("lease_ttl", "read_timeout", "ready_timeout"):
        if key in found:
            found[key] = _seconds(key, found[key])
    port = found.get("peer_port", 0)
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65_535:
        raise refuse("peer_port", f"is {port!r}", "0 to 65535")
    if not isinstance(found.get("sidecar", {}), Mapping):
        raise refuse("sidecar", f"is {found['sidecar']!r}", "a mapping of settings' names and values")
    settings = ConnectorSettings(**found)
    _check_together(settings, values)
    return settings


def refuse(key: str, message: str, allowed: str) -> KvxferError:
    """A FIELD_INVALID error about a setting."""
    where = f"{WHERE}.{key}"
    return KvxferError(Reason.FIELD_INVALID, f"{where} {message}; allowed: {allowed}", field=where, allowed=allowed)


def not_in_host_memory(device: str) -> KvxferError:
    """An error about a cache on an accelerator, which no setting but one can serve."""
    return KvxferError(
        Reason.UNSUPPORTED,
        f"the cache is on {device}, and only host memory can be shared between engine and sidecar: use memory="
        f"{MemoryMode.EMBEDDED.value}",
    )


def _mode(value: Any) -> MemoryMode:
    try:
        return MemoryMode(value)
    except ValueError:
        raise refuse("memory", f"is {value!r}", ", ".join(mode.value for mode in MemoryMode)) from None


def _seconds(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86_400:
        raise refuse(key, f"is {value!r}", "a number of seconds, more than 0 and at most 86400")
    return float(value)


def _check_together(settings: ConnectorSettings, given: Mapping[str, Any]) -> None:
    mode = settings.memory
    if mode is not MemoryMode.EMBEDDED:
        if not settings.engine_socket:
            raise refuse("engine_socket", f"is needed with memory={mode.value}", "the path of the sidecar's socket")
        for key in ("peer_host", "peer_port", "sidecar"):
            if key in given:
                raise refuse(key, f"means nothing with memory={mode.value}", "memory=embedded beside it")
    if settings.memory_directory and mode is not MemoryMode.SHARED:
        raise refuse("memory_directory", f"means nothing with memory={mode.value}", "memory=shared beside it")
    try:
        settings.socket(Rank())
    except (KeyError, IndexError, ValueError):
        allowed = " ".join(f"{{{place}}}" for place in PLACES)
        raise refuse("engine_socket", f"is {settings.engine_socket!r}", f"a path with {allowed}") from None
