"""kill -9 of an engine that holds its cache, and of the sidecar that it holds it with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.tickets import Ticket
from tests.support.errors import refused, told
from tests.support.holders import HolderProcess, Task, content
from tests.support.plain import PlainEngine
from tests.support.processes import SidecarProcess, sidecars, until
from tests.support.stopping import stopped

TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
SMALL, LARGE = 8, 512
FEW = [1, 3, 5]
#: An engine that stands still for a moment must not be taken for a dead one.
GRACE = 3.0
DEADLINE = 10.0


class Scene:
    """P and D."""

    def __init__(self, processes: Sequence[SidecarProcess]) -> None:
        self.p_side, self.d_side = processes
        self.d = PlainEngine("d", self.d_side, LARGE).register()

    def request(self, ticket: Ticket, ids: Sequence[int]) -> pb.ReadBlocksRequest:
        self.d.blocks[list(ids)] = 0
        return self.d.request(ticket, ids)

    def read(self, ticket: Ticket, ids: Sequence[int]) -> None:
        """A good read, compared."""
        done = self.d_side.stub.ReadBlocks(self.request(ticket, ids), timeout=DEADLINE).transfer
        assert done.state == pb.TRANSFER_STATE_DONE
        self.compare(ids)

    def compare(self, ids: Sequence[int]) -> None:
        for i in ids:
            assert (self.d.blocks[i] == content(i)).all()

    def known(self, engine_id: str) -> bool:
        return any(r.engine_id == engine_id for r in self.p_side.status().registrations)

    def mapped(self, path: str) -> bool:
        return path in Path(f"/proc/{self.p_side.pid}/maps").read_text()


@pytest.fixture(scope="module")
def stage() -> Iterator[Scene]:
    with sidecars(["p", "d"], {"drain_timeout": 2, "engine_grace": GRACE}, TCP) as processes:
        made = Scene(processes)
        yield made
        made.d.close()


@pytest.fixture
def engine(stage: Scene) -> Iterator[Callable[..., HolderProcess]]:
    """Makes engines at P's sidecar; those that live at the end are killed."""
    made: list[HolderProcess] = []

    def make(engine_id: str, blocks: int = SMALL, *, owned: bool = False) -> HolderProcess:
        task = Task(str(stage.p_side.socket), engine_id, str(stage.p_side.directory), blocks, owned)
        made.append(HolderProcess(task))
        return made[-1]

    yield make
    for one in made:
        one.discard()


def test_a_killed_engine_leaves_nothing(stage: Scene, engine: Callable[..., HolderProcess]) -> None:
    mortal, other = engine("mortal"), engine("other")
    stage.read(mortal.ticket(FEW), FEW)
    late = mortal.ticket(FEW)
    assert stage.mapped(mortal.path)

    def known() -> list[tuple[int, int]]:
        found = stage.p_side.status().registrations
        return [(r.holders, r.published) for r in found if r.engine_id == "mortal"]

    until(lambda: known() == [(1, 1)], DEADLINE, "the end of the first lease, and not of the second")
    killed = time.monotonic()
    mortal.kill()
    until(lambda: not stage.mapped(mortal.path), GRACE + DEADLINE, "unmapping")
    until(lambda: not stage.known("mortal"), DEADLINE, "the end of the registration")
    assert time.monotonic() - killed >= GRACE / 2  # not before its time either
    error = refused(lambda: stage.d_side.stub.ReadBlocks(stage.request(late, FEW), timeout=DEADLINE))
    assert error.reason in (Reason.NOT_REGISTERED, Reason.PEER_LOST, Reason.PEER_UNREACHABLE)
    stage.d.rest()
    # Others of the same sidecar notice nothing.
    stage.read(other.ticket(FEW), FEW)
    other.close()
    assert not stage.known("other")
    assert not stage.mapped(other.path)


def test_an_engine_killed_in_mid_read(stage: Scene, engine: Callable[..., HolderProcess]) -> None:
    """D gets what it was promised or a clear error, and P's memory goes when the read has ended."""
    mortal = engine("large", LARGE)
    every = range(LARGE)
    stage.read(mortal.ticket(FEW), FEW)
    ticket = mortal.ticket(every)
    stage.d.blocks[:] = 0
    stage.d_side.stub.ReadBlocks(stage.d.request(ticket, every, transfer_id="mid", wait=False), timeout=DEADLINE)
    until(stage.d.blocks[:: LARGE // 64, 0].any, DEADLINE, "the first byte")
    mortal.kill()
    read = pb.ReadBlocksRequest(engine_id="d", transfer_id="mid")
    try:
        done = stage.d_side.stub.ReadBlocks(read, timeout=DEADLINE + 20).transfer
    except grpc.RpcError as failure:
        assert told(failure).reason in (Reason.LEASE_EXPIRED, Reason.PEER_LOST)
    else:
        assert done.state == pb.TRANSFER_STATE_DONE
        stage.compare(every)
    until(lambda: not stage.mapped(mortal.path), GRACE + DEADLINE, "unmapping")
    until(lambda: not stage.known("large"), DEADLINE, "the end of the registration")


def test_what_was_published_outlives_its_engine(stage: Scene, engine: Callable[..., HolderProcess]) -> None:
    mortal = engine("mortal", owned=True)
    tickets = [mortal.ticket(FEW) for _ in range(2)]
    mortal.kill()
    until(lambda: any(r.orphaned for r in stage.p_side.status().registrations), GRACE + DEADLINE, "its end")
    for ticket in tickets:
        assert Path(mortal.path).exists()
        stage.read(ticket, FEW)
    until(lambda: not stage.known("mortal"), DEADLINE, "the end of its leases")
    assert not stage.mapped(mortal.path)
    assert not Path(mortal.path).exists()


@pytest.mark.slow
def test_a_stopped_engine_is_noticed_by_its_silence(stage: Scene, engine: Callable[..., HolderProcess]) -> None:
    """Its socket is open, but nobody answers there.  Where it goes on after all, its session begins anew."""
    mute = engine("mute")
    assert mute.process.pid is not None
    with stopped(mute.process.pid):
        until(lambda: not stage.known("mute"), 30.0 + GRACE + DEADLINE, "the end of the registration")
    assert mute.hear("lost", DEADLINE) == (Reason.NOT_REGISTERED.value, mute.incarnation)
    mute.hear("registered", DEADLINE)
    stage.read(mute.ticket(FEW), FEW)
    mute.close()


@pytest.mark.parametrize("owned", [False, True])
def test_a_killed_sidecar_is_told_everything_again(
    stage: Scene, engine: Callable[..., HolderProcess], owned: bool
) -> None:
    """Without anybody's help; and the cache is still there, also where the dead sidecar had made it."""
    patient = engine("patient", owned=owned)
    old = patient.ticket(FEW)
    stage.read(patient.ticket(FEW), FEW)
    stage.p_side.kill()
    stage.p_side.start()
    stage.p_side.ready()
    reason, lost = patient.hear("lost", DEADLINE)
    assert (reason, lost) == (Reason.NOT_REGISTERED.value, patient.incarnation)
    (fresh,) = patient.hear("registered", DEADLINE)
    assert fresh != lost
    stage.read(patient.ticket(FEW), FEW)
    error: KvxferError = refused(lambda: stage.d_side.stub.ReadBlocks(stage.request(old, FEW), timeout=DEADLINE))
    assert error.reason in (Reason.PEER_LOST, Reason.PEER_UNREACHABLE, Reason.STALE_INCARNATION)
    (known,) = stage.p_side.status().registrations
    assert (known.incarnation, known.holders) == (fresh, 1)
    assert stage.mapped(patient.path)
    patient.kill()
    until(lambda: not stage.mapped(patient.path), GRACE + DEADLINE, "unmapping")
    assert Path(patient.path).exists() is not owned
