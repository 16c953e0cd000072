"""Reads whose peer has stopped: what is told, when the local blocks are free, and that the next read works.

Reads are caught in the middle by stopping P's sidecar when the first bytes have come (over TCP nothing moves without
it), and once more where the read was over by then.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import numpy as np
import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import Axis, AxisKind, CacheLayout, Component, Group, GroupKind, Rank, Region, UnitRange, View
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.status import from_rpc_error
from tests.support.engines import block_lists, make_lists, read_request
from tests.support.fleet import Engine
from tests.support.processes import SidecarProcess, sidecars, until
from tests.support.stopping import stopped
from tests.truth import Labels, Want

TOKENS = 16 * 24
KV = Component(
    "kv",
    "bfloat16",
    2,
    (Axis(AxisKind.UNIT, 2), Axis(AxisKind.TOKEN, 16), Axis(AxisKind.INNER, 8_192)),
    UnitRange(0, 2, 2),
)
BLOCK = KV.data_bytes


def layout(blocks: int = 32) -> CacheLayout:
    views = tuple(View(f"l{i}", i, 0, BLOCK, blocks, (KV,)) for i in range(2))
    return CacheLayout(
        tuple(Region(blocks * BLOCK) for _ in views), (Group("attention", GroupKind.ATTENTION, views, 16),)
    )


@pytest.fixture
def four() -> Iterator[list[SidecarProcess]]:
    """Two P and two D sidecars over TCP, where a read needs the target's help; tests may kill any of them."""
    with sidecars(["p", "p2", "d", "d2"], environment={"UCX_TLS": "tcp"}) as processes:
        yield processes


def engine(letter: str, process: SidecarProcess, labels: Labels) -> Engine:
    return Engine(letter, [(Rank(), layout())], [process], labels).register()


def read(d: Engine, p: Engine, *, seed: int = 1, timeout: float = 20) -> pb.Transfer:
    """A whole read, every byte compared."""
    p_lists, _ = make_lists(p.groups, TOKENS, seed)
    d_lists, _ = make_lists(d.groups, TOKENS, seed + 1)
    p.hold(p_lists)
    return d.read(0, p, p.ticket(p_lists, TOKENS), d_lists, {"attention": Want(0, TOKENS)}, timeout=timeout)


#: A sample of every block.
STEP = 65_536


def arrived(d: Engine) -> float:
    """How much of what :func:`request` reads has come, since :func:`forget`."""
    here = list(make_lists(d.groups, TOKENS, 2)[0]["attention"].ids)
    sampled = [array.reshape(-1, BLOCK)[here, ::STEP] for array in d.members[0].regions.arrays]
    return sum(np.count_nonzero(s) for s in sampled) / sum(s.size for s in sampled)


def forget(d: Engine) -> None:
    """What is in the blocks that :func:`request` reads into."""
    here = list(make_lists(d.groups, TOKENS, 2)[0]["attention"].ids)
    for array in d.members[0].regions.arrays:
        array.reshape(-1, BLOCK)[here] = 0


@contextmanager
def in_mid_read(
    d: Engine, p: Engine, timeout: float = 20.0
) -> Iterator[tuple[str, grpc.Future[pb.ReadBlocksResponse]]]:
    """P's sidecar is stopped while D reads: some bytes are there, many are not.

    :returns: the read's ID, and the call that waits for it.
    """
    for attempt in range(20):
        message = request(d, p, transfer_id=f"caught-{attempt}")
        message.timeout.FromMilliseconds(int(timeout * 1000))
        forget(d)
        waiting = d.processes[0].stub.ReadBlocks.future(message, timeout=60)
        while not arrived(d) and not waiting.done():
            continue  # a pause would be as long as the read
        with stopped(p.processes[0].pid):
            if arrived(d) < 0.75:  # what is still in sockets is less than the rest
                yield message.spec.transfer_id, waiting
                return
        waiting.result(60)
    raise AssertionError("the read has always been over before it could be caught")


def request(d: Engine, p: Engine, *, wait: bool = True, transfer_id: str = "") -> pb.ReadBlocksRequest:
    p_lists, _ = make_lists(p.groups, TOKENS, 1)
    d_lists, _ = make_lists(d.groups, TOKENS, 2)
    ticket = p.ticket(p_lists, TOKENS)
    return read_request(d.engine_id, ticket, block_lists(d.groups, d_lists), wait=wait, transfer_id=transfer_id)


def refused(d: Engine, message: pb.ReadBlocksRequest, *, within: float = 20) -> KvxferError:
    """The error of a read, which must come in time."""
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        d.processes[0].stub.ReadBlocks(message, timeout=within)
    assert time.monotonic() - began < within, "the call ran into the caller's own deadline"
    return from_rpc_error(caught.value)


def transfer_of(d: Engine, transfer_id: str) -> pb.Transfer:
    query = pb.GetTransferRequest(engine_id=d.engine_id, transfer_id=transfer_id)
    return d.processes[0].stub.GetTransfer(query, timeout=10).transfer


def test_p_sidecar_killed_in_the_middle_of_a_read(four: list[SidecarProcess]) -> None:
    labels = Labels()
    p, p2, d = engine("p", four[0], labels), engine("p2", four[1], labels), engine("d", four[2], labels)
    read(d, p)
    other = request(d, p2)
    with in_mid_read(d, p) as (caught, _):
        assert transfer_of(d, caught).state == pb.TRANSFER_STATE_POSTED
        busy = refused(d, other)
        assert busy.reason is Reason.LOCAL_BLOCK_BUSY
        four[0].kill()
    until(lambda: transfer_of(d, caught).state == pb.TRANSFER_STATE_FAILED, 20, "the failure")
    ended = transfer_of(d, caught)
    assert ended.quiesced
    assert ended.error.message
    read(d, p2)


def test_a_stopped_p_runs_into_the_deadline_and_drains(four: list[SidecarProcess]) -> None:
    labels = Labels()
    p, d = engine("p", four[0], labels), engine("d", four[2], labels)
    read(d, p)
    other = request(d, p)
    with in_mid_read(d, p, timeout=3.0) as (slow, waiting):
        error = from_rpc_error(waiting.exception(20))
        assert error.reason is Reason.DEADLINE_EXCEEDED
        assert error.metadata["quiesced"] == "false"
        assert transfer_of(d, slow).state == pb.TRANSFER_STATE_DRAINING
        busy = refused(d, other)
        assert busy.reason is Reason.LOCAL_BLOCK_BUSY
    until(lambda: transfer_of(d, slow).quiesced, 20, "quiescence")
    assert transfer_of(d, slow).state == pb.TRANSFER_STATE_FAILED
    read(d, p, seed=7)


def test_a_drain_that_takes_too_long_ends_with_its_agent() -> None:
    """Past the limit the blocks are free, though the source is stopped still: nothing may arrive in them afterwards."""
    labels = Labels()
    with sidecars(["p", "p2", "d"], {"drain_limit": 1}, {"UCX_TLS": "tcp"}) as (p_side, p2_side, d_side):
        p, p2, d = engine("p", p_side, labels), engine("p2", p2_side, labels), engine("d", d_side, labels)
        read(d, p)
        read(d, p2)
        with in_mid_read(d, p, timeout=3.0) as (stuck, waiting):
            error = from_rpc_error(waiting.exception(20))
            assert error.reason is Reason.DEADLINE_EXCEEDED
            assert error.metadata["quiesced"] == "false"
            until(lambda: transfer_of(d, stuck).quiesced, 10, "quiescence")
            assert transfer_of(d, stuck).state == pb.TRANSFER_STATE_FAILED
            read(d, p2, seed=7)  # into the very same blocks
        # It goes on where it was stopped; UCX may abort it, now that its reader is gone.
        until(lambda: p_side.process.poll() is not None or answers(p_side), 20, "an answer, or the end")
        member, watched = d.members[0], time.monotonic() + 2
        while time.monotonic() < watched:
            assert not (late := member.differences(member.model.image)), late
        read(d, p2, seed=8)
        if p_side.process.poll() is None:
            read(d, p, seed=9)


def answers(process: SidecarProcess) -> bool:
    try:
        process.status()
    except grpc.RpcError:
        return False
    return True


_ENGINE = """
import sys
import numpy as np
from kvxfer.pb import transfer_pb2 as pb, transfer_pb2_grpc
import grpc
stub = transfer_pb2_grpc.KvTransferStub(grpc.insecure_channel(sys.argv[1]))
message = pb.{kind}.FromString(sys.stdin.buffer.read())
stub.{call}(message, timeout=60)
print("done", flush=True)
sys.stdin.close()
import signal
signal.pause()
"""


def engine_process(process: SidecarProcess, call: str, message: bytes) -> subprocess.Popen[bytes]:
    """An engine of its own process, which makes one call and then lives on."""
    code = _ENGINE.format(kind=f"{call}Request", call=call)
    command = [sys.executable, "-c", code, f"unix:{process.socket}"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(message)
    child.stdin.close()
    return child


def test_d_engine_killed_while_its_read_waits_for_p(four: list[SidecarProcess]) -> None:
    """The transfer is the sidecar's: it ends as if nothing had happened."""
    labels = Labels()
    p, d = engine("p", four[0], labels), engine("d", four[2], labels)
    read(d, p)
    message = request(d, p, transfer_id="orphan").SerializeToString()
    with stopped(four[0].pid), engine_process(four[2], "ReadBlocks", message) as child:
        until(lambda: four[2].status().counts.posted == 1, 20, "posting")
        child.kill()
    until(lambda: transfer_of(d, "orphan").state == pb.TRANSFER_STATE_DONE, 20, "the end of the read")
    read(d, p, seed=9)
