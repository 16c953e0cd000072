"""P, D and a third, their sidecars, and one read that is brought to a phase."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np
import psutil

from kvxfer.core.resolve import BlockList
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.tickets import Ticket
from tests.chaos.census import Census, assert_no_leaks, census
from tests.chaos.engines import FINAL, Engine, Pending, outcome_of
from tests.support.engines import make_ticket, publication
from tests.support.processes import SidecarProcess
from tests.support.stopping import wake

#: Blocks of a mebibyte: a read that can be caught in the middle, and one that only shows that reads work.
LARGE, SMALL = 192, 8
FEW = (1, 3, 5)
EVERY = range(LARGE)

_numbers = itertools.count(1)

#: How a first read over a connection that has broken meanwhile may fail.
AGAIN = ("PEER_LOST", "PEER_UNREACHABLE")


class Stage:
    """The sidecars.  They outlive the cases, for a leak shows best in a process that has seen much."""

    def __init__(self, processes: Sequence[SidecarProcess]) -> None:
        self.p, self.d, self.third = processes
        self.born: dict[int, Census] = {}

    def __iter__(self) -> Iterator[SidecarProcess]:
        return iter((self.p, self.d, self.third))

    def repair(self) -> None:
        """Restart what is dead, and take note of what a sidecar has that has done nothing but one read."""
        dead = [side for side in self if side.process.poll() is not None]
        for side in dead:
            side.settings.pop("peer_port", None)
            side.log_path.unlink(missing_ok=True)  # how it died was the case's matter
            side.start()
        for side in dead:
            side.ready()

    def baseline(self) -> dict[int, Census]:
        """What everybody has now, by process; threads and memory as they were when it was new."""
        found = {}
        for side in self:
            now = census(side)
            born = self.born.setdefault(side.pid, now)
            found[side.pid] = Census(**{**vars(now), "threads": born.threads, "anonymous": born.anonymous})
        return found


def is_connected(side: SidecarProcess, address: str) -> bool:
    """Whether a sidecar has a TCP connection to an address."""
    host, _, port = address.rpartition(":")
    ends = (host, int(port))
    return any(
        c.status == psutil.CONN_ESTABLISHED and c.raddr and (c.raddr.ip.removeprefix("::ffff:"), c.raddr.port) == ends
        for c in psutil.Process(side.pid).net_connections("tcp")
    )


@dataclass
class Play:
    """One case's engines, and its one large read."""

    stage: Stage
    mortal_p: bool = False
    mortal_d: bool = False
    before: dict[int, Census] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stage.repair()
        self.before = self.stage.baseline()
        number = next(_numbers)
        self.transfer_id = f"read-{number}"
        self.p = Engine(f"p{number}", self.stage.p, LARGE, mortal=self.mortal_p)
        self.d = Engine(f"d{number}", self.stage.d, LARGE + SMALL, mortal=self.mortal_d)
        self.third = Engine(f"third{number}", self.stage.third, SMALL)
        self.engines = [self.p, self.d, self.third]
        for engine in self.engines:
            engine.register()
        self.p.fill(number)
        self.third.fill(number + 1)
        self.expected = self.p.blocks.copy()

    # -- the large read ------------------------------------------------------------------------------------------------

    def make_ticket(self) -> Ticket:
        """For a read of everything that is not published yet."""
        blocks = (BlockList("attn", np.array(EVERY)),)
        return make_ticket(self.p.engine_id, [self.p.member], blocks, LARGE)

    def publish(self, ticket: Ticket, hold: float) -> None:
        """By P's engine itself."""
        self.p.worker.stub.PublishBlocks(publication(self.p.engine_id, ticket, hold), timeout=20)

    def start(self, ticket: Ticket, deadline: float, patience: float) -> Pending:
        """D's engine asks for everything and waits."""
        self.d.blocks[:LARGE] = 0
        request = self.d.request(ticket, EVERY, transfer_id=self.transfer_id)
        request.timeout.FromMilliseconds(int(deadline * 1000))
        return self.d.start_read(request, patience)

    def large(self) -> pb.Transfer | None:
        """The large read at D's sidecar, if it knows it."""
        return self.d.transfer(self.transfer_id)

    def state(self) -> int:
        """Of the large read."""
        found = self.large()
        return pb.TRANSFER_STATE_UNSPECIFIED if found is None else found.state

    def posted(self) -> bool:
        return self.state() == pb.TRANSFER_STATE_POSTED

    def final(self) -> bool:
        return self.state() in FINAL

    def opened(self) -> bool:
        """Whether P has OpenRead before it."""
        peers = self.stage.p.status().peers
        return any(p.role == pb.PEER_ROLE_READER and p.reads and p.engine_id == self.p.engine_id for p in peers)

    def begun(self) -> bool:
        """Whether bytes have arrived."""
        return bool(self.d.blocks[: LARGE : LARGE // 16, ::4096].any())

    def arrived(self) -> float:
        """The share of its pages that have arrived."""
        return float((self.d.blocks[:LARGE, ::4096] != 0).mean())

    def complete(self) -> bool:
        return bool(self.d.blocks[:LARGE, ::4096].all())

    def right(self) -> bool:
        """Whether D has what P had when it published, to the last byte."""
        return bool((self.d.blocks[:LARGE] == self.expected).all())

    def reuse(self) -> None:
        """P's engine puts something else into its blocks, which it may once their lease has ended."""
        self.p.blocks[:] = 255 - self.p.blocks

    def lease(self, ticket: Ticket) -> tuple[str, bool]:
        """P's lease of the large read: its state, and whether it has ended."""
        listed = self.stage.p.stub.ListLeases(pb.ListLeasesRequest(engine_id=self.p.engine_id), timeout=10).leases
        state = next((x.state for x in listed if x.request_id == ticket.request_id), pb.LEASE_STATE_UNSPECIFIED)
        name = pb.LeaseState.Name(state).removeprefix("LEASE_STATE_")
        return ("UNPUBLISHED", True) if name == "UNSPECIFIED" else (name, name != "HELD")

    # -- everybody else ------------------------------------------------------------------------------------------------

    def serve_a_third(self, survivor: str) -> float:
        """The survivor serves somebody else; seconds that took, handshake and all."""
        began = time.monotonic()
        if survivor == "p":
            self.third.read(self.p, FEW, timeout=20)
        else:
            # Into blocks of their own: those of the large read may not be free yet.
            into = [LARGE + i for i in FEW]
            self.d.blocks[into] = 0
            request = self.d.request(self.third.ticket(FEW), into)
            self.d.side.stub.ReadBlocks(request, timeout=20)
            assert (self.d.blocks[into] == self.third.blocks[list(FEW)]).all()
        return time.monotonic() - began

    def read_again(self) -> str:
        """From P to D, whoever of them was restarted.

        :returns: why the first try failed, where it did: a connection that broke while nobody used it is found broken
            by the first that does.  That may be told once, as what may be tried again.
        """
        try:
            self.d.read(self.p, FEW, timeout=30)
        except grpc.RpcError as error:
            reason = outcome_of(error)
            assert reason in AGAIN, f"the first read afterwards: {reason}"
            self.d.read(self.p, FEW, timeout=30)
            return reason
        return ""

    def restart(self, engine: Engine) -> Engine:
        """A new process for an engine that was killed, with new memory under the old name."""
        assert engine.calls is not None
        reborn = Engine(engine.engine_id, engine.side, len(engine.blocks), mortal=True)
        reborn.register(replace=True)
        self.engines[self.engines.index(engine)] = reborn
        engine.close()
        if engine is self.p:
            self.p = reborn
            self.p.fill(7)
        else:
            self.d = reborn
        return reborn

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self, survivors: Sequence[SidecarProcess], seconds: float = 15.0) -> None:
        """Take everything away again; nothing may be left."""
        for engine in (self.d, self.third, self.p):
            engine.unregister()
        for engine in self.engines:
            engine.disconnect()
        for side in survivors:
            assert_no_leaks(side, self.before[side.pid], seconds)

    def close(self) -> None:
        """Whatever has happened."""
        for side in self.stage:
            wake(side.pid)
            if side.process.poll() is not None:  # only where the test has failed, which this may explain
                print(f"sidecar {side.name} ended {side.process.returncode}:\n{side.log()[-3000:]}")
        for engine in self.engines:
            with contextlib.suppress(grpc.RpcError):  # it is gone, or its sidecar is: the test has failed before
                engine.unregister()
            engine.close()
