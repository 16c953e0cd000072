"""The least that it takes to ask another process and then to read from it: a gRPC handler with nothing of kvxfer.

Two processes as sidecars are, each with gRPC's asyncio server on uvloop.  The handler of one makes an empty call to the
other, and then one READ of descriptors that were known before, which it makes, posts and polls for at once: no request
to parse, nothing to check, no other thread, nobody else who could wait.
"""

from __future__ import annotations

import asyncio
import gc
import struct
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import grpc
import numpy as np
import uvloop

from benchmarks.aside import Aside
from benchmarks.caches import Case, Memory
from benchmarks.raw import descriptors_of, new_agent
from kvxfer.core.plan import RowTable
from kvxfer.memory.handles import FileHandle
from kvxfer_client.memory import SharedRegion

_SERVICE = "bare.Bare"
_INTERVAL = 0.004

Handler = Callable[[bytes, Any], Awaitable[bytes]]


def _agent(name: str, path: str, size: int) -> tuple[Any, int, SharedRegion]:
    agent, region = new_agent(name), SharedRegion.map(FileHandle(path, 0, size))
    address = region.numpy(np.uint8, (size,)).ctypes.data
    agent.register_memory([(address, size, 0, "")], "DRAM")
    return agent, address, region


async def _server(address: str, handlers: dict[str, Handler]) -> tuple[Any, int]:
    server = grpc.aio.server()
    methods: dict[str, Any] = {name: grpc.unary_unary_rpc_method_handler(call) for name, call in handlers.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    port = server.add_insecure_port(address)
    await server.start()
    gc.collect()
    gc.freeze()
    return server, port


async def _empty(request: bytes, context: Any) -> bytes:
    return b""


def _serve_source(path: str, size: int) -> tuple[Any, Any]:
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    agent, address, region = _agent("bare-source", path, size)
    reads = 0

    async def grant(request: bytes, context: Any) -> bytes:
        nonlocal reads
        reads += 1
        return b""

    async def attend() -> None:
        """As a sidecar does: without pause while it is read, else every few milliseconds."""
        nonlocal reads
        while True:
            reads -= len(agent.get_new_notifs())
            await asyncio.sleep(0 if reads > 0 else _INTERVAL)

    server, port = loop.run_until_complete(_server("127.0.0.1:0", {"Grant": grant}))
    return (port, agent.get_agent_metadata(), address), (loop, loop.create_task(attend()), server, region)


def _serve_reader(
    path: str, size: int, socket: str, source: tuple[int, bytes, int], case: Case, offsets: list[int]
) -> tuple[Any, Any]:
    port, metadata, there = source
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    agent, here, region = _agent("bare-reader", path, size)
    name = agent.add_remote_agent(metadata).decode()
    plan, read = descriptors_of(case)

    def prepared(whose: str, rows: RowTable, base: int) -> Any:
        return agent.prep_xfer_dlist(whose, rows.bind([base + o for o in offsets], [0] * len(offsets)), "DRAM")

    ours, theirs = prepared("NIXL_INIT_AGENT", plan.local, here), prepared(name, plan.remote, there)

    async def start() -> Any:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        grant: Any = channel.unary_unary(f"/{_SERVICE}/Grant")

        async def nested(request: bytes, context: Any) -> bytes:
            await grant(b"")
            return b""

        async def ask_and_read(request: bytes, context: Any) -> bytes:
            await grant(b"")
            began = time.perf_counter()
            handle = agent.make_prepped_xfer("READ", ours, read.local_indices, theirs, read.remote_indices, b"done")
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            seconds = time.perf_counter() - began
            agent.release_xfer_handle(handle)
            if state != "DONE":
                raise RuntimeError(f"a bare READ ended as {state}")
            return struct.pack("d", seconds)

        server, _ = await _server(f"unix:{socket}", {"Empty": _empty, "Nested": nested, "Read": ask_and_read})
        return channel, server

    kept = loop.run_until_complete(start())
    return None, (loop, kept, region)


def _attend(pipe: Connection, kept: Any) -> None:
    """Serve until the pipe is closed."""
    loop = kept[0]
    closed = loop.create_future()
    loop.add_reader(pipe.fileno(), lambda: closed.done() or closed.set_result(None))
    loop.run_until_complete(closed)
    raise EOFError


class Bare:
    """Both processes, over the files of a :class:`Memory`, for the reads of one case."""

    def __init__(self, memory: Memory, case: Case) -> None:
        paths = {side: str(memory.directory / side) for side in "PD"}
        size, socket = memory.files["P"].size, str(memory.directory / "bare.sock")
        self._source = Aside(_serve_source, paths["P"], size, attend=_attend)
        try:
            told = (paths["D"], size, socket, self._source.told, case, memory.offsets(case))
            self._reader = Aside(_serve_reader, *told, attend=_attend)
        except BaseException:
            self._source.__exit__(None, None, None)
            raise
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        self._calls: dict[str, Any] = {
            name: self._channel.unary_unary(f"/{_SERVICE}/{name}") for name in ("Empty", "Nested", "Read")
        }

    def __enter__(self) -> Bare:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
        self._reader.__exit__(kind, error, trace)
        self._source.__exit__(kind, error, trace)

    def call(self, name: str) -> tuple[float, float]:
        """Seconds of a call: ``Empty``, ``Nested`` (an empty one inside an empty one), or ``Read``; and of its READ."""
        began = time.perf_counter()
        answer = self._calls[name](b"", timeout=60)
        seconds = time.perf_counter() - began
        return seconds, struct.unpack("d", answer)[0] if answer else 0.0
