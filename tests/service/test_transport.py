"""Which way bytes take, as far as it can be seen."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from kvxfer.service import transport
from kvxfer.service.transport import LEAST_BYTES, Probe, Transport, host_mark, judge, received_over_tcp
from kvxfer.xfer.api import ReadResult

SIZE = 1_000_000


def result(post: float, move: float) -> ReadResult:
    return ReadResult(SIZE, 0.0, post, move, None)


@pytest.mark.parametrize(
    "received, post, move, one_host, expected",
    [
        (SIZE + 500, 0.001, 0.1, True, Transport.TCP),
        (SIZE + 500, 0.001, 0.1, False, Transport.TCP),
        (300, 0.1, 0.0001, True, Transport.CMA),
        (300, 0.001, 0.1, True, Transport.OTHER),
        (300, 0.1, 0.0001, False, Transport.OTHER),
        (300, 0.001, 0.1, False, Transport.OTHER),
        (SIZE // 2, 0.001, 0.1, True, Transport.UNKNOWN),
    ],
)
def test_what_is_made_of_what_was_seen(
    received: int, post: float, move: float, one_host: bool, expected: Transport
) -> None:
    assert judge(received, SIZE, [result(post, move)], one_host=one_host) is expected


def counted() -> int:
    received = received_over_tcp()
    assert received is not None
    return received


def test_what_comes_over_tcp_is_counted() -> None:
    """The kernel's count of this very process, whatever the sockets are wrapped in."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            before = counted()
            thread = threading.Thread(target=sender.sendall, args=(bytes(SIZE),))
            thread.start()
            left = SIZE
            while left:
                left -= len(receiver.recv(min(left, 65_536)))
            thread.join()
            assert SIZE <= counted() - before < SIZE + 10_000


def test_looking_leaves_the_sockets_as_they_are() -> None:
    one, other = socket.socketpair()
    with one, other, socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        received_over_tcp()
        assert server.getblocking() is False
        one.sendall(b"x")
        assert other.recv(1) == b"x"


def test_looking_leaves_sockets_blocking_where_python_has_a_default_timeout() -> None:
    """As in an engine's process that embeds a sidecar: the mode is the open socket's, not the Python object's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.setdefaulttimeout(5.0)
        try:
            received_over_tcp()
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(server.fileno())


def test_looking_bears_descriptors_that_come_and_go() -> None:
    """Others close theirs, and open files under the same numbers, between any two steps."""
    before, over = len(os.listdir("/proc/self/fd")), threading.Event()

    def churn() -> None:
        while not over.is_set():
            one, other = socket.socketpair()
            one.close()
            file = os.open(os.devnull, os.O_RDONLY)
            other.close()
            os.close(file)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(1_000):
            counted()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert len(os.listdir("/proc/self/fd")) <= before  # those of earlier tests may be closed only now


def test_where_it_cannot_be_told_no_transport_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With very many descriptors nobody waits for all of them to be looked at."""
    monkeypatch.setattr(transport, "MOST_DESCRIPTORS", 2)
    assert received_over_tcp() is None
    probe = Probe()
    look = probe.posted(SIZE, wanted=True)
    assert look is not None
    assert probe.see(look, SIZE, [result(0.1, 0.0)], one_host=True) is Transport.UNKNOWN


def test_a_read_is_looked_at_only_where_it_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "received_over_tcp", lambda: 0)
    probe = Probe()
    assert probe.posted(LEAST_BYTES - 1, wanted=True) is None
    probe.ended()
    assert probe.posted(SIZE, wanted=False) is None
    first = probe.posted(SIZE, wanted=True)
    assert first is None  # another is under way
    probe.ended()
    probe.ended()
    look = probe.posted(SIZE, wanted=True)
    assert look is not None
    assert probe.see(look, SIZE, [result(0.1, 0.0)], one_host=True) is Transport.CMA
    probe.posted(SIZE, wanted=True)  # one more came meanwhile: whose bytes were they?
    assert probe.see(look, SIZE, [result(0.1, 0.0)], one_host=True) is Transport.UNKNOWN


def test_the_mark_of_a_host_tells_nothing_else_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    mark = host_mark()
    assert mark == host_mark()
    assert len(mark) == 32
    assert transport._BOOT_ID.read_text().strip().replace("-", "") not in mark
    monkeypatch.setattr(transport, "_BOOT_ID", Path(f"{tmp_path}/nothing"))
    assert host_mark() == ""
