"""A sidecar inside the engine's process, for set-ups where its memory cannot be shared with another.

The service is the same; what differs is whose process it is: nothing here handles signals, ends the process, or touches
the engine's logging.  What that costs is in ``docs/how-to/embed-a-sidecar.md``.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

import structlog
import uvloop
from pydantic import ValidationError

from kvxfer.config import Settings, problems
from kvxfer.core.errors import KvxferError, Reason
from kvxfer.logs import use_logging
from kvxfer.service.registrations import EngineFactory
from kvxfer.sidecar import Sidecar

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")

#: How long starting may take, seconds; it takes one where nothing is wrong.
START_LIMIT: Final = 60.0

#: Where a process has started a sidecar; a process that was forked from it cannot have one.
_started_in: int | None = None


class EmbeddedSidecar:
    """A sidecar that runs on a thread of this process, and takes memory by address.

    ::

        with EmbeddedSidecar(peer_host="10.0.0.7", peer_tls_cert=...) as sidecar:
            client = Client(sidecar.engine_address, engine_id="decode-0")

    Threads may call all methods.  Where it is not stopped it stops when the interpreter exits.

    :param settings: all of them, or some by name; those that are not given come from ``KVXFER_*`` and the defaults.
        Without ``engine_socket`` the engine listener is a socket in a private directory that goes with the sidecar.
        ``log_level`` and ``log_format`` mean nothing here: what is logged goes to the logger ``kvxfer`` of
        :mod:`logging`, or to structlog where the process has configured it.
    :param make_engine: builds transfer engines; NIXL's by default.

    :raises KvxferError: FIELD_INVALID where the settings cannot work.
    """

    def __init__(
        self, settings: Settings | None = None, *, make_engine: EngineFactory | None = None, **named: Any
    ) -> None:
        if settings is not None and named:
            raise KvxferError(
                Reason.FIELD_INVALID, "settings are given as one object or by name, not both", field="settings"
            )
        try:
            given = Settings(**named) if settings is None else settings
        except ValidationError as error:
            raise KvxferError(Reason.FIELD_INVALID, "; ".join(problems(error)), field="settings") from None
        chosen: dict[str, Any] = {"allow_address": True}
        if "memory_directories" not in given.model_fields_set:
            chosen |= {"memory_directories": ()}  # the engine's memory is no file
        self.settings: Final = given.model_copy(update=chosen)
        self._private = "engine_socket" not in given.model_fields_set
        self._make_engine = make_engine
        self._lock = threading.Lock()
        self._process = 0
        self._thread: threading.Thread | None = None
        self._end: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._addresses = ("", "")

    @property
    def engine_address(self) -> str:
        """The engine listener, as a gRPC target; empty while the sidecar does not run."""
        return self._addresses[0]

    @property
    def peer_address(self) -> str:
        """``host:port`` of the peer listener as peers reach it; empty while the sidecar does not run."""
        return self._addresses[1]

    def start(self) -> EmbeddedSidecar:
        """Start, and return once both listeners serve.  Does nothing where it runs.

        :raises KvxferError: FIELD_INVALID where an address, the socket or its directory cannot be had; UNSUPPORTED
            where NIXL is not installed, or in a process that was forked from one with an embedded sidecar.
        """
        self._check_fork()
        with self._lock:
            if self._thread is not None:
                return self
            if self._make_engine is None:
                _load_nixl()
            use_logging()
            self._begin()
        return self

    def stop(self) -> None:
        """Drain and stop, as ``kvxfer serve`` does when it is told to end.  Does nothing where it does not run.

        Nobody reads or writes registered memory any more when this returns.  Takes as long as posted reads and those
        that were granted to others may: ``drain_timeout`` or ``read_grant``, and two seconds.
        """
        if self._process != os.getpid():
            return  # not ours: of the process that this one was forked from
        with self._lock:
            if self._thread is not None:
                self._end()
                self._thread.join()
                self._thread, self._loop, self._addresses = None, None, ("", "")
                atexit.unregister(self._at_exit)

    def __enter__(self) -> EmbeddedSidecar:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<EmbeddedSidecar {self.peer_address or 'stopped'}>"

    # -- the thread ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        global _started_in
        started: Future[tuple[str, str]] = Future()
        thread = threading.Thread(target=self._run, args=(started,), name="kvxfer-sidecar", daemon=True)
        _started_in = self._process = os.getpid()
        thread.start()
        try:
            self._addresses = started.result(START_LIMIT)
        except FutureTimeout:
            raise KvxferError(
                Reason.DEADLINE_EXCEEDED,
                f"the embedded sidecar has not started within {START_LIMIT:g} s; that is so where this process was "
                "forked from one that has used gRPC's asyncio API: have it spawned instead",
                field="process",
            ) from None
        except BaseException:
            self._end()  # where it is this thread that was interrupted
            thread.join()
            raise
        self._thread = thread
        atexit.register(self._at_exit)

    def _run(self, started: Future[tuple[str, str]]) -> None:
        try:
            with contextlib.ExitStack() as stack:
                settings = self.settings
                if self._private:
                    settings = settings.model_copy(update={"engine_socket": stack.enter_context(_private_socket())})
                uvloop.run(self._serve(settings, started))
        except BaseException as error:
            if started.done():
                log.exception("the embedded sidecar has failed")
            else:
                started.set_exception(error)

    async def _serve(self, settings: Settings, started: Future[tuple[str, str]]) -> None:
        loop, ending = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(ending.set)

        self._loop, self._end = loop, end
        sidecar = Sidecar(settings, self._make_engine)
        await sidecar.start()
        started.set_result((sidecar.engine_target, sidecar.peer_address))
        await ending.wait()
        await sidecar.stop()

    # -- the ends of processes -------------------------------------------------------------------------------------

    def _check_fork(self) -> None:
        if _started_in not in (None, os.getpid()):
            raise KvxferError(
                Reason.UNSUPPORTED,
                f"this process was forked from process {_started_in}, which had started an embedded sidecar; gRPC and "
                "UCX do not outlive a fork: start it after forking, or have workers spawned",
                field="process",
                forked_from=_started_in,
            )

    def _at_exit(self) -> None:
        if self._process == os.getpid() and self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.set_default_executor, _AtOnce())
            self.stop()


class _AtOnce(ThreadPoolExecutor):
    """While the interpreter exits no pool takes work any more; what is left to do is little, and done at once."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  it is told to whoever waits
            done.set_exception(error)
        return done


def _load_nixl() -> None:
    """Load it here, where a failure can be told at once.

    UCX would take SIGHUP for a wish to debug it, and keep the engine from ending with its terminal.
    """
    from kvxfer.xfer.nixl import load

    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
    load()


@contextlib.contextmanager
def _private_socket() -> Iterator[Path]:
    try:
        directory = tempfile.mkdtemp(prefix="kvxfer-")  # mode 0700
    except OSError as error:
        raise KvxferError(
            Reason.FIELD_INVALID,
            f"there is no directory for the engine socket: {error}; set engine_socket",
            field="engine_socket",
        ) from error
    try:
        yield Path(directory) / "engine.sock"
    finally:
        shutil.rmtree(directory, ignore_errors=True)
