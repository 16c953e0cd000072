from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire import fields
from tests.wire.strategies import PRINTABLE, addresses, durations


def refused(call: object, *arguments: object, **keywords: object) -> KvxferError:
    with pytest.raises(KvxferError) as caught:
        call(*arguments, **keywords)  # type: ignore[operator]
    return caught.value


@pytest.mark.parametrize("value", ["", " a", "a ", "a\n", "\n", "a\x7fb", "grün", "x" * 257, "\0"])
def test_text_refuses(value: str) -> None:
    error = refused(fields.text, value, "spec.engine_id")
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "spec.engine_id")


@given(st.text(PRINTABLE, min_size=1, max_size=256))
def test_text_takes(value: str) -> None:
    assert fields.text(value, "f") == value
    assert fields.optional_text("", "f") == ""


@pytest.mark.parametrize(
    "value",
    [
        "",
        "host",
        "host:",
        ":1",
        "host:0",
        "host:65536",
        "host:99999999",
        "host:-1",
        "host:1 ",
        " host:1",
        "unix:/run/x.sock",
        "unix:1",
        "unix:///a:1",
        "dns:///host:1",
        "ipv4:10.0.0.1:1",
        "::1:80",
        "[::1]",
        "[::1]:",
        "[zz]:1",
        "a/b:1",
        "a@b:1",
        "host:1,host:2",
        "host:١",
        "x" * 300 + ":1",
        "1234:80",
        "1.2.3:80",
        "1.2.3.4.5:80",
        "1.2.3.4.:80",
        "999.1.1.1:80",
        "01.1.1.1:80",
        "host.7:80",
        "a..b:80",
        "a..:80",
        "x" * 64 + ":80",
        "[:]:80",
        "[1]:80",
        "[1.2.3.4]:80",
        "[::1::]:80",
        "[12345::]:80",
    ],
)
def test_address_refuses(value: str) -> None:
    if value == "unix:1":
        # A host of that name; whoever dials prepends "dns:" and the like.
        assert fields.address(value, "f") == value
        return
    assert refused(fields.address, value, "ranks[0].address").field == "ranks[0].address"


@given(addresses)
def test_address_takes_and_splits(value: str) -> None:
    host, port = fields.split_address(fields.address(value, "f"))
    assert value in (f"{host}:{port}", f"[{host}]:{port}")


@pytest.mark.parametrize("size", [0, 15, 17, 1000])
def test_token_refuses_without_telling(size: int) -> None:
    error = refused(fields.token, b"\x41" * size, "lease_token")
    assert "A" * 5 not in error.message
    assert error.metadata == {"bytes": str(size)}


def test_digest_has_32_bytes() -> None:
    assert fields.digest(bytes(32), "f") == bytes(32)
    assert refused(fields.digest, bytes(31), "f").field == "f"


def test_integer_names_bounds() -> None:
    assert fields.integer(3, "f", 3, 3) == 3
    assert refused(fields.integer, 4, "f", 1, 3).metadata == {"value": "4", "minimum": "1", "maximum": "3"}
    assert refused(fields.integer, 4, "f", 1, 3, reason=Reason.RANGE_INVALID).reason is Reason.RANGE_INVALID


@pytest.mark.parametrize("asked, given_", [(0, 100), (1, 1), (1000, 1000), (1001, 1000), (2**32 - 1, 1000)])
def test_page_size(asked: int, given_: int) -> None:
    assert fields.page_size(asked) == given_


def test_choice_refuses_unspecified_and_unknown() -> None:
    known = {1: "a"}
    assert fields.choice(1, known, "f") == "a"
    assert "must be set" in refused(fields.choice, 0, known, "f").message
    assert "is 7" in refused(fields.choice, 7, known, "f").message


def test_required_and_variant() -> None:
    message = pb.HandshakeRequest()
    assert refused(fields.required, message, "options", "").field == "options"
    error = refused(fields.variant, message, "remote", "request")
    assert error.field == "request.remote"
    assert "engine, ticket" in error.message
    message.engine.SetInParent()
    assert fields.variant(message, "remote", "") == "engine"


@given(durations)
def test_durations_round_trip(value: float) -> None:
    message = pb.ReadBlocksRequest(timeout=fields.duration(value))
    assert fields.optional_seconds(message, "timeout", "") == value
    assert fields.seconds(message, "timeout", "") == value


def test_duration_of_negative_seconds_is_zero() -> None:
    assert fields.duration(-1e-9) == Duration()


@pytest.mark.parametrize(
    "seconds, nanos",
    [(0, 0), (-1, 0), (0, -1), (1, -1), (0, 10**9), (86_400, 1), (2**63 - 1, 0), (-(2**63), -(2**31)), (0, 2**31 - 1)],
)
def test_duration_refuses(seconds: int, nanos: int) -> None:
    message = pb.ReadBlocksRequest(timeout=Duration(seconds=seconds, nanos=nanos))
    assert refused(fields.optional_seconds, message, "timeout", "a").field == "a.timeout"


def test_duration_may_be_missing() -> None:
    assert fields.optional_seconds(pb.ReadBlocksRequest(), "timeout", "") is None
    assert refused(fields.seconds, pb.PublishBlocksRequest(), "ttl", "").field == "ttl"


def test_parse_refuses_damage_and_size() -> None:
    assert fields.parse(pb.Ticket, b"", "t", 10) == pb.Ticket()
    assert refused(fields.parse, pb.Ticket, b"\xff\xff", "t", 10).field == "t"
    assert refused(fields.parse, pb.Ticket, bytes(11), "t", 10).metadata["maximum"] == "10"


def test_under_puts_the_path_before() -> None:
    with pytest.raises(KvxferError) as caught, fields.under("a"), fields.under("b[1]"):
        raise fields.refuse("c", "is wrong", value=3)
    assert (caught.value.field, dict(caught.value.metadata)) == ("a.b[1].c", {"value": "3"})
    with pytest.raises(KvxferError) as caught, fields.under(""):
        raise fields.refuse("c", "is wrong")
    assert caught.value.field == "c"
