"""What D says is what one engine says that has computed everything itself: the same tokens, the same logprobs to the
last bit; and what two engines with vLLM's own connector say."""

from __future__ import annotations

import time

import pytest

from kvxfer_client import LeaseState, TransferState
from tests.engines.vllm.conftest import Seen
from tests.engines.vllm.models import Model
from tests.engines.vllm.pairs import PROMPTS, TOKENS, Pair, Workshop, hand_over, side
from tests.engines.vllm.processes import Answer
from tests.engines.vllm.report import Row
from tests.engines.vllm.settings import kvxfer
from tests.support.processes import SidecarProcess

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def row(seen: Seen, model: Model) -> Row:
    """This model's line of the table."""
    return seen.models.setdefault(model.name, Row(model.name, model.dtype, len(PROMPTS)))


def test_equal_to_one_engine(engines: Pair, truth: list[Answer], row: Row) -> None:
    began = time.monotonic()
    handed = [engines.hand_over(each) for each in PROMPTS]
    answers = [engines.read(prompt, params) for prompt, params in zip(PROMPTS, handed, strict=True)]
    for answer, right in zip(answers, truth, strict=True):
        assert answer.tokens == right.tokens
        assert answer.said == right.said
    for params in handed:
        transfer = engines.transfer_of(params)
        assert transfer is not None and transfer.state is TransferState.DONE, transfer
        row.read += transfer.bytes
    row.tokens = row.logprobs = len(answers)
    row.seconds += time.monotonic() - began
    for each in (engines.p, engines.d):
        each.assert_nothing_left()


def test_all_at_once(engines: Pair, truth: list[Answer]) -> None:
    """Requests that wait for each other's blocks and for each other's reads; steps are still of one request each."""
    handed = engines.p.engine.generate_all([(each, 1, engines.wanted) for each in PROMPTS * 3])
    answers = engines.d.engine.generate_all(
        [(each, TOKENS, answer.params) for each, answer in zip(PROMPTS * 3, handed, strict=True)]
    )
    assert [answer.said for answer in answers] == [right.said for right in truth] * 3
    for each in (engines.p, engines.d):
        each.assert_nothing_left()


def test_a_zeroed_component_is_noticed(engines: Pair, truth: list[Answer], row: Row) -> None:
    """Otherwise equal answers would not mean much."""
    began = time.monotonic()
    for component in engines.model.components:
        params = engines.hand_over(PROMPTS[0])
        assert engines.p.engine.zero(component, params["remote_block_ids"])
        assert engines.read(PROMPTS[0], params).said != truth[0].said, f"nobody missed {component}"
        row.noticed.append(component)
    row.seconds += time.monotonic() - began


def test_equal_to_vllms_own_connector(nixl: list[Answer], truth: list[Answer], row: Row) -> None:
    """The monolithic answers are those of NixlConnector, hence ours are."""
    assert [answer.said for answer in nixl] == [right.said for right in truth]
    row.nixl = len(nixl)


@pytest.mark.parametrize("model", ["granitemoehybrid"], indirect=True)
def test_shared_and_embedded(
    workshop: Workshop, model: Model, truth: list[Answer], plain: list[SidecarProcess]
) -> None:
    """P's own memory, mapped by its sidecar; D's own memory, and its sidecar in its process."""
    sidecar = plain[0]
    shared = {"memory": "shared", "memory_directory": str(sidecar.directory)}
    embedded = kvxfer(sidecar.directory / "embedded.sock", "embedded", memory="embedded")
    with side(workshop, "shared", model, sidecar, shared) as p, workshop.engine("embedded", model, embedded) as d:
        p.engine.ready()
        d.ready()
        for prompt, right in zip(PROMPTS, truth, strict=True):
            assert d.generate(prompt, TOKENS, hand_over(p.engine, prompt)).said == right.said
        p.assert_nothing_left()
        assert [lease.state for lease in p.client.list_leases()] == [LeaseState.RELEASED] * len(PROMPTS)
        d.stop()
