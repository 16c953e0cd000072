"""The HTTP listener: what it answers, to whom, and that nobody can hang it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvxfer import web
from kvxfer.core.errors import KvxferError, Reason
from kvxfer.service.meters import Counter, Family, Histogram, Kind, Spec
from kvxfer.web import Monitor, WebServer
from tests.support.processes import until
from tests.support.scrape import Scraped, get, scrape

COUNTER = Counter(Spec("kvxfer_x_total", Kind.COUNTER, "Counts.", ("a",)))
COUNTER.add(('strange "\\\n',), 2)
HISTOGRAM = Histogram(Spec("kvxfer_y_seconds", Kind.HISTOGRAM, "Times.", (), (0.001, 1.0)))
for _seconds in (0.0005, 0.5, 5.0):
    HISTOGRAM.observe((), _seconds)


class Scene:
    """A listener on an event loop that can be kept busy."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.why = ""
        self.fails = False
        self.asked = 0
        self.monitor = Monitor(self.loop, self._collect, lambda: self.why)
        self.server = WebServer("127.0.0.1", 0, self.monitor)
        self.port = self.server.port
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.server.start()

    def _collect(self) -> list[Family]:
        self.asked += 1
        if self.fails:
            raise ZeroDivisionError("a fault of ours")
        return [COUNTER.family(), HISTOGRAM.family()]

    @contextlib.contextmanager
    def busy(self, patience: float = 0.2) -> Iterator[None]:
        """The event loop does not come round, and is waited for so long."""
        blocked, free = threading.Event(), threading.Event()

        def block() -> None:
            blocked.set()
            free.wait(30)

        self.loop.call_soon_threadsafe(block)
        assert blocked.wait(5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(web, "PATIENCE", patience)
            try:
                yield
            finally:
                free.set()

    def close(self) -> None:
        self.server.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(web, "PATIENCE", 5.0)  # a loop that is not kept busy comes round by then
    made = Scene()
    yield made
    made.close()


def test_metrics_are_text_that_prometheus_reads(scene: Scene) -> None:
    answer = get(scene.port, "/metrics")
    assert answer.status == 200
    assert answer.type.startswith("text/plain")
    found = Scraped(answer.body)
    assert found.of("kvxfer_x_total") == {(("a", 'strange "\\\n'),): 2.0}
    buckets = {dict(labels)["le"]: n for labels, n in found.of("kvxfer_y_seconds_bucket").items()}
    assert buckets == {"0.001": 1.0, "1.0": 2.0, "+Inf": 3.0}
    assert found.sum("kvxfer_y_seconds_count") == 3
    assert found.sum("kvxfer_y_seconds_sum") == 5.5005
    assert found.sum("kvxfer_snapshot_age_seconds") == 0
    assert found.sum("process_resident_memory_bytes") > 0
    assert "_created" not in answer.body


def test_openmetrics_where_it_is_asked_for(scene: Scene) -> None:
    answer = get(scene.port, "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert answer.type.startswith("application/openmetrics-text")
    assert answer.body.endswith("# EOF\n")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metrics/x", "/../metrics", "/debug", "/healthz/x"])
def test_there_is_nothing_else(scene: Scene, path: str) -> None:
    answer = get(scene.port, path)
    assert answer.status == 404
    assert "kvxfer_x" not in answer.body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_is_read_only(scene: Scene, method: str) -> None:
    assert get(scene.port, "/metrics", method=method).status == 501


def test_head_has_no_body(scene: Scene) -> None:
    answer = get(scene.port, "/metrics", method="HEAD")
    assert (answer.status, answer.body) == (200, "")


def test_ready_says_why_it_is_not(scene: Scene) -> None:
    assert get(scene.port, "/readyz").status == 200
    scene.why = "no cache is registered"
    answer = get(scene.port, "/readyz?verbose")
    assert (answer.status, answer.body) == (503, "not ready: no cache is registered\n")
    assert get(scene.port, "/healthz").status == 200


def test_a_busy_loop_makes_a_scrape_old_and_not_late(scene: Scene) -> None:
    scrape(scene.port)
    asked = scene.asked
    with scene.busy():
        for _ in range(3):
            began = time.monotonic()
            found = scrape(scene.port)
            assert time.monotonic() - began < 5
            assert found.sum("kvxfer_x_total") == 2
            assert found.sum("kvxfer_snapshot_age_seconds") >= 0.2
        assert get(scene.port, "/healthz").status == 503
        assert get(scene.port, "/readyz").status == 503
    assert get(scene.port, "/healthz").status == 200
    assert scrape(scene.port).sum("kvxfer_snapshot_age_seconds") == 0
    assert scene.asked <= asked + 2  # what was asked in vain was asked once


def test_a_loop_that_never_came_round_has_nothing_to_tell(scene: Scene) -> None:
    with scene.busy():
        assert get(scene.port, "/metrics").status == 503


def test_a_scrape_that_fails_is_contained(scene: Scene) -> None:
    scene.fails = True
    answer = get(scene.port, "/metrics")
    assert (answer.status, answer.body) == (500, "the scrape failed; see the sidecar's log\n")
    scene.fails = False
    assert scrape(scene.port).sum("kvxfer_x_total") == 2


@contextlib.contextmanager
def connected(scene: Scene, sent: bytes) -> Iterator[list[socket.socket]]:
    """As many clients as there are threads, each of which has sent this."""
    clients = [socket.create_connection(("127.0.0.1", scene.port)) for _ in range(web.MOST_AT_ONCE)]
    try:
        for client in clients:
            client.sendall(sent)
        deadline = time.monotonic() + 5
        while len(scene.server._deadlines) < web.MOST_AT_ONCE:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        yield clients
    finally:
        for client in clients:
            client.close()


def test_slow_clients_are_hung_up_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sends a byte now and then; then they are over their time."""
    monkeypatch.setattr(web, "DEADLINE", 4.0)
    with connected(scene, b"G") as slow:
        deadline = time.monotonic() + 15
        while scene.server._deadlines:
            assert time.monotonic() < deadline
            for client in slow:
                with contextlib.suppress(OSError):
                    client.send(b"G")
            time.sleep(0.05)
        assert scrape(scene.port).sum("kvxfer_x_total") == 2


def test_slow_clients_keep_no_probe_away(scene: Scene) -> None:
    """A liveness probe that fails restarts the sidecar: nobody can make it fail by holding connections open."""
    with connected(scene, b"GET /hea"):
        for _ in range(3 * web.MOST_AT_ONCE):
            assert get(scene.port, "/healthz").status == 200
    until(lambda: not scene.server._deadlines and scene.server._slots._value >= web.MOST_AT_ONCE)
    assert scene.server._slots._value == web.MOST_AT_ONCE  # none was given back twice


def test_a_client_that_waits_for_its_answer_keeps_its_place(scene: Scene) -> None:
    with scene.busy(patience=3.0), connected(scene, b"GET /metrics HTTP/1.0\r\n\r\n") as waiting:
        deadline = time.monotonic() + 5
        while scene.server._silent:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert get(scene.port, "/metrics").status == 503  # told at once
        for client in waiting:
            assert client.recv(12) == b"HTTP/1.0 503"  # the loop has never come round


def test_what_a_client_accepts_may_be_anything(scene: Scene) -> None:
    for accepted in (b"\xff", b"application/openmetrics-text; version=\xff", b"text/plain; version=;;,"):
        with socket.create_connection(("127.0.0.1", scene.port)) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\nAccept: " + accepted + b"\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.0 200"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x00\xff\xfe\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"A" * 70_000,
        b"GET /metrics HTTP/1.1\r\n",
    ],
    ids=["nothing", "noise", "short", "version", "long", "half"],
)
def test_nonsense_does_no_harm(scene: Scene, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", scene.port)) as client, contextlib.suppress(OSError):
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        while client.recv(65_536):
            pass
    assert scrape(scene.port).sum("kvxfer_x_total") == 2


def test_a_client_that_goes_away_in_the_answer(scene: Scene) -> None:
    for _ in range(20):
        client = socket.create_connection(("127.0.0.1", scene.port))
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        client.close()
    until(lambda: get(scene.port, "/metrics").status == 200)  # those that went away are still being served
    until(lambda: not scene.server._deadlines)
    assert scrape(scene.port).sum("kvxfer_x_total") == 2


def test_a_port_that_is_taken(scene: Scene) -> None:
    with pytest.raises(KvxferError) as caught:
        WebServer("127.0.0.1", scene.port, scene.monitor)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "http_port")
    assert str(scene.port) in caught.value.message


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", ""])
def test_names_are_resolved(scene: Scene, host: str) -> None:
    server = WebServer(host, 0, scene.monitor)
    server.start()
    try:
        assert scrape(server.port).sum("kvxfer_x_total") == 2
    finally:
        server.stop()


def test_places_are_ipv4_first(monkeypatch: pytest.MonkeyPatch) -> None:
    six, four = ("::1", 9100, 0, 0), ("127.0.0.1", 9100)
    kind = (socket.SOCK_STREAM, 6, "")
    both = [(socket.AF_INET6, *kind, six), (socket.AF_INET, *kind, four)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert web.places("name", 9100) == [(socket.AF_INET, four), (socket.AF_INET6, six)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both[:1])
    assert web.places("name", 9100) == [(socket.AF_INET6, six)]
    seen: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: seen.append(host) or both)
    web.places("[::1]", 9100)
    assert seen == ["::1"]


def test_a_name_of_ipv6_alone_is_bound(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> None:
    bound: list[object] = []
    place = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 9100, 0, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [place])
    monkeypatch.setattr(WebServer, "server_bind", lambda self: bound.append((self.address_family, self.server_address)))
    monkeypatch.setattr(WebServer, "server_activate", lambda self: None)
    WebServer("six", 9100, scene.monitor).server_close()
    assert bound == [(socket.AF_INET6, ("::1", 9100, 0, 0))]


def test_a_name_that_nobody_knows(scene: Scene) -> None:
    with pytest.raises(KvxferError, match=r"nowhere\.invalid:9100") as caught:
        WebServer("nowhere.invalid", 9100, scene.monitor)
    assert caught.value.field == "http_port"


def test_a_host_that_is_none() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    for host in ("nosuch.invalid", "\xfc" * 80, "a\0b", "300.1.1.1"):
        with pytest.raises(KvxferError) as caught:
            WebServer(host, 0, Monitor(loop, list, str))
        assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "http_port")


def test_a_closed_loop_is_not_alive() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    assert not Monitor(loop, list, str).alive()
