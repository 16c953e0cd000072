"""Engines to be killed and stopped, and calls whose answers are awaited with a deadline.

An engine that is to die is a process of its own, which owns the memory (a memfd) and makes the calls.  The test maps
the same memory, so that it can look at it whatever becomes of the process.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import grpc

from kvxfer.memory.handles import Memfd
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.pb import transfer_pb2_grpc
from kvxfer.wire.status import from_rpc_error, status_of
from kvxfer_client import SharedRegion
from tests.support.engines import SharedRegions
from tests.support.plain import BLOCK, PlainEngine
from tests.support.processes import SidecarProcess

_SPAWN = multiprocessing.get_context("spawn")

#: Nothing happens to a transfer in these any more.
FINAL = (pb.TRANSFER_STATE_DONE, pb.TRANSFER_STATE_FAILED, pb.TRANSFER_STATE_CANCELLED)

#: What a caller sees where no sidecar answers it.
SIDECAR_GONE = "SIDECAR_GONE"
NO_ANSWER = "NO_ANSWER"


def outcome_of(error: grpc.RpcError) -> str:
    """The reason of a failed call, or what came instead of an answer."""
    if status_of(error).details:
        return from_rpc_error(error).reason.value
    return {grpc.StatusCode.UNAVAILABLE: SIDECAR_GONE, grpc.StatusCode.DEADLINE_EXCEEDED: NO_ANSWER}[error.code()]


def _child(pipe: Connection, socket: str, blocks: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the test, also where it is stopped itself
    region = SharedRegion.create_memfd(blocks * BLOCK)
    handle = region.handle
    assert isinstance(handle, Memfd)
    channel = grpc.insecure_channel(f"unix:{socket}")
    stub = transfer_pb2_grpc.KvTransferStub(channel)
    pipe.send((handle.pid, handle.fd))
    lock = threading.Lock()

    def call(number: int, method: str, request: bytes, timeout: float) -> None:
        message = getattr(pb, f"{method}Request").FromString(request)
        try:
            answer = ("", getattr(stub, method)(message, timeout=timeout).SerializeToString())
        except grpc.RpcError as error:
            answer = (outcome_of(error), b"")
        with lock:
            pipe.send((number, *answer))

    while (task := pipe.recv()) is not None:
        threading.Thread(target=call, args=task, daemon=True).start()


class Pending:
    """A call under way; :meth:`outcome` waits for it.  The time of the answer is taken when it comes."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._outcome = ""
        self.answer = b""
        self.at = 0.0

    def settle(self, outcome: str, answer: bytes) -> None:
        self._outcome, self.answer, self.at = outcome, answer, time.monotonic()
        self._done.set()

    @property
    def settled(self) -> bool:
        return self._done.is_set()

    def outcome(self, seconds: float) -> str:
        """Empty for an answer, else the reason; NO_ANSWER where there is none in time."""
        return self._outcome if self._done.wait(seconds) else NO_ANSWER


class ChildCalls:
    """The calls of an engine's process, as if it were a stub."""

    def __init__(self, socket: Path, blocks: int) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_child, args=(theirs, str(socket), blocks), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(60), "the engine's process says nothing"
        pid, fd = self._pipe.recv()
        self.region = SharedRegion.map(Memfd(pid, fd, 0, blocks * BLOCK))
        self._numbers = itertools.count()
        self._waiting: dict[int, Pending] = {}
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        try:
            while True:
                number, outcome, answer = self._pipe.recv()
                self._waiting.pop(number).settle(outcome, answer)
        except (EOFError, OSError):  # it was killed, or the test is over
            return

    def start(self, method: str, request: Any, timeout: float) -> Pending:
        number, pending = next(self._numbers), Pending()
        self._waiting[number] = pending
        self._pipe.send((number, method, request.SerializeToString(), timeout))
        return pending

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(request: Any, timeout: float) -> Any:
            pending = self.start(method, request, timeout)
            outcome = pending.outcome(timeout + 5)
            assert not outcome, f"{method} of an engine's process: {outcome}"
            return getattr(pb, f"{method}Response").FromString(pending.answer)

        return call

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        """End the process, also one that is stopped."""
        self.process.kill()
        self.process.join(10)
        self._listener.join(10)
        self._pipe.close()


class ChildWorker:
    """A sidecar, called by an engine's process."""

    def __init__(self, side: SidecarProcess, blocks: int) -> None:
        self.directory = side.directory
        self.stub: Any = ChildCalls(side.socket, blocks)


class Side(Protocol):
    """A sidecar as its engine sees it."""

    @property
    def directory(self) -> Path: ...
    @property
    def stub(self) -> transfer_pb2_grpc.KvTransferStub: ...


class Engine(PlainEngine):
    """An engine of this process or, with ``mortal``, of one of its own."""

    def __init__(self, engine_id: str, side: Side, blocks: int, *, mortal: bool = False) -> None:
        self.side = side
        if mortal:
            assert isinstance(side, SidecarProcess)
            worker = ChildWorker(side, blocks)
            self.calls: ChildCalls | None = worker.stub
            super().__init__(engine_id, worker, blocks, SharedRegions([worker.stub.region]))
        else:
            self.calls = None
            super().__init__(engine_id, side, blocks)

    def start_read(self, request: pb.ReadBlocksRequest, timeout: float) -> Pending:
        """ReadBlocks, not awaited."""
        if self.calls is not None:
            return self.calls.start("ReadBlocks", request, timeout)
        pending = Pending()
        future = self.side.stub.ReadBlocks.future(request, timeout=timeout)

        def done(ended: Any) -> None:
            error = ended.exception()
            if error is None:
                pending.settle("", ended.result().SerializeToString())
            else:
                pending.settle(outcome_of(error), b"")

        future.add_done_callback(done)
        return pending

    def transfer(self, transfer_id: str, timeout: float = 10.0) -> pb.Transfer | None:
        """The transfer as its sidecar knows it, whatever has become of the engine; None where it knows none."""
        query = pb.GetTransferRequest(engine_id=self.engine_id, transfer_id=transfer_id)
        try:
            return self.side.stub.GetTransfer(query, timeout=timeout).transfer
        except grpc.RpcError as error:
            if outcome_of(error) == "TRANSFER_UNKNOWN":
                return None
            raise

    def unregister(self) -> None:
        """Through its sidecar, whatever has become of the engine."""
        request = pb.UnregisterCacheRequest(engine_id=self.engine_id)
        request.drain_timeout.FromSeconds(15)  # longer than any grant
        self.side.stub.UnregisterCache(request, timeout=60)

    def disconnect(self) -> None:
        """End the process, if it has one, and with it its connections."""
        if self.calls is not None:
            self.calls.close()

    def close(self) -> None:
        super().close()
        self.disconnect()
