"""`kvxfer health` against real servers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner, Result

from kvxfer.cli.main import app
from kvxfer.core.errors import KvxferError, Reason

SERVICE = "kvxfer.v1.KvTransfer"
S = health_pb2.HealthCheckResponse


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, health.HealthServicer, int]]:
    """A socket and a port with the health service."""
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    socket = tmp_path / "s.sock"
    server.add_insecure_port(f"unix:{socket}")
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield socket, servicer, port
    server.stop(0).wait(10)


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["health", *arguments], env=environment)


def test_serving(served: tuple[Path, health.HealthServicer, int]) -> None:
    socket, servicer, port = served
    servicer.set("", S.SERVING)
    for found in (
        run("--engine-socket", str(socket)),
        run(KVXFER_ENGINE_SOCKET=str(socket)),
        run(f"127.0.0.1:{port}"),
        run(f"unix:{socket}", "--timeout", "5"),
        run(str(socket)),
    ):
        assert (found.exit_code, found.output) == (0, "SERVING\n")


def test_not_serving(served: tuple[Path, health.HealthServicer, int]) -> None:
    socket, servicer, _ = served
    servicer.set("", S.SERVING)
    servicer.set(SERVICE, S.NOT_SERVING)
    found = run("--engine-socket", str(socket), "--service", SERVICE)
    assert (found.exit_code, found.output) == (1, "NOT_SERVING\n")
    servicer.set(SERVICE, S.SERVING)
    assert run("--engine-socket", str(socket), "--service", SERVICE).exit_code == 0


def test_a_service_that_is_not_there_is_named(served: tuple[Path, health.HealthServicer, int]) -> None:
    found = run("--engine-socket", str(served[0]), "--service", "no.such")
    assert isinstance(found.exception, KvxferError)
    assert found.exception.reason is Reason.FIELD_INVALID
    assert "'no.such'" in str(found.exception)


def test_nobody_there(tmp_path: Path) -> None:
    found = run("--engine-socket", str(tmp_path / "none.sock"), "--timeout", "0.5")
    assert isinstance(found.exception, KvxferError)
    assert found.exception.reason is Reason.PEER_UNREACHABLE
    assert str(tmp_path / "none.sock") in str(found.exception)


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "never", "1e9"])
def test_a_timeout_that_is_none(timeout: str) -> None:
    assert run("--timeout", timeout).exit_code == 2
