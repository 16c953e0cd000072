"""Both clients against a server that does what a test says: messages, errors, deadlines, streams."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.fields import duration
from kvxfer.wire.requests import handshake_from_pb, publish_from_pb, read_from_pb, register_from_pb
from kvxfer_client import (
    AsyncClient,
    Client,
    KvxferError,
    PairingOptions,
    PosixShm,
    Rank,
    RankAddress,
    Reason,
    RemoteEngine,
    Ticket,
    TicketRank,
    TransferState,
    attention_blocks,
    make_ticket,
    snapshot,
)
from tests.clients.stub import Awaiting, Blocking, Stub
from tests.clients.test_client_sidecars import layout

BLOCKS = [attention_blocks("attn", [1, 2]), snapshot("ssm", 3, 20)]
TOKEN = bytes(range(16))
Caller = Blocking | Awaiting


def ticket() -> Ticket:
    ranks = [TicketRank(Rank(r, 2), f"i{r}", f"host:{9000 + r}") for r in (1, 0)]
    return make_ticket(
        engine_id="prefill",
        compatibility_key="key",
        ranks=ranks,
        request_id="r",
        blocks=BLOCKS,
        num_tokens=20,
        lease_token=TOKEN,
        ttl=5.0,
    )


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    stub = Stub(tmp_path / "s.sock").start()
    yield stub
    stub.stop()


@pytest.fixture(params=[Blocking, Awaiting])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Caller]]:
    """Makes clients of either kind, and closes them."""
    made: list[Caller] = []

    def make(target: str, **options: Any) -> Caller:
        made.append(request.param(target, engine_id="decode", **options))
        return made[-1]

    yield make
    for caller in made:
        caller.close()


#: Every method that is one call, with arguments that will do.
CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "register": (
        "RegisterCache",
        (layout(), [PosixShm(f"/kvxfer-{i}", r.size) for i, r in enumerate(layout().regions)]),
        {"compatibility_key": "key"},
    ),
    "unregister": ("UnregisterCache", (), {}),
    "handshake": ("Handshake", (ticket(),), {}),
    "prepare": ("PrepareTransfer", (ticket(), BLOCKS), {}),
    "read": ("ReadBlocks", (ticket(), BLOCKS), {}),
    "read_prepared": ("ReadBlocks", ("t",), {}),
    "get_transfer": ("GetTransfer", ("t",), {}),
    "cancel": ("CancelTransfer", ("t",), {}),
    "publish": ("PublishBlocks", ("r", BLOCKS, 20, TOKEN), {"ttl": 5.0}),
    "withdraw": ("WithdrawBlocks", ("r", TOKEN), {}),
    "wait_ready": ("GetStatus", (), {}),
    "status": ("GetStatus", (), {}),
}


# -- what is asked, what is answered -----------------------------------------------------------------------------------


def test_register_and_what_comes_back(stub: Stub, connect: Callable[..., Caller]) -> None:
    answer = pb.RegisterCacheResponse(incarnation="i", layout_fingerprint="f", peer_address="h:1")
    exported = answer.exported.add(region=1)
    exported.handle.size = 64
    exported.handle.file.path = "/cache/one"
    stub.answers["RegisterCache"] = answer
    rank = Rank(1, 2)
    _, args, _ = CALLS["register"]
    registered = connect(stub.target)(
        "register", *args, compatibility_key="key", rank=rank, ranks=[(Rank(0, 2), "a:1"), (rank, "b:2")], replace=True
    )
    record = register_from_pb(stub.requests[0])
    assert (record.engine_id, record.rank, record.replace) == ("decode", rank, True)
    assert record.layout == layout()
    assert record.memory == tuple(args[1])
    assert [r.address for r in record.ranks] == ["a:1", "b:2"]
    assert registered.ticket_rank == TicketRank(rank, "i", "h:1")
    assert registered.exported[1].path == "/cache/one"


def test_handshake_with_a_ticket_and_by_addresses(stub: Stub, connect: Callable[..., Caller]) -> None:
    stub.answers["Handshake"] = pb.HandshakeResponse()
    call = connect(stub.target)
    options = PairingOptions(0, frozenset({"a"}), frozenset({"b"}))
    call("handshake", ticket(), options=options, timeout=2.5)
    remote = RemoteEngine("prefill", tuple(RankAddress(Rank(r, 2), f"h:{r + 1}") for r in range(2)))
    call("handshake", remote)
    first, second = (handshake_from_pb(request) for request in stub.requests)
    assert (first.engine_id, first.options, first.timeout) == ("decode", options, 2.5)
    assert [r.incarnation for r in first.target.ranks] == ["i0", "i1"]
    assert second.options is None
    assert [(r.incarnation, r.address) for r in second.target.ranks] == [("", "h:1"), ("", "h:2")]


def test_read_says_what_to_read_and_gives_the_sidecar_time_to_answer(
    stub: Stub, connect: Callable[..., Caller]
) -> None:
    stub.answers["ReadBlocks"] = pb.ReadBlocksResponse()
    call = connect(stub.target, timeout=10.0)
    call("read", ticket(), BLOCKS, skip_tokens=16, num_tokens=18, transfer_id="t", timeout=40.0)
    call("read", ticket(), BLOCKS, wait=False, timeout=40.0)
    call("read_prepared", "u")
    first, second, third = (read_from_pb(request) for request in stub.requests)
    assert (first.wait, first.timeout, second.wait, third.source) == (True, 40.0, False, "u")
    assert not isinstance(first.source, str)
    assert not isinstance(second.source, str)
    assert (first.source.transfer_id, first.source.skip_tokens, first.source.num_tokens) == ("t", 16, 18)
    assert (second.source.skip_tokens, second.source.num_tokens) == (0, 20)
    # Chosen by the client, so that it can be asked for even if the answer is lost.
    assert len(second.source.transfer_id) >= 32
    for remaining, deadline in zip(stub.remaining, (50.0, 10.0, 70.0), strict=True):
        # gRPC rounds deadlines up a little.
        assert deadline - 9.0 < remaining < deadline + 1.0


def test_publish_and_withdraw(stub: Stub, connect: Callable[..., Caller]) -> None:
    stub.answers["PublishBlocks"] = pb.PublishBlocksResponse(expires_in=duration(4.5))
    stub.answers["WithdrawBlocks"] = lambda *_: pb.WithdrawBlocksResponse(held_for=duration(1.5))
    call = connect(stub.target)
    assert call("publish", "r", BLOCKS, 20, TOKEN, ttl=5.0, readers=4, incarnation="i") == 4.5
    record = publish_from_pb(stub.requests[0])
    assert (record.engine_id, record.incarnation, record.readers, record.ttl) == ("decode", "i", 4, 5.0)
    assert record.lease_token == TOKEN
    assert call("withdraw", "r", TOKEN) == 1.5
    stub.answers["WithdrawBlocks"] = pb.WithdrawBlocksResponse()
    assert call("withdraw", "r", TOKEN) == 0.0


def test_a_transfer_as_data(stub: Stub, connect: Callable[..., Caller]) -> None:
    transfer = pb.Transfer(
        transfer_id="t",
        state=pb.TRANSFER_STATE_DONE,
        quiesced=True,
        num_tokens=20,
        bytes=30,
        descriptors=3,
        timings=pb.TransferTimings(move=duration(0.25), total=duration(1.5)),
    )
    for rank, size, told in ((0, 10, 10), (1, 20, None)):
        source = transfer.sources.add(bytes=size, reported_bytes=told)
        source.rank.tp_rank, source.rank.tp_size, source.rank.pp_size = rank, 2, 1
        source.groups.add(group="attn", bytes=size)
    transfer.create_time.FromSeconds(1_700_000_000)
    stub.answers["GetTransfer"] = pb.GetTransferResponse(transfer=transfer)
    info = connect(stub.target)("get_transfer", "t")
    assert (info.state, info.quiesced, info.bytes, info.descriptors) == (TransferState.DONE, True, 30, 3)
    assert (info.timings.move, info.timings.total, info.timings.post) == (0.25, 1.5, None)
    assert [s.reported_bytes for s in info.sources] == [10, None]
    assert info.reported_bytes is None
    assert [dict(s.groups) for s in info.sources] == [{"attn": 10}, {"attn": 20}]
    assert info.create_time is not None
    assert (info.create_time.timestamp(), info.end_time, info.error) == (1_700_000_000, None, None)


def test_a_state_of_a_later_version_is_unknown(stub: Stub, connect: Callable[..., Caller]) -> None:
    stub.answers["GetTransfer"] = pb.GetTransferResponse(transfer=pb.Transfer(state=99))  # type: ignore[arg-type]
    assert connect(stub.target)("get_transfer", "t").state is TransferState.UNKNOWN


def test_lists_come_in_pages(stub: Stub, connect: Callable[..., Caller]) -> None:
    def page(request: pb.ListTransfersRequest, _: object) -> pb.ListTransfersResponse:
        first = int(request.page_token or "0")
        assert (request.page_size, list(request.states)) == (2, [pb.TRANSFER_STATE_DONE])
        ids = range(first, min(first + 2, 5))
        return pb.ListTransfersResponse(
            transfers=[pb.Transfer(transfer_id=str(i)) for i in ids],
            next_page_token=str(first + 2) if first + 2 < 5 else "",
        )

    stub.answers["ListTransfers"] = page
    found = connect(stub.target).list("list_transfers", [TransferState.DONE], page_size=2)
    assert [t.id for t in found] == ["0", "1", "2", "3", "4"]
    assert len(stub.requests) == 3


def test_status_has_the_peers_of_every_page(stub: Stub, connect: Callable[..., Caller]) -> None:
    def page(request: pb.GetStatusRequest, _: object) -> pb.GetStatusResponse:
        last = request.peers_page_token == "x"
        answer = pb.GetStatusResponse(version="1", serving=True, uptime=duration(2.0), next_peers_page_token="x")
        if last:
            answer.next_peers_page_token = ""
        peer = answer.peers.add(remote_engine_id="b" if last else "a", role=pb.PEER_ROLE_READER)
        peer.rank.tp_size = peer.rank.pp_size = 1
        return answer

    stub.answers["GetStatus"] = page
    status = connect(stub.target)("status")
    assert [p.remote_engine_id for p in status.peers] == ["a", "b"]
    assert (status.version, status.uptime, status.serving) == ("1", 2.0, True)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", CALLS)
def test_every_call_raises_what_the_sidecar_says(stub: Stub, connect: Callable[..., Caller], method: str) -> None:
    rpc, args, kwargs = CALLS[method]
    stub.answers[rpc] = KvxferError(Reason.LIMIT_EXCEEDED, "too much", field="x.y", limit=3)
    with pytest.raises(KvxferError) as caught:
        connect(stub.target)(method, *args, **kwargs)
    error = caught.value
    assert (error.reason, error.message, error.field) == (Reason.LIMIT_EXCEEDED, "too much", "x.y")
    assert error.metadata["limit"] == "3"
    assert float(error.metadata["retry_delay_s"]) > 0
    assert ("transfer_id" in error.metadata) == (
        method in ("prepare", "read", "read_prepared", "get_transfer", "cancel")
    )


@pytest.mark.parametrize("method", CALLS)
def test_every_call_has_a_deadline(stub: Stub, connect: Callable[..., Caller], method: str) -> None:
    rpc, args, kwargs = CALLS[method]
    stub.answers[rpc] = stub.wait
    if method in ("register", "wait_ready", "read", "read_prepared", "handshake", "cancel"):
        kwargs = {**kwargs, "timeout": 0.1}
    with pytest.raises(KvxferError) as caught:
        connect(stub.target, timeout=0.1)(method, *args, **kwargs)
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    assert caught.value.metadata["method"] == rpc
    assert caught.value.metadata["target"] == stub.target


@pytest.mark.parametrize("method", [method for method in CALLS if method != "wait_ready"])
def test_nobody_answers(connect: Callable[..., Caller], tmp_path: Path, method: str) -> None:
    _, args, kwargs = CALLS[method]
    began = time.monotonic()
    with pytest.raises(KvxferError) as caught:
        connect(f"unix:{tmp_path}/nobody.sock")(method, *args, **kwargs)
    assert caught.value.reason is Reason.PEER_UNREACHABLE
    assert "nobody.sock" in caught.value.message
    assert time.monotonic() - began < 10.0


def test_failures_of_other_kinds_of_server(stub: Stub, connect: Callable[..., Caller]) -> None:
    call = connect(stub.target)
    for code, reason in (
        (grpc.StatusCode.UNIMPLEMENTED, Reason.UNSUPPORTED),
        (grpc.StatusCode.UNAVAILABLE, Reason.PEER_UNREACHABLE),
        (grpc.StatusCode.DATA_LOSS, Reason.INTERNAL),
    ):
        stub.answers["GetTransfer"] = code
        with pytest.raises(KvxferError) as caught:
            call("get_transfer", "t")
        assert caught.value.reason is reason
        assert caught.value.metadata["grpc_code"] == code.name


def test_the_transfer_that_keeps_a_block_busy_is_told_apart(stub: Stub, connect: Callable[..., Caller]) -> None:
    stub.answers["ReadBlocks"] = KvxferError(Reason.LOCAL_BLOCK_BUSY, "busy", transfer_id="other")
    with pytest.raises(KvxferError) as caught:
        connect(stub.target)("read", ticket(), BLOCKS, transfer_id="mine")
    assert caught.value.metadata["transfer_id"] == "mine"
    assert caught.value.metadata["other_transfer_id"] == "other"


@pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf, 100_000])
def test_times_that_cannot_be_are_refused(connect: Callable[..., Caller], timeout: float) -> None:
    call = connect("unix:/nowhere")
    for work in (
        lambda: call("read_prepared", "t", timeout=timeout),
        lambda: call("cancel", "t", timeout=timeout),
        lambda: call("wait_ready", timeout),
        lambda: call("unregister", drain_timeout=timeout),
        lambda: call.watch(timeout=timeout),
        lambda: Client("unix:/nowhere", timeout=timeout),
    ):
        with pytest.raises(KvxferError) as caught:
            work()
        assert caught.value.reason is Reason.FIELD_INVALID


@pytest.mark.parametrize(
    "reason, work",
    [
        (Reason.RANGE_INVALID, lambda call: call("read", ticket(), BLOCKS, skip_tokens=-1)),
        (Reason.RANGE_INVALID, lambda call: call("prepare", ticket(), BLOCKS, num_tokens=0)),
        (Reason.BLOCK_OUT_OF_RANGE, lambda call: call("read", ticket(), [attention_blocks("a", [-2])])),
        (Reason.FIELD_INVALID, lambda call: call("read", "no ticket", BLOCKS)),
        (Reason.FIELD_INVALID, lambda call: call("publish", "r", BLOCKS, 20, b"short", ttl=1.0)),
        (Reason.FIELD_INVALID, lambda call: call("publish", "r", BLOCKS, 20, TOKEN, ttl=1.0, readers=0)),
        (Reason.FIELD_INVALID, lambda call: call.list("list_transfers", page_size=-1)),
        (Reason.FIELD_INVALID, lambda call: call.list("list_transfers", [TransferState.UNKNOWN])),
    ],
)
def test_what_cannot_be_is_refused_without_a_call(
    connect: Callable[..., Caller], reason: Reason, work: Callable[[Caller], Any]
) -> None:
    with pytest.raises(KvxferError) as caught:
        work(connect("unix:/nowhere"))
    assert caught.value.reason is reason


def test_messages_up_to_16_mib(stub: Stub, connect: Callable[..., Caller]) -> None:
    call = connect(stub.target)
    stub.answers["Handshake"] = pb.HandshakeResponse(plan=pb.Plan(explanation="x" * 15 * 2**20))
    assert len(call("handshake", ticket()).explanation) == 15 * 2**20
    stub.answers["Handshake"] = pb.HandshakeResponse(plan=pb.Plan(explanation="x" * 17 * 2**20))
    with pytest.raises(KvxferError) as caught:
        call("handshake", ticket())
    assert caught.value.reason is Reason.FIELD_INVALID
    assert caught.value.metadata["grpc_code"] == "RESOURCE_EXHAUSTED"


# -- coming and going --------------------------------------------------------------------------------------------------


def test_wait_ready_gives_up(connect: Callable[..., Caller], tmp_path: Path) -> None:
    with pytest.raises(KvxferError) as caught:
        connect(f"unix:{tmp_path}/nobody.sock")("wait_ready", 0.2)
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED


def test_wait_ready_waits_for_a_sidecar_that_starts_later(tmp_path: Path) -> None:
    stub = Stub(tmp_path / "later.sock")
    (tmp_path / "later.sock").rename(tmp_path / "hidden")
    stub.answers["GetStatus"] = pb.GetStatusResponse(version="7", serving=True)
    with Client(stub.target) as client, ThreadPoolExecutor(1) as pool:
        with pytest.raises(KvxferError):
            client.status()
        waiting = pool.submit(client.wait_ready)
        (tmp_path / "hidden").rename(tmp_path / "later.sock")
        stub.start()
        assert waiting.result().version == "7"
    stub.stop()


def test_wait_ready_tells_of_a_sidecar_that_stops(stub: Stub, connect: Callable[..., Caller]) -> None:
    stub.answers["GetStatus"] = pb.GetStatusResponse(serving=False)
    with pytest.raises(KvxferError) as caught:
        connect(stub.target)("wait_ready")
    assert caught.value.reason is Reason.SHUTTING_DOWN


def test_sidecar_that_comes_back_is_found_again(tmp_path: Path, connect: Callable[..., Caller]) -> None:
    call = connect(f"unix:{tmp_path}/s.sock")
    for version in ("1", "2"):
        stub = Stub(tmp_path / "s.sock")
        stub.answers["GetStatus"] = pb.GetStatusResponse(version=version, serving=True)
        stub.start()
        assert call("wait_ready").version == version
        stub.stop()
        with pytest.raises(KvxferError):
            call("status")  # the client has noticed


def test_closed_client_refuses_calls(stub: Stub) -> None:
    client = Client(stub.target)
    client.close()
    client.close()
    for work in (client.status, client.watch, lambda: list(client.list_transfers())):
        with pytest.raises(KvxferError, match="is closed"):
            work()


def test_close_ends_a_blocking_call(stub: Stub) -> None:
    arrived = threading.Event()

    def answer(*_: object) -> Any:
        arrived.set()
        return stub.wait()

    stub.answers["GetStatus"] = answer
    client = Client(stub.target)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.status)
        assert arrived.wait(10)
        client.close()
        with pytest.raises(KvxferError):
            call.result()


async def test_close_ends_an_awaited_call_with_an_error_of_ours(stub: Stub) -> None:
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()

    def answer(*_: object) -> Any:
        loop.call_soon_threadsafe(arrived.set)
        return stub.wait()

    stub.answers["GetStatus"] = answer
    client = AsyncClient(stub.target)
    call = asyncio.ensure_future(client.status())
    await arrived.wait()
    await client.close()
    with pytest.raises(KvxferError, match="is closed"):
        await call
    with pytest.raises(KvxferError, match="is closed"):
        await client.status()
    with pytest.raises(KvxferError, match="is closed"):
        await client.watch()


async def test_cancelled_task_stays_cancelled(stub: Stub) -> None:
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()

    def answer(*_: object) -> Any:
        loop.call_soon_threadsafe(arrived.set)
        return stub.wait()

    stub.answers["GetStatus"] = answer
    async with AsyncClient(stub.target) as client:
        call = asyncio.ensure_future(client.status())
        await arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


def test_async_client_may_be_made_outside_a_loop(stub: Stub) -> None:
    stub.answers["GetStatus"] = pb.GetStatusResponse(version="1", serving=True)
    client = AsyncClient(stub.target)

    async def ask() -> str:
        async with client:
            return (await client.status()).version

    assert asyncio.run(ask()) == "1"


# -- watching ----------------------------------------------------------------------------------------------------------

READY = pb.WatchTransfersResponse(ready=pb.WatchReady())


def change(transfer_id: str) -> pb.WatchTransfersResponse:
    return pb.WatchTransfersResponse(event=pb.TransferEvent(transfer=pb.Transfer(transfer_id=transfer_id)))


def test_watch_gives_changes_until_the_end(stub: Stub, connect: Callable[..., Caller]) -> None:
    stub.answers["WatchTransfers"] = [change("a"), READY, change("b"), change("c")]
    assert [t.id for t in connect(stub.target).watch(include_current=True)] == ["a", "b", "c"]
    assert stub.requests[0] == pb.WatchTransfersRequest(engine_id="decode", include_current=True)


def test_watch_that_is_refused(stub: Stub, connect: Callable[..., Caller]) -> None:
    stub.answers["WatchTransfers"] = [KvxferError(Reason.NOT_REGISTERED, "not here")]
    with pytest.raises(KvxferError) as caught:
        connect(stub.target)("watch")
    assert caught.value.reason is Reason.NOT_REGISTERED


def test_watch_that_breaks_later(stub: Stub, connect: Callable[..., Caller]) -> None:
    stub.answers["WatchTransfers"] = [READY, change("a"), KvxferError(Reason.LIMIT_EXCEEDED, "too slow")]
    call = connect(stub.target)
    assert [t.id for t in call.watch(most=1)] == ["a"]
    with pytest.raises(KvxferError) as caught:
        call.watch()
    assert caught.value.reason is Reason.LIMIT_EXCEEDED


def test_watch_that_never_begins(stub: Stub, connect: Callable[..., Caller]) -> None:
    stub.answers["WatchTransfers"] = [stub.wait]
    with pytest.raises(KvxferError) as caught:
        connect(stub.target, timeout=0.1)("watch")
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    assert caught.value.metadata["method"] == "WatchTransfers"


def test_watch_for_a_time(stub: Stub, connect: Callable[..., Caller]) -> None:
    stub.answers["WatchTransfers"] = [READY, change("a"), stub.wait]
    with pytest.raises(KvxferError) as caught:
        connect(stub.target).watch(timeout=0.5)
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED


def test_closing_a_watch_ends_its_iteration(stub: Stub) -> None:
    stub.answers["WatchTransfers"] = [READY, change("a"), stub.wait]
    with Client(stub.target) as client, ThreadPoolExecutor(1) as pool:
        for end in (lambda watch: watch.close(), lambda _: client.close()):
            watch = client.watch()
            assert next(watch).id == "a"
            rest = pool.submit(list, watch)
            end(watch)
            assert rest.result() == []


async def test_closing_an_async_watch_ends_its_iteration(stub: Stub) -> None:
    stub.answers["WatchTransfers"] = [READY, change("a"), stub.wait]

    async def rest(watch: Any) -> list[Any]:
        return [change async for change in watch]

    client = AsyncClient(stub.target)
    for last in (False, True):
        watch = await client.watch()
        assert (await watch.__anext__()).id == "a"
        others = asyncio.ensure_future(rest(watch))
        if last:
            await client.close()
        else:
            watch.close()
        assert await others == []


def test_dead_sidecar_ends_a_watch_with_an_error(tmp_path: Path) -> None:
    stub = Stub(tmp_path / "s.sock").start()
    stub.answers["WatchTransfers"] = [READY, stub.wait]
    with Client(stub.target) as client:
        watch = client.watch()
        stub.kill()
        with pytest.raises(KvxferError) as caught:
            next(watch)
    assert caught.value.reason is Reason.PEER_UNREACHABLE
    stub.stop()
