"""Ends of reads travel together, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import structlog
import structlog.testing

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Rank
from kvxfer.pb import peer_pb2
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.service import closing
from kvxfer.service.closing import Ends
from kvxfer.wire.layouts import rank_to_pb
from kvxfer.wire.peer import MAX_ENDS, CloseRead, Outcome, Reader, ReadRef
from tests.support.errors import refusal
from tests.support.loopback import Reading, soon

REF = ReadRef("p", Rank(), "i", "request", bytes(16), Reader("d", Rank(), "i"), 1, "transfer")


def end(number: int) -> CloseRead:
    return CloseRead(replace(REF, request_id=f"r{number}"), Outcome.DONE)


class Client:
    """Keeps what it is told, and fails as often as it is asked to."""

    address = "127.0.0.1:1"

    def __init__(self, *failures: Reason) -> None:
        self.failures = list(failures)
        self.calls: list[list[str]] = []
        self.answer = asyncio.Event()
        self.answer.set()

    async def close_reads(self, records: Sequence[CloseRead], timeout: float) -> None:
        self.calls.append([record.ref.request_id for record in records])
        await self.answer.wait()
        if self.failures:
            raise KvxferError(self.failures.pop(0), "as asked")


def ends_at(client: Client) -> Ends:
    return Ends(cast(Any, client))


async def test_what_ends_within_a_moment_is_one_call() -> None:
    client = Client()
    ends = ends_at(client)
    await asyncio.wait({ends.tell(end(i)) for i in range(3)})
    assert client.calls == [["r0", "r1", "r2"]]
    await ends.tell(end(3))
    assert client.calls[1:] == [["r3"]]


async def test_what_ends_during_a_call_is_told_by_the_next() -> None:
    client = Client()
    client.answer.clear()
    ends = ends_at(client)
    first = ends.tell(end(0))
    await soon(lambda: client.calls)
    second = ends.tell(end(1))
    await soon(lambda: len(client.calls) == 2)
    assert not first.done()
    assert not second.done()
    client.answer.set()
    await asyncio.wait({first, second})
    assert client.calls == [["r0"], ["r1"]]


async def test_more_than_a_call_may_tell_are_several() -> None:
    client = Client()
    ends = ends_at(client)
    await asyncio.wait({ends.tell(end(i)) for i in range(2 * MAX_ENDS + 1)})
    assert [len(call) for call in client.calls] == [MAX_ENDS, MAX_ENDS, 1]
    assert len({name for call in client.calls for name in call}) == 2 * MAX_ENDS + 1


async def test_all_are_told_again_where_the_peer_was_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "BACKOFF", (0.001, 0.001))
    client = Client(Reason.PEER_UNREACHABLE, Reason.PEER_UNREACHABLE)
    ends = ends_at(client)
    await asyncio.wait({ends.tell(end(i)) for i in range(2)})
    assert client.calls == [["r0", "r1"]] * 3


@pytest.mark.parametrize(
    "failures", [[Reason.LEASE_TOKEN_MISMATCH], [Reason.LIMIT_EXCEEDED], [Reason.PEER_UNREACHABLE] * 3]
)
async def test_what_cannot_be_told_is_left(failures: list[Reason], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever: a loss costs the lease's time."""
    monkeypatch.setattr(closing, "BACKOFF", (0.001, 0.001))
    client = Client(*failures)
    await ends_at(client).tell(end(0))
    assert client.calls == [["r0"]] * len(failures)


async def test_what_nobody_foresaw_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    client, ends = Client(), ends_at(Client())

    async def broken(*_: Any) -> None:
        raise ValueError("as asked")

    monkeypatch.setattr(client, "close_reads", broken)
    monkeypatch.setattr(ends, "_client", client)
    with structlog.testing.capture_logs() as logged:
        await asyncio.wait_for(ends.tell(end(0)), 5)
    assert [(line["log_level"], line["reads"]) for line in logged] == [("error", 1)]


async def test_what_was_told_is_forgotten() -> None:
    """A lease token is a secret."""
    ends = ends_at(Client())
    await ends.tell(end(0))
    assert not ends._gathered


async def test_closing_ends_what_is_under_way() -> None:
    client = Client()
    client.answer.clear()
    ends = ends_at(client)
    under_way = ends.tell(end(0))
    await soon(lambda: client.calls)
    gathered = ends.tell(end(1))
    ends.close()
    await asyncio.wait({under_way, gathered}, timeout=5)
    assert under_way.cancelled()
    assert gathered.cancelled()
    assert client.calls == [["r0"]]


async def test_one_that_is_refused_does_not_keep_the_others(reading: Reading) -> None:
    node = reading.p.nodes[0]
    (known,) = node.sidecar.registrations
    rank = rank_to_pb(reading.p.members[0].rank)
    reader = peer_pb2.Reader(engine_id="stranger", rank=rank, incarnation="i")
    whose: dict[str, Any] = {
        "engine_id": "engine-p",
        "rank": rank,
        "incarnation": known.incarnation,
        "reader": reader,
    }
    reads = []
    for name in ("request-a", "request-b", "request-c"):
        ticket = reading.ticket(name)
        read: dict[str, Any] = {"request_id": name, "lease_token": ticket.lease_token}
        read |= {"readers": 1, "transfer_id": name}
        await node.peer_stub.OpenRead(peer_pb2.OpenReadRequest(**whose, **read))
        reads.append(peer_pb2.ReadEnd(**read, outcome=peer_pb2.READ_OUTCOME_DONE))
    assert known.readers.open_reads == len(known.leases) == 3
    reads[1].lease_token = bytes(16)
    error = await refusal(node.peer_stub.CloseReads(peer_pb2.CloseReadsRequest(**whose, reads=reads)))
    assert error.reason is Reason.LEASE_TOKEN_MISMATCH
    assert error.field.startswith("reads[1]")
    assert [lease.request_id for _, lease in known.leases if not lease.ended] == ["request-b"]


async def test_reads_that_end_together_are_closed_together(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a source, and not one for each read."""
    await reading.good()
    (link,) = reading.d.nodes[0].sidecar.registrations.get("engine-d").links
    client, ends = link.sources[0].client, link.sources[0].rank.ends
    await soon(lambda: not ends._running)
    calls: list[set[str]] = []
    really = client.close_reads

    async def counting(records: Sequence[CloseRead], timeout: float) -> None:
        calls.append({record.ref.request_id for record in records})
        await really(records, timeout)

    monkeypatch.setattr(client, "close_reads", counting)
    monkeypatch.setattr(closing, "GATHER", 0.5)
    reading.fabric.hold()
    apart = [reading.request(first=first) for first in (1, 7, 13)]
    running = [asyncio.ensure_future(reading.stub.ReadBlocks(request)) for request in apart]
    leases = reading.p.nodes[0].sidecar.registrations.get("engine-p").leases
    await soon(lambda: leases.open_reads == 3)
    reading.fabric.let_go()
    answers = await asyncio.gather(*running)
    assert {answer.transfer.state for answer in answers} == {pb.TRANSFER_STATE_DONE}
    wanted = {request.spec.ticket.request_id for request in apart}
    await soon(lambda: any(wanted & call for call in calls))
    assert [call & wanted for call in calls] == [wanted]
