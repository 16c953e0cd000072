"""The life of a lease: P's promise to keep a request's blocks as they are, as a table and the bookkeeping around it.

A one-sided READ cannot be refused, and not be called back.  So a READ is posted only once P has *granted* it, and its
bytes count only if it ended inside the time of the grant; and P frees blocks only once their lease has ended, which it
does not while a granted read is open.  A lease is released by distinct readers, never by a count of messages: a message
that comes twice changes nothing, and one that is lost costs the time until the lease expires.

Pure: time comes in as an argument (seconds on any monotonic clock), and nothing is told to anybody from here.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank

#: For each lease: reads that may be open at once, engines that may read it, ends of reads that are remembered.
MAX_GRANTS: Final = 4_096
MAX_ENGINES: Final = 1_024
MAX_CLOSED: Final = 4_096


class State(str, Enum):
    """Where a lease is.  What is ending remembers as what."""

    HELD = "HELD"
    RELEASING = "RELEASING"
    EXPIRING = "EXPIRING"
    WITHDRAWING = "WITHDRAWING"
    RELEASED = "RELEASED"
    EXPIRED = "EXPIRED"
    WITHDRAWN = "WITHDRAWN"


class Event(str, Enum):
    """What can happen to a lease."""

    READERS_DONE = "READERS_DONE"
    """Every reader of an engine is done with it."""
    EXPIRE = "EXPIRE"
    """Its time has passed."""
    WITHDRAW = "WITHDRAW"
    """P wants the blocks back."""
    QUIET = "QUIET"
    """No granted read is open."""


TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = MappingProxyType(
    {
        (State.HELD, Event.READERS_DONE): State.RELEASING,
        (State.HELD, Event.EXPIRE): State.EXPIRING,
        (State.HELD, Event.WITHDRAW): State.WITHDRAWING,
        (State.HELD, Event.QUIET): State.HELD,
        (State.RELEASING, Event.READERS_DONE): State.RELEASING,
        (State.RELEASING, Event.EXPIRE): State.RELEASING,
        # What P wants back is not granted any longer, whoever is done with it.
        (State.RELEASING, Event.WITHDRAW): State.WITHDRAWING,
        (State.RELEASING, Event.QUIET): State.RELEASED,
        # Those that were still reading when the time passed may all succeed.
        (State.EXPIRING, Event.READERS_DONE): State.RELEASING,
        (State.EXPIRING, Event.EXPIRE): State.EXPIRING,
        (State.EXPIRING, Event.WITHDRAW): State.WITHDRAWING,
        (State.EXPIRING, Event.QUIET): State.EXPIRED,
        (State.WITHDRAWING, Event.READERS_DONE): State.WITHDRAWING,
        (State.WITHDRAWING, Event.EXPIRE): State.WITHDRAWING,
        (State.WITHDRAWING, Event.WITHDRAW): State.WITHDRAWING,
        (State.WITHDRAWING, Event.QUIET): State.WITHDRAWN,
        # A lease that has ended stays as it ended.
        (State.RELEASED, Event.READERS_DONE): State.RELEASED,
        (State.RELEASED, Event.EXPIRE): State.RELEASED,
        (State.RELEASED, Event.WITHDRAW): State.RELEASED,
        (State.RELEASED, Event.QUIET): State.RELEASED,
        (State.EXPIRED, Event.READERS_DONE): State.EXPIRED,
        (State.EXPIRED, Event.EXPIRE): State.EXPIRED,
        (State.EXPIRED, Event.WITHDRAW): State.EXPIRED,
        (State.EXPIRED, Event.QUIET): State.EXPIRED,
        (State.WITHDRAWN, Event.READERS_DONE): State.WITHDRAWN,
        (State.WITHDRAWN, Event.EXPIRE): State.WITHDRAWN,
        (State.WITHDRAWN, Event.WITHDRAW): State.WITHDRAWN,
        (State.WITHDRAWN, Event.QUIET): State.WITHDRAWN,
    }
)

#: The blocks may be freed in these, and in no others.
ENDED: Final = frozenset({State.RELEASED, State.EXPIRED, State.WITHDRAWN})

_ENDED_AS: Final[Mapping[State, str]] = MappingProxyType(
    {
        State.RELEASING: "its readers are done",
        State.RELEASED: "its readers were done",
        State.EXPIRING: "its time has passed",
        State.EXPIRED: "its time has passed",
        State.WITHDRAWING: "it was withdrawn",
        State.WITHDRAWN: "it was withdrawn",
    }
)


@dataclass(frozen=True, slots=True)
class ReadKey:
    """One read of one reader.  ``incarnation`` and ``transfer_id`` keep it apart from the reader's other reads."""

    engine_id: str
    rank: Rank
    incarnation: str
    transfer_id: str


@dataclass(slots=True)
class Grant:
    """The blocks stay as they are until ``until``, for a read that was opened at ``opened``; monotonic seconds."""

    opened: float
    until: float


@dataclass(slots=True)
class Tally:
    """What is known of the readers of one engine: how many there are (0: nobody has said), and which are done."""

    readers: int = 0
    done: set[Rank] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether all are done."""
        return 0 < self.readers <= len(self.done)


class Lease:
    """A request's blocks, held until their readers are done or a time has passed.

    :param number: of this publication; a request that is published anew has another.
    :param token: a secret; whoever has it may read.
    :param digests: over the blocks of each group, by its name.
    :param readers: how many will read, where whoever publishes knows; else the readers tell.
    :param published: monotonic seconds.
    :param deadline: monotonic seconds.
    """

    def __init__(
        self,
        request_id: str,
        token: bytes,
        digests: Mapping[str, bytes],
        num_tokens: int,
        *,
        number: int = 0,
        readers: int | None = None,
        published: float,
        deadline: float,
    ) -> None:
        self.request_id: Final = request_id
        self.token: Final = token
        self.digests: Final = dict(digests)
        self.num_tokens: Final = num_tokens
        self.number: Final = number
        self.readers: Final = readers
        self.published: Final = published
        self.deadline = deadline
        self.state = State.HELD
        self._grants: dict[ReadKey, Grant] = {}
        self._tallies: dict[str, Tally] = {}
        # Reads that have ended; a dict for its order.  An OpenRead that comes later is not granted any more.
        self._closed: dict[ReadKey, None] = {}

    # -- looking ---------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether the blocks may be freed."""
        return self.state in ENDED

    @property
    def open_reads(self) -> int:
        """Granted reads that are open."""
        return len(self._grants)

    @property
    def tallies(self) -> Mapping[str, Tally]:
        """By reading engine, who is done."""
        return MappingProxyType(self._tallies)

    def left(self, now: float) -> float:
        """Seconds until it ends by itself; 0 once that has begun."""
        return max(0.0, self.deadline - now) if self.state is State.HELD else 0.0

    def held_for(self, now: float) -> float:
        """Seconds that granted reads may still go on."""
        return max((grant.until - now for grant in self._grants.values()), default=0.0)

    def due(self) -> float:
        """When :meth:`tick` next has something to do, monotonic seconds."""
        ends = [grant.until for grant in self._grants.values()]
        return min([*ends, self.deadline] if self.state is State.HELD else ends, default=0.0)

    def check_token(self, token: bytes) -> None:
        """:raises KvxferError: LEASE_TOKEN_MISMATCH."""
        if not hmac.compare_digest(self.token, token):
            raise KvxferError(
                Reason.LEASE_TOKEN_MISMATCH,
                f"the lease token is not the one that request {self.request_id} was published with",
                field="lease_token",
                request_id=self.request_id,
            )

    def check_held(self) -> None:
        """:raises KvxferError: LEASE_EXPIRED where it has ended, or is about to."""
        if self.state is not State.HELD:
            raise KvxferError(
                Reason.LEASE_EXPIRED,
                f"request {self.request_id} is not held any more: {_ENDED_AS[self.state]}",
                field="request_id",
                request_id=self.request_id,
                state=self.state.value,
            )

    # -- what P does -----------------------------------------------------------------------------------------------

    def extend(self, deadline: float) -> None:
        """Hold until ``deadline`` at least.

        :raises KvxferError: LEASE_EXPIRED.
        """
        self.check_held()
        self.deadline = max(self.deadline, deadline)

    def withdraw(self) -> None:
        """Grant nothing new, and end with the reads that are open."""
        self._apply(Event.WITHDRAW)
        self._quiet()

    def tick(self, now: float) -> None:
        """Let time pass: grants and the lease itself end when theirs has."""
        for key in [k for k, grant in self._grants.items() if now >= grant.until]:
            del self._grants[key]
        if now >= self.deadline:
            self._apply(Event.EXPIRE)
        self._quiet()

    # -- what readers do -------------------------------------------------------------------------------------------

    def open(self, key: ReadKey, readers: int, seconds: float, now: float) -> None:
        """Grant a read for ``seconds``.

        :raises KvxferError: LEASE_EXPIRED, FIELD_INVALID (``readers`` is not what others said), LIMIT_EXCEEDED.
        """
        self.tick(now)
        if key in self._closed:
            raise self._too_late(key, "it has ended")
        self.check_held()
        self._expect(key.engine_id, readers)
        grant = self._grants.get(key)
        if grant is None:
            if len(self._grants) >= MAX_GRANTS:
                raise self._too_many("open reads", "max_grants", MAX_GRANTS)
            grant = self._grants[key] = Grant(now, now)
        grant.until = max(grant.until, now + seconds)

    def renew(self, key: ReadKey, seconds: float, longest: float, now: float) -> float:
        """Grant an open read ``seconds`` more, but not over ``longest`` seconds in all.

        :returns: seconds that are granted from now on.
        :raises KvxferError: LEASE_EXPIRED where its time has run out, or the lease was withdrawn.
        """
        self.tick(now)
        grant = self._grants.get(key)
        if grant is None:
            raise self._too_late(key, "no such read is open, or its time has passed")
        if self.state is State.WITHDRAWING:
            raise self._too_late(key, _ENDED_AS[self.state])
        grant.until = max(grant.until, min(now + seconds, grant.opened + longest))
        return grant.until - now

    def finished(self, key: ReadKey, now: float) -> bool:
        """The transport says that the last byte of a READ was read; anybody may say so.

        A read is posted once, and only when it was granted: of any other it means nothing.

        :returns: whether it was the end of an open read.
        """
        self.tick(now)
        if key not in self._grants:
            return False
        self.close(key, 0, now, done=True)
        return True

    def close(self, key: ReadKey, readers: int, now: float, *, done: bool) -> None:
        """A read has ended; told again it changes nothing.

        :param readers: 0 where it is not told.
        :param done: the reader will not read this request again.
        :raises KvxferError: FIELD_INVALID, LIMIT_EXCEEDED.
        """
        self.tick(now)
        if self.ended:
            return
        if readers:
            self._expect(key.engine_id, readers)
        self._grants.pop(key, None)
        if key not in self._closed:
            self._remember(key)
            if done and not (tally := self._tally(key.engine_id)).complete:
                tally.done.add(key.rank)
        self._complete()

    # -- small things ----------------------------------------------------------------------------------------------

    def _too_late(self, key: ReadKey, why: str) -> KvxferError:
        return KvxferError(
            Reason.LEASE_EXPIRED,
            f"read {key.transfer_id} of request {self.request_id} is not covered: {why}",
            request_id=self.request_id,
            transfer_id=key.transfer_id,
        )

    def _expect(self, engine_id: str, readers: int) -> None:
        tally = self._tally(engine_id)
        if tally.readers and tally.readers != readers:
            raise KvxferError(
                Reason.FIELD_INVALID,
                f"readers is {readers}; request {self.request_id} is read by {tally.readers}, as was told before",
                field="readers",
                value=readers,
                known=tally.readers,
            )
        tally.readers = readers

    def _tally(self, engine_id: str) -> Tally:
        found = self._tallies.get(engine_id)
        if found is None:
            if len(self._tallies) >= MAX_ENGINES:
                raise self._too_many("reading engines", "max_reading_engines", MAX_ENGINES)
            found = self._tallies[engine_id] = Tally(self.readers or 0)
        return found

    def _too_many(self, what: str, name: str, limit: int) -> KvxferError:
        return KvxferError(
            Reason.LIMIT_EXCEEDED,
            f"request {self.request_id} has too many {what}; the limit is {limit} ({name})",
            limit_name=name,
            limit=limit,
        )

    def _apply(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]

    def _remember(self, key: ReadKey) -> None:
        if len(self._closed) >= MAX_CLOSED:  # a reader gone wild: what it says is not worth more memory
            del self._closed[next(iter(self._closed))]
        self._closed[key] = None

    def _complete(self) -> None:
        if any(tally.complete for tally in self._tallies.values()):
            self._apply(Event.READERS_DONE)
        self._quiet()

    def _quiet(self) -> None:
        if not self._grants:
            self._apply(Event.QUIET)
