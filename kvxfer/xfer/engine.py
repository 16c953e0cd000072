"""The bookkeeping of a transfer engine, over any driver: what exists, what uses what, what may be freed when.

Runs on the event loop; every call of the library goes through the :class:`~kvxfer.xfer.pump.Pump`, which is told how
many peers are known.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.xfer.api import (
    Demand,
    EngineInfo,
    Indices,
    MemoryKind,
    NotificationHandler,
    Peer,
    Read,
    ReadResult,
    ReadState,
    Registration,
    RowArray,
    Rows,
    Span,
)
from kvxfer.xfer.checks import check_read, check_rows, check_spans, lengths_of, require_mapped
from kvxfer.xfer.driver import Driver, LibraryInfo
from kvxfer.xfer.handles import PumpedRead, RowsEntry
from kvxfer.xfer.jobs import Job
from kvxfer.xfer.pieces import Pieces
from kvxfer.xfer.pump import Pump, PumpSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine behaves; seconds.

    :param pump: the rhythm of polling.
    :param drain: how long :meth:`PumpedEngine.close` waits for posted reads.
    :param warm_up: how long :meth:`PumpedEngine.add_peer` may spend on a first one-byte read; 0: no warm-up.
    """

    pump: PumpSettings = field(default_factory=PumpSettings)
    drain: float = 5.0
    warm_up: float = 5.0


class PumpedEngine:
    """A :class:`kvxfer.xfer.api.TransferEngine` over a :class:`~kvxfer.xfer.driver.Driver`.

    :param name: the agent name.
    :param on_notification: called on the event loop for every notification that arrives.
    """

    def __init__(
        self,
        name: str,
        driver: Driver,
        on_notification: NotificationHandler | None = None,
        settings: EngineSettings | None = None,
    ) -> None:
        if not name or len(name) > 255 or not name.isascii() or not name.isprintable():
            raise KvxferError(
                Reason.FIELD_INVALID, "an agent name has 1 to 255 printable ASCII characters", field="name"
            )
        self._name = name
        self._driver = driver
        self._on_notification = on_notification
        self._settings = settings or EngineSettings()
        self._ids = itertools.count(1)
        self._running: Pump | None = None
        self._state = "new"
        self._closing: asyncio.Task[None] | None = None
        self._library: LibraryInfo | None = None
        self._registrations: dict[int, tuple[Registration, Any]] = {}
        self._peers: dict[str, Peer] = {}
        self._adding: set[str] = set()
        self._leaving: dict[str, asyncio.Future[None]] = {}
        self._rows: dict[int, RowsEntry] = {}
        self._reads: set[PumpedRead] = set()
        self._warm_ups: set[Read] = set()  # the engine's own among them
        self._scratch: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._scratch_registration: Registration | None = None

    # --- life ------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The agent name."""
        return self._name

    @property
    def fault(self) -> str:
        """See :attr:`kvxfer.xfer.api.TransferEngine.fault`."""
        if self._state != "open" or self._running is None:
            return f"the transfer engine is {self._state}"
        return self._running.fault

    async def start(self) -> None:
        """See :meth:`kvxfer.xfer.api.TransferEngine.start`."""
        if self._state != "new":
            raise KvxferError(Reason.TRANSFER_STATE, "a transfer engine is started once", state=self._state)
        self._state = "starting"
        pump = self._running = Pump(self._name, self._driver, self._settings.pump, self._on_notification)
        pump.start()

        def open_agent(driver: Driver) -> LibraryInfo:
            driver.open(self._name)
            return driver.describe()

        try:
            self._library = await pump.call(open_agent)
        except BaseException:
            self._state = "closed"
            await pump.stop()
            raise
        self._state = "open"

    async def close(self, drain: float | None = None) -> None:
        """See :meth:`kvxfer.xfer.api.TransferEngine.close`."""
        if self._state in ("new", "closed"):
            self._state = "closed"
            return
        if self._closing is None:
            self._state = "closing"
            self._closing = asyncio.get_running_loop().create_task(self._shut_down(drain))
        await asyncio.shield(self._closing)

    async def _shut_down(self, drain: float | None) -> None:
        pump = self._running
        seconds = self._settings.drain if drain is None else drain
        posted = [read for read in self._reads if read.state is ReadState.POSTED or not read.is_quiesced]
        if posted:
            _, late = await asyncio.wait([asyncio.ensure_future(read.quiesced) for read in posted], timeout=seconds)
            if late:
                _log.warning("%s: %d reads did not finish in %.1f s", self._name, len(late), seconds)
        if pump is not None:
            await pump.stop()
        for read in list(self._reads):
            self._forget(read)
        self._rows.clear()
        self._peers.clear()
        self._registrations.clear()
        self._state = "closed"

    def _pump(self) -> Pump:
        if self._state != "open" or self._running is None:
            raise KvxferError(Reason.SHUTTING_DOWN, "the transfer engine is not running", state=self._state)
        return self._running

    # --- memory ----------------------------------------------------------------------------------------------------

    async def register(self, spans: Sequence[Span]) -> Registration:
        """See :meth:`kvxfer.xfer.api.TransferEngine.register`."""
        pump = self._pump()
        existing = [span for known, _ in self._registrations.values() for span in known.spans]
        registration = Registration(next(self._ids), check_spans(spans, existing))
        self._registrations[registration.id] = (registration, None)  # so that a concurrent call sees the overlap

        def work(driver: Driver) -> Any:
            require_mapped(registration.spans)
            return driver.register(registration.spans)

        def unwanted(handle: Any) -> None:
            self._background(lambda driver: driver.deregister(handle))

        try:
            handle = await pump.call(work, unwanted=unwanted)
        except BaseException:
            self._registrations.pop(registration.id, None)
            raise
        self._registrations[registration.id] = (registration, handle)
        return registration

    async def deregister(self, registration: Registration) -> None:
        """See :meth:`kvxfer.xfer.api.TransferEngine.deregister`."""
        pump = self._pump()
        known = self._registrations.get(registration.id)
        if known is None or known[0] is not registration:
            raise KvxferError(Reason.NOT_REGISTERED, "no such registration", field="registration", id=registration.id)
        users = sum(registration.id in entry.registrations for entry in self._rows.values())
        if users:
            raise KvxferError(
                Reason.REGISTRATION_BUSY, "prepared lists still use this memory", field="registration", users=users
            )
        del self._registrations[registration.id]
        await asyncio.shield(pump.call(lambda driver: driver.deregister(known[1])))

    async def metadata(self) -> bytes:
        """See :meth:`kvxfer.xfer.api.TransferEngine.metadata`."""
        blob: bytes = await self._pump().call(lambda driver: driver.metadata())
        return blob

    # --- peers -----------------------------------------------------------------------------------------------------

    async def add_peer(self, metadata: bytes, expected_name: str, *, spans: Sequence[Span]) -> Peer:
        """See :meth:`kvxfer.xfer.api.TransferEngine.add_peer`."""
        self._pump()
        promised = check_spans(spans)
        if expected_name == self._name:
            raise KvxferError(Reason.PEER_METADATA_INVALID, "an engine cannot be its own peer", name=expected_name)
        while (leaving := self._leaving.get(expected_name)) is not None:
            await asyncio.wait([leaving])
        pump = self._pump()
        if expected_name in self._peers or expected_name in self._adding:
            raise KvxferError(
                Reason.FIELD_INVALID, "the peer is known already", field="expected_name", name=expected_name
            )
        self._adding.add(expected_name)
        meeting = asyncio.ensure_future(self._meet(pump, metadata, expected_name, promised))
        try:
            return await asyncio.shield(meeting)
        except asyncio.CancelledError:
            # Half a peer cannot be dropped in the middle of its first read: let it finish, then undo it.
            self._leaves(expected_name, self._undo_meeting(meeting))
            raise

    async def _meet(self, pump: Pump, metadata: bytes, name: str, spans: tuple[Span, ...]) -> Peer:
        try:
            await pump.call(lambda driver: driver.add_peer(metadata, name))
            peer = self._peers[name] = Peer(name, next(self._ids), spans)
        finally:
            self._adding.discard(name)
        pump.adjust(peers=1)
        try:
            seconds = await self._warm_up(peer)
        except BaseException:
            self._leave(peer)
            raise
        if seconds is not None:
            peer = self._peers[name] = replace(peer, warm_seconds=seconds)
        return peer

    async def _undo_meeting(self, meeting: asyncio.Future[Peer]) -> None:
        try:
            self._leave(await meeting)
        except KvxferError as error:
            _log.info("%s: a peer that nobody waited for: %s", self._name, error)

    async def _warm_up(self, peer: Peer) -> float | None:
        """Read one byte into a scratch buffer: connections are made by use only, and the first use is the slow one.

        A failure to do it at all (a memory kind that cannot be read into host memory) is no failure of the peer; a
        lost connection is.  A peer that does not answer in time keeps the read in flight, which is harmless: it only
        writes into the scratch buffer.
        """
        source = next((span for span in peer.spans if span.kind is MemoryKind.DRAM), None)
        if self._settings.warm_up <= 0.0 or source is None:
            return None
        began = time.perf_counter()
        try:
            if self._scratch is None:
                scratch = np.zeros(64, dtype=np.uint8)
                self._scratch, self._scratch_registration = scratch, None
                self._scratch_registration = await self.register([Span(scratch.ctypes.data, scratch.nbytes)])
            elif self._scratch_registration is None:
                return None  # another add_peer is registering it right now
            here = np.array([[self._scratch.ctypes.data, 1, 0, 1, 1]], dtype=np.uint64)
            there = np.array([[source.address, 1, source.device, 1, 1]], dtype=np.uint64)
            zero = np.zeros(1, dtype=np.int32)
            local = await self.prepare_local(here, MemoryKind.DRAM, peer)
            remote = await self.prepare_remote(there, MemoryKind.DRAM, peer)
            read = await self.make_read(local, zero, remote, zero, b"")
            self._warm_ups.add(read)
            try:
                await asyncio.wait_for(self.post(read), self._settings.warm_up)
            finally:
                await self.release_rows(local)
                await self.release_rows(remote)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            _log.warning("%s: no answer from %s within %.1f s", self._name, peer.name, self._settings.warm_up)
            return None
        except KvxferError as error:
            if error.reason in (Reason.PEER_LOST, Reason.SHUTTING_DOWN):
                raise
            _log.warning("%s: the connection to %s was not warmed up: %s", self._name, peer.name, error)
            return None
        return time.perf_counter() - began

    async def remove_peer(self, peer: Peer) -> None:
        """See :meth:`kvxfer.xfer.api.TransferEngine.remove_peer`."""
        self.require_idle(peer)
        removal = self.start_removal(peer)
        if removal is not None:
            await asyncio.shield(removal)

    def require_idle(self, peer: Peer) -> None:
        """Raise what :meth:`remove_peer` would; then :meth:`start_removal` may follow, before anything else happens."""
        self._pump()
        busy = sum(read not in self._warm_ups for read in self._moving(self._known(peer)))
        if busy:
            raise KvxferError(
                Reason.TRANSFER_STATE, "reads from this peer are still posted", peer=peer.name, posted=busy
            )

    def start_removal(self, peer: Peer) -> asyncio.Future[None] | None:
        """Forget a peer at once; what remains to be waited for, or None where that depends on the peer."""
        warming = self._moving(peer)
        leaving = self._leave(peer)
        return None if warming else leaving

    def _leave(self, peer: Peer) -> asyncio.Future[None]:
        """Forget a peer at once, and have the library forget it as soon as nothing of it is under way any more.

        What is under way is at most a warm-up read that the peer never answered, or that failed: it must keep neither
        the caller waiting nor the peer known, but its request and its lists stay until the library has let go of it.
        """
        self._peers.pop(peer.name, None)
        return self._leaves(peer.name, self._drop_peer(peer))

    def _leaves(self, name: str, how: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        """Have a new :meth:`add_peer` of this name wait for something."""
        task = self._leaving[name] = asyncio.ensure_future(how)

        def gone(_: asyncio.Future[None]) -> None:
            if self._leaving.get(name) is task:
                del self._leaving[name]
            if not task.cancelled() and task.exception() is not None:
                _log.warning("%s: removing peer %s failed: %s", self._name, name, task.exception())

        task.add_done_callback(gone)
        return task

    async def _drop_peer(self, peer: Peer) -> None:
        pump = self._running
        if pump is None:
            return
        try:
            if self._state == "open":
                for read in self._reads_of(peer):
                    if read.state is ReadState.READY:
                        await self.release(read)
                for entry in [e for e in self._rows.values() if e.rows.peer.id == peer.id]:
                    await self.release_rows(entry.rows)
            for read in self._moving(peer):
                await read.quiesced
            if self._state == "open":
                await pump.call(lambda driver: driver.remove_peer(peer.name))
        finally:
            pump.adjust(peers=-1)

    def _reads_of(self, peer: Peer) -> list[PumpedRead]:
        return [read for read in self._reads if read.peer.id == peer.id]

    def _moving(self, peer: Peer) -> list[PumpedRead]:
        """The reads from a peer that may still write."""
        return [r for r in self._reads_of(peer) if r.state is ReadState.POSTED or not r.is_quiesced]

    def _known(self, peer: Peer) -> Peer:
        known = self._peers.get(peer.name)
        if known is None or known.id != peer.id:
            raise KvxferError(Reason.NO_HANDSHAKE, "the peer is not (or no longer) known", field="peer", name=peer.name)
        return known

    # --- prepared lists --------------------------------------------------------------------------------------------

    async def prepare_local(self, rows: RowArray, kind: MemoryKind, peer: Peer) -> Rows:
        """See :meth:`kvxfer.xfer.api.TransferEngine.prepare_local`."""
        return await self._prepare(rows, kind, peer, remote=False)

    async def prepare_remote(self, rows: RowArray, kind: MemoryKind, peer: Peer) -> Rows:
        """See :meth:`kvxfer.xfer.api.TransferEngine.prepare_remote`."""
        return await self._prepare(rows, kind, peer, remote=True)

    async def _prepare(self, rows: RowArray, kind: MemoryKind, peer: Peer, *, remote: bool) -> Rows:
        pump = self._pump()
        known = self._known(peer)
        registered = {i: r.spans for i, (r, handle) in self._registrations.items() if handle is not None}
        owners = {0: known.spans} if remote else registered
        checked, starts, touched = check_rows(rows, kind, owners, "remote" if remote else "local")
        result = Rows(next(self._ids), known, kind, remote, checked, starts)
        # Entered before the library is asked, so that deregister() sees the memory in use meanwhile.
        entry = RowsEntry(result, None, frozenset() if remote else touched)
        self._rows[result.id] = entry

        def unwanted(handle: Any) -> None:
            self._background(lambda driver: driver.release_rows(handle))

        try:
            entry.handle = await pump.call(
                lambda driver: driver.prepare(checked, kind, known.name if remote else None), unwanted=unwanted
            )
        except BaseException:
            self._rows.pop(result.id, None)
            raise
        return result

    async def release_rows(self, rows: Rows) -> None:
        """See :meth:`kvxfer.xfer.api.TransferEngine.release_rows`."""
        self._pump()
        entry = self._rows.get(rows.id)
        if entry is not None:
            entry.closing = True
            await self._free_rows(entry)

    async def _free_rows(self, entry: RowsEntry) -> None:
        if entry.users or not entry.closing or self._state != "open" or self._running is None:
            return
        if self._rows.pop(entry.rows.id, None) is not None:
            await asyncio.shield(self._running.call(lambda driver: driver.release_rows(entry.handle)))

    # --- reads -----------------------------------------------------------------------------------------------------

    async def make_read(
        self,
        local: Rows,
        local_indices: Indices,
        remote: Rows,
        remote_indices: Indices,
        notification: bytes,
        *,
        now: bool = True,
    ) -> Read:
        """See :meth:`kvxfer.xfer.api.TransferEngine.make_read`."""
        pump = self._pump()
        here, there = self._entry(local, remote=False), self._entry(remote, remote=True)
        if local.peer.id != remote.peer.id:
            raise KvxferError(
                Reason.NO_HANDSHAKE, "both lists must be of one peer", local=local.peer.name, remote=remote.peer.name
            )
        nbytes = check_read(local, local_indices, remote, remote_indices)
        if now:  # copies: the caller may reuse its arrays while the command is still in the queue
            ours, theirs = np.array(local_indices, order="C"), np.array(remote_indices, order="C")
        else:
            ours, theirs = np.ascontiguousarray(local_indices), np.ascontiguousarray(remote_indices)

        def make(ours: Indices, theirs: Indices, whole: bool) -> Any:
            began = time.perf_counter()
            handle = self._driver.make(here.handle, ours, there.handle, theirs, notification if whole else b"")
            seconds = time.perf_counter() - began
            read.make_seconds += seconds
            pump.counters.made += 1
            pump.counters.make_seconds += seconds
            return handle

        pieces = Pieces(make, ours, theirs, lengths_of(local, ours))
        read = PumpedRead(pieces, local, remote, nbytes, ours.size, notification)

        def work(driver: Driver) -> None:
            try:
                pieces.make(pump.piece(nbytes))
            except BaseException:
                _release(driver, pieces.drop())
                raise

        def undo(made: asyncio.Future[None]) -> None:
            if made.exception() is None:
                self._background(lambda driver: _release(driver, pieces.drop()))
            self._unuse(here, there)

        here.users += 1
        there.users += 1
        if now:
            making = pump.call(work)
            try:
                await asyncio.shield(making)
            except asyncio.CancelledError:
                making.add_done_callback(undo)  # the lists stay in use until the library has made what nobody wants now
                raise
            except KvxferError:
                self._unuse(here, there)
                raise
        self._reads.add(read)
        return read

    def _entry(self, rows: Rows, *, remote: bool) -> RowsEntry:
        entry = self._rows.get(rows.id)
        if entry is None or entry.rows is not rows or entry.closing or entry.handle is None:
            raise KvxferError(
                Reason.NO_HANDSHAKE, "the prepared list was released", field="remote" if remote else "local"
            )
        if rows.remote is not remote:
            raise KvxferError(
                Reason.FIELD_INVALID, "a prepared list of the other side", field="remote" if remote else "local"
            )
        return entry

    def _unuse(self, *entries: RowsEntry) -> None:
        for entry in entries:
            entry.users -= 1
            if entry.closing and not entry.users and self._rows.pop(entry.rows.id, None) is not None:
                self._background(lambda driver, handle=entry.handle: driver.release_rows(handle))

    def _forget(self, read: PumpedRead) -> None:
        """The library has freed all requests of this read (or is about to, before anything else)."""
        read.let_go()
        self._warm_ups.discard(read)
        if read in self._reads:
            self._reads.discard(read)
            entries = (self._rows.get(read.local.id), self._rows.get(read.remote.id))
            self._unuse(*(entry for entry in entries if entry is not None))

    async def post(self, read: Read) -> ReadResult:
        """See :meth:`kvxfer.xfer.api.TransferEngine.post`."""
        return await self.submit(read)

    def submit(self, read: Read) -> asyncio.Future[ReadResult]:
        """See :meth:`kvxfer.xfer.api.TransferEngine.submit`."""
        pump = self._pump()
        if not isinstance(read, PumpedRead) or read not in self._reads or read.state is not ReadState.READY:
            state = read.state.value if read.state is not ReadState.READY else "not of this engine"
            raise KvxferError(Reason.TRANSFER_STATE, "only a read that is ready can be posted", state=state)
        read.state = ReadState.POSTED
        outcome: asyncio.Future[ReadResult] = asyncio.get_running_loop().create_future()

        def settle(result: ReadResult | KvxferError) -> None:
            failed = isinstance(result, KvxferError)
            read.state, read.kept = ReadState.FAILED if failed else ReadState.DONE, job.kept
            if outcome.done():
                return  # nobody waits any more
            if isinstance(result, KvxferError):
                outcome.set_exception(result)
            else:
                outcome.set_result(result)

        def let_go() -> None:
            read.lost = job.lost
            self._forget(read)

        job = Job(
            pieces=read.pieces,
            peer=read.peer.name,
            size=read.bytes,
            notification=read.notification,
            wanted=lambda: not read.abandoned,
            settle=settle,
            let_go=let_go,
        )
        pump.post(job)

        def abandon(ended: asyncio.Future[ReadResult]) -> None:
            if ended.cancelled():
                read.abandoned = True  # what was not handed over yet never will be; what was drains
                pump.abandon(job)

        outcome.add_done_callback(abandon)
        return outcome

    async def notify(self, peer: Peer, payload: bytes) -> None:
        """Send a notification that belongs to no request.  Raises PEER_LOST."""
        name = self._known(peer).name
        await self._pump().call(lambda driver: driver.notify(name, payload))

    async def release(self, read: Read) -> None:
        """See :meth:`kvxfer.xfer.api.TransferEngine.release`."""
        pump = self._pump()
        if read.state is ReadState.POSTED:
            raise KvxferError(Reason.TRANSFER_STATE, "a posted read cannot be released", state=read.state.value)
        if read.state is not ReadState.READY or not isinstance(read, PumpedRead):
            return  # the pump frees a finished request by itself
        if read not in self._reads:
            raise KvxferError(Reason.TRANSFER_STATE, "a read of another engine", state=read.state.value)
        read.state = ReadState.RELEASED
        made = read.pieces.drop()
        if not made:  # it never was
            self._forget(read)
            return

        def work(driver: Driver) -> None:
            _release(driver, made)
            pump.counters.released += len(made)

        freed = asyncio.ensure_future(pump.call(work))
        freed.add_done_callback(lambda _: self._forget(read))
        await asyncio.shield(freed)

    # --- polling and information -----------------------------------------------------------------------------------

    def serving(self) -> Demand:
        """See :meth:`kvxfer.xfer.api.TransferEngine.serving`."""
        pump = self._pump()
        pump.adjust(spinning=1)
        return Demand(lambda: pump.adjust(spinning=-1))

    def connected(self) -> Demand:
        """See :meth:`kvxfer.xfer.api.TransferEngine.connected`."""
        pump = self._pump()
        pump.adjust(connected=1)
        return Demand(lambda: pump.adjust(connected=-1))

    async def info(self) -> EngineInfo:
        """See :meth:`kvxfer.xfer.api.TransferEngine.info`."""
        library, pump = self._library, self._running
        if library is None or pump is None:
            raise KvxferError(Reason.SHUTTING_DOWN, "the transfer engine was not started", state=self._state)
        return EngineInfo(
            name=self._name,
            library=library.library,
            library_version=library.library_version,
            transport_version=library.transport_version,
            backends=library.backends,
            environment=library.environment,
            defaults=library.defaults,
            registrations=len(self._registrations),
            peers=len(self._peers),
            rows=len(self._rows),
            reads=len(self._reads),
            in_flight=sum(read.state is not ReadState.READY for read in self._reads),
            counters=replace(pump.counters),
        )

    def _background(self, work: Any) -> None:
        """Have the pump do something that nobody waits for; a failure is logged."""
        if self._state != "open" or self._running is None:
            return  # closing destroys everything

        def report(done: asyncio.Future[Any]) -> None:
            if not done.cancelled() and done.exception() is not None:
                _log.warning("%s: giving something back failed: %s", self._name, done.exception())

        self._running.call(work).add_done_callback(report)


def _release(driver: Driver, handles: Sequence[Any]) -> None:
    """Free requests; raises what the first of those has raised that could not be freed."""
    failures = []
    for handle in handles:
        try:
            driver.release(handle)
        except KvxferError as error:
            failures.append(error)
    if failures:
        raise failures[0]
