"""What is said of a target at which no sidecar's engine listener answers."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvxfer_client import KvxferError, Reason
from tests.clients.stub import Awaiting, Blocking, Stub

BOTH = pytest.mark.parametrize("connect", [Blocking, Awaiting])
Connect = Callable[..., Any]


def failure(connect: Connect, target: str, method: str = "wait_ready", *args: Any) -> KvxferError:
    call = connect(target, engine_id="e")
    try:
        with pytest.raises(KvxferError) as caught:
            call(method, *args)
    finally:
        call.close()
    return caught.value


@BOTH
def test_a_socket_that_is_not_there(connect: Connect, tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/no.sock"
    error = failure(connect, target, "wait_ready", 0.2)
    assert error.reason is Reason.DEADLINE_EXCEEDED
    assert error.message == (
        f"nobody answered at {target} within 0.2 s: No such file or directory; is the sidecar running, and is this its "
        "engine socket?"
    )
    assert error.metadata["grpc_code"] == "DEADLINE_EXCEEDED"


@BOTH
def test_a_socket_that_nobody_listens_at(connect: Connect, tmp_path: Path) -> None:
    path = f"{tmp_path}/old.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(path)
    assert "0.2 s: Connection refused; is the sidecar running" in failure(connect, path, "wait_ready", 0.2).message


@BOTH
def test_a_path_is_a_unix_socket(connect: Connect, tmp_path: Path) -> None:
    stub = Stub(tmp_path / "s.sock").start()
    try:
        stub.answers["GetTransfer"] = KvxferError(Reason.TRANSFER_UNKNOWN, "there")
        assert failure(connect, str(tmp_path / "s.sock"), "get_transfer", "t").reason is Reason.TRANSFER_UNKNOWN
    finally:
        stub.stop()


@BOTH
def test_another_service_is_taken_for_a_peer_listener(connect: Connect, tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/peer.sock"
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port(target)
    server.start()
    try:
        error = failure(connect, target)
    finally:
        server.stop(0).wait()
    assert error.reason is Reason.UNSUPPORTED
    assert "peer listener: give its engine socket" in error.message
    assert error.metadata["grpc_code"] == "UNIMPLEMENTED"


@BOTH
def test_a_failed_call_shows_no_traceback_of_grpc(connect: Connect, tmp_path: Path) -> None:
    error = failure(connect, f"unix:{tmp_path}/no.sock", "get_transfer", "t")
    assert "grpc/" not in "".join(traceback.format_exception(error))
    assert error.metadata["grpc_code"] == "UNAVAILABLE"
