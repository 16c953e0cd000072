"""Engines that are processes of their own, to be killed."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np

from kvxfer.pb import transfer_pb2 as pb
from kvxfer.pb import transfer_pb2_grpc
from tests.support.engines import SharedRegions, registration
from tests.support.plain import PlainMember, large_layout

_SPAWN = multiprocessing.get_context("spawn")


class Task(NamedTuple):
    """What a process shall do: register a cache in a memfd of its own, in which every byte is ``fill``."""

    socket: str
    engine_id: str
    directory: str
    blocks: int
    fill: int


def _main(pipe: Connection, task: Task) -> None:
    layout = large_layout(task.blocks)
    member = PlainMember(layout, SharedRegions.memfds(Path(task.directory), task.engine_id, layout))
    member.regions.arrays[0][:] = np.uint8(task.fill)
    with grpc.insecure_channel(f"unix:{task.socket}") as channel:
        stub = transfer_pb2_grpc.KvTransferStub(channel)
        registered = stub.RegisterCache(registration(task.engine_id, member), timeout=30)
        pipe.send(registered.SerializeToString())
        pipe.poll(None)  # until the test goes away, or kills


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, task: Task) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_main, args=(theirs, task), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(60), "the engine's process says nothing"
        self.registered = pb.RegisterCacheResponse.FromString(self._pipe.recv())

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.join(10)
        assert self.process.exitcode == -9
        self._pipe.close()
