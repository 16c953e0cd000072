"""Processes for the tests with real NIXL: a target that serves memory, and scenarios in a process of their own.

NIXL can abort its process, and UCX reads its environment once; so nothing of it happens in the process of pytest.
A target ends when its controller goes away, so that a killed scenario leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.xfer.api import Demand, Span
from kvxfer.xfer.engine import EngineSettings
from kvxfer.xfer.environment import hard_exit
from kvxfer.xfer.nixl import NixlEngine, preload
from tests.xfer.waiting import until

_SPAWN = multiprocessing.get_context("spawn")
Bytes = npt.NDArray[np.uint8]


def pattern(size: int, seed: int) -> Bytes:
    """Noise that both processes can make."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def span_of(memory: Bytes) -> Span:
    return Span(memory.ctypes.data, memory.nbytes)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def _target(pipe: Connection, name: str, size: int, seed: int) -> None:
    notes: list[tuple[str, bytes]] = []
    engine = NixlEngine(name, lambda peer, payload: notes.append((peer, payload)))
    await engine.start()
    memory = pattern(size, seed)
    await engine.register([span_of(memory)])
    demands: dict[str, Demand] = {}
    commands: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    def readable() -> None:
        try:
            commands.put_nowait(pipe.recv())
        except (EOFError, OSError):
            hard_exit(0)

    asyncio.get_running_loop().add_reader(pipe.fileno(), readable)
    pipe.send((await engine.metadata(), span_of(memory)))
    while True:
        command, argument = await commands.get()
        reply: Any = None
        if command == "serve":
            demands["serving"] = engine.serving()
        elif command == "connect":
            demands["connected"] = engine.connected()
        elif command == "drop":
            demands.pop(argument).close()
        elif command == "notes":  # waits for so many
            with contextlib.suppress(AssertionError):
                await until(lambda n=argument: len(notes) >= n, 5.0)  # type: ignore[misc]
            reply = list(notes)
        elif command == "memory":
            reply = bool((memory == pattern(size, seed)).all())
        elif command == "cpu":
            start, began = cpu_seconds(), time.monotonic()
            await asyncio.sleep(argument)
            reply = (cpu_seconds() - start) / (time.monotonic() - began)
        elif command == "polls":
            reply = (await engine.info()).counters.polls
        elif command == "exit":
            await engine.close()
            pipe.send(None)
            return
        pipe.send(reply)


def _target_main(pipe: Connection, name: str, size: int, seed: int) -> None:
    try:
        preload()
        asyncio.run(_target(pipe, name, size, seed))
    except BaseException:  # noqa: BLE001  reported, whatever it is
        traceback.print_exc()
        hard_exit(1)
    hard_exit(0)


class Target:
    """A process with one engine and one registered range of memory, driven over a pipe."""

    def __init__(self, name: str = "target-1", size: int = 1 << 20, seed: int = 7) -> None:
        self.name, self.size, self.seed = name, size, seed
        self._pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_target_main, args=(theirs, name, size, seed))
        self.process.start()
        theirs.close()

    async def ready(self) -> Target:
        self.metadata, self.span = await self._receive()
        return self

    async def do(self, command: str, argument: Any = None, *, seconds: float = 15.0) -> Any:
        self._pipe.send((command, argument))
        return await self._receive(seconds)

    async def _receive(self, seconds: float = 30.0) -> Any:
        found = await asyncio.to_thread(self._pipe.poll, seconds)
        if not found:
            raise AssertionError("the target did not answer in time")
        return self._pipe.recv()

    @property
    def memory(self) -> Bytes:
        return pattern(self.size, self.seed)

    def end(self) -> None:
        self._pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextlib.asynccontextmanager
async def target(
    name: str = "target-1", size: int = 1 << 20, seed: int = 7, serve: bool = True
) -> AsyncIterator[Target]:
    it = Target(name, size, seed)
    try:
        await it.ready()
        if serve:
            await it.do("serve")
        yield it
    finally:
        it.end()


@contextlib.asynccontextmanager
async def reader(name: str = "reader-1", settings: EngineSettings | None = None) -> AsyncIterator[NixlEngine]:
    engine = NixlEngine(name, settings=settings)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def _scenario_main(scenario: Callable[[], Awaitable[None]], environment: Mapping[str, str], errors: Connection) -> None:
    os.environ.update(environment)
    try:
        preload()
        asyncio.run(_awaited(scenario))
    except BaseException:  # noqa: BLE001  reported, whatever it is
        errors.send(traceback.format_exc())
        hard_exit(1)
    hard_exit(0)


async def _awaited(scenario: Callable[[], Awaitable[None]]) -> None:
    await scenario()


def run(
    scenario: Callable[[], Awaitable[None]], environment: Mapping[str, str] | None = None, seconds: float = 100.0
) -> None:
    """Run an async function in a process of its own, and fail with its traceback, or when it takes too long."""
    ours, theirs = _SPAWN.Pipe(duplex=False)
    process = _SPAWN.Process(target=_scenario_main, args=(scenario, dict(environment or {}), theirs))
    process.start()
    theirs.close()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"the scenario took longer than {seconds} s")
    if process.exitcode != 0:
        try:
            report = ours.recv() if ours.poll() else "no traceback"
        except EOFError:
            report = "no traceback"
        raise AssertionError(f"the scenario ended with {process.exitcode}:\n{report}")
