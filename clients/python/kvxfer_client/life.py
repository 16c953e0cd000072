"""What a session does, step by step: register, hold, and after a break find out what is left and register again.

A pure plan, without a clock or a call: a generator of steps.  Whoever drives it does what a step says and sends back
what came of it, or throws in the :class:`KvxferError` that it failed with; an error that comes out of the generator is
one that no retry helps, and ends the session.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory.handles import CudaIpc, Memfd
from kvxfer_client.local import Memory
from kvxfer_client.results import Registered

#: The first pause between two attempts, and the longest, seconds.
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 2.0


@dataclass(frozen=True)
class Register:
    """Hand over the cache; send back the :class:`Registered`.

    :param memory: what to name it by.
    :param again: after a break: nobody else's registration may be replaced.
    """

    memory: tuple[Memory, ...]
    again: bool


@dataclass(frozen=True)
class Hold:
    """Open a stream that holds this incarnation, and see that it is live."""

    incarnation: str


@dataclass(frozen=True)
class Found:
    """A registration is held.

    :param fresh: it is another one than before.
    """

    registered: Registered
    fresh: bool


@dataclass(frozen=True)
class Follow:
    """Wait until the stream ends; send back why."""


@dataclass(frozen=True)
class Lost:
    """A registration is gone with all its leases and transfers."""

    reason: KvxferError
    incarnation: str


@dataclass(frozen=True)
class Sleep:
    """Do nothing for so many seconds."""

    seconds: float


#: Ends of a registration that nobody need make sure of.
GONE: Final = frozenset(
    {Reason.NOT_REGISTERED, Reason.STALE_INCARNATION, Reason.PEER_UNREACHABLE, Reason.SHUTTING_DOWN}
)

Step: TypeAlias = Register | Hold | Found | Follow | Lost | Sleep
Plan: TypeAlias = Generator[Step, Any, None]

#: A stream that ends so was ended on purpose: by whoever unregistered the cache, or registered another in its place.
_ON_PURPOSE: Final = frozenset({Reason.NOT_REGISTERED, Reason.STALE_INCARNATION})


def plan(memory: Sequence[Memory]) -> Plan:
    """The life of a session.  Nothing is tried again before the cache is registered for the first time."""
    known = yield Register(tuple(memory), again=False)
    yield Hold(known.incarnation)
    yield Found(known, fresh=True)
    while True:
        why: KvxferError = yield Follow()
        known = yield from _after_a_break(known, memory, why)


def _after_a_break(known: Registered, memory: Sequence[Memory], why: KvxferError) -> Generator[Step, Any, Registered]:
    if why.reason in _ON_PURPOSE:
        yield Lost(why, known.incarnation)
        raise why
    lost = why.reason is Reason.SHUTTING_DOWN
    if lost:
        yield Lost(why, known.incarnation)
    rising, wait = pauses(), 0.0
    while True:
        yield Sleep(max(next(rising), wait))
        wait = 0.0
        try:
            if not lost:
                # The sidecar may be well, and only the connection was lost: then nothing has changed.
                yield Hold(known.incarnation)
                yield Found(known, fresh=False)
                return known
        except KvxferError as error:
            if error.reason in _ON_PURPOSE:
                yield Lost(error, known.incarnation)
                lost = True
            if error.reason is not Reason.NOT_REGISTERED:
                wait = _delay_of(error)  # or raise
                continue
        try:
            fresh: Registered = yield Register(memory_again(known, memory), again=True)
        except KvxferError as error:
            _check_ours(error, known)
            wait = _delay_of(error)
            continue
        try:
            yield Hold(fresh.incarnation)
        except KvxferError as error:
            if error.reason is not Reason.NOT_REGISTERED:  # or the sidecar has been restarted once more
                wait = _delay_of(error)
            continue
        yield Found(fresh, fresh=True)
        return fresh


def pauses() -> Iterator[float]:
    """Longer and longer, and no two sessions alike: all engines of a node lose the same sidecar at the same moment."""
    longest = FIRST_PAUSE
    while True:
        yield longest * random.uniform(0.5, 1.0)
        longest = min(2 * longest, LONGEST_PAUSE)


def memory_again(known: Registered, memory: Sequence[Memory]) -> tuple[Memory, ...]:
    """What to name the memory by, once the sidecar that may have made it is gone.

    What was handed over is what it was.  A file that the sidecar made is named by its path: it outlives the sidecar,
    and the cache is still in it.

    :raises KvxferError: MEMORY_HANDLE_INVALID where the sidecar made a memfd or memory on a GPU: gone with it.
    """
    gone = [number for number, handle in sorted(known.exported.items()) if isinstance(handle, Memfd | CudaIpc)]
    if gone:
        regions = ", ".join(map(str, gone))
        raise KvxferError(
            Reason.MEMORY_HANDLE_INVALID,
            f"the sidecar is gone, and with it the memory that it had made for regions {regions}: build a new cache",
            field=f"memory[{gone[0]}]",
            regions=regions,
        )
    return tuple(known.exported.get(number, handle) for number, handle in enumerate(memory))


def _check_ours(error: KvxferError, known: Registered) -> None:
    """Whether what keeps the place busy is our own registration, which is still ending; anybody else has taken it."""
    if error.reason is Reason.REGISTRATION_BUSY and error.metadata.get("incarnation") not in ("", known.incarnation):
        raise error


def _delay_of(error: KvxferError) -> float:
    """How long to wait at least before trying again.

    :raises KvxferError: ``error``, where trying again does not help.
    """
    if not error.spec.retry:
        raise error
    return float(error.metadata.get("retry_delay_s", "0"))
