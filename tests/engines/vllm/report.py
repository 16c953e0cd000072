"""The table of what was seen, for docs/engines.md.  KVXFER_ENGINES_REPORT names the file to write it into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.report import table


@dataclass
class Row:
    """One model.

    :param tokens: answers whose tokens were equal to the monolithic ones, of how many.
    :param logprobs: those whose logprobs were, too, to the last bit.
    :param noticed: components that were zeroed, and missed.
    :param nixl: answers that were equal to those with NixlConnector.
    :param read: bytes that D's sidecar read for all of them.
    :param seconds: of P's prefills and D's answers.
    """

    model: str
    dtype: str
    asked: int
    tokens: int = 0
    logprobs: int = 0
    noticed: list[str] = field(default_factory=list)
    nixl: int = 0
    read: int = 0
    seconds: float = 0.0

    def cells(self) -> tuple[str, ...]:
        equal = (f"{found} of {self.asked}" for found in (self.tokens, self.logprobs, self.nixl))
        tokens, logprobs, nixl = equal
        noticed = ", ".join(self.noticed)
        return self.model, self.dtype, tokens, logprobs, noticed, nixl, f"{self.read:,}", f"{self.seconds:.0f} s"


HEAD = (
    "model",
    "data type",
    "tokens equal",
    "logprobs equal",
    "zeroed and noticed",
    "equal to NixlConnector",
    "bytes read",
    "in",
)


def model_table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    return table(HEAD, [row.cells() for row in rows])


@dataclass(frozen=True)
class Fault:
    """One fault with engines in the loop.

    :param told: what D's sidecar said of the read.
    :param seconds: until D's answer was there.
    """

    what: str
    told: str
    answer: str
    seconds: float


def fault_table(rows: Sequence[Fault]) -> str:
    """In Markdown."""
    head = ("fault", "what D's sidecar told of the read", "D's answer", "after")
    return table(head, [(row.what, row.told, row.answer, f"{row.seconds:.1f} s") for row in rows])


def fact_table(rows: Sequence[tuple[str, str]]) -> str:
    """In Markdown."""
    return table(("what", "seen"), rows)
