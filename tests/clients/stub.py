"""A gRPC server that answers as a test says, and one way to call both clients."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc_status import rpc_status

from kvxfer.core.errors import KvxferError
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.pb import transfer_pb2_grpc
from kvxfer.wire.status import to_status
from kvxfer_client import AsyncClient, Client

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["KvTransfer"].methods]
STREAMS = [m.name for m in pb.DESCRIPTOR.services_by_name["KvTransfer"].methods if m.server_streaming]


class Stub:
    """KvTransfer on a unix socket.

    ``answers`` holds for each RPC what to answer: a message, an error, or a function of the request and the context
    that returns or raises one.  A stream's answer is an iterable of them.
    """

    def __init__(self, path: Path) -> None:
        self.target = f"unix:{path}"
        self.answers: dict[str, Any] = {}
        self.requests: list[Any] = []
        self.remaining: list[float] = []
        #: Set at the end, for handlers that wait.
        self.over = threading.Event()
        self._server = grpc.server(
            ThreadPoolExecutor(16),
            options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
        )
        servicer = type("Servicer", (), {name: self._handler(name) for name in METHODS})()
        transfer_pb2_grpc.add_KvTransferServicer_to_server(servicer, self._server)
        self._server.add_insecure_port(self.target)

    def start(self) -> Stub:
        self._server.start()
        return self

    def kill(self) -> None:
        """Cut every call off; handlers that wait go on waiting, so that no answer of theirs gets through."""
        self._stopped = self._server.stop(0)

    def stop(self) -> None:
        self.kill()
        self.over.set()
        self._stopped.wait()

    def wait(self, *_: object) -> Any:
        """An answer that does not come."""
        self.over.wait()
        return pb.GetStatusResponse()

    def _handler(self, name: str) -> Callable[..., Any]:
        def unary(_: object, request: Any, context: grpc.ServicerContext) -> Any:
            self.requests.append(request)
            self.remaining.append(context.time_remaining())
            return self._give(self.answers[name], request, context)

        def stream(_: object, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            self.requests.append(request)
            for answer in self.answers[name]:
                yield self._give(answer, request, context)

        return stream if name in STREAMS else unary

    @staticmethod
    def _give(answer: Any, request: Any, context: grpc.ServicerContext) -> Any:
        if callable(answer):
            answer = answer(request, context)
        if isinstance(answer, KvxferError):
            context.abort_with_status(rpc_status.to_status(to_status(answer)))
        if isinstance(answer, grpc.StatusCode):
            context.abort(answer, "as the test says")
        return answer


class Blocking:
    """Calls the blocking client."""

    def __init__(self, target: str, **options: Any) -> None:
        self.client = Client(target, **options)

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.client, method)(*args, **kwargs)

    def list(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return list(getattr(self.client, method)(*args, **kwargs))

    def watch(self, most: int = 1_000, **kwargs: Any) -> list[Any]:
        """At most so many changes."""
        with self.client.watch(**kwargs) as watch:
            return list(itertools.islice(watch, most))

    def close(self) -> None:
        self.client.close()


class Awaiting:
    """Calls the asyncio client, on a loop of its own."""

    def __init__(self, target: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self.client = AsyncClient(target, **options)

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._run(getattr(self.client, method)(*args, **kwargs))

    def list(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        async def collect() -> list[Any]:
            return [item async for item in getattr(self.client, method)(*args, **kwargs)]

        return self._run(collect())

    def watch(self, most: int = 1_000, **kwargs: Any) -> list[Any]:
        async def collect() -> list[Any]:
            found: list[Any] = []
            async with await self.client.watch(**kwargs) as watch:
                async for change in watch:
                    found.append(change)
                    if len(found) == most:
                        break
            return found

        return self._run(collect())

    def close(self) -> None:
        self._run(self.client.close())
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)
