"""A transfer engine within one process, by ``memcpy``, with scripted faults.  For tests only.

Engines that share a :class:`Fabric` can be each other's peers.  They run on the same pump and the same bookkeeping
as the real ones; only the driver differs.  As with NIXL, a target sees notifications only while it polls.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.xfer.api import Indices, MemoryKind, NotificationHandler, RowArray, Span, Telemetry
from kvxfer.xfer.driver import LibraryInfo
from kvxfer.xfer.engine import EngineSettings, PumpedEngine

#: The settings of a loopback engine that is given none.
QUICK: Final = EngineSettings(warm_up=0.0)

_MAGIC: Final = b"kvxfer-loopback\0"


class Fabric:
    """What joins loopback engines, and the script of what goes wrong.  Thread-safe.

    Posts and notifications are counted over the whole fabric, from 1, warm-up reads included where they are on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inboxes: dict[str, deque[tuple[str, bytes]]] = {}
        self._gone: set[str] = set()
        self._posts = 0
        self._failing: dict[int, Reason] = {}
        self._held = False
        self._lose = 0
        self._duplicate = 0

    # --- the script ------------------------------------------------------------------------------------------------

    def fail_post(self, k: int, reason: Reason = Reason.TRANSFER_FAILED) -> None:
        """Let the ``k``-th post from now (1: the next) fail with ``reason``; nothing is copied."""
        with self._lock:
            self._failing[self._posts + k] = reason

    def hold(self) -> None:
        """Let reads stay in flight, uncopied, until :meth:`let_go`: what is written late is written *after* that."""
        with self._lock:
            self._held = True

    def let_go(self) -> None:
        """Let held reads, and all later ones, complete."""
        with self._lock:
            self._held = False

    def lose_notifications(self, count: int = 1) -> None:
        """Let the next ``count`` notifications vanish."""
        with self._lock:
            self._lose += count

    def duplicate_notifications(self, count: int = 1) -> None:
        """Let the next ``count`` notifications (that are not lost) arrive twice."""
        with self._lock:
            self._duplicate += count

    def vanish(self, name: str) -> None:
        """Let an engine be gone for all others: reads from it fail with PEER_LOST, also those in flight."""
        with self._lock:
            self._gone.add(name)

    @property
    def posts(self) -> int:
        """Posts so far."""
        with self._lock:
            return self._posts

    # --- for the driver --------------------------------------------------------------------------------------------

    def join(self, name: str) -> None:
        """Add an engine."""
        with self._lock:
            if name in self._inboxes:
                raise KvxferError(Reason.INTERNAL, "an agent of this name exists", agent=name)
            self._inboxes[name] = deque()
            self._gone.discard(name)

    def leave(self, name: str) -> None:
        """Remove an engine."""
        with self._lock:
            self._inboxes.pop(name, None)

    def knows(self, name: str) -> bool:
        """Whether the engine can be reached."""
        with self._lock:
            return name in self._inboxes and name not in self._gone

    def count_post(self) -> Reason | None:
        """Count a post; the reason that it shall fail with."""
        with self._lock:
            self._posts += 1
            return self._failing.pop(self._posts, None)

    @property
    def held(self) -> bool:
        """Whether reads shall stay in flight."""
        with self._lock:
            return self._held

    def notify(self, sender: str, target: str, payload: bytes) -> None:
        """Put a notification into the target's inbox, as often as the script says."""
        with self._lock:
            inbox = self._inboxes.get(target)
            if self._lose:
                self._lose -= 1
                return
            times = 1
            if self._duplicate:
                self._duplicate -= 1
                times = 2
            if inbox is not None:
                inbox.extend([(sender, payload)] * times)

    def collect(self, name: str) -> list[tuple[str, bytes]]:
        """Take what is in an inbox."""
        with self._lock:
            inbox = self._inboxes.get(name)
            found = list(inbox or ())
            if inbox is not None:
                inbox.clear()
            return found


@dataclass(frozen=True, slots=True, eq=False)
class _List:
    peer: str | None
    addresses: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class _Request:
    peer: str
    into: npt.NDArray[np.uint64]
    source: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint64]
    note: bytes
    in_flight: bool = False


class LoopbackDriver:
    """See :class:`kvxfer.xfer.driver.Driver`."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._name = ""
        self._peers: set[str] = set()
        self.alive: set[Any] = set()

    def open(self, name: str) -> None:
        """Join the fabric."""
        self._fabric.join(name)
        self._name = name

    def close(self) -> None:
        """Leave the fabric; what is in flight is never copied."""
        if self._name:
            self._fabric.leave(self._name)
        self.alive.clear()

    def register(self, spans: Sequence[Span]) -> Any:
        """Accepts host memory."""
        if any(span.kind is not MemoryKind.DRAM for span in spans):
            raise KvxferError(Reason.UNSUPPORTED, "the loopback engine knows host memory only")
        handle = object()
        self.alive.add(handle)
        return handle

    def deregister(self, handle: Any) -> None:
        """Undo :meth:`register`."""
        self.alive.discard(handle)

    def metadata(self) -> bytes:
        """Names the engine."""
        return _MAGIC + self._name.encode("ascii")

    def add_peer(self, metadata: bytes, expected_name: str) -> None:
        """Check the metadata."""
        if not metadata.startswith(_MAGIC) or metadata[len(_MAGIC) :] != expected_name.encode():
            raise KvxferError(Reason.PEER_METADATA_INVALID, "metadata of another agent", expected=expected_name)
        if not self._fabric.knows(expected_name):
            raise KvxferError(Reason.PEER_LOST, "the peer is gone", peer=expected_name)
        self._peers.add(expected_name)

    def remove_peer(self, name: str) -> None:
        """Forget a peer."""
        self._peers.discard(name)

    def prepare(self, rows: RowArray, kind: MemoryKind, peer: str | None) -> Any:
        """Expand the rows."""
        counts = rows[:, 4].astype(np.int64)
        which = np.repeat(np.arange(rows.shape[0]), counts)
        first = np.cumsum(counts) - counts
        part = (np.arange(which.size) - first[which]).astype(np.uint64)
        handle = _List(peer, rows[which, 0] + part * rows[which, 3], rows[which, 1].copy())
        self.alive.add(handle)
        return handle

    def release_rows(self, handle: Any) -> None:
        """Free a list."""
        self.alive.remove(handle)

    def make(self, local: Any, local_indices: Indices, remote: Any, remote_indices: Indices, note: bytes) -> Any:
        """Pick the descriptors."""
        into, source = local.addresses[local_indices], remote.addresses[remote_indices]
        request = _Request(remote.peer, into, source, local.lengths[local_indices], note)
        self.alive.add(request)
        return request

    def post(self, handle: Any) -> bool:
        """Copy, unless the script says otherwise."""
        reason = self._fabric.count_post()
        if reason is not None:
            raise KvxferError(reason, "the script lets this read fail")
        handle.in_flight = True
        return self.check(handle)

    def check(self, handle: Any) -> bool:
        """Copy now, if the read was held and is not any more."""
        if handle.peer not in self._peers or not self._fabric.knows(handle.peer):
            handle.in_flight = False
            raise KvxferError(Reason.PEER_LOST, "the peer is gone")
        if self._fabric.held:
            return False
        for into, source, length in zip(
            handle.into.tolist(), handle.source.tolist(), handle.lengths.tolist(), strict=True
        ):
            ctypes.memmove(into, source, length)
        handle.in_flight = False
        if handle.note:
            self._fabric.notify(self._name, handle.peer, handle.note)
        return True

    def telemetry(self, handle: Any) -> Telemetry | None:
        """Bytes and descriptors; takes no time worth telling."""
        return Telemetry(0.0, 0.0, int(handle.lengths.sum()), int(handle.lengths.size))

    def release(self, handle: Any) -> None:
        """Free a request; refuses one in flight, as nothing else would show such a mistake in a test."""
        if handle.in_flight:
            raise KvxferError(Reason.TRANSFER_STATE, "a request in flight was released")
        self.alive.remove(handle)

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a notification."""
        self._fabric.notify(self._name, peer, payload)

    def notifications(self) -> Sequence[tuple[str, bytes]]:
        """What arrived."""
        return self._fabric.collect(self._name)

    def describe(self) -> LibraryInfo:
        """Next to nothing."""
        return LibraryInfo("loopback", "0", "", {"memcpy": {}}, {}, ())


class LoopbackEngine(PumpedEngine):
    """The transfer engine over a :class:`Fabric`; no warm-up reads unless the settings ask for them."""

    def __init__(
        self,
        name: str,
        fabric: Fabric,
        on_notification: NotificationHandler | None = None,
        *,
        settings: EngineSettings | None = None,
    ) -> None:
        self.driver: Final = LoopbackDriver(fabric)
        super().__init__(name, self.driver, on_notification, settings or QUICK)
