"""The NIXL driver.  The only module that imports ``nixl``, and only when an agent is created.

NIXL's exceptions have no common base class and its states are strings; neither leaves this file.  Progress thread off:
on, an idle agent spins at 100 % of a core and halves same-host throughput.  Telemetry capture on: it costs a few
microseconds a request, and its byte counts are what tests and users compare against the plan.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import logging
import struct
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.files import FILES
from kvxfer.xfer.api import Indices, MemoryKind, NotificationHandler, RowArray, Span, Telemetry
from kvxfer.xfer.driver import LibraryInfo
from kvxfer.xfer.engine import EngineSettings, PumpedEngine
from kvxfer.xfer.environment import apply_defaults, effective, hard_exit, ucx_version

__all__ = ["NixlDriver", "NixlEngine", "hard_exit", "nixl_version", "preload", "ucx_version"]

_log = logging.getLogger(__name__)

_MEMORY: Final[Mapping[MemoryKind, str]] = {MemoryKind.DRAM: "DRAM", MemoryKind.VRAM: "VRAM"}
#: NIXL's name for the local side of a transfer.
_LOCAL: Final = "NIXL_INIT_AGENT"
#: Metadata starts so, followed by the length (64 bit, little endian) and the text of the agent's name.
_MAGIC: Final = b"nixlSerDes|Agent"
#: NIXL exception -> reason, where the kind of failure says more than the call that failed.
_REASONS: Final[Mapping[str, Reason]] = {
    "nixlRemoteDisconnectError": Reason.PEER_LOST,
    "nixlNotSupportedError": Reason.UNSUPPORTED,
}


def named_agent(metadata: bytes) -> str | None:
    """The agent name that a metadata blob carries, or None where the blob is not of the known form."""
    head = len(_MAGIC) + 8
    if len(metadata) < head or not metadata.startswith(_MAGIC):
        return None
    (length,) = struct.unpack_from("<Q", metadata, len(_MAGIC))
    if length > len(metadata) - head:
        return None
    return metadata[head : head + length].decode("utf-8", "replace")


class _translated:
    """Turn whatever NIXL raises into a :class:`KvxferError`; the original goes to the log only.

    Not a generator: the frames of :mod:`contextlib` would keep the original's traceback; see :func:`_translate`.
    """

    def __init__(self, default: Reason, what: str, **values: object) -> None:
        self._default, self._what, self._values = default, what, values

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, caught: BaseException | None, trace: TracebackType | None
    ) -> None:
        # NIXL's exceptions have no common base.
        if isinstance(caught, Exception) and not isinstance(caught, KvxferError):
            made = [_translate(caught, self._default, self._what, **self._values)]
            del caught, trace  # this frame is part of what is raised
            raise made.pop() from None


def _translate(caught: Exception, default: Reason, what: str, **values: object) -> KvxferError:
    _log.debug("NIXL: %s: %r", what, caught)
    # It becomes the context of what is raised here, and its frames have hold of the agent: whoever kept the error would
    # keep the agent from being destroyed, with its connections and its thread.
    caught.__traceback__ = None
    kind = type(caught).__name__
    reason = _REASONS.get(kind, default)
    if reason is Reason.PEER_LOST:
        what += ": the peer is gone"
    elif reason is Reason.UNSUPPORTED and reason is not default:
        what += ": no backend supports it"
    return KvxferError(reason, what, field="", **values)


def load() -> Any:
    """Import NIXL.

    :raises KvxferError: UNSUPPORTED where it is not installed.
    """
    apply_defaults()  # before the import: UCX reads part of its settings when it is loaded
    try:
        return importlib.import_module("nixl._api")
    except ImportError as missing:
        what = "NIXL is not installed; pip install 'kvxfer[nixl]' brings it"
        raise KvxferError(Reason.UNSUPPORTED, what, detail=missing) from None


def preload() -> None:
    """Load NIXL, but not torch, which it would import to learn of a CUDA version when nothing else tells.

    That costs about 1.7 seconds and 195 MB, and we hand it no tensors.  Only for a process of our own that has no other
    threads yet: an import of torch elsewhere would fail meanwhile.  A torch that is loaded already stays.

    :raises KvxferError: UNSUPPORTED where NIXL is not installed.
    """
    if "torch" in sys.modules:
        load()
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # what makes an import of it fail at once
    try:
        load()
    finally:
        del sys.modules["torch"]


class NixlDriver:
    """One NIXL agent; see :class:`kvxfer.xfer.driver.Driver`.  All calls on one thread.

    :param backends: NIXL backend -> its initialisation parameters.
    """

    def __init__(self, backends: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self._wanted = dict(backends) if backends is not None else {"UCX": {}}
        self._agent: Any = None
        # NIXL's handle objects keep the agent alive.  They are known outside by number only, so that clearing these
        # tables is enough for the agent to be destroyed.
        self._numbers = itertools.count(1)
        self._rows: dict[int, Any] = {}
        self._requests: dict[int, Any] = {}
        self._posted: set[int] = set()
        self._registered: dict[int, tuple[Any, ...]] = {}

    def open(self, name: str) -> None:
        """Create the agent and its backends; LIMIT_EXCEEDED where that could take the last file descriptor."""
        api = load()
        with FILES.agent():
            self._open(api, name)

    def _open(self, api: Any, name: str) -> None:
        config: dict[str, Any] = {"enable_prog_thread": False, "capture_telemetry": True, "backends": []}
        with _translated(Reason.INTERNAL, "the NIXL agent could not be created", agent=name):
            self._agent = api.nixl_agent(name, api.nixl_agent_config(**config))
        plugins = self._agent.get_plugin_list()
        for backend, parameters in self._wanted.items():
            if backend not in plugins:
                raise KvxferError(Reason.UNSUPPORTED, "no such NIXL backend", backend=backend, available=plugins)
            with _translated(Reason.UNSUPPORTED, "the NIXL backend could not be created", backend=backend):
                self._agent.create_backend(backend, dict(parameters))

    def close(self) -> None:
        """Destroy the agent.  Posted requests are let go of only here, where destroying stops them."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for number in self._posted:
            # Never released in flight: marked as released, so that its finaliser does not do it either.
            self._requests.pop(number)._released = True
        for handle in (*self._requests.values(), *self._rows.values()):
            try:
                handle.release()
            except Exception as caught:  # noqa: BLE001  NIXL's exceptions have no common base
                _log.warning("NIXL: a handle could not be released: %r", caught)
            del handle
        for descriptors in self._registered.values():
            for descriptor in descriptors:
                try:
                    agent.deregister_memory(descriptor)
                except Exception as caught:  # noqa: BLE001  NIXL's exceptions have no common base
                    _log.warning("NIXL: memory could not be deregistered: %r", caught)
        self._requests.clear()
        self._rows.clear()
        self._posted.clear()
        self._registered.clear()
        del agent  # the last reference: here it is destroyed

    def register(self, spans: Sequence[Span]) -> int:
        """Register each kind of memory in one call; undoes the first kinds when a later one fails."""
        done: list[Any] = []
        try:
            for kind in MemoryKind:
                chosen = [(s.address, s.length, s.device, "") for s in spans if s.kind is kind]
                if chosen:
                    with _translated(Reason.MEMORY_LIMIT, "memory could not be registered", kind=kind.value):
                        done.append(self._agent.register_memory(chosen, _MEMORY[kind]))
        except KvxferError:
            for descriptor in done:
                self._agent.deregister_memory(descriptor)
            raise
        number = next(self._numbers)
        self._registered[number] = tuple(done)
        return number

    def deregister(self, handle: int) -> None:
        """Undo :meth:`register`."""
        for descriptor in self._registered.pop(handle):
            with _translated(Reason.INTERNAL, "memory could not be deregistered"):
                self._agent.deregister_memory(descriptor)

    def metadata(self) -> bytes:
        """The agent's full metadata."""
        with _translated(Reason.INTERNAL, "the agent metadata could not be read"):
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes, expected_name: str) -> None:
        """Load metadata; a blob that names another agent is refused before NIXL sees it.

        Loading it first could add sections to a live peer, and removing that peer again would break its connection.
        """
        claimed = named_agent(metadata)
        if claimed is not None and claimed != expected_name:
            raise KvxferError(
                Reason.PEER_METADATA_INVALID, "metadata of another agent", expected=expected_name, found=claimed
            )
        try:
            loaded = self._agent.add_remote_agent(metadata)
        except Exception as caught:  # noqa: BLE001  NIXL's exceptions have no common base
            # A blob that breaks off in its memory section leaves its connection behind in NIXL 1.5.1 whatever is done
            # here: this agent then refuses that name for good (other names are unaffected).  Hence the digest around
            # the blob on the wire, and a fresh name for every incarnation.
            self._forget(expected_name)
            if type(caught).__name__ == "nixlBackendError":
                # The blob was read; UCX could not do anything with what it says: its ports are not reachable.
                what = "no connection to the peer's transfer library"
                raise _translate(caught, Reason.PEER_UNREACHABLE, what, peer=expected_name) from None
            what = "the peer's metadata could not be loaded"
            raise _translate(caught, Reason.PEER_METADATA_INVALID, what, peer=expected_name) from None
        found = loaded.decode("utf-8", "replace") if isinstance(loaded, bytes) else str(loaded)
        if found != expected_name:
            self._forget(found)
            raise KvxferError(
                Reason.PEER_METADATA_INVALID, "metadata of another agent", expected=expected_name, found=found
            )
        try:
            self._agent.make_connection(expected_name)  # returns at once; the handshake itself runs while polling
        except Exception as caught:  # noqa: BLE001  NIXL's exceptions have no common base
            self._forget(expected_name)
            what = "no connection to the peer"
            raise _translate(caught, Reason.PEER_UNREACHABLE, what, peer=expected_name) from None

    def _forget(self, name: str) -> None:
        """Clean up after a failure, which is reported anyway."""
        try:
            self._agent.remove_remote_agent(name)
        except Exception as caught:  # noqa: BLE001  NIXL's exceptions have no common base
            _log.debug("NIXL: nothing of %s to clean up: %r", name, caught)

    def remove_peer(self, name: str) -> None:
        """Forget a peer."""
        with _translated(Reason.INTERNAL, "the peer could not be removed", peer=name):
            try:
                self._agent.remove_remote_agent(name)
            except Exception as caught:
                # A peer that disconnected is gone from NIXL's tables already in some versions.
                if type(caught).__name__ != "nixlNotFoundError":
                    raise

    def prepare(self, rows: RowArray, kind: MemoryKind, peer: str | None) -> int:
        """Prepare N x 5 rows as they are; NIXL expands strides by itself."""
        with _translated(Reason.NOT_REGISTERED, "the descriptor list was refused", side=peer or "local"):
            prepared = self._agent.prep_xfer_dlist(peer if peer is not None else _LOCAL, rows, _MEMORY[kind])
        number = next(self._numbers)
        self._rows[number] = prepared
        return number

    def release_rows(self, handle: int) -> None:
        """Free a prepared list."""
        with _translated(Reason.INTERNAL, "a prepared list could not be released"):
            self._rows[handle].release()
        del self._rows[handle]

    def make(self, local: int, local_indices: Indices, remote: int, remote_indices: Indices, note: bytes) -> int:
        """Make a READ request."""
        with _translated(Reason.INTERNAL, "the request was refused"):
            ours, theirs = self._rows[local], self._rows[remote]
            request = self._agent.make_prepped_xfer("READ", ours, local_indices, theirs, remote_indices, note)
        number = next(self._numbers)
        self._requests[number] = request
        return number

    def post(self, handle: int) -> bool:
        """Post; may take as long as the whole copy."""
        self._posted.add(handle)
        try:
            state = self._agent.transfer(self._requests[handle])
        except Exception as caught:  # noqa: BLE001  NIXL's exceptions have no common base
            self._posted.discard(handle)
            raise _translate(caught, Reason.TRANSFER_FAILED, "the read could not be posted") from None
        return self._complete(handle, state)

    def check(self, handle: int) -> bool:
        """Ask for the state, which also drives progress."""
        try:
            state = self._agent.check_xfer_state(self._requests[handle])
        except Exception as caught:  # noqa: BLE001  NIXL's exceptions have no common base
            self._posted.discard(handle)
            raise _translate(caught, Reason.TRANSFER_FAILED, "the read failed") from None
        return self._complete(handle, state)

    def _complete(self, handle: int, state: str) -> bool:
        if state == "PROC":
            return False
        self._posted.discard(handle)
        if state != "DONE":
            raise KvxferError(Reason.TRANSFER_FAILED, "the read failed")
        return True

    def telemetry(self, handle: int) -> Telemetry | None:
        """NIXL's own figures (it counts in microseconds)."""
        with _translated(Reason.INTERNAL, "no telemetry"):
            figures = self._agent.get_xfer_telemetry(self._requests[handle])
        return Telemetry(
            post_seconds=figures.postDuration / 1e6,
            transfer_seconds=figures.xferDuration / 1e6,
            bytes=int(figures.totalBytes),
            descriptors=int(figures.descCount),
        )

    def release(self, handle: int) -> None:
        """Free a request that is not in flight."""
        with _translated(Reason.TRANSFER_STATE, "the request could not be released"):
            self._requests[handle].release()
        del self._requests[handle]

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a notification."""
        with _translated(Reason.PEER_LOST, "the notification could not be sent", peer=peer):
            self._agent.send_notif(peer, payload)

    def notifications(self) -> Sequence[tuple[str, bytes]]:
        """Drive progress and take what arrived."""
        # A hundred times a second for as long as a reader is connected: hence not through _translated.
        try:
            arrived = self._agent.get_new_notifs()
        except Exception as caught:  # noqa: BLE001  NIXL's exceptions have no common base
            raise _translate(caught, Reason.INTERNAL, "notifications could not be read") from None
        if not arrived:
            return ()
        return [(str(peer), bytes(payload)) for peer, payloads in arrived.items() for payload in payloads]

    def describe(self) -> LibraryInfo:
        """Versions, backends with their parameters, environment."""
        environment, defaults = effective()
        backends = {name: dict(self._agent.get_backend_params(name)) for name in self._wanted}
        return LibraryInfo("nixl", nixl_version(), ucx_version(), backends, environment, defaults)


def nixl_version() -> str:
    """The version of the NIXL distribution that is installed."""
    for package in ("nixl", "nixl-cu13", "nixl-cu12", "nixl-rocm"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


class NixlEngine(PumpedEngine):
    """The transfer engine over NIXL.

    :param name: the agent name; unique among all agents that may ever meet, so it carries the incarnation.
    :param on_notification: called on the event loop with (peer's agent name, payload).
    :param backends: NIXL backend -> initialisation parameters; UCX with its defaults where None.
    """

    def __init__(
        self,
        name: str,
        on_notification: NotificationHandler | None = None,
        *,
        settings: EngineSettings | None = None,
        backends: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        super().__init__(name, NixlDriver(backends), on_notification, settings)
