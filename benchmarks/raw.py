"""What a bare NIXL READ of given descriptors costs between two processes: the yardstick for everything above it.

Nothing of kvxfer is in the path: two agents, prepared lists, one request.  Rows and index arrays are those of kvxfer,
and so are the settings of UCX, which are the better ones here, unless UCX is asked for as it comes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from benchmarks.aside import Aside
from benchmarks.caches import Case, Memory
from kvxfer.cli.bench.case import GROUP
from kvxfer.core.layout import Rank
from kvxfer.core.pairing import Member, compile_plan
from kvxfer.core.plan import RowTable, SourcePlan
from kvxfer.core.resolve import BlockList, Request, SourceRead, resolve
from kvxfer.memory.handles import FileHandle
from kvxfer_client.memory import SharedRegion


class Sample(NamedTuple):
    """Seconds of one READ.

    :param make: making the request.
    :param move: from the posting call until completion was seen.
    """

    make: float
    move: float

    @property
    def whole(self) -> float:
        """What a caller of NIXL waits."""
        return self.make + self.move


def new_agent(name: str, *, as_it_comes: bool = False) -> Any:
    """An agent with the settings of kvxfer; or of UCX, where the process has not made one with those of kvxfer before.

    NIXL's own thread for the progress is left out in either case: it would keep a processor busy from here on.
    """
    if not as_it_comes:
        from kvxfer.xfer.environment import apply_defaults

        apply_defaults()
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, capture_telemetry=True))


def descriptors_of(case: Case) -> tuple[SourcePlan, SourceRead]:
    """The rows of both sides, and the descriptors of the read in the order of kvxfer."""
    member = Member(Rank(), case.layout)
    plan = compile_plan(member, [member])
    request = Request([BlockList(GROUP, case.ids("D"))], [BlockList(GROUP, case.ids("P"))], case.tokens)
    return plan.sources[0], resolve(plan, request).sources[0]


def _serve(path: str, size: int, as_it_comes: bool) -> tuple[tuple[bytes, int], Any]:
    agent = new_agent("raw-target", as_it_comes=as_it_comes)
    region = SharedRegion.map(FileHandle(path, 0, size))
    address = region.numpy(np.uint8, (size,)).ctypes.data
    agent.register_memory([(address, size, 0, "")], "DRAM")
    return (agent.get_agent_metadata(), address), (agent, region)


def _attend(pipe: Connection, kept: Any) -> None:
    """As a sidecar does: polling without pause while a read is under way, else every few milliseconds."""
    agent, reading = kept[0], False
    while True:
        if pipe.poll(0 if reading else 0.004):
            reading = pipe.recv()
        agent.get_new_notifs()
        os.sched_yield()


class Raw(Aside):
    """A reader in this process, and a target in one of its own, over the files of a :class:`Memory`.

    :param as_it_comes: UCX with settings of its own.  No agent of this process may have had other ones.
    """

    def __init__(self, memory: Memory, *, as_it_comes: bool = False) -> None:
        files = str(memory.directory / "P"), memory.files["P"].size
        super().__init__(_serve, *files, as_it_comes, attend=_attend)
        metadata, self._there = self.told
        self._memory = memory
        self._agent = new_agent("raw-reader", as_it_comes=as_it_comes)
        self._here = memory.bytes["D"].ctypes.data
        self._agent.register_memory([(self._here, memory.bytes["D"].size, 0, "")], "DRAM")
        self._name = self._agent.add_remote_agent(metadata).decode()

    def prepare(self, case: Case) -> RawRead:
        """The lists of a case, and its descriptors in the order of kvxfer."""
        plan, read = descriptors_of(case)
        offsets = self._memory.offsets(case)
        here = self._list("NIXL_INIT_AGENT", plan.local, [self._here + o for o in offsets])
        there = self._list(self._name, plan.remote, [self._there + o for o in offsets])
        return RawRead(self._pipe, self._agent, here, there, read)

    def _list(self, name: str, rows: RowTable, addresses: Sequence[int]) -> Any:
        return self._agent.prep_xfer_dlist(name, rows.bind(addresses, [0] * len(addresses)), "DRAM")


class RawRead:
    """A READ that can be repeated."""

    def __init__(self, pipe: Connection, agent: Any, here: Any, there: Any, read: SourceRead) -> None:
        self._pipe, self._agent, self._here, self._there = pipe, agent, here, there
        self._local, self._remote = read.local_indices, read.remote_indices

    @property
    def descriptors(self) -> int:
        """Before NIXL merges any."""
        return len(self._local)

    def by_remote(self) -> RawRead:
        """The same in the order of P's blocks."""
        return self._ordered(np.argsort(self._remote, kind="stable"))

    def by_local(self) -> RawRead:
        """The same in the order of D's blocks."""
        return self._ordered(np.argsort(self._local, kind="stable"))

    def as_listed(self, seed: int = 0) -> RawRead:
        """The same in no order, as a scheduler's free list gives it."""
        return self._ordered(np.random.default_rng(seed).permutation(self.descriptors))

    def _ordered(self, order: Any) -> RawRead:
        read = SourceRead(Rank(), self._local[order], self._remote[order], {})
        return RawRead(self._pipe, self._agent, self._here, self._there, read)

    def once(self) -> Sample:
        """Make it, and wait for its end."""
        agent = self._agent
        self._pipe.send(True)
        began = time.perf_counter()
        handle = agent.make_prepped_xfer("READ", self._here, self._local, self._there, self._remote, b"done")
        made = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        done = time.perf_counter()
        if state != "DONE":
            raise RuntimeError(f"the raw read ended as {state}")
        agent.release_xfer_handle(handle)
        self._pipe.send(False)
        return Sample(made - began, done - made)

    def close(self) -> None:
        """Give the lists back."""
        for prepared in (self._here, self._there):
            self._agent.release_dlist_handle(prepared)
