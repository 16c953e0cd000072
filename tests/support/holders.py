"""Engines in processes of their own that hold their cache with a session, to be killed or bereaved."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvxfer.memory.handles import Handle
from kvxfer.wire.tickets import Ticket
from kvxfer_client import (
    Client,
    KvxferError,
    Owned,
    Registered,
    SharedRegion,
    attention_blocks,
    make_ticket,
    new_lease_token,
)
from tests.support.engines import KEY
from tests.support.plain import BLOCK, large_layout

_SPAWN = multiprocessing.get_context("spawn")


class Task(NamedTuple):
    """What such an engine is.

    :param owned: its memory is the sidecar's, and what it has published outlives it.
    """

    socket: str
    engine_id: str
    directory: str
    blocks: int
    owned: bool = False


def content(block: int) -> int:
    """What every byte of a block is."""
    return block % 251 + 1


def _main(pipe: Connection, task: Task) -> None:
    layout = large_layout(task.blocks)
    size = layout.regions[0].size
    telling = threading.Lock()
    region: SharedRegion | None = None
    memory: list[Handle | SharedRegion] = [Owned(size)]
    if not task.owned:
        region = SharedRegion.create_file(Path(task.directory) / task.engine_id, size)
        memory = [region]

    def tell(*what: Any) -> None:
        with telling:
            pipe.send(what)

    def fill(of: SharedRegion) -> None:
        array = of.numpy(np.uint8, (task.blocks, BLOCK))
        array[:] = np.array([content(i) for i in range(task.blocks)], np.uint8)[:, None]

    def on_registered(registered: Registered) -> None:
        tell("registered", registered.incarnation)

    def on_lost(reason: KvxferError, incarnation: str) -> None:
        tell("lost", reason.reason.value, incarnation)

    if region is not None:
        fill(region)
    with Client(f"unix:{task.socket}", engine_id=task.engine_id) as client:
        session = client.session(
            layout,
            memory,
            compatibility_key=KEY,
            keep_leases=task.owned,
            on_lost=on_lost,
            on_registered=on_registered,
            on_ended=lambda error: tell("ended", error.reason.value),
        )
        first = session.wait_registered()
        if region is None:
            region = SharedRegion.map(first.exported[0])
            fill(region)
        tell("ready", getattr(region.handle, "path", ""))
        while True:
            ids: Sequence[int] | None = pipe.recv()
            if ids is None:
                break
            registered = session.wait_registered()
            ticket = make_ticket(
                engine_id=task.engine_id,
                compatibility_key=KEY,
                ranks=[registered.ticket_rank],
                request_id=os.urandom(8).hex(),
                blocks=[attention_blocks("attn", ids)],
                num_tokens=len(ids),
                lease_token=new_lease_token(),
                ttl=30.0,
            )
            client.publish(
                ticket.request_id,
                ticket.blocks,
                ticket.num_tokens,
                ticket.lease_token,
                ttl=ticket.ttl,
                incarnation=registered.incarnation,
            )
            tell("ticket", ticket)
        session.close()
        tell("closed")


class HolderProcess:
    """An engine in a process of its own."""

    def __init__(self, task: Task) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_main, args=(theirs, task), daemon=True)
        self.process.start()
        theirs.close()
        self.incarnation = self.hear("registered")[0]
        #: Of its memory.
        self.path: str = self.hear("ready")[0]

    def hear(self, what: str, seconds: float = 60.0) -> tuple[Any, ...]:
        """The next thing it says, which must be this."""
        assert self._pipe.poll(seconds), f"the engine's process says nothing, where {what} was due"
        said = self._pipe.recv()
        assert said[0] == what, said
        return tuple(said[1:])

    def ticket(self, ids: Sequence[int]) -> Ticket:
        """Has it publish blocks."""
        self._pipe.send(list(ids))
        found: Ticket = self.hear("ticket")[0]
        return found

    def close(self) -> None:
        """Has it end well."""
        self._pipe.send(None)
        self.hear("closed")
        self.process.join(10)
        assert self.process.exitcode == 0

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.join(10)
        assert self.process.exitcode == -9

    def discard(self) -> None:
        """End it in whatever way."""
        self.process.kill()
        self.process.join(10)
        self._pipe.close()
