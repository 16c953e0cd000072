"""What the conformance kit needs of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias


@dataclass(frozen=True)
class Place:
    """Where an engine is to run.

    :param engine_id: the name to register by.
    :param target: its sidecar's engine listener; for :class:`kvxfer_client.Client`.
    :param directory: where the sidecar takes memory files from; they are the engine's to remove.
    """

    engine_id: str
    target: str
    directory: Path


class Adapter(Protocol):
    """One rank of an engine whose cache is registered at a sidecar; it can be P and D.

    Everything is done the way the engine does it: its scheduler, its connector, its allocator.  Prompts are lists of
    small numbers, of some hundred tokens at most; caches of some dozens of blocks are enough.
    """

    #: Tokens of an attention block; 0 for an engine without attention.
    block_tokens: int
    #: Whether a request may begin with tokens whose cache is there already.
    prefix_caching: bool

    # -- as P ------------------------------------------------------------------------------------------------------

    def prefill(self, request_id: str, tokens: Sequence[int], ttl: float, writing: Callable[[], None]) -> str:
        """Compute and publish a prompt's cache; the ticket, as a string.

        :param ttl: for the publication, seconds.
        :param writing: call it once, when the last bytes of the request are about to be written.
        """

    # -- as D ------------------------------------------------------------------------------------------------------

    def decode(self, request_id: str, tokens: Sequence[int], ticket: str, cached_tokens: int) -> None:
        """Take on a request, and begin to read its cache; does not wait for it.

        :param cached_tokens: a multiple of ``block_tokens``: so many are in this engine's prefix cache, and are put
            there now by computing them.  0 where the engine has no prefix caching.
        """

    def ready(self, request_id: str) -> bool | None:
        """Whether the engine would decode the request now: its cache is there, loaded or computed again.

        ``None`` while it is still loading; false for good where the engine has failed the request instead.
        """

    # -- as either -------------------------------------------------------------------------------------------------

    def finish(self, request_id: str) -> None:
        """The request is over, or its client has hung up: at any time, also twice, also for one that is not known."""

    def step(self) -> None:
        """One turn of the engine's loop: look at what the sidecar has told, and act on it.  Does not block."""

    def cache(self, request_id: str, num_tokens: int) -> Mapping[str, bytes]:
        """What the request's blocks hold, by group: of ``num_tokens`` tokens in their order, or the snapshot."""

    def expected(self, tokens: Sequence[int]) -> Mapping[str, bytes]:
        """What :meth:`cache` is where these tokens, and no more, were computed here."""

    def blocks(self, request_id: str) -> Mapping[str, AbstractSet[int]]:
        """The blocks that a request has, or had last, by group."""

    def allocated(self) -> Mapping[str, AbstractSet[int]]:
        """The blocks that are not free, by group."""

    def poison(self) -> None:
        """Fill every free block with bytes that no cache has."""

    def close(self) -> None:
        """Take everything back."""


#: Builds an engine.
Make: TypeAlias = Callable[[Place], Adapter]
