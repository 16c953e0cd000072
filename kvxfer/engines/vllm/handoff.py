"""The scheduler's side: which request is handed to whom, and what the workers shall do about it.

Knows requests and block lists, no memory, no sidecar and no vLLM.  P, for a request with ``do_remote_decode``: computes
the prompt (one token short where :func:`~kvxfer.engines.vllm.groups.back_off` says so), keeps its blocks when it has
finished, has the workers publish them and answers with a ticket.  D, for one with ``do_remote_prefill``: has the
workers read what the ticket names, and computes the rest.  Whatever is wrong with a ticket costs time only: D then
computes the whole prompt.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvxfer.core.errors import KvxferError
from kvxfer.engines.vllm.groups import CacheGroup, back_off, listed
from kvxfer.engines.vllm.steps import Publication, Reading, Step
from kvxfer.wire.params import ticket_from_params, ticket_to_params
from kvxfer.wire.tickets import Ticket, TicketRank, ticket_to_string
from kvxfer_client.tickets import make_ticket, new_lease_token

# vLLM shows what is logged below its own name.
log = logging.getLogger("vllm.kvxfer")

#: The statuses, by name, of requests that have come to their end and not been cut off.
COMPLETE = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"})


class Request(Protocol):
    """What is used of vLLM's request."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    status: Any


class Handoff:
    """One scheduler's requests.

    :param ranks: how tickets name this engine's ranks; nothing is handed over as long as there are none.
    """

    def __init__(self, groups: Sequence[CacheGroup], engine_id: str, compatibility_key: str, lease_ttl: float) -> None:
        self.ranks: dict[int, TicketRank] = {}
        self._groups = tuple(groups)
        self._engine_id = engine_id
        self._key = compatibility_key
        self._ttl = lease_ttl
        self._back_off = back_off(groups)
        self._tickets: dict[str, Ticket] = {}
        self._loading: set[str] = set()
        self._publish: list[Publication] = []
        self._read: list[Reading] = []
        self._cancel: list[str] = []
        self._give_back: list[str] = []

    # -- prefill ---------------------------------------------------------------------------------------------------

    def tokens_to_leave(self, request: Request) -> int:
        """Tokens at the end of a new request's prompt that are D's to compute; 0 for requests that stay here."""
        wanted = _wants(request, "do_remote_decode") and request.num_prompt_tokens > self._back_off
        return self._back_off if wanted else 0

    def finished(self, request: Request, ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: whether its blocks are kept, and what to answer.

        :param ids: its blocks, one list for each group.
        """
        if _wants(request, "do_remote_prefill"):  # never scheduled
            self._return(self._ticket_of(request))
        self._tickets.pop(request.request_id, None)
        if request.request_id in self._loading:
            # The blocks stay until the workers say that nothing writes them any more.
            self._loading.discard(request.request_id)
            self._cancel.append(request.request_id)
            return False, None
        if not _wants(request, "do_remote_decode") or request.status.name not in COMPLETE:
            return False, None
        if (why := self._why_not(request)) is not None:
            log.warning("request %s is not handed over: %s", request.request_id, why)
            return False, None
        return self._hand_over(request, ids)

    def _why_not(self, request: Request) -> str | None:
        if not self.ranks:
            return "no worker has registered its cache"
        if not self._back_off:
            return None
        # A step under way, or one that ran past the prompt, has moved the states on.
        if request.num_in_flight_tokens or request.num_computed_tokens != request.num_prompt_tokens:
            return (
                f"its states are at token {request.num_computed_tokens}, {request.num_in_flight_tokens} of them still "
                f"being computed, and its prompt has {request.num_prompt_tokens}"
            )
        return None

    def _hand_over(self, request: Request, ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        num_tokens = min(request.num_prompt_tokens, request.num_computed_tokens)
        token = new_lease_token()
        name = f"{_ascii(request.request_id)[:200]}.{secrets.token_hex(8)}"
        try:
            blocks = listed(self._groups, ids, num_tokens)
            ticket = make_ticket(
                engine_id=self._engine_id,
                compatibility_key=self._key,
                ranks=self.ranks.values(),
                request_id=name,
                blocks=blocks,
                num_tokens=num_tokens,
                lease_token=token,
                ttl=self._ttl,
            )
        except (KvxferError, ValueError) as error:
            log.error("request %s cannot be handed over: %s", request.request_id, error)
            return False, None
        incarnations = {number: rank.incarnation for number, rank in self.ranks.items()}
        self._publish.append(
            Publication(name, request.request_id, blocks, num_tokens, token, self._ttl, incarnations),
        )
        return True, ticket_to_params(ticket)

    # -- decode ----------------------------------------------------------------------------------------------------

    def matched(self, request: Request, computed: int) -> int:
        """Tokens of a waiting request that can be read, after the ``computed`` ones that are here already."""
        if not _wants(request, "do_remote_prefill"):
            return 0
        ticket = self._ticket_of(request)
        return max(0, ticket.num_tokens - computed) if ticket is not None else 0

    def allocated(self, request: Request, ids: Sequence[Sequence[int]], external: int) -> None:
        """Blocks have been allocated, of which ``external`` tokens are to be read.  A ticket is used once."""
        if not _wants(request, "do_remote_prefill"):
            return
        ticket = self._ticket_of(request)
        self._tickets.pop(request.request_id, None)
        _params(request)["do_remote_prefill"] = False
        if ticket is None or external == 0:
            self._return(ticket)
            return
        # Lists that the scheduler has made itself do not fail; if they do, the engine must not go on.
        blocks = listed(self._groups, ids, ticket.num_tokens)
        end = ticket.num_tokens
        needed = {g.name: first for g in self._groups if (first := g.needed_from(end))}
        partly = {
            group.name: each[(end - 1) // group.block_tokens]
            for group, each in zip(self._groups, ids, strict=True)
            if not group.is_state and end % group.block_tokens
        }
        self._loading.add(request.request_id)
        self._read.append(
            Reading(request.request_id, ticket_to_string(ticket), blocks, end - external, end, needed, partly),
        )

    def _return(self, ticket: Ticket | None) -> None:
        """P need not hold its blocks for a request that will not be read."""
        if ticket is not None:
            self._give_back.append(ticket_to_string(ticket))

    def loaded(self, request_ids: Sequence[str]) -> None:
        """These are told as read, or as failed."""
        self._loading.difference_update(request_ids)

    def _ticket_of(self, request: Request) -> Ticket | None:
        """The request's ticket, once checked; ``None``, and never asked again, where there is none of use."""
        found = self._tickets.get(request.request_id)
        if found is None:
            most = request.num_prompt_tokens - self._back_off
            try:
                found = ticket_from_params(_params(request))
                if found.num_tokens > most:
                    raise ValueError(f"it is about {found.num_tokens} tokens, and the prompt has {most} before its end")
            except (KvxferError, ValueError) as error:
                log.warning("request %s: its ticket is of no use: %s", request.request_id, error)
                _params(request)["do_remote_prefill"] = False
                return None
            self._tickets[request.request_id] = found
        return found

    # -- both ------------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """What the workers shall do now; each thing is told once."""
        told = Step(tuple(self._publish), tuple(self._read), tuple(self._cancel), tuple(self._give_back))
        self._publish, self._read, self._cancel, self._give_back = [], [], [], []
        return told


def _params(request: Request) -> dict[str, Any]:
    return request.kv_transfer_params if request.kv_transfer_params is not None else {}


def _wants(request: Request, key: str) -> bool:
    params: Mapping[str, Any] | None = request.kv_transfer_params
    return params is not None and bool(params.get(key))


def _ascii(text: str) -> str:
    """A request ID as a name: printable, without spaces."""
    return "".join(c if "!" <= c <= "~" else "_" for c in text)
