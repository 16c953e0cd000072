"""The scheduler's side: which request is handed to whom."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest

from kvxfer.core.layout import Rank
from kvxfer.engines.vllm.groups import CacheGroup
from kvxfer.engines.vllm.handoff import Handoff
from kvxfer.engines.vllm.steps import Step
from kvxfer_client import Ticket, TicketRank, prefill_params, ticket_from_params, ticket_from_string

FULL, STATE, WINDOW = CacheGroup("full", 16), CacheGroup("state", 0), CacheGroup("window", 16, window=20)
HYBRID = (FULL, STATE)


class Status(Enum):
    RUNNING = 0
    FINISHED_STOPPED = 1
    FINISHED_LENGTH_CAPPED = 2
    FINISHED_ABORTED = 3


@dataclass
class FakeRequest:
    """What is used of vLLM's request."""

    kv_transfer_params: dict[str, Any] | None = None
    num_prompt_tokens: int = 40
    num_computed_tokens: int = 40
    num_in_flight_tokens: int = 0
    status: Status = Status.FINISHED_LENGTH_CAPPED
    request_id: str = "r 1"


@dataclass
class Side:
    """A scheduler side with what it was told."""

    groups: tuple[CacheGroup, ...] = HYBRID
    name: str = "p"
    handoff: Handoff = field(init=False)

    def __post_init__(self) -> None:
        self.handoff = Handoff(self.groups, self.name, "key", 60.0)
        self.handoff.ranks = {i: TicketRank(Rank(i, 2), f"incarnation-{i}", f"10.0.0.{i}:7000") for i in range(2)}


def prefilled(groups: tuple[CacheGroup, ...] = HYBRID, tokens: int = 39) -> tuple[Side, dict[str, Any], FakeRequest]:
    """P has computed a request; its side, what it answers, and the request."""
    p = Side(groups)
    request = FakeRequest(dict(prefill_params()), tokens, tokens)
    kept, params = p.handoff.finished(request, [[7] if g.is_state else [4, 5, 6] for g in groups])
    assert kept and params is not None
    return p, params, request


# -- prefill -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "groups, params, prompt, left",
    [
        (HYBRID, dict(prefill_params()), 40, 1),
        ((FULL, WINDOW), dict(prefill_params()), 40, 1),
        ((FULL,), dict(prefill_params()), 40, 0),
        (HYBRID, dict(prefill_params()), 1, 0),
        (HYBRID, None, 40, 0),
        (HYBRID, {"do_remote_prefill": True}, 40, 0),
    ],
)
def test_what_p_leaves_to_d(
    groups: tuple[CacheGroup, ...], params: dict[str, Any] | None, prompt: int, left: int
) -> None:
    assert Side(groups).handoff.tokens_to_leave(FakeRequest(params, prompt)) == left


def test_a_finished_prefill_is_published_and_answered_with_its_ticket() -> None:
    p, params, _ = prefilled()
    (publication,) = p.handoff.step().publish
    assert p.handoff.step() == Step()
    ticket = ticket_from_params(params)
    assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
    assert (params["remote_engine_id"], params["remote_request_id"]) == ("p", publication.id)
    assert (params["remote_host"], params["remote_port"], params["tp_size"]) == ("10.0.0.0", 7000, 2)
    assert params["remote_block_ids"] == [[4, 5, 6], [7]]
    assert (ticket.num_tokens, ticket.lease_token, ticket.ttl) == (39, publication.lease_token, 60.0)
    assert [np.asarray(b.ids).tolist() for b in publication.blocks] == [[4, 5, 6], [7]]
    assert np.asarray(publication.blocks[1].positions).tolist() == [39]
    assert publication.incarnations == {0: "incarnation-0", 1: "incarnation-1"}
    assert publication.request_id == "r 1" and publication.id.startswith("r_1.")


def test_no_two_publications_have_a_name_or_a_token_in_common() -> None:
    found = [prefilled()[0].handoff.step().publish[0] for _ in range(3)]
    assert len({f.id for f in found}) == len({f.lease_token for f in found}) == 3


def test_one_token_more_than_the_prompt_does_no_harm_to_attention_alone() -> None:
    p = Side((FULL,))
    request = FakeRequest(dict(prefill_params()), 40, 43, num_in_flight_tokens=1)
    kept, params = p.handoff.finished(request, [[4, 5, 6]])
    assert kept and ticket_from_params(params or {}).num_tokens == 40


@pytest.mark.parametrize(
    "change, told",
    [
        ({"num_computed_tokens": 40}, "its states are at token 40"),
        ({"num_in_flight_tokens": 1}, "1 of them still being computed"),
        ({"num_computed_tokens": 38}, "its states are at token 38"),
    ],
)
def test_states_that_are_elsewhere_are_not_published(
    change: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    p = Side()
    request = FakeRequest(dict(prefill_params()), 39, 39)
    for name, value in change.items():
        setattr(request, name, value)
    with caplog.at_level(logging.WARNING):
        assert p.handoff.finished(request, [[4, 5, 6], [7]]) == (False, None)
    assert told in caplog.text
    assert not p.handoff.step()


@pytest.mark.parametrize("status", [Status.FINISHED_ABORTED, Status.RUNNING])
def test_what_was_cut_off_is_not_published(status: Status) -> None:
    p = Side()
    request = FakeRequest(dict(prefill_params()), 39, 39, status=status)
    assert p.handoff.finished(request, [[4, 5, 6], [7]]) == (False, None)
    assert not p.handoff.step()


def test_nothing_is_published_before_a_worker_has_registered(caplog: pytest.LogCaptureFixture) -> None:
    p = Side()
    p.handoff.ranks.clear()
    assert p.handoff.finished(FakeRequest(dict(prefill_params()), 39, 39), [[4, 5, 6], [7]]) == (False, None)
    assert "no worker has registered" in caplog.text


@pytest.mark.parametrize("ids", [[[4, 5, 6]], [[4], [7]], [[4, 5, 6], [0]]])
def test_lists_that_make_no_sense_are_not_published(ids: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    p = Side()
    assert p.handoff.finished(FakeRequest(dict(prefill_params()), 39, 39), ids) == (False, None)
    assert "cannot be handed over" in caplog.text
    assert not p.handoff.step()


def test_other_requests_are_left_alone() -> None:
    p = Side()
    for params in (None, {}, {"do_remote_decode": False}):
        assert p.handoff.finished(FakeRequest(params), [[4, 5, 6], [7]]) == (False, None)


# -- decode ------------------------------------------------------------------------------------------------------------


def decoding(params: dict[str, Any], groups: tuple[CacheGroup, ...] = HYBRID) -> tuple[Side, FakeRequest]:
    return Side(groups, "d"), FakeRequest(params, 40, 0, status=Status.RUNNING, request_id="r2")


def test_d_reads_what_the_ticket_names() -> None:
    _, params, _ = prefilled()
    d, request = decoding(params)
    assert d.handoff.matched(request, 0) == d.handoff.matched(request, 0) == 39
    d.handoff.allocated(request, [[10, 11, 12], [13]], 39)
    (reading,) = d.handoff.step().read
    assert not d.handoff.step()
    assert (reading.request_id, reading.skip_tokens, reading.num_tokens) == ("r2", 0, 39)
    assert [np.asarray(b.ids).tolist() for b in reading.blocks] == [[10, 11, 12], [13]]
    assert reading.needed_from == {} and reading.partly == {"full": 12}
    assert ticket_from_string(reading.ticket).request_id == params["remote_request_id"]


def test_what_is_cached_here_is_not_read_again() -> None:
    _, params, _ = prefilled()
    d, request = decoding(params)
    assert d.handoff.matched(request, 32) == 7
    d.handoff.allocated(request, [[1, 2, 12], [13]], 7)
    assert d.handoff.step().read[0].skip_tokens == 32


def test_blocks_that_are_read_whole_need_no_clearing() -> None:
    _, params, _ = prefilled((FULL,), 32)
    d, request = decoding(params, (FULL,))
    d.handoff.allocated(request, [[10, 11, 12]], 32)
    reading = d.handoff.step().read[0]
    assert reading.partly == {} and np.asarray(reading.blocks[0].ids).tolist() == [10, 11]


def test_a_window_is_read_from_where_it_is_needed() -> None:
    _, params, _ = prefilled((FULL, WINDOW))
    d, request = decoding(params, (FULL, WINDOW))
    d.handoff.allocated(request, [[10, 11, 12], [0, 13, 14]], 39)
    assert d.handoff.step().read[0].needed_from == {"window": 20}


def test_a_ticket_is_used_once() -> None:
    _, params, _ = prefilled()
    d, request = decoding(params)
    d.handoff.allocated(request, [[10, 11, 12], [13]], 39)
    assert d.handoff.matched(request, 0) == 0  # after a failed load, or a preemption
    d.handoff.allocated(request, [[10, 11, 12], [13]], 0)
    assert len(d.handoff.step().read) == 1


def test_nothing_is_read_where_all_is_cached() -> None:
    _, params, _ = prefilled()
    d, request = decoding(params)
    assert d.handoff.matched(request, 48) == 0
    d.handoff.allocated(request, [[1, 2, 3], [13]], 0)
    step = d.handoff.step()
    assert not step.read
    assert [ticket_from_string(t).request_id for t in step.give_back] == [params["remote_request_id"]]


def test_a_request_that_never_got_blocks_gives_its_ticket_back() -> None:
    _, params, _ = prefilled()
    d, request = decoding(params)
    request.status = Status.FINISHED_ABORTED
    assert d.handoff.finished(request, [[], []]) == (False, None)
    assert [ticket_from_string(t).request_id for t in d.handoff.step().give_back] == [params["remote_request_id"]]


@pytest.mark.parametrize(
    "change, told",
    [
        ({"kvxfer_ticket": "nonsense"}, "is damaged or cut short"),
        ({"kvxfer_ticket": None}, "must be set"),
        ({"remote_block_ids": [[1], [2]]}, "not those of the ticket"),
        ({"remote_engine_id": "q"}, "the ticket says 'p'"),
    ],
)
def test_a_bad_ticket_costs_time_only(change: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture) -> None:
    _, params, _ = prefilled()
    d, request = decoding(params | change)
    assert d.handoff.matched(request, 0) == 0
    assert told in caplog.text
    d.handoff.allocated(request, [[10, 11, 12], [13]], 0)
    assert not d.handoff.step()


def test_a_ticket_of_another_prompt_is_of_no_use(caplog: pytest.LogCaptureFixture) -> None:
    _, params, _ = prefilled(tokens=40)  # D could not compute the last token: the state has seen it
    d, request = decoding(params)
    assert d.handoff.matched(request, 0) == 0
    assert "about 40 tokens, and the prompt has 39" in caplog.text


def test_a_request_that_is_given_up_while_it_is_read_is_cancelled() -> None:
    _, params, _ = prefilled()
    d, request = decoding(params)
    d.handoff.allocated(request, [[10, 11, 12], [13]], 39)
    d.handoff.step()
    request.status = Status.FINISHED_ABORTED
    assert d.handoff.finished(request, [[10, 11, 12], [13]]) == (False, None)
    assert d.handoff.step() == Step(cancel=("r2",))


def test_a_request_that_was_read_is_not_cancelled_later() -> None:
    _, params, _ = prefilled()
    d, request = decoding(params)
    d.handoff.allocated(request, [[10, 11, 12], [13]], 39)
    d.handoff.step()
    d.handoff.loaded(["r2"])
    request.status = Status.FINISHED_ABORTED
    d.handoff.finished(request, [[10, 11, 12], [13]])
    assert not d.handoff.step()


def test_a_ticket_survives_what_proxies_do_to_it() -> None:
    import json

    _, params, _ = prefilled()
    through = json.loads(json.dumps(params))
    through["remote_port"] = float(through["remote_port"])
    through |= {"transfer_mode": "pull", "dcp_size": 1, "remote_num_tokens": 39}
    d, request = decoding(through)
    assert d.handoff.matched(request, 0) == 39
    ticket: Ticket = ticket_from_params(through)
    assert ticket.num_tokens == 39
