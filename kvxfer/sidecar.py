"""The composition root: settings in, a running service out.

:class:`Sidecar` is what ``kvxfer serve`` runs, and, where memory cannot be shared between processes,
:class:`kvxfer.embedded.EmbeddedSidecar` in the process of an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import grpc.aio
import structlog
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from kvxfer import __version__
from kvxfer.config import Settings, group_number, is_loopback
from kvxfer.core.errors import KvxferError, Reason
from kvxfer.files import raise_limit
from kvxfer.logs import configure
from kvxfer.memory.api import list_owned
from kvxfer.pb import peer_pb2, peer_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from kvxfer.service import gauges
from kvxfer.service.access import AccessInterceptor
from kvxfer.service.engine import EngineService
from kvxfer.service.interceptors import ErrorInterceptor
from kvxfer.service.links import PROTOCOL_VERSIONS
from kvxfer.service.meters import Family
from kvxfer.service.metrics import Metrics
from kvxfer.service.peer import PeerService
from kvxfer.service.peer_client import GrpcPeerClient
from kvxfer.service.registrations import EngineFactory, Registrations
from kvxfer.tls import PeerTls
from kvxfer.web import Monitor, WebServer, places
from kvxfer.xfer.api import NotificationHandler, TransferEngine

log = structlog.get_logger()

ENGINE_SERVICE: Final = transfer_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name
PEER_SERVICE: Final = peer_pb2.DESCRIPTOR.services_by_name["KvPeer"].full_name

#: How often leases and readers are looked through, seconds.
TICK: Final = 1.0
#: How long calls may still run once everything has drained, seconds.
GRACE: Final = 1.0

#: How long the event loop and the NIXL thread may keep the interpreter from one another, seconds.  Python's 5 ms are
#: longer than a read of many megabytes; a shorter interval costs nothing while one of the two sleeps.
SWITCH_INTERVAL: Final = 0.0002

_Status = health_pb2.HealthCheckResponse


def nixl_engine(settings: Settings) -> EngineFactory:
    """Transfer engines over NIXL."""
    from kvxfer.xfer.engine import EngineSettings
    from kvxfer.xfer.lanes import LanedEngine
    from kvxfer.xfer.nixl import NixlEngine
    from kvxfer.xfer.pump import PumpSettings

    chosen = EngineSettings(
        pump=PumpSettings(interval=settings.poll_interval),
        drain=settings.drain_timeout,
        warm_up=settings.warm_up_timeout,
    )

    def make(name: str, on_notification: NotificationHandler | None) -> TransferEngine:
        first = NixlEngine(name, on_notification, settings=chosen)
        if on_notification is not None:  # only reading is split
            return first
        return LanedEngine((first, *(NixlEngine(f"{name}.{i}", settings=chosen) for i in range(1, settings.lanes))))

    return make


def library_versions() -> tuple[str, str]:
    """Versions of NIXL and UCX; empty where they are not loaded yet."""
    from kvxfer.xfer.nixl import nixl_version, ucx_version

    return nixl_version(), ucx_version()


class Sidecar:
    """One sidecar: an engine listener, a peer listener, and what lies between them.

    :param make_engine: builds transfer engines; NIXL's by default.

    :raises KvxferError: FIELD_INVALID where the TLS files cannot be used.
    """

    def __init__(self, settings: Settings, make_engine: EngineFactory | None = None) -> None:
        self.settings: Final = settings
        files = settings.peer_tls()
        self._tls = PeerTls(files) if files else None
        self.metrics: Final = Metrics()
        self._limits = settings.service()
        self._versions = ("", "")
        self.registrations: Final = Registrations(
            self._limits,
            make_engine or nixl_engine(settings),
            self._connect,
            self.metrics,
        )
        self.registrations.on_change = self._on_change
        #: ``host:port`` of the peer listener as peers reach it; known once started.
        self.peer_address = ""
        #: Port of the metrics and probes; 0 where they are not served.
        self.http_port = 0
        self._web: WebServer | None = None
        self._servers: list[grpc.aio.Server] = []
        self._health: list[health.HealthServicer] = []
        self._service: EngineService | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._unready = "the sidecar is starting"

    @property
    def engine_target(self) -> str:
        """The gRPC target of the engine listener."""
        return f"unix:{self.settings.engine_socket}"

    async def start(self) -> None:
        """Bind both listeners, and that of the metrics where it is wanted, and serve.

        :raises KvxferError: FIELD_INVALID where an address or the socket cannot be bound.
        """
        peer_server, port = self._bind_peer()
        self.peer_address = self._advertised(port)
        self._bind_web()
        engine_server = self._new_server()
        try:
            self._bind_engine(engine_server)
        except KvxferError:
            if self._web is not None:
                self._web.stop()
            raise
        self._versions = library_versions()
        self._service = EngineService(self.registrations, self._limits, self.peer_address, self._versions)
        transfer_pb2_grpc.add_KvTransferServicer_to_server(self._service, _by_name(engine_server))
        peer = PeerService(self.registrations)
        peer_pb2_grpc.add_KvPeerServicer_to_server(peer, _by_name(peer_server))
        for server, name in ((engine_server, ENGINE_SERVICE), (peer_server, PEER_SERVICE)):
            servicer = health.HealthServicer()
            self._health.append(servicer)
            health_pb2_grpc.add_HealthServicer_to_server(servicer, _by_name(server))
            names = (name, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        self._servers = [engine_server, peer_server]
        await self._tell_health()
        for server in self._servers:
            await server.start()
        if self._web is not None:
            self._web.start()
        self._ticker = asyncio.ensure_future(self._tick())
        security = "mutual TLS" if self._tls else "plaintext"
        log.info(
            "serving",
            version=__version__,
            engine=self.engine_target,
            peers=self.peer_address,
            peer_security=security,
            http=f"{self.settings.http_host}:{self.http_port}" if self._web else "off",
        )
        if self._tls is None and not is_loopback(self.settings.peer_host):
            log.warning("the peer port is plaintext: whoever reaches it can read every registered cache")
        if self._web is not None and not is_loopback(self.settings.http_host):
            log.info("whoever reaches the HTTP port can read the metrics", http_host=self.settings.http_host)
        self._tell_missing()
        self._tell_owned("memory that a sidecar made is there to be adopted")

    async def stop(self) -> None:
        """Drain and stop: refuse new work, let transfers end, unregister, close the listeners.  Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        log.info("draining")
        if self._service is not None:
            self._service.serving = False
        await self._tell_health()
        await self.registrations.close()
        if self._ticker is not None:
            self._ticker.cancel()
        await asyncio.gather(*(s.stop(GRACE) for s in self._servers))
        if self._web is not None:
            await asyncio.to_thread(self._web.stop)
        with contextlib.suppress(FileNotFoundError):
            self.settings.engine_socket.unlink()
        self._tell_owned(
            "memory that a sidecar made stays, for an engine that lives on; who needs it no more removes it"
        )
        log.info("stopped")

    def _tell_missing(self) -> None:
        for directory in self.settings.memory_directories:
            if not Path(directory).is_dir():
                log.warning("there is no such memory directory; engines cannot hand over files there", path=directory)

    def _tell_owned(self, event: str) -> None:
        """It outlives its sidecar so that an engine can have it again; what nobody asks for stays for good."""
        for left in list_owned(self.settings.memory_policy()):
            log.info(event, path=left.path, bytes=left.size)

    # -- listeners -------------------------------------------------------------------------------------------------

    def _connect(self, address: str) -> GrpcPeerClient:
        credentials = self._tls.channel_credentials() if self._tls else None
        return GrpcPeerClient(address, self.settings.message_limit, credentials, self.settings.peer_server_name)

    def _new_server(self, *before: grpc.aio.ServerInterceptor) -> grpc.aio.Server:
        limit = self.settings.message_limit
        return grpc.aio.server(
            interceptors=[*before, ErrorInterceptor(self.metrics)],
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                ("grpc.so_reuseport", 0),
                # Calls that wait for the event loop to come by; beyond, gRPC refuses some at random, in a way that
                # looks as if the caller had given them up.  Its own are a tenth of these.
                ("grpc.server.max_pending_requests", 10_000),
                ("grpc.server.max_pending_requests_hard_limit", 30_000),
                # Peers ping every 10 seconds, also when no call is under way.
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                # A caller that does not answer for 30 seconds is taken for dead, and its streams end.
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                # What gRPC itself allows a ping is a minute, and while one of its own is out it sends no other.
                ("grpc.http2.ping_timeout_ms", 10_000),
                # Else its pings end after two, and a connection whose other end has vanished stays for good.
                ("grpc.http2.max_pings_without_data", 0),
            ],
        )

    def _bind_web(self) -> None:
        if self.settings.http_port is not None:
            monitor = Monitor(asyncio.get_running_loop(), self._measure, lambda: self._unready)
            self._web = WebServer(self.settings.http_host, self.settings.http_port, monitor)
            self.http_port = self._web.port

    def _measure(self) -> list[Family]:
        """Everything that is measured, now."""
        self.metrics.tick(time.monotonic(), gauges.connected(self.registrations))
        if not all(self._versions):  # UCX is loaded with the first agent
            self._versions = library_versions()
        versions = (__version__, str(PROTOCOL_VERSIONS[1]), *self._versions)
        now = gauges.families(self.registrations, self._limits, versions, ready=not self._unready)
        return [*now, *self.metrics.families()]

    def _bind_peer(self) -> tuple[grpc.aio.Server, int]:
        access = (AccessInterceptor(self.settings.peer_allowed_sans, self.metrics),) if self._tls else ()
        server = self._new_server(*access)
        host, port = self.settings.peer_host, self.settings.peer_port
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            _try_to_bind(places(host, port))
            if self._tls:
                return server, server.add_secure_port(where, self._tls.server_credentials())
            return server, server.add_insecure_port(where)
        except (RuntimeError, OSError) as error:
            port_is_it = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
            raise KvxferError(
                Reason.FIELD_INVALID,
                f"the peer listener cannot bind {where}: {_words(error)}",
                field="peer_port" if port_is_it else "peer_host",
                address=where,
            ) from error

    def _advertised(self, port: int) -> str:
        if self.settings.advertise:
            return self.settings.advertise
        host = self.settings.advertised_host()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _bind_engine(self, server: grpc.aio.Server) -> None:
        path = self.settings.engine_socket
        group = group_number(self.settings.engine_socket_group)
        _make_way(path, group)
        mode = int(self.settings.engine_socket_mode, 8)
        # The socket must never be open to others, not even for the moment before chmod.  Where its directory is closed
        # to them the mask can stay: it is that of the whole process, which may be an engine's.
        private = path.parent.stat().st_mode & 0o077 == 0
        before = None if private else os.umask(0o777 & ~mode)
        try:
            _try_to_bind([(socket.AF_UNIX, str(path))])
            path.unlink()
            server.add_insecure_port(self.engine_target)
            path.chmod(mode)
            if group is not None:
                os.chown(path, -1, group)
            if path.parent.stat().st_mode & 0o022:
                log.warning(
                    "others can write to the engine socket's directory, and put their own there", path=str(path)
                )
        except (RuntimeError, OSError) as error:
            raise KvxferError(
                Reason.FIELD_INVALID,
                f"the engine listener cannot bind {path}: {_words(error)}",
                field="engine_socket",
                path=path,
            ) from error
        finally:
            if before is not None:
                os.umask(before)

    # -- health and time -------------------------------------------------------------------------------------------

    def _on_change(self) -> None:
        task = asyncio.ensure_future(self._tell_health())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_health(self) -> None:
        """The process is alive at once, until it ends.  The services serve while there is work to be taken: a cache is
        registered, NIXL works, and nothing is draining.  Both listeners answer for both."""
        self._unready = "the sidecar is stopping" if self._stopping else self.registrations.unready
        for servicer in self._health:
            await servicer.set("", _Status.SERVING)
            for name in (ENGINE_SERVICE, PEER_SERVICE):
                await servicer.set(name, _Status.NOT_SERVING if self._unready else _Status.SERVING)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            for registration in self.registrations:
                try:
                    registration.leases.tick(now)
                    registration.readers.tick(now)
                except Exception:  # without this nothing would expire any more
                    log.exception("letting time pass failed", engine=registration.identity.engine_id)
            # A transfer engine that fails tells nobody.
            if self._unready != ("the sidecar is stopping" if self._stopping else self.registrations.unready):
                await self._tell_health()


def _try_to_bind(found: Sequence[tuple[socket.AddressFamily, Any]]) -> None:
    """As gRPC is about to, whose own words for a failure name no cause, and go to standard error besides.

    :param found: families and addresses, of which one is enough: not every machine has IPv6.
    :raises OSError: where none can be bound, or one belongs to somebody else, who would get some of the calls.
    """
    faults = []
    for family, address in found:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(address)
            except OSError as fault:
                faults.append(fault)
    theirs = [fault for fault in faults if fault.errno == errno.EADDRINUSE]
    if theirs or len(faults) == len(found):
        raise (theirs or faults)[0]


def _by_name(server: grpc.aio.Server) -> Any:
    """A server as the generated code sees it, which finds its methods by their names.

    That code would have every method registered as well; then gRPC waits for a call of each in a future of its own,
    and looks at all of these futures at every call.  By their names all methods share one queue.
    """
    return SimpleNamespace(
        add_generic_rpc_handlers=server.add_generic_rpc_handlers,
        add_registered_method_handlers=lambda service, handlers: None,
    )


def _words(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _make_way(path: Path, group: int | None) -> None:
    """Make the socket's directory, and remove a socket that nobody listens on any more.

    :param group: may pass through a directory that is made here.

    :raises KvxferError: FIELD_INVALID where something else is there, or a live sidecar.
    """
    try:
        if not path.parent.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            log.info("made the engine socket's directory", path=str(path.parent))
            if group is not None:
                os.chown(path.parent, -1, group)
                path.parent.chmod(0o710)
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise KvxferError(
            Reason.FIELD_INVALID, f"the directory of {path} cannot be made: {error}", field="engine_socket", path=path
        ) from error
    problem = "" if stat.S_ISSOCK(kind) else "is there and is no socket"
    with socket.socket(socket.AF_UNIX) as probe:
        if not problem and probe.connect_ex(str(path)) == 0:
            problem = "is served by another sidecar"
    if problem:
        raise KvxferError(Reason.FIELD_INVALID, f"{path} {problem}", field="engine_socket", path=path)
    path.unlink()


async def _serve(settings: Settings, started: Callable[[Sidecar], None] | None) -> None:
    sidecar = Sidecar(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():  # the second time means now
            log.warning("stopping at once")
            os._exit(130)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    await sidecar.start()
    # What is there now stays.  Python's full collections would look through all of it every few thousand calls, and
    # for some 50 ms nothing else would happen.
    gc.collect()
    gc.freeze()
    if started is not None:
        started(sidecar)
    await stop.wait()
    await sidecar.stop()


def serve(settings: Settings, started: Callable[[Sidecar], None] | None = None) -> None:
    """Run a sidecar until SIGINT or SIGTERM; a second signal ends the process at once.

    :param started: called once both listeners serve.

    :raises KvxferError: FIELD_INVALID where it cannot start; UNSUPPORTED where NIXL is not installed.
    """
    from kvxfer.xfer.nixl import preload

    if settings.allow_address:  # every address that an engine could name would be one of this process
        raise KvxferError(
            Reason.FIELD_INVALID,
            "allow_address is for a sidecar that is embedded in its engine (kvxfer.embedded)",
            field="allow_address",
        )

    configure(settings.log_level, settings.log_format)
    raise_limit()
    preload()
    sys.setswitchinterval(SWITCH_INTERVAL)
    uvloop.run(_serve(settings, started))
