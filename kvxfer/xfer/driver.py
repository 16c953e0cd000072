"""What a transfer library must do for the pump: the port between :mod:`kvxfer.xfer.pump` and each library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvxfer.xfer.api import Indices, MemoryKind, RowArray, Span, Telemetry


@dataclass(frozen=True, slots=True)
class LibraryInfo:
    """What a driver knows about the library that it drives; see :class:`kvxfer.xfer.api.EngineInfo`."""

    library: str
    library_version: str
    transport_version: str
    backends: Mapping[str, Mapping[str, str]]
    environment: Mapping[str, str]
    defaults: tuple[str, ...]


class Driver(Protocol):
    """One agent of a transfer library, as the pump needs it.

    Every method is called on the pump's thread, one at a time, and raises only :class:`KvxferError`.  Handles are
    opaque.
    """

    def open(self, name: str) -> None:
        """Create the agent."""

    def close(self) -> None:
        """Destroy the agent; whatever was in flight stops.  Called once, also after a failed :meth:`open`."""

    def register(self, spans: Sequence[Span]) -> Any:
        """Register memory; gives a handle."""

    def deregister(self, handle: Any) -> None:
        """Undo :meth:`register`."""

    def metadata(self) -> bytes:
        """What peers need to know."""

    def add_peer(self, metadata: bytes, expected_name: str) -> None:
        """Load a peer's metadata and connect; leaves nothing behind when it raises."""

    def remove_peer(self, name: str) -> None:
        """Forget a peer."""

    def prepare(self, rows: RowArray, kind: MemoryKind, peer: str | None) -> Any:
        """Prepare a descriptor list (of the local side where ``peer`` is None); gives a handle."""

    def release_rows(self, handle: Any) -> None:
        """Free a prepared list."""

    def make(self, local: Any, local_indices: Indices, remote: Any, remote_indices: Indices, note: bytes) -> Any:
        """Make a request; gives a handle."""

    def post(self, handle: Any) -> bool:
        """Post a request; true when it is complete already."""

    def check(self, handle: Any) -> bool:
        """Drive progress; true when the posted request is complete."""

    def telemetry(self, handle: Any) -> Telemetry | None:
        """The library's figures for a complete request."""

    def release(self, handle: Any) -> None:
        """Free a request; raises where the library has not let go of it yet."""

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a notification that belongs to no request."""

    def notifications(self) -> Sequence[tuple[str, bytes]]:
        """Drive progress; what arrived since the last call, as (peer, payload)."""

    def describe(self) -> LibraryInfo:
        """Versions, backends, environment."""
