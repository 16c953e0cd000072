"""Several transfer engines that act as one: large reads are split over them, small ones go beside.

Where the transport copies inside the posting call (between processes of one host it does), one agent moves bytes at
the speed of one core, and everything else that it is asked for waits for the pieces under way.  Two agents, each with
its thread, copy at once.

The first lane is the engine that peers know: its metadata is given out, it receives notifications, it serves.  The
others only read.  Handles are the first lane's; what stands behind them in the other lanes is kept here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.xfer.api import (
    Counters,
    Demand,
    EngineInfo,
    Indices,
    MemoryKind,
    Peer,
    Read,
    ReadResult,
    ReadState,
    Registration,
    RowArray,
    Rows,
    Span,
    Telemetry,
)
from kvxfer.xfer.checks import check_read, lengths_of
from kvxfer.xfer.engine import PumpedEngine

_log = logging.getLogger(__name__)

#: Reads of at least so many bytes are split.  Below, what splitting costs (some 0.2 ms) is more than it saves.
SPLIT_BYTES: Final = 8 * 2**20

T = TypeVar("T")


class LanedRead:
    """A read that one or more lanes carry; see :class:`kvxfer.xfer.api.Read`."""

    def __init__(self, peer: Peer, parts: Sequence[tuple[PumpedEngine, Read]], notification: bytes) -> None:
        self._peer = peer
        self.parts: Final = tuple(parts)
        #: Sent once all parts are done; a single part sees to it itself.
        self.notification: Final = notification if len(parts) > 1 else b""

    @property
    def peer(self) -> Peer:
        """Whose memory it reads."""
        return self._peer

    @property
    def state(self) -> ReadState:
        """POSTED while any part is; then FAILED if one failed, or was refused where another was posted."""
        states = {read.state for _, read in self.parts}
        if states == {ReadState.DONE, ReadState.READY}:
            return ReadState.FAILED  # a lane refused its part: this never became what was asked for
        order = (ReadState.POSTED, ReadState.FAILED, ReadState.RELEASED, ReadState.READY)
        return next((s for s in order if s in states), ReadState.DONE)

    @property
    def bytes(self) -> int:
        """Bytes that it moves."""
        return sum(read.bytes for _, read in self.parts)

    @property
    def descriptors(self) -> int:
        """Descriptor pairs."""
        return sum(read.descriptors for _, read in self.parts)

    @property
    def make_seconds(self) -> float:
        """What making the requests took, the longest."""
        return max(read.make_seconds for _, read in self.parts)

    @property
    def kept(self) -> bool:
        """Whether any part is."""
        return any(read.kept for _, read in self.parts)

    @property
    def lost(self) -> bool:
        """Whether the connection of any part was."""
        return any(read.lost for _, read in self.parts)

    @property
    def is_quiesced(self) -> bool:
        """Whether nothing writes into its local blocks any more."""
        return all(read.is_quiesced for _, read in self.parts)

    @property
    def quiesced(self) -> Awaitable[None]:
        """Resolves when no part writes any more.

        A part that was refused stays READY, and would only resolve with its release: it is waited for only where no
        part was posted, so that the whole was not.
        """
        unposted = self.state is ReadState.READY
        waits = [read.quiesced for _, read in self.parts if unposted or not read.is_quiesced]
        return asyncio.ensure_future(_all_of(waits))


async def _all_of(waits: Sequence[Awaitable[None]]) -> None:
    await asyncio.gather(*waits)


class LanedEngine:
    """See :class:`kvxfer.xfer.api.TransferEngine`.

    :param lanes: engines that are not started yet; the first is the one that peers know.
    :param split_bytes: reads of at least so many bytes are split over the lanes.
    """

    def __init__(self, lanes: Sequence[PumpedEngine], split_bytes: int = SPLIT_BYTES) -> None:
        if not lanes:
            raise KvxferError(Reason.FIELD_INVALID, "at least one lane is needed", field="lanes")
        self._lanes: Final = tuple(lanes)
        self._first: Final = lanes[0]
        self._split_bytes = split_bytes
        self._registrations: dict[int, tuple[Registration, ...]] = {}
        self._peers: dict[int, tuple[Peer, ...]] = {}
        self._rows: dict[int, tuple[Rows, ...]] = {}
        self._load = [0] * len(lanes)
        self._tasks: set[asyncio.Future[None]] = set()

    # -- life, memory, peers ---------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The agent name of the first lane."""
        return self._first.name

    @property
    def fault(self) -> str:
        """That of the first lane that has one."""
        return next((lane.fault for lane in self._lanes if lane.fault), "")

    async def start(self) -> None:
        """Start every lane; on a failure none is left running."""
        await self._everywhere(lambda lane: lane.start(), undo=lambda lane, _: lane.close())

    async def close(self, drain: float | None = None) -> None:
        """Close every lane."""
        await asyncio.gather(*(lane.close(drain) for lane in self._lanes))

    async def register(self, spans: Sequence[Span]) -> Registration:
        """Register memory in every lane."""
        found = await self._everywhere(
            lambda lane: lane.register(spans), undo=lambda lane, registration: lane.deregister(registration)
        )
        self._registrations[found[0].id] = found
        return found[0]

    async def deregister(self, registration: Registration) -> None:
        """Undo it in every lane."""
        found = self._registrations.get(registration.id, (registration,))
        await asyncio.gather(*(lane.deregister(r) for lane, r in zip(self._lanes, found, strict=False)))
        self._registrations.pop(registration.id, None)

    async def metadata(self) -> bytes:
        """The first lane's: the others are not to be read from."""
        return await self._first.metadata()

    async def add_peer(self, metadata: bytes, expected_name: str, *, spans: Sequence[Span]) -> Peer:
        """Learn to read from a peer, in every lane."""
        found = await self._everywhere(
            lambda lane: lane.add_peer(metadata, expected_name, spans=spans),
            undo=lambda lane, peer: lane.remove_peer(peer),
        )
        self._peers[found[0].id] = found
        return found[0]

    async def remove_peer(self, peer: Peer) -> None:
        """Forget a peer in every lane; TRANSFER_STATE while any still reads from it."""
        found = list(zip(self._lanes, self._peers.get(peer.id, (peer,)), strict=False))
        for lane, known in found:
            lane.require_idle(known)
        self._peers.pop(peer.id, None)
        # All lanes forget the peer here and now, so that nothing can come between; only the library takes its time.
        removals = [removal for lane, known in found if (removal := lane.start_removal(known)) is not None]
        await asyncio.gather(*(asyncio.shield(removal) for removal in removals))

    # -- descriptor lists ------------------------------------------------------------------------------------------

    async def prepare_local(self, rows: RowArray, kind: MemoryKind, peer: Peer) -> Rows:
        """Prepare a list in every lane."""
        return await self._prepare(lambda lane, known: lane.prepare_local(rows, kind, known), peer)

    async def prepare_remote(self, rows: RowArray, kind: MemoryKind, peer: Peer) -> Rows:
        """Prepare a list in every lane."""
        return await self._prepare(lambda lane, known: lane.prepare_remote(rows, kind, known), peer)

    async def _prepare(self, prepare: Callable[[PumpedEngine, Peer], Awaitable[Rows]], peer: Peer) -> Rows:
        peers = dict(zip(self._lanes, self._peers.get(peer.id, (peer,) * len(self._lanes)), strict=True))
        found = await self._everywhere(
            lambda lane: prepare(lane, peers[lane]), undo=lambda lane, rows: lane.release_rows(rows)
        )
        self._rows[found[0].id] = found
        return found[0]

    async def release_rows(self, rows: Rows) -> None:
        """Give a list back in every lane."""
        found = self._rows.pop(rows.id, None)
        if found is not None:
            await asyncio.gather(*(lane.release_rows(r) for lane, r in zip(self._lanes, found, strict=True)))

    # -- reads -----------------------------------------------------------------------------------------------------

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
        """Make a read, split where it is large; a small one goes to the lane with the least to do."""
        ours, theirs = self._rows.get(local.id), self._rows.get(remote.id)
        if ours is None or theirs is None:
            raise KvxferError(Reason.NO_HANDSHAKE, "the prepared list was released")
        size = check_read(local, local_indices, remote, remote_indices)
        count = len(self._lanes) if size >= self._split_bytes else 1
        cuts = _cuts(local, local_indices, count)
        first = min(range(len(self._lanes)), key=self._load.__getitem__)
        note = notification if len(cuts) == 1 else b""
        parts: list[tuple[PumpedEngine, Read]] = []
        try:
            for number, cut in enumerate(cuts):
                i = (first + number) % len(self._lanes)
                lane = self._lanes[i]
                made = await lane.make_read(ours[i], local_indices[cut], theirs[i], remote_indices[cut], note, now=now)
                parts.append((lane, made))
        except BaseException:
            for lane, made in parts:
                await lane.release(made)
            raise
        return LanedRead(remote.peer, parts, notification)

    async def post(self, read: Read) -> ReadResult:
        """Post every part and wait for all."""
        return await self.submit(read)

    def submit(self, read: Read) -> asyncio.Future[ReadResult]:
        """Hand every part over."""
        if not isinstance(read, LanedRead):
            raise KvxferError(Reason.TRANSFER_STATE, "a read of another engine", state=read.state.value)
        if read.state is not ReadState.READY:
            raise KvxferError(Reason.TRANSFER_STATE, "only a read that is ready can be posted", state=read.state.value)
        waits: list[asyncio.Future[ReadResult]] = []
        for lane, part in read.parts:
            try:
                waits.append(lane.submit(part))
            except KvxferError as error:
                if not waits:
                    raise
                refused: asyncio.Future[ReadResult] = asyncio.get_running_loop().create_future()
                refused.set_exception(error)
                waits.append(refused)
        for lane, part in read.parts:
            if part.state is ReadState.POSTED:  # and was not refused
                self._busy(lane, part)
        if len(waits) == 1:
            return waits[0]
        return self._joined(read, waits)

    def _busy(self, lane: PumpedEngine, part: Read) -> None:
        """Count a part as its lane's load until it has quiesced."""
        i, size = self._lanes.index(lane), part.bytes
        self._load[i] += size

        def ended(_: asyncio.Future[None]) -> None:
            self._load[i] -= size

        quiet = asyncio.ensure_future(part.quiesced)
        self._tasks.add(quiet)
        quiet.add_done_callback(self._tasks.discard)
        quiet.add_done_callback(ended)

    def _joined(self, read: LanedRead, waits: Sequence[asyncio.Future[ReadResult]]) -> asyncio.Future[ReadResult]:
        """The result of all parts.  The first failure is that of the whole, and the others end with their pieces."""
        whole: asyncio.Future[ReadResult] = asyncio.get_running_loop().create_future()
        failures: list[BaseException] = []
        left = len(waits)

        def ended(one: asyncio.Future[ReadResult]) -> None:
            nonlocal left
            left -= 1
            failed = asyncio.CancelledError() if one.cancelled() else one.exception()
            if failed is not None:
                failures.append(failed)
                for other in waits:
                    other.cancel()
            if left or whole.done():
                return
            if failures:
                whole.set_exception(failures[0])
                return
            whole.set_result(_sum_of([wait.result() for wait in waits]))
            if read.notification:
                self._tell(read)

        def given_up(_: asyncio.Future[ReadResult]) -> None:
            if whole.cancelled():
                for wait in waits:
                    wait.cancel()

        for wait in waits:
            wait.add_done_callback(ended)
        whole.add_done_callback(given_up)
        return whole

    def _tell(self, read: LanedRead) -> None:
        """Send the notification, now that the last byte was read.  Its loss is made good by those who need it."""

        async def send() -> None:
            try:
                await self._first.notify(read.peer, read.notification)
            except KvxferError as error:
                _log.info("%s: a notification was not sent: %s", self.name, error)

        task = asyncio.ensure_future(send())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def release(self, read: Read) -> None:
        """Drop every part, or none while one is posted."""
        if not isinstance(read, LanedRead):
            raise KvxferError(Reason.TRANSFER_STATE, "a read of another engine", state=read.state.value)
        if read.state is ReadState.POSTED:
            raise KvxferError(Reason.TRANSFER_STATE, "a posted read cannot be released", state=read.state.value)
        for lane, part in read.parts:
            await lane.release(part)

    # -- polling and information -----------------------------------------------------------------------------------

    def serving(self) -> Demand:
        """The first lane is what peers read from."""
        return self._first.serving()

    def connected(self) -> Demand:
        """The first lane is what peers read from."""
        return self._first.connected()

    async def info(self) -> EngineInfo:
        """The first lane's, with the reads and counters of all."""
        infos = [await lane.info() for lane in self._lanes]
        counters = Counters()
        for info in infos:
            for name in Counters.__dataclass_fields__:
                setattr(counters, name, getattr(counters, name) + getattr(info.counters, name))
        return replace(
            infos[0],
            reads=sum(i.reads for i in infos),
            in_flight=sum(i.in_flight for i in infos),
            counters=counters,
        )

    async def _everywhere(
        self, do: Callable[[PumpedEngine], Awaitable[T]], *, undo: Callable[[PumpedEngine, T], Awaitable[Any]]
    ) -> tuple[T, ...]:
        """Do something in every lane at once; if it fails in one, undo it in the others."""
        doing = [asyncio.ensure_future(do(lane)) for lane in self._lanes]
        try:
            results = await asyncio.gather(*doing, return_exceptions=True)
        except asyncio.CancelledError:  # has cancelled those that were still at it
            undoing = asyncio.ensure_future(self._undone(doing, undo))
            self._tasks.add(undoing)
            undoing.add_done_callback(self._tasks.discard)
            await asyncio.shield(undoing)
            raise
        failures = [r for r in results if isinstance(r, BaseException)]
        done: list[T] = []
        for lane, result in zip(self._lanes, results, strict=True):
            if isinstance(result, BaseException):
                continue
            done.append(result)
            if failures:
                try:
                    await undo(lane, result)
                except KvxferError as error:
                    _log.warning("%s: not undone: %s", lane.name, error)
        if failures:
            raise failures[0]
        return tuple(done)

    async def _undone(
        self, doing: Sequence[asyncio.Future[T]], undo: Callable[[PumpedEngine, T], Awaitable[Any]]
    ) -> None:
        """Undo what was done in some lanes before the caller gave up."""
        results = await asyncio.gather(*doing, return_exceptions=True)
        for lane, result in zip(self._lanes, results, strict=True):
            if not isinstance(result, BaseException):
                try:
                    await undo(lane, result)
                except KvxferError as error:
                    _log.warning("%s: not undone: %s", lane.name, error)


def _cuts(local: Rows, indices: Indices, count: int) -> list[slice]:
    """Cut a read into ``count`` consecutive parts of about equal bytes at most, so that what is contiguous stays so."""
    if count == 1:
        return [slice(None)]
    ends = np.cumsum(np.broadcast_to(lengths_of(local, indices), indices.shape), dtype=np.uint64)
    marks = np.searchsorted(ends, [int(ends[-1]) * i // count for i in range(1, count)], "right").tolist()
    edges = [0, *marks, len(indices)]
    return [slice(a, b) for a, b in itertools.pairwise(edges) if a < b]


def _sum_of(results: Sequence[ReadResult]) -> ReadResult:
    """Of parts that moved side by side."""
    told = [r.telemetry for r in results if r.telemetry is not None]
    return ReadResult(
        bytes=sum(r.bytes for r in results),
        queue_seconds=max(r.queue_seconds for r in results),
        post_seconds=max(r.post_seconds for r in results),
        move_seconds=max(r.move_seconds for r in results),
        telemetry=_together(told) if len(told) == len(results) else None,
    )


def _together(parts: Sequence[Telemetry]) -> Telemetry:
    return Telemetry(
        post_seconds=max(p.post_seconds for p in parts),
        transfer_seconds=max(p.transfer_seconds for p in parts),
        bytes=sum(p.bytes for p in parts),
        descriptors=sum(p.descriptors for p in parts),
    )
