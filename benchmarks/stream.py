"""The same blocks through a plain gRPC byte stream: what people write first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np

from benchmarks.aside import Aside
from benchmarks.caches import Bytes, Case, Memory
from kvxfer.memory.handles import FileHandle
from kvxfer_client.memory import SharedRegion

_SERVICE, _METHOD = "blocks.Blocks", "Read"


def _pages(memory: Bytes, start: int, blocks: int, block: int) -> Bytes:
    """One layer, as blocks."""
    return memory[start : start + blocks * block].reshape(blocks, block)


def _serve(path: str, size: int) -> tuple[int, object]:
    memory = SharedRegion.map(FileHandle(path, 0, size)).numpy(np.uint8, (size,))

    def read(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """What is asked for: bytes of a block, blocks of a message, blocks of a layer, layers; then where these begin;
        then the block IDs."""
        block, many, count, layers, *rest = np.frombuffer(request, np.int64).tolist()
        starts, ids = rest[:layers], np.array(rest[layers:])
        for start in starts:
            pages = _pages(memory, start, count, block)
            for first in range(0, len(ids), many):
                yield pages[ids[first : first + many]].tobytes()

    server = grpc.server(futures.ThreadPoolExecutor(4))
    handler: Any = grpc.unary_stream_rpc_method_handler(read)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return port, server


class Stream(Aside):
    """A reader in this process, and a server in one of its own, over the files of a :class:`Memory`."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(_serve, str(memory.directory / "P"), memory.bytes["P"].size)
        self._memory = memory
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self.told}")
        self._read: Any = self._channel.unary_stream(f"/{_SERVICE}/{_METHOD}")

    def __exit__(self, *told: Any) -> None:
        self._channel.close()
        super().__exit__(*told)

    def prepare(self, case: Case, message: int = 1) -> Callable[[], float]:
        """Seconds of one read in messages of so many bytes, but at least one block."""
        many = max(1, message // case.block)
        count, starts = case.blocks * case.spare, self._memory.offsets(case)
        head = [case.block, many, count, case.layers, *starts]
        request = np.array([*head, *case.ids("P").tolist()], np.int64).tobytes()
        ids = case.ids("D")
        layers = [_pages(self._memory.bytes["D"], start, count, case.block) for start in starts]

        def read() -> float:
            began = time.perf_counter()
            answers = self._read(request)
            for pages in layers:
                for first in range(0, len(ids), many):
                    pages[ids[first : first + many]] = np.frombuffer(next(answers), np.uint8).reshape(-1, case.block)
            return time.perf_counter() - began

        return read
