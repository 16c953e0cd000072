"""What happens to a registration that somebody may want to know of: each event goes to the log and to the metrics.

Both are told in one place, so that they say the same, with the same names: ``engine`` and ``incarnation`` are the
local engine's, ``peer``, ``peer_rank`` and ``peer_incarnation`` those of whom it reads from, or who reads from it;
``request`` and ``transfer`` are IDs.  Tokens and agent metadata are never among them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.core.leases import Lease
from kvxfer.core.leases import State as LeaseState
from kvxfer.core.transfers import State
from kvxfer.service.metrics import NONE, STALE, Metrics
from kvxfer.wire.peer import Reader, ReadRef

if TYPE_CHECKING:
    from kvxfer.service.link import Link
    from kvxfer.service.transfer import Transfer

#: What is wrong with a link between two sidecars of one host whose bytes come over TCP.
SLOW: Final = (
    "both sidecars are on one host, but reads go over TCP: the kernel's direct copy (CMA) needs one user (or "
    "CAP_SYS_PTRACE) and one pid namespace for both, and UCX_TLS must not leave it out"
)
#: Peers that were lost: how many of them are remembered.
KEPT_LOST: Final = 32


@dataclass(frozen=True, slots=True)
class Lost:
    """A peer that was lost; ``when`` in monotonic seconds.

    :param reading: it read from here, and fell silent; else it was read from.
    """

    remote_engine_id: str
    rank: Rank | None
    address: str
    incarnation: str
    reading: bool
    error: KvxferError
    when: float


class Events:
    """The events of one registration.

    :param engine_id: the local engine.
    :param incarnation: of its registration.
    """

    def __init__(self, metrics: Metrics, engine_id: str, incarnation: str) -> None:
        self._metrics = metrics
        self._engine_id = engine_id
        # Bound once: the lazy logger of a module is made anew for every line, which takes longer than all the rest.
        self._log = structlog.get_logger().bind(engine=engine_id, incarnation=incarnation)
        # What goes well is told at this level only: not even put together where nobody wants it.
        enabled = getattr(self._log, "is_enabled_for", None)
        self._tells_all = enabled is None or bool(enabled(logging.DEBUG))
        #: The peers that were lost last.
        self.lost: Final[deque[Lost]] = deque(maxlen=KEPT_LOST)
        #: How often, since the registration.
        self.links_lost = self.readers_lost = self.reads_refused = self.stale_reads_refused = 0

    def registered(self) -> None:
        """The registration is there: these events can happen."""
        self._metrics.begin_engine(self._engine_id)

    # -- reading ---------------------------------------------------------------------------------------------------

    def handshake_ended(
        self, remote_engine_id: str, seconds: float, error: KvxferError | None, link: Link | None
    ) -> None:
        """A handshake has made a link, or has failed."""
        metrics = self._metrics
        reason = NONE if error is None else error.reason.value
        pair = metrics.pair(self._engine_id, remote_engine_id)
        metrics.handshakes.add((*pair, reason))
        if link is None:
            self._log.info("handshake failed", peer=remote_engine_id, reason=reason, error=str(error))
            return
        metrics.begin_link(pair)
        metrics.handshake_seconds.observe(metrics.local(self._engine_id), seconds)
        sources = [f"{s.facts.rank}/{s.facts.incarnation}" for s in link.sources]
        self._log.info("handshake done", peer=remote_engine_id, sources=sources, seconds=round(seconds, 6))

    def transfer_ended(self, transfer: Transfer) -> None:
        """A transfer has its outcome, and its local blocks are nobody's any more."""
        metrics, error = self._metrics, transfer.error
        pair = metrics.pair(self._engine_id, transfer.remote_engine_id)
        reason = NONE if error is None else error.reason.value
        metrics.transfers.add((*pair, transfer.state.value.lower(), reason))
        if transfer.state is State.DONE:
            for part in transfer.parts:
                labels = metrics.rank(pair, str(part.rank))
                metrics.read_bytes.add(labels, part.bytes)
                metrics.read_descriptors.add(labels, part.descriptors)
                if part.result is not None and part.result.telemetry is not None:
                    metrics.merged_descriptors.add(labels, part.result.telemetry.descriptors)
            for phase, seconds in vars(transfer.timings).items():
                if seconds is not None:
                    metrics.phases.observe((*pair, phase), seconds)
        if error is None and not self._tells_all:
            return
        (self._log.debug if error is None else self._log.info)(
            "transfer ended", **_of_transfer(transfer), reason=reason
        )

    def peer_lost(self, link: Link, error: KvxferError) -> None:
        """A link is of no use any more."""
        told = error.metadata
        rank = next((r for r in link.ranks if r.facts.incarnation == told.get("incarnation")), None)
        named = rank or (link.ranks[0] if len(link.ranks) == 1 else None)
        lost = Lost(
            link.target.engine_id,
            None if named is None else named.facts.rank,
            "" if named is None else named.client.address,
            "" if named is None else named.facts.incarnation,
            False,
            error.bare(),
            time.monotonic(),
        )
        self.lost.append(lost)
        self.links_lost += 1
        pair = self._metrics.pair(self._engine_id, lost.remote_engine_id)
        self._metrics.links_lost.add((*pair, error.reason.value))
        self._log.warning("peer lost", **_of_lost(lost), reason=error.reason.value, detail=error.message)

    def slow_link(self, link: Link) -> None:
        """Both ends are on one host, and yet its bytes come over TCP."""
        remote = link.target.engine_id
        self._metrics.slow_links.add(self._metrics.pair(self._engine_id, remote))
        self._log.warning(
            "reads from a sidecar on this host come over TCP",
            peer=remote,
            peer_ranks=[str(source.facts.rank) for source in link.sources],
            peer_incarnations=[source.facts.incarnation for source in link.sources],
            detail=SLOW,
        )

    # -- being read from ---------------------------------------------------------------------------------------------

    def reader_met(self, reader: Reader) -> None:
        """A peer's rank has introduced itself, or says that it is alive."""
        self._metrics.begin_reader(self._metrics.stranger(self._engine_id, reader.engine_id), str(reader.rank))

    def read_granted(self, ref: ReadRef) -> None:
        """A peer's read is granted."""
        metrics, reader = self._metrics, ref.reader
        metrics.reads_granted.add(metrics.rank(metrics.pair(self._engine_id, reader.engine_id), str(reader.rank)))
        if self._tells_all:
            self._log.debug("read granted", **_of_read(ref))

    def read_refused(self, ref: ReadRef, error: KvxferError) -> None:
        """A peer's read, or its renewal, is refused: its bytes do not count."""
        metrics, reader = self._metrics, ref.reader
        labels = metrics.rank(metrics.stranger(self._engine_id, reader.engine_id), str(reader.rank))
        metrics.reads_refused.add((*labels, error.reason.value))
        stale = error.reason in STALE
        self.reads_refused += 1
        self.stale_reads_refused += stale
        (self._log.warning if stale else self._log.info)(
            "read refused", **_of_read(ref), reason=error.reason.value, detail=error.message
        )

    def reader_lost(self, reader: Reader, address: str, idle: float) -> None:
        """A reader has fallen silent."""
        why = KvxferError(Reason.PEER_LOST, f"nothing was heard of it for {idle:.0f} s", idle_s=round(idle, 3))
        lost = Lost(reader.engine_id, reader.rank, address, reader.incarnation, True, why, time.monotonic())
        self.lost.append(lost)
        self.readers_lost += 1
        self._metrics.readers_lost.add(self._metrics.stranger(self._engine_id, reader.engine_id))
        self._log.warning("reader lost", **_of_lost(lost), reason=why.reason.value, detail=why.message)

    # -- publishing --------------------------------------------------------------------------------------------------

    def lease_published(self) -> None:
        """A request's blocks are held."""
        self._metrics.leases_published.add(self._metrics.local(self._engine_id))

    def lease_ended(self, lease: Lease, now: float) -> None:
        """A request's blocks may be freed.

        :param now: monotonic seconds.
        """
        state = lease.state.value.lower()
        self._metrics.leases_ended.add((*self._metrics.local(self._engine_id), state))
        expired = lease.state is LeaseState.EXPIRED
        if not expired and not self._tells_all:
            return
        (self._log.warning if expired else self._log.debug)(
            "lease ended",
            request=lease.request_id,
            publication=lease.number,
            state=state,
            age=round(now - lease.published, 6),
            readers={name: f"{len(tally.done)}/{tally.readers or '?'}" for name, tally in lease.tallies.items()},
        )

    def engine_lost(self, leases: int) -> None:
        """The engine that held the registration is gone."""
        self._metrics.engines_lost.add(self._metrics.local(self._engine_id))
        self._log.warning("engine lost", leases=leases)


def _of_transfer(transfer: Transfer) -> dict[str, object]:
    told: dict[str, object] = {
        "request": transfer.request_id,
        "transfer": transfer.id,
        "peer": transfer.remote_engine_id,
        "peer_ranks": [str(part.rank) for part in transfer.parts],
        "peer_incarnations": [part.incarnation for part in transfer.parts],
        "state": transfer.state.value.lower(),
        "bytes": transfer.bytes,
        "descriptors": transfer.descriptors,
    }
    if transfer.timings.total is not None:
        told["seconds"] = round(transfer.timings.total, 6)
    if transfer.error is not None:
        told["detail"] = transfer.error.message
    return told


def _of_read(ref: ReadRef) -> dict[str, object]:
    reader = ref.reader
    return {
        "request": ref.request_id,
        "transfer": ref.transfer_id,
        "peer": reader.engine_id,
        "peer_rank": str(reader.rank),
        "peer_incarnation": reader.incarnation,
    }


def _of_lost(lost: Lost) -> dict[str, object]:
    return {
        "peer": lost.remote_engine_id,
        "peer_rank": "" if lost.rank is None else str(lost.rank),
        "peer_incarnation": lost.incarnation,
        "address": lost.address,
    }
