"""What is to be listened at: tried, and judged."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvxfer.doctor import ports
from kvxfer.doctor.findings import Status
from kvxfer.doctor.ports import Port, UnixSocket


@pytest.mark.parametrize(
    "problem, status, says",
    [
        ("", Status.OK, "can be bound"),
        ("EADDRINUSE", Status.ERROR, "is taken by a process that cannot be seen"),
        ("EADDRNOTAVAIL", Status.ERROR, "no such address"),
        ("EACCES", Status.ERROR, "may not be bound"),
        ("ENOBUFS", Status.ERROR, "ENOBUFS"),
    ],
)
def test_ports_judged(problem: str, status: Status, says: str) -> None:
    found = ports.judge_port(Port("peer_port", "10.0.0.1", 9000, problem))
    assert found.status is status
    assert says in found.what
    assert "process 7" in ports.judge_port(Port("p", "h", 1, "EADDRINUSE", "process 7")).what


@pytest.mark.parametrize(
    "state, status",
    [
        ("free", Status.OK),
        ("stale", Status.WARNING),
        ("taken", Status.ERROR),
        ("other", Status.ERROR),
        ("denied", Status.ERROR),
    ],
)
def test_sockets_judged(state: str, status: Status) -> None:
    assert ports.judge_socket(UnixSocket("/run/x.sock", state)).status is status


def test_ports_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = ports.look_at_port("peer_port", "127.0.0.1", port)
    assert found.problem == "EADDRINUSE"
    assert found.holder.startswith(f"process {os.getpid()} (")
    assert ports.look_at_port("peer_port", "127.0.0.1", port).problem == ""
    assert ports.look_at_port("peer_port", "127.0.0.1", 0).problem == ""
    assert ports.look_at_port("peer_port", "192.0.2.250", port).problem == "EADDRNOTAVAIL"
    assert "cannot be resolved" in ports.look_at_port("peer_port", "nowhere.invalid", port).problem


def test_of_a_name_the_http_listener_takes_the_first_place_and_grpc_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [(socket.AF_INET, (host, 0)) for host in ("127.0.0.1", "192.0.2.250")]
    monkeypatch.setattr(ports, "places", lambda host, port: there)
    assert ports.look_at_port("http_port", "name", 0).problem == ""
    assert ports.look_at_port("peer_port", "name", 0).problem == "EADDRNOTAVAIL"


def test_sockets_tried(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    assert ports.look_at_socket(path).state == "free"
    assert ports.look_at_socket(tmp_path / "a" / "b" / "engine.sock").state == "free"
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(str(path))
        engine.listen()
        found = ports.look_at_socket(path)
        assert (found.state, found.holder.split(" (")[0]) == ("taken", f"process {os.getpid()}")
    assert ports.look_at_socket(path).state == "stale"
    path.unlink()
    path.touch()
    assert ports.look_at_socket(path).state == "other"
    assert ports.look_at_socket(path / "below").state in ("denied", "other")
