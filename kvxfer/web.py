"""Metrics and probes over HTTP: ``/metrics``, ``/healthz`` and ``/readyz``, on threads of their own.

The state belongs to the event loop, so a thread asks it and waits for a while.  A loop that is busy makes a scrape
late, at most by :data:`PATIENCE`; then the answer is what was there when it last came round, and says how old that is.
A loop that does not come round at all is what ``/healthz`` is there to tell.

Clients that are slow or many cost little: so many threads at most (:data:`MOST_AT_ONCE`), each for so long
(:data:`DEADLINE`), one request a connection.  Nor do they keep others away, or whoever holds some connections open
could make ``/healthz`` fail, and the sidecar be restarted: where all threads are taken, the connection that has been
silent for longest makes room.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import structlog
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.service.gauges import AGE
from kvxfer.service.meters import Distribution, Family, Kind, gauge

log = structlog.get_logger()

#: How long a thread waits for the event loop, seconds.
PATIENCE: Final = 1.0
#: Connections that are served at once; another one takes the place of one that has not asked yet, or is told to come
#: back where all have.
MOST_AT_ONCE: Final = 8
#: How long a connection may take in all, seconds.
DEADLINE: Final = 10.0
#: How often connections that take too long are looked for, seconds.
_TURN: Final = 0.5

_HANGS: Final = "the event loop does not come round"
_OPEN: Final = "application/openmetrics-text"
_PLAIN: Final = "text/plain; charset=utf-8"
_BUSY: Final = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"


class Monitor:
    """What other threads may ask of the event loop.

    :param collect: gives the metrics; called on the loop.
    :param unready: why the sidecar does not take work, or nothing where it does; may be called on any thread.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, collect: Callable[[], list[Family]], unready: Callable[[], str]
    ) -> None:
        self._loop = loop
        self._collect = collect
        self.unready: Final = unready
        self._lock = threading.Lock()
        self._asked: Future[list[Family]] | None = None
        self._latest: tuple[list[Family], float] | None = None

    def families(self) -> list[Family] | None:
        """The metrics as they are, or as they were when the loop last came round; ``None`` where it never has."""
        age = 0.0
        try:
            found = self._ask().result(PATIENCE)
        except FutureTimeoutError:
            if self._latest is None:
                return None
            found, when = self._latest
            age = time.monotonic() - when
        return [*found, gauge(AGE, [((), age)])]

    def _ask(self) -> Future[list[Family]]:
        """At most one question is under way: a loop that is busy is not given more to do."""
        with self._lock:
            if self._asked is None or self._asked.done():
                self._asked = Future()
                self._loop.call_soon_threadsafe(self._answer, self._asked)
            return self._asked

    def _answer(self, asked: Future[list[Family]]) -> None:
        try:
            found = self._collect()
        except Exception as error:  # noqa: BLE001  told to the thread that has asked, which logs it
            asked.set_exception(error)
            return
        self._latest = (found, time.monotonic())
        asked.set_result(found)

    def alive(self) -> bool:
        """Whether the loop comes round."""
        seen = threading.Event()
        try:
            self._loop.call_soon_threadsafe(seen.set)
        except RuntimeError:  # it is closed
            return False
        return seen.wait(PATIENCE)


class _Collected:
    """What an encoder of prometheus_client takes."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from (as_metric(family) for family in self._families)
        yield from ProcessCollector(registry=None).collect()


def as_metric(family: Family) -> Metric:
    """A family as prometheus_client knows it."""
    spec = family.spec
    labels = list(spec.labels)
    if spec.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(spec.name, spec.help, labels=labels)
        for values, seen in family.values.items():
            if isinstance(seen, Distribution):
                histogram.add_metric(list(values), _cumulated(spec.buckets, seen.counts), seen.sum)
        return histogram
    made: CounterMetricFamily | GaugeMetricFamily
    if spec.kind is Kind.COUNTER:
        made = CounterMetricFamily(spec.name.removesuffix("_total"), spec.help, labels=labels)
    else:
        made = GaugeMetricFamily(spec.name, spec.help, labels=labels)
    for values, number in family.values.items():
        if not isinstance(number, Distribution):
            made.add_metric(list(values), number)
    return made


def _cumulated(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    names = [*map(str, bounds), "+Inf"]
    return list(zip(names, itertools.accumulate(counts), strict=True))


class _Handler(BaseHTTPRequestHandler):
    server_version = "kvxfer"
    sys_version = ""
    timeout = DEADLINE
    server: WebServer

    def do_GET(self) -> None:
        """Answer, whatever goes wrong."""
        path = self.path.partition("?")[0]
        self.server.asked(self.connection)
        try:
            if path == "/metrics":
                self._metrics()
            elif path == "/healthz":
                alive = self.server.monitor.alive()
                self._answer(200 if alive else 503, "alive" if alive else _HANGS)
            elif path == "/readyz":
                why = self.server.monitor.unready() or ("" if self.server.monitor.alive() else _HANGS)
                self._answer(503 if why else 200, f"not ready: {why}" if why else "ready")
            else:
                self._answer(404, "there are /metrics, /healthz and /readyz here")
        except OSError:  # the client has gone
            self.close_connection = True

    do_HEAD = do_GET

    def _metrics(self) -> None:
        try:
            families = self.server.monitor.families()
            if families is None:
                self._answer(503, "the event loop has not come round yet")
                return
            # Nothing else of what a client accepts is looked at: it may be anything.
            encode, kind = choose_encoder(_OPEN if _OPEN in self.headers.get("Accept", "") else "")
            body: bytes = encode(_Collected(families))
        except OSError:
            raise
        except Exception:
            log.exception("a scrape failed")
            self._answer(500, "the scrape failed; see the sidecar's log")
            return
        self._send(200, kind, body)

    def _answer(self, status: int, text: str) -> None:
        self._send(status, _PLAIN, f"{text}\n".encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is the base class's
        """Probes come every few seconds."""
        log.debug("http", client=self.client_address[0], what=format % args)


def places(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """Where a listener at ``host`` may bind: families and addresses, IPv4 first, which is what most of the world asks.

    :param host: a name, or an address, in brackets or not; empty: every address.
    :raises OSError: where it cannot be resolved.
    """
    name = host.strip("[]") or None
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return sorted(((family, address) for family, _, _, _, address in found), key=lambda f: f[0] != socket.AF_INET)


class WebServer(ThreadingHTTPServer):
    """The listener; see the module's docstring.

    :raises KvxferError: FIELD_INVALID where the address cannot be bound.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, monitor: Monitor) -> None:
        self.monitor: Final = monitor
        self._slots = threading.Semaphore(MOST_AT_ONCE)
        # Of all connections, in the order of their coming; and which of them have sent no request yet.
        self._deadlines: dict[Any, float] = {}
        self._silent: set[Any] = set()
        try:
            # Of a name that has several addresses the first is taken.
            self.address_family, address = places(host, port)[0]
            super().__init__(address, _Handler)
        except (OSError, TypeError, ValueError) as error:  # a host that cannot be a name is one of the latter two
            where = f"{host}:{port}"
            why = getattr(error, "strerror", None) or error
            raise KvxferError(
                Reason.FIELD_INVALID, f"metrics cannot bind {where}: {why}", field="http_port", address=where
            ) from error
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": _TURN}, name="kvxfer-web", daemon=True
        )

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self.server_address[1])

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def stop(self) -> None:
        """Serve no more; takes :data:`_TURN` at most."""
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind, without the base class's look-up of this host's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.port

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for a connection, where one is free or can be had."""
        if not self._slots.acquire(blocking=False) and not (self._make_room() and self._slots.acquire(blocking=False)):
            with contextlib.suppress(OSError):
                request.settimeout(0.0)
                request.sendall(_BUSY)
            self.shutdown_request(request)
            return
        self._silent.add(request)
        self._deadlines[request] = time.monotonic() + DEADLINE
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._done(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """On the connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._done(request)

    def asked(self, request: Any) -> None:
        """A connection has sent its request; on its thread."""
        self._silent.discard(request)

    def _make_room(self) -> bool:
        """Hang up on the connection that has been silent for longest; its thread ends by itself."""
        for request in list(self._deadlines):
            if request in self._silent:
                _hang_up(request)
                self._done(request)
                return True
        return False

    def _done(self, request: Any) -> None:
        self._silent.discard(request)
        if self._deadlines.pop(request, None) is not None:
            self._slots.release()

    def service_actions(self) -> None:
        """Hang up on those who take too long: a client that sends a byte now and then never runs into a timeout."""
        now = time.monotonic()
        for request, until in list(self._deadlines.items()):
            if now >= until:
                _hang_up(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whatever a client does is no matter for the log."""
        log.debug("http connection failed", client=client_address[0])


def _hang_up(connection: Any) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
