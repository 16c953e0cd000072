"""What a sidecar measures: the names, what they mean, and the counters behind them.

All of it belongs to the event loop.  Labels are names that engines and peers give themselves, and these are bounded:
see :data:`MAX_PEERS`.  Nothing that is fresh for every request is a label.

What follows from the state of the service (how many leases are held now) is not counted here but looked up when it is
asked for, in :mod:`kvxfer.service.gauges`.

What should never happen is told as 0 from the moment on at which it can happen: Prometheus does not see an event with
which a series begins.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

from kvxfer.core.errors import Reason
from kvxfer.core.leases import ENDED
from kvxfer.service.meters import Counter, Family, Histogram, Kind, Labels, Spec

#: Pairs of a local engine and a remote one that have series of their own.  One more takes the place of the one that was
#: heard of longest ago; its series begin at 0 when it comes back.
MAX_PEERS: Final = 1_024
#: Ranks of one remote engine that have series of their own; the others share the rank :data:`OTHER`.
MAX_RANKS: Final = 64
#: Of these, pairs with a remote engine that was only met, refused or fell silent, and ranks of each: whoever
#: reaches the peer port may give itself any name, and takes nobody's place.  The others share the engine :data:`OTHER`.
MAX_STRANGERS: Final = 64
MAX_STRANGE_RANKS: Final = 16
#: A pair that is not connected, and was not heard of for so long, is forgotten, seconds.
FORGET_AFTER: Final = 900.0
#: A reason where nothing went wrong.
NONE: Final = "NONE"
OTHER: Final = "other"

#: Reasons of a read that was refused since its ticket is not true any more, whatever the transport has brought.
STALE: Final = frozenset(
    {Reason.LEASE_EXPIRED, Reason.LEASE_UNKNOWN, Reason.LEASE_TOKEN_MISMATCH, Reason.STALE_INCARNATION}
)
#: Reasons after which a link is of no use, and a new handshake is needed.
LINK_BREAKERS: Final = frozenset({Reason.PEER_LOST, Reason.PEER_UNREACHABLE, Reason.STALE_INCARNATION})

#: A READ of some kilobytes over shared memory takes tens of microseconds, one of gigabytes over TCP seconds.
SECONDS: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)

PAIR: Final = ("engine", "remote_engine")
RANK: Final = (*PAIR, "remote_rank")

TRANSFERS: Final = Spec(
    "kvxfer_transfers_total",
    Kind.COUNTER,
    "Reads by this sidecar that have ended: done, failed or cancelled, and for what reason (NONE where done).",
    (*PAIR, "outcome", "reason"),
)
READ_BYTES: Final = Spec(
    "kvxfer_read_bytes_total", Kind.COUNTER, "Bytes read from a rank, of reads that are done and count.", RANK
)
READ_DESCRIPTORS: Final = Spec(
    "kvxfer_read_descriptors_total",
    Kind.COUNTER,
    "Descriptor pairs read from a rank, before NIXL merges neighbours, of reads that are done.",
    RANK,
)
MERGED_DESCRIPTORS: Final = Spec(
    "kvxfer_read_merged_descriptors_total",
    Kind.COUNTER,
    "The same after NIXL has merged neighbours, as NIXL counts them.",
    RANK,
)
PHASES: Final = Spec(
    "kvxfer_transfer_phase_seconds",
    Kind.HISTOGRAM,
    "Time of reads that are done, by phase: open (until it is granted, beside resolve and make), resolve, make, queue, "
    "post, move, total (from POSTED to the outcome). Of several sources the longest.",
    (*PAIR, "phase"),
    SECONDS,
)
HANDSHAKES: Final = Spec(
    "kvxfer_handshakes_total",
    Kind.COUNTER,
    "Handshakes with an engine to read from that have ended, by reason (NONE where the link was made).",
    (*PAIR, "reason"),
)
HANDSHAKE_SECONDS: Final = Spec(
    "kvxfer_handshake_seconds", Kind.HISTOGRAM, "Time of handshakes that made a link.", ("engine",), SECONDS
)
LINKS_LOST: Final = Spec(
    "kvxfer_links_lost_total",
    Kind.COUNTER,
    "Links to an engine that broke: its sidecar or the network failed, or it came back as another incarnation.",
    (*PAIR, "reason"),
)
SLOW_LINKS: Final = Spec(
    "kvxfer_slow_links_total",
    Kind.COUNTER,
    "Links between two sidecars of one host that were found to use TCP, where the kernel could copy directly.",
    PAIR,
)
READS_GRANTED: Final = Spec(
    "kvxfer_reads_granted_total", Kind.COUNTER, "Reads from here that were granted to a peer's rank.", RANK
)
READS_REFUSED: Final = Spec(
    "kvxfer_reads_refused_total",
    Kind.COUNTER,
    "Reads from here that were not granted, or not for longer: stale (LEASE_EXPIRED, LEASE_UNKNOWN, "
    "LEASE_TOKEN_MISMATCH, STALE_INCARNATION) or for another reason.",
    (*RANK, "reason"),
)
READERS_LOST: Final = Spec(
    "kvxfer_readers_lost_total", Kind.COUNTER, "Readers that fell silent without a goodbye.", PAIR
)
LEASES_PUBLISHED: Final = Spec(
    "kvxfer_leases_published_total", Kind.COUNTER, "Requests whose blocks were published for readers.", ("engine",)
)
LEASES_ENDED: Final = Spec(
    "kvxfer_leases_ended_total",
    Kind.COUNTER,
    "Published requests that have ended: released by their readers, expired, or withdrawn.",
    ("engine", "state"),
)
ENGINES_LOST: Final = Spec(
    "kvxfer_engines_lost_total",
    Kind.COUNTER,
    "Local engines that held their registration and were gone longer than engine_grace.",
    ("engine",),
)
LIMIT_REFUSALS: Final = Spec(
    "kvxfer_limit_refusals_total",
    Kind.COUNTER,
    "Calls that were refused since a limit of this sidecar was reached.",
    ("limit",),
)
CALLS: Final = Spec(
    "kvxfer_grpc_calls_total",
    Kind.COUNTER,
    "gRPC calls that have ended, by status code; a stream when it ends.",
    ("service", "method", "code"),
)


class Metrics:
    """The counters of a sidecar."""

    def __init__(self) -> None:
        self.transfers: Final = Counter(TRANSFERS, _heads(TRANSFERS))
        self.read_bytes: Final = Counter(READ_BYTES, _heads(READ_BYTES))
        self.read_descriptors: Final = Counter(READ_DESCRIPTORS, _heads(READ_DESCRIPTORS))
        self.merged_descriptors: Final = Counter(MERGED_DESCRIPTORS, _heads(MERGED_DESCRIPTORS))
        self.phases: Final = Histogram(PHASES, _heads(PHASES))
        self.handshakes: Final = Counter(HANDSHAKES, _heads(HANDSHAKES))
        self.handshake_seconds: Final = Histogram(HANDSHAKE_SECONDS, _heads(HANDSHAKE_SECONDS))
        self.links_lost: Final = Counter(LINKS_LOST, _heads(LINKS_LOST))
        self.slow_links: Final = Counter(SLOW_LINKS, _heads(SLOW_LINKS))
        self.reads_granted: Final = Counter(READS_GRANTED, _heads(READS_GRANTED))
        self.reads_refused: Final = Counter(READS_REFUSED, _heads(READS_REFUSED))
        self.readers_lost: Final = Counter(READERS_LOST, _heads(READERS_LOST))
        self.leases_published: Final = Counter(LEASES_PUBLISHED, _heads(LEASES_PUBLISHED))
        self.leases_ended: Final = Counter(LEASES_ENDED, _heads(LEASES_ENDED))
        self.engines_lost: Final = Counter(ENGINES_LOST, _heads(ENGINES_LOST))
        self.limit_refusals: Final = Counter(LIMIT_REFUSALS, _heads(LIMIT_REFUSALS))
        self.calls: Final = Counter(CALLS, _heads(CALLS))
        self._all: Final[tuple[Counter | Histogram, ...]] = tuple(
            m for m in vars(self).values() if isinstance(m, Counter | Histogram)
        )
        # When each pair was last heard of, in that order; those of the local engines alone, whose place nobody takes.
        self._pairs: dict[Labels, float] = {}
        self._locals: dict[Labels, float] = {}
        self._strangers: set[Labels] = set()
        self._ranks: dict[Labels, set[str]] = {}

    @property
    def specs(self) -> tuple[Spec, ...]:
        """What is counted."""
        return tuple(m.spec for m in self._all)

    def pair(self, engine: str, remote: str) -> Labels:
        """The labels of a pair of engines, which is heard of now.

        :param remote: an engine that the local one has chosen to read from, or has granted a read.
        """
        pair = (engine, remote)
        self._strangers.discard(pair)
        self._heard(self._pairs, pair)
        return pair

    def stranger(self, engine: str, remote: str) -> Labels:
        """The same for a remote engine that nobody here has chosen: it may be called :data:`OTHER`."""
        pair = (engine, remote)
        if pair not in self._pairs:
            if len(self._strangers) >= MAX_STRANGERS:
                return self.pair(engine, OTHER)
            self._strangers.add(pair)
        self._heard(self._pairs, pair)
        return pair

    def _heard(self, known: dict[Labels, float], pair: Labels) -> None:
        known.pop(pair, None)
        if len(known) >= MAX_PEERS:
            self._forget(next(iter(known)))
        known[pair] = time.monotonic()

    def rank(self, pair: Labels, rank: str) -> Labels:
        """The labels of a rank of a pair's remote engine."""
        known = self._ranks.setdefault(pair, set())
        if rank not in known:
            if len(known) >= (MAX_STRANGE_RANKS if pair in self._strangers else MAX_RANKS):
                rank = OTHER
            known.add(rank)
        return (*pair, rank)

    def local(self, engine: str) -> Labels:
        """The labels of what concerns a local engine alone."""
        self._heard(self._locals, (engine, ""))
        return (engine,)

    def begin_engine(self, engine: str) -> None:
        """A local engine has registered."""
        labels = self.local(engine)
        self.leases_published.add(labels, 0)
        self.engines_lost.add(labels, 0)
        for state in ENDED:
            self.leases_ended.add((*labels, state.value.lower()), 0)

    def begin_link(self, pair: Labels) -> None:
        """There is a link to the remote engine."""
        self.slow_links.add(pair, 0)
        for reason in LINK_BREAKERS:
            self.links_lost.add((*pair, reason.value), 0)

    def begin_reader(self, pair: Labels, rank: str) -> None:
        """A rank of the remote engine may read from here."""
        self.readers_lost.add(pair, 0)
        for reason in STALE:
            self.reads_refused.add((*self.rank(pair, rank), reason.value), 0)

    def tick(self, now: float, connected: Collection[Labels]) -> None:
        """Forget pairs that have been gone for long.

        :param now: monotonic seconds.
        :param connected: pairs that are not gone.
        """
        for known in (self._pairs, self._locals):
            for pair, heard in list(known.items()):
                if now - heard < FORGET_AFTER:
                    break
                if pair in connected:
                    self._heard(known, pair)
                else:
                    self._forget(pair)

    def _forget(self, pair: Labels) -> None:
        del (self._pairs if pair[1] else self._locals)[pair]
        self._strangers.discard(pair)
        self._ranks.pop(pair, None)
        head = pair if pair[1] else pair[:1]
        for metric in self._all:
            if metric.heads == len(head):
                metric.forget(head)

    def families(self) -> list[Family]:
        """A copy of everything."""
        return [m.family() for m in self._all]


def _heads(spec: Spec) -> int:
    """How many labels say whose a series is: a pair's, a local engine's, or (none) the sidecar's."""
    return 2 if spec.labels[:2] == PAIR else int(spec.labels[:1] == PAIR[:1])
