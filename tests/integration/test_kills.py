"""kill -9 of engines and sidecars: nobody else hangs, and what is left goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from kvxfer.core.errors import Reason
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.tickets import ticket_from_pb
from tests.support.clients import EngineProcess, Task
from tests.support.engines import publication
from tests.support.errors import refused
from tests.support.plain import PlainEngine
from tests.support.processes import SidecarProcess, sidecars, until

#: Over TCP a large read takes a while, and the source has a hand in it.
TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
SMALL, LARGE = 8, 1024
FEW = [1, 3, 5]

#: No call may take longer, whatever has died.
DEADLINE = 10.0


class Scene:
    """P, D, and a third that shows that the survivors are well."""

    def __init__(self, processes: list[SidecarProcess]) -> None:
        self.p_side, self.d_side, self.third_side = processes
        self.p = PlainEngine("p", self.p_side, LARGE).register()
        self.d = PlainEngine("d", self.d_side, LARGE).register()
        self.third = PlainEngine("third", self.third_side, SMALL).register()
        self.p.fill(1)
        self.third.fill(3)

    def repair(self) -> None:
        """Bring back what a test has killed."""
        for engine, process in ((self.p, self.p_side), (self.d, self.d_side), (self.third, self.third_side)):
            if process.process.poll() is not None:
                process.settings.pop("peer_port", None)
                process.start()
                process.ready()
                engine.register()

    def close(self) -> None:
        for engine in (self.p, self.d, self.third):
            engine.close()


@pytest.fixture(scope="module")
def stage() -> Iterator[Scene]:
    with sidecars(["p", "d", "third"], {"drain_timeout": 2}, TCP) as processes:
        made = Scene(processes)
        yield made
        made.repair()
        made.close()


@pytest.fixture
def scene(stage: Scene) -> Scene:
    stage.repair()
    stage.d.read(stage.p, FEW)
    return stage


def in_mid_read(scene: Scene, transfer_id: str, side: SidecarProcess) -> tuple[str, grpc.Future[pb.ReadBlocksResponse]]:
    """Have everything read, and stop a sidecar while that is under way: some bytes are there, many are not.

    Where the read was over before, it is tried again.

    :returns: the read's ID, and the call that waits for it.
    """
    every = range(LARGE)
    probes = scene.d.blocks[:: LARGE // 64, 0]
    for attempt in range(5):
        name = f"{transfer_id}-{attempt}"
        scene.d.blocks[:] = 0
        request = scene.d.request(scene.p.ticket(every), every, transfer_id=name)
        waiting: grpc.Future[pb.ReadBlocksResponse] = scene.d_side.stub.ReadBlocks.future(request, timeout=60)
        until(probes.any, 30, "the first byte")
        os.kill(side.pid, signal.SIGSTOP)
        if np.count_nonzero(probes) < 0.75 * len(probes):  # what is still in sockets is less than the rest
            return name, waiting
        os.kill(side.pid, signal.SIGCONT)
        waiting.result(60)
    raise AssertionError("the read has always been over before it could be caught")


def test_a_killed_p_engine_with_memory_of_no_name(scene: Scene) -> None:
    """A memfd outlives the engine that made it: D still reads what was promised."""
    task = Task(str(scene.p_side.socket), "mortal", str(scene.p_side.directory), SMALL, 77)
    engine = EngineProcess(task)
    for transfer_id in ("before", "after"):
        request = scene.d.request(scene.p.ticket(FEW), FEW, transfer_id=transfer_id)
        request.spec.ticket.engine_id = "mortal"
        request.spec.ticket.ranks[0].incarnation = engine.registered.incarnation
        ticket = ticket_from_pb(request.spec.ticket)
        scene.p_side.stub.PublishBlocks(publication("mortal", ticket), timeout=DEADLINE)
        scene.d.blocks[FEW] = 0
        scene.d_side.stub.ReadBlocks(request, timeout=DEADLINE)
        assert (scene.d.blocks[FEW] == 77).all()
        if transfer_id == "before":
            engine.kill()
    farewell = pb.UnregisterCacheRequest(engine_id="mortal")
    farewell.drain_timeout.FromSeconds(20)  # until D's sidecar has told that the read is over
    scene.p_side.stub.UnregisterCache(farewell, timeout=30)
    scene.d.read(scene.p, FEW)


def survivors_are_well(scene: Scene) -> None:
    """D reads from another, and knows of nothing that is under way."""
    scene.d.read(scene.third, FEW)
    counts = scene.d_side.status().counts
    assert (counts.posted, counts.draining, counts.bytes_in_flight) == (0, 0, 0)


def restart_p(scene: Scene) -> None:
    """P's sidecar comes back at another port, knows nothing, and is told everything again."""
    scene.p_side.start()
    scene.p_side.ready()
    scene.p.register()


def test_p_killed_while_connected_and_idle(scene: Scene) -> None:
    ticket = scene.p.ticket(FEW)
    scene.d.read(scene.p, FEW)
    prepared = pb.PrepareTransferRequest(spec=scene.d.request(ticket, FEW, transfer_id="prepared").spec)
    scene.d_side.stub.PrepareTransfer(prepared, timeout=DEADLINE)
    scene.p_side.kill()
    until(lambda: scene.d.get("prepared").state == pb.TRANSFER_STATE_FAILED, DEADLINE, "that D misses P")
    read = pb.ReadBlocksRequest(engine_id="d", transfer_id="prepared")
    error = refused(lambda: scene.d_side.stub.ReadBlocks(read, timeout=DEADLINE))
    assert error.reason is Reason.PEER_LOST
    error = refused(lambda: scene.d_side.stub.ReadBlocks(scene.d.request(ticket, FEW), timeout=DEADLINE))
    assert error.reason in (Reason.PEER_LOST, Reason.PEER_UNREACHABLE)
    survivors_are_well(scene)
    old = scene.p.member.registered.incarnation
    restart_p(scene)
    assert scene.p.member.registered.incarnation != old
    # The old ticket leads to where nobody listens any more, or, at the new address, to another incarnation.
    request = scene.d.request(ticket, FEW)
    error = refused(lambda: scene.d_side.stub.ReadBlocks(request, timeout=DEADLINE))
    assert error.reason in (Reason.PEER_LOST, Reason.PEER_UNREACHABLE)
    request.spec.ticket.ranks[0].address = scene.p.member.registered.peer_address
    error = refused(lambda: scene.d_side.stub.ReadBlocks(request, timeout=DEADLINE))
    assert error.reason is Reason.STALE_INCARNATION
    assert (error.metadata["expected"], error.metadata["found"]) == (old, scene.p.member.registered.incarnation)
    scene.d.read(scene.p, FEW)
    survivors_are_well(scene)


def test_p_back_at_the_same_port(scene: Scene) -> None:
    """As in a deployment with fixed ports: the old ticket is stale, a fresh one works."""
    scene.d.read(scene.p, FEW)
    old_ticket = scene.p.ticket(FEW)
    scene.p_side.kill()
    scene.p_side.settings["peer_port"] = scene.p.member.registered.peer_address.rpartition(":")[2]
    restart_p(scene)
    error = refused(lambda: scene.d_side.stub.ReadBlocks(scene.d.request(old_ticket, FEW), timeout=DEADLINE))
    # It may still find the old connection broken, once.
    if error.reason in (Reason.PEER_LOST, Reason.PEER_UNREACHABLE):
        scene.d.rest()
        error = refused(lambda: scene.d_side.stub.ReadBlocks(scene.d.request(old_ticket, FEW), timeout=DEADLINE))
    assert error.reason is Reason.STALE_INCARNATION
    scene.d.read(scene.p, FEW)


def test_p_killed_in_mid_read(scene: Scene) -> None:
    name, waiting = in_mid_read(scene, "t1", scene.p_side)
    scene.p_side.kill()
    error = refused(lambda: waiting.result(DEADLINE))
    # P may have died before it confirmed the read.
    assert error.reason in (Reason.PEER_LOST, Reason.PEER_UNREACHABLE)
    assert not scene.d.blocks.all(), "the read had ended before the kill"
    until(lambda: scene.d.get(name).quiesced, DEADLINE, "quiesced")
    assert scene.d.get(name).state == pb.TRANSFER_STATE_FAILED
    survivors_are_well(scene)
    restart_p(scene)
    scene.d.read(scene.p, FEW)


def test_d_killed_in_mid_read(scene: Scene) -> None:
    """P goes on serving: its other readers and its own engine notice nothing."""
    _, waiting = in_mid_read(scene, "t2", scene.d_side)
    scene.d_side.kill()
    with pytest.raises(grpc.RpcError) as caught:
        waiting.result(DEADLINE)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not scene.d.blocks.all(), "the read had ended before the kill"
    # For some seconds, in which UCX finds out that the reader is gone.
    began = time.monotonic()
    while time.monotonic() - began < 4:
        scene.third.read(scene.p, FEW)
    assert scene.p_side.process.poll() is None
    scene.d_side.start()
    scene.d_side.ready()
    scene.d.register()
    scene.d.read(scene.p, FEW)
