"""What the scheduler side tells the workers with a step; plain data, it is pickled on its way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvxfer.core.resolve import BlockList


@dataclass(frozen=True)
class Publication:
    """P: a finished request whose blocks are to be published.

    :param id: its name for readers; fresh, whatever the request is called.
    :param request_id: vLLM's.
    :param incarnations: of the ticket, by rank number: a rank that has registered anew since need not publish.
    """

    id: str
    request_id: str
    blocks: tuple[BlockList, ...]
    num_tokens: int
    lease_token: bytes = field(repr=False)
    ttl: float
    incarnations: Mapping[int, str]


@dataclass(frozen=True)
class Reading:
    """D: a request whose blocks are to be read.

    :param request_id: vLLM's.
    :param ticket: as a string.
    :param blocks: where to: one list for each group.
    :param skip_tokens: what is in the local prefix cache.
    :param num_tokens: of the ticket.
    :param needed_from: by group, the first token that is of use, where it is not the first of all.
    :param partly: by group, the last block where its end is not read.
    """

    request_id: str
    ticket: str = field(repr=False)
    blocks: tuple[BlockList, ...]
    skip_tokens: int
    num_tokens: int
    needed_from: Mapping[str, int]
    partly: Mapping[str, int]


@dataclass(frozen=True)
class Step:
    """What is new since the last step.

    :param cancel: requests whose reading is of no use any more.
    :param give_back: tickets, as strings, of requests that will not be read.
    """

    publish: tuple[Publication, ...] = ()
    read: tuple[Reading, ...] = ()
    cancel: tuple[str, ...] = ()
    give_back: tuple[str, ...] = field(default=(), repr=False)

    def __bool__(self) -> bool:
        return bool(self.publish or self.read or self.cancel or self.give_back)
