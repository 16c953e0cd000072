from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import pytest
from google.rpc import code_pb2, error_details_pb2
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.core.errors import SPECS, Code, KvxferError, Reason
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.pb.transfer_pb2_grpc import KvTransferServicer, KvTransferStub, add_KvTransferServicer_to_server
from kvxfer.wire.status import (
    RETRY_DELAY,
    RETRY_DELAYS,
    TRAILER,
    from_rpc_error,
    from_status,
    retry_delay,
    status_of,
    to_status,
)

keys = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12).filter(
    lambda key: key not in {"self", "reason", "message", "field"}
)


def same(a: KvxferError, b: KvxferError) -> bool:
    return (a.reason, a.message, a.field, dict(a.metadata)) == (b.reason, b.message, b.field, dict(b.metadata))


@given(st.sampled_from(Reason), st.text(max_size=80), st.text(max_size=40), st.dictionaries(keys, st.text(max_size=20)))
def test_round_trip(reason: Reason, message: str, field: str, values: dict[str, str]) -> None:
    error = KvxferError(reason, message, field=field, **values)  # type: ignore[arg-type]
    status = Status.FromString(to_status(error).SerializeToString())
    assert same(from_status(status), error)
    assert code_pb2.Code.Name(status.code) == error.spec.code.value


@pytest.mark.parametrize("reason", Reason)
def test_retry_info_is_there_where_it_helps(reason: Reason) -> None:
    delay = retry_delay(to_status(KvxferError(reason, "m")))
    assert delay == (RETRY_DELAYS.get(reason, RETRY_DELAY) if SPECS[reason].retry else None)
    assert retry_delay(to_status(KvxferError(reason, "m"), retry_delay=0.25)) == (0.25 if SPECS[reason].retry else None)


def test_reasons_with_a_delay_may_be_retried() -> None:
    assert all(SPECS[reason].retry for reason in RETRY_DELAYS)


def test_details_are_of_the_kinds_that_others_know() -> None:
    status = to_status(KvxferError(Reason.LOCAL_BLOCK_BUSY, "block 7 is busy", field="local_blocks[0]", block=7))
    assert [d.type_url for d in status.details] == [
        "type.googleapis.com/google.rpc.ErrorInfo",
        "type.googleapis.com/google.rpc.BadRequest",
        "type.googleapis.com/google.rpc.RetryInfo",
    ]
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    assert (info.domain, info.reason, dict(info.metadata)) == ("kvxfer", "LOCAL_BLOCK_BUSY", {"block": "7"})


def test_metadata_named_like_arguments_is_kept_apart() -> None:
    info = error_details_pb2.ErrorInfo(
        reason="LAYOUT_INVALID", domain="kvxfer", metadata={"self": "1", "reason": "2", "message": "3", "field": "4"}
    )
    status = Status(code=3, message="m")
    status.details.add().Pack(info)
    error = from_status(status)
    assert error.message == "m"
    assert dict(error.metadata) == {"self_": "1", "reason_": "2", "message_": "3", "field_": "4"}


def test_reason_of_a_later_version() -> None:
    status = Status(code=9, message="m")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="NEW", domain="kvxfer", metadata={"a": "b"}))
    error = from_status(status)
    assert error.reason is Reason.INTERNAL
    assert dict(error.metadata) == {"a": "b", "unknown_reason": "NEW", "grpc_code": "FAILED_PRECONDITION"}


def test_other_domains_are_taken_by_their_code() -> None:
    status = Status(code=14, message="m")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="INTERNAL", domain="example.com"))
    assert from_status(status).reason is Reason.PEER_UNREACHABLE


@pytest.mark.parametrize(
    "code, reason",
    [
        ("UNAVAILABLE", Reason.PEER_UNREACHABLE),
        ("CANCELLED", Reason.PEER_UNREACHABLE),
        ("DEADLINE_EXCEEDED", Reason.DEADLINE_EXCEEDED),
        ("UNIMPLEMENTED", Reason.UNSUPPORTED),
        ("RESOURCE_EXHAUSTED", Reason.FIELD_INVALID),
        ("UNKNOWN", Reason.INTERNAL),
        ("UNAUTHENTICATED", Reason.INTERNAL),
        ("OK", Reason.INTERNAL),
    ],
)
def test_failures_without_details(code: str, reason: Reason) -> None:
    error = from_status(Status(code=code_pb2.Code.Value(code)))
    assert (error.reason, error.metadata["grpc_code"]) == (reason, code)
    assert code in error.message


def test_code_that_is_none() -> None:
    assert from_status(Status(code=99, message="m")).metadata["grpc_code"] == "99"


@given(st.binary(max_size=64), st.sampled_from(["ErrorInfo", "BadRequest", "RetryInfo", "Other"]))
@example(b"\xff", "ErrorInfo")
def test_damaged_details_do_no_harm(raw: bytes, kind: str) -> None:
    status = Status(code=3, message="m")
    status.details.add(type_url=f"type.googleapis.com/google.rpc.{kind}", value=raw)
    assert isinstance(from_status(status), KvxferError)
    retry_delay(status)


class _Failure:
    def __init__(self, code: object, details: str | None, trailers: object) -> None:
        self._answers = (code, details, trailers)

    def code(self) -> object:
        return self._answers[0]

    def details(self) -> str | None:
        return self._answers[1]

    def trailing_metadata(self) -> object:
        return self._answers[2]


@pytest.mark.parametrize(
    "trailers",
    [
        None,
        (),
        ((TRAILER, b"\xff\xff"),),
        ((TRAILER, "text"),),
        ((TRAILER, Status(code=5, message="other").SerializeToString()),),
        ((TRAILER, bytes(100_000)),),
    ],
)
def test_trailers_that_do_not_fit_are_left_aside(trailers: object) -> None:
    error = from_rpc_error(_Failure(grpc.StatusCode.UNAVAILABLE, None, trailers))
    assert error.reason is Reason.PEER_UNREACHABLE


#: Percent signs and other scripts take the most room in a header.
HUGE = KvxferError(
    Reason.LAYOUT_MISMATCH,
    "% ü" * 10_000,
    field="groups[3]." * 1_000,
    **{f"key_{i}": "漢" * 1_000 for i in range(200)},  # type: ignore[arg-type]
)
ERRORS = {
    "plain": KvxferError(Reason.LOCAL_BLOCK_BUSY, "block 7 is busy", field="local_blocks[0]", block=7),
    "unicode": KvxferError(Reason.LAYOUT_MISMATCH, "größer\nals 100 %", group="ä\0"),
    "surrogate": KvxferError(Reason.INTERNAL, "\udcff", path="\udcff"),
    "huge": HUGE,
}


class _Service(KvTransferServicer):
    def GetTransfer(self, request: pb.GetTransferRequest, context: grpc.ServicerContext) -> pb.GetTransferResponse:
        if request.transfer_id == "crash":
            raise RuntimeError("as it happens")
        context.abort_with_status(rpc_status.to_status(to_status(ERRORS[request.transfer_id])))
        raise AssertionError("abort returned")


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    add_KvTransferServicer_to_server(_Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("name", ERRORS)
async def test_over_grpc(target: str, name: str) -> None:
    request = pb.GetTransferRequest(transfer_id=name)
    with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as caught:
        KvTransferStub(channel).GetTransfer(request, timeout=10)
    async with grpc.aio.insecure_channel(target) as channel_:
        with pytest.raises(grpc.aio.AioRpcError) as caught_:
            await KvTransferStub(channel_).GetTransfer(request, timeout=10)
    sent = from_status(to_status(ERRORS[name]))
    assert sent.reason is ERRORS[name].reason
    for failure in (caught.value, caught_.value):
        assert same(from_rpc_error(failure), sent)  # type: ignore[arg-type]
        assert status_of(failure) == to_status(ERRORS[name])  # type: ignore[arg-type]


def test_plain_failures_over_grpc(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        stub = KvTransferStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetStatus(pb.GetStatusRequest(), timeout=10)
        assert from_rpc_error(caught.value).reason is Reason.UNSUPPORTED  # type: ignore[arg-type]
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetTransfer(pb.GetTransferRequest(transfer_id="crash"), timeout=10)
        assert from_rpc_error(caught.value).reason is Reason.INTERNAL  # type: ignore[arg-type]
    with grpc.insecure_channel("127.0.0.1:1") as channel, pytest.raises(grpc.RpcError) as caught:
        KvTransferStub(channel).GetStatus(pb.GetStatusRequest(), timeout=10)
    assert from_rpc_error(caught.value).reason is Reason.PEER_UNREACHABLE  # type: ignore[arg-type]


def test_status_of_a_huge_error_fits_a_trailer() -> None:
    status = to_status(HUGE)
    percent_encoded = 3 * len(status.message.encode())
    assert percent_encoded + len(status.SerializeToString()) * 4 / 3 < 8_000
    assert from_status(status).reason is Reason.LAYOUT_MISMATCH


def test_codes_are_those_of_grpc() -> None:
    for code in Code:
        assert grpc.StatusCode[code.value].value[0] == code_pb2.Code.Value(code.value)
