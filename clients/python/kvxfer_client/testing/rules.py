"""The rules that an engine has to keep, and how one that is broken is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NoReturn


@dataclass(frozen=True)
class Rule:
    """One rule.

    :param name: short, for programs.
    :param says: what has to be.
    :param todo: what to change where it is not.
    """

    name: str
    says: str
    todo: str


class BrokenRule(AssertionError):
    """An engine does not keep a rule.

    :param seen: what was seen.
    """

    def __init__(self, rule: Rule, seen: str) -> None:
        super().__init__(f"{rule.name}: {rule.says}\n  seen: {seen}\n  what to do: {rule.todo}")
        self.rule: Final = rule
        self.seen: Final = seen


def broken(rule: Rule, seen: str) -> NoReturn:
    """Raise it."""
    raise BrokenRule(rule, seen)


SAME_BYTES: Final = Rule(
    "same-bytes",
    "what D decodes from is what a prefill of the same tokens gives",
    "compare layouts on both sides: names of layers and components, units, order of axes, block lists of the request",
)
WRITE_FIRST: Final = Rule(
    "write-first",
    "a request is published when its last byte is written, not before",
    "wait for the device (an event or a stream synchronisation) and for steps in flight, then call publish",
)
ONE_SHORT: Final = Rule(
    "one-short",
    "with state layers, of N prompt tokens N - 1 are computed and published, and the snapshot is of exactly N - 1",
    "stop the prefill one token short; num_tokens and the position of every snapshot are N - 1",
)
UNTOUCHED: Final = Rule(
    "untouched",
    "published blocks do not change while they are held",
    "no step may write them after publish: keep asynchronous scheduling from running one token further",
)
HELD: Final = Rule(
    "held",
    "P frees blocks when their lease is told as ended, not before",
    "free on what watch_leases or withdraw tell, never on a clock of your own or when the request ends",
)
FREED: Final = Rule(
    "freed",
    "blocks are free again some time after they are needed no more",
    "free on every end: released, expired, withdrawn, a registration that is lost (on_lost), a failed read, an abort",
)
NEVER_GOOD: Final = Rule(
    "never-good",
    "a load that has failed is never used: the cache is computed again, or the request fails",
    "whatever read raises, and whatever state but DONE a transfer ends in, means that no byte of it counts",
)
NO_HANG: Final = Rule(
    "no-hang",
    "no request waits for ever: it is loaded, computed again, or failed",
    "give every read a timeout; act on whatever it raises and on transfers that are told FAILED or CANCELLED",
)
QUIET: Final = Rule(
    "quiet",
    "D's blocks are not free before the transfer has quiesced",
    "cancel, and wait until it says quiesced (cancel waits); until then the bytes may still arrive",
)
SKIPPED: Final = Rule(
    "skipped",
    "what D has in its own prefix cache is not read again",
    "pass skip_tokens to read; block lists still begin where their tokens are",
)
COMES_BACK: Final = Rule(
    "comes-back",
    "an engine works again after its sidecar, or its peer's, was restarted",
    "hold the cache with Client.session; send the new ticket_rank to the scheduler after on_registered",
)
HOOK: Final = Rule(
    "hook",
    "the adapter calls writing once in each prefill",
    "call it in the adapter, right before the engine writes the last bytes of the request",
)

RULES: Final = (
    SAME_BYTES,
    WRITE_FIRST,
    ONE_SHORT,
    UNTOUCHED,
    HELD,
    FREED,
    NEVER_GOOD,
    NO_HANG,
    QUIET,
    SKIPPED,
    COMES_BACK,
    HOOK,
)
