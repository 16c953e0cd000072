"""Random reads under random faults: ``python -m tests.chaos.soak --minutes 20 --seed 1``.

P publishes requests and overwrites their blocks the moment their lease has ended, by itself or with P's sidecar, and
gives them to the next request.  D reads, and every byte of a read that it is told is DONE is compared with what the
request was.  Meanwhile sidecars are killed and stopped, reads cancelled, holds withdrawn or much too short.  Now and
then everything is let come to rest, and what the sidecars hold is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt

from kvxfer.core.resolve import BlockList
from kvxfer.pb import transfer_pb2 as pb
from kvxfer.pb import transfer_pb2_grpc
from kvxfer.wire.tickets import Ticket
from tests.chaos.census import Census, census
from tests.chaos.engines import FINAL, Engine, outcome_of
from tests.chaos.report import table, write_section
from tests.support.engines import make_ticket, publication
from tests.support.plain import BLOCK
from tests.support.processes import SidecarProcess, sidecars, until
from tests.support.stopping import stopped, wake

BLOCKS, WORKERS, MOST = 96, 4, 12
SETTINGS = {"handshake_timeout": 4, "publish_wait": 1, "read_grant": 2, "drain_limit": 2, "drain_timeout": 2}
#: Seconds between two times of rest, and between two faults (on average).
REST_EVERY, FAULT_EVERY = 40.0, 6.0

_RAMP = np.arange(BLOCK // 8, dtype=np.uint64)
_STRIDE = np.uint64(0x9E37_79B9_7F4A_7C15)


def pattern(number: int, index: int) -> npt.NDArray[np.uint64]:
    """What the ``index``-th block of a request holds: no two requests, blocks or places are alike."""
    made: npt.NDArray[np.uint64] = (_RAMP + np.uint64(number * 64 + index) * np.uint64(BLOCK)) * _STRIDE
    return made


class Steady:
    """A sidecar as its engine sees it: one channel that outlives restarts."""

    def __init__(self, process: SidecarProcess) -> None:
        self.directory = process.directory
        self.channel = process.steady_channel()
        self.stub = transfer_pb2_grpc.KvTransferStub(self.channel)

    def wait(self) -> None:
        """Until it is connected again."""
        grpc.channel_ready_future(self.channel).result(timeout=20)


@dataclass
class Published:
    """A request whose blocks P may not touch."""

    number: int
    ids: list[int]
    ticket: Ticket
    generation: int
    doubtful: bool = False
    """PublishBlocks was not answered."""


@dataclass
class Figures:
    reads: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    leases: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    leaks: list[str] = field(default_factory=list)
    bytes_compared: int = 0


class Soak:
    """Everything that the threads share; ``_lock`` guards the pools."""

    def __init__(self, p_side: SidecarProcess, d_side: SidecarProcess, seed: int) -> None:
        self.sides = {"p": p_side, "d": d_side}
        self.steady = {"p": Steady(p_side), "d": Steady(d_side)}
        self.p, self.d = (Engine(name, steady, BLOCKS) for name, steady in self.steady.items())
        self.generation = {"p": 0, "d": 0}
        self.figures = Figures()
        self.samples: list[tuple[str, ...]] = []
        self._seed = seed
        self._lock = threading.Lock()
        self._free_p, self._free_d = list(range(BLOCKS)), list(range(BLOCKS))
        self._held: dict[str, Published] = {}
        self._numbers = iter(range(1, 1 << 40))
        self._go, self._end = threading.Event(), threading.Event()
        self._busy = 0
        self._first: dict[int, Census] = {}
        self.failure: BaseException | None = None
        for engine in (self.p, self.d):
            engine.register()

    # -- P's engine ----------------------------------------------------------------------------------------------------

    def _publish(self, source: random.Random) -> Published | None:
        with self._lock:
            count = source.randint(1, MOST)
            if len(self._free_p) < count:
                return None
            ids = [self._free_p.pop(source.randrange(len(self._free_p))) for _ in range(count)]
            number, generation = next(self._numbers), self.generation["p"]
        for index, block in enumerate(ids):
            self.p.blocks[block].view(np.uint64)[:] = pattern(number, index)
        ticket = make_ticket("p", [self.p.member], (BlockList("attn", np.array(ids)),), count, request_id=f"r{number}")
        made = Published(number, ids, ticket, generation)
        hold = source.choice((0.05, 0.3, 1.0, 3.0, 8.0))
        with self._lock:
            self._held[ticket.request_id] = made
        try:
            self.p.side.stub.PublishBlocks(publication("p", ticket, hold), timeout=5)
        except grpc.RpcError as error:
            # It may have been published, where only the answer is missing.
            made.doubtful = True
            self.figures.leases[f"publication {outcome_of(error)}"] += 1
        return made

    def _reap(self) -> None:
        """Overwrite and re-use the blocks of leases that have ended."""
        while not self._end.is_set():
            with self._lock:
                before = dict(self._held)
                generation = self.generation["p"]
            try:
                listed = self.p.side.stub.ListLeases(pb.ListLeasesRequest(engine_id="p", page_size=1000), timeout=5)
                states = {lease.request_id: lease.state for lease in listed.leases}
            except grpc.RpcError:  # stopped, dead, or just reconnecting
                states = None
            with self._lock:
                for request_id, made in before.items():
                    if made.generation != self.generation["p"]:
                        self._poison(request_id, made, "GONE")
                    elif states is not None and generation == made.generation and request_id in states:
                        state = states[request_id]
                        if state != pb.LEASE_STATE_HELD:
                            self._poison(request_id, made, pb.LeaseState.Name(state).removeprefix("LEASE_STATE_"))
            for request_id, made in before.items():
                if made.doubtful and states is not None and request_id not in states:
                    self._look_into(request_id, made)
            self._end.wait(0.01)

    def _look_into(self, request_id: str, made: Published) -> None:
        """Whether a request was published; asked over the same connection, and so after it."""
        token = made.ticket.lease_token
        query = pb.WithdrawBlocksRequest(engine_id="p", request_id=request_id, lease_token=token)
        try:
            self.p.side.stub.WithdrawBlocks(query, timeout=5)
        except grpc.RpcError as error:
            if outcome_of(error) == "LEASE_UNKNOWN":
                with self._lock:
                    if request_id in self._held:
                        self._poison(request_id, made, "UNPUBLISHED")

    def _poison(self, request_id: str, made: Published, how: str) -> None:
        for block in made.ids:
            self.p.blocks[block] = 0xEE
        self._free_p.extend(made.ids)
        del self._held[request_id]
        self.figures.leases[how] += 1

    # -- D's engine ----------------------------------------------------------------------------------------------------

    def _work(self, number: int) -> None:
        source = random.Random(f"{self._seed}/{number}")
        try:
            while not self._end.is_set():
                if not self._go.wait(0.1):
                    continue
                with self._lock:
                    self._busy += 1
                try:
                    if self._go.is_set():
                        self._read(source)
                finally:
                    with self._lock:
                        self._busy -= 1
        except BaseException as error:
            self.failure = error
            self._end.set()
            raise

    def _read(self, source: random.Random) -> None:
        made = self._publish(source)
        if made is None:
            self._end.wait(0.02)
            return
        count = len(made.ids)
        with self._lock:
            if len(self._free_d) < count:
                return
            ids = [self._free_d.pop() for _ in range(count)]
            generation = self.generation["d"]
        self.d.blocks[ids] = 0
        transfer_id = f"t{made.number}"
        cancel, withdraw = source.random() < 0.15, source.random() < 0.1
        request = self.d.request(made.ticket, ids, transfer_id=transfer_id, wait=not cancel)
        request.timeout.FromMilliseconds(source.choice((300, 2_000, 10_000)))
        pending = self.d.start_read(request, 25)
        if withdraw:
            lease = made.ticket
            self._try("p", lambda: self.p.side.stub.WithdrawBlocks(
                pb.WithdrawBlocksRequest(engine_id="p", request_id=lease.request_id, lease_token=lease.lease_token),
                timeout=5,
            ))  # fmt: skip
        outcome = pending.outcome(40)
        if cancel and not outcome:
            query = pb.CancelTransferRequest(engine_id="d", transfer_id=transfer_id)
            self._try("d", lambda: self.d.side.stub.CancelTransfer(query, timeout=5))
        found = self._quiesced(transfer_id, generation)
        if found is not None and found.state == pb.TRANSFER_STATE_DONE:
            self._compare(made, ids)
            outcome = "DONE"
        elif not outcome:
            if found is None and not cancel:
                # Its sidecar said DONE, and was killed since: what it said holds.
                self._compare(made, ids)
                outcome = "DONE"
            else:
                outcome = "CANCELLED" if found is not None else "SIDECAR_GONE"
        with self._lock:
            self.figures.reads[outcome] += 1
            self._free_d.extend(ids)

    def _compare(self, made: Published, ids: list[int]) -> None:
        for index, block in enumerate(ids):
            wrong = int(np.count_nonzero(self.d.blocks[block].view(np.uint64) != pattern(made.number, index)))
            with self._lock:
                self.figures.wrong += 8 * wrong
                self.figures.bytes_compared += BLOCK

    def _quiesced(self, transfer_id: str, generation: int) -> pb.Transfer | None:
        """Wait until D's blocks are free; None where the transfer is gone with its sidecar, or was never begun."""
        deadline = time.monotonic() + 60
        while self.generation["d"] == generation:
            with contextlib.suppress(grpc.RpcError):  # stopped, dead, or just reconnecting
                found = self.d.transfer(transfer_id, 2.0)
                if found is None or (found.quiesced and found.state in FINAL):
                    return found
            if time.monotonic() > deadline:
                raise AssertionError(f"transfer {transfer_id} does not quiesce")
            time.sleep(0.01)
        return None

    def _try(self, side: str, call: object) -> None:
        assert callable(call)
        try:
            call()
        except grpc.RpcError as error:
            with self._lock:
                self.figures.leases[f"call of {side.upper()}: {outcome_of(error)}"] += 1

    # -- faults --------------------------------------------------------------------------------------------------------

    def strike(self, source: random.Random) -> None:
        side = source.choice(("p", "d"))
        if source.random() < 0.25:
            self.figures.faults[f"kill -9 of {side.upper()}'s sidecar"] += 1
            self._kill(side)
            return
        seconds = source.choice((0.05, 0.3, 1.0, 2.5, 5.0))
        self.figures.faults[f"SIGSTOP of {side.upper()}'s sidecar"] += 1
        pid = self.sides[side].pid
        with stopped(pid):
            self._end.wait(seconds)

    def _kill(self, side: str) -> None:
        self.sides[side].kill()
        self._restart(side)

    def _restart(self, side: str) -> None:
        process = self.sides[side]
        with self._lock:
            self.generation[side] += 1
        process.log_path.unlink(missing_ok=True)
        process.start()
        process.ready()
        self.steady[side].wait()
        (self.p if side == "p" else self.d).register()

    def restart_the_dead(self) -> None:
        """UCX aborts a process now and then that was stopped."""
        for side, process in self.sides.items():
            if process.process.poll() is not None:
                self.figures.faults[
                    f"{side.upper()}'s sidecar aborted by UCX (status {process.process.returncode})"
                ] += 1
                self._restart(side)

    # -- rest ----------------------------------------------------------------------------------------------------------

    def rest(self, elapsed: float) -> None:
        """Let everything end, and count."""
        self._go.clear()
        until(lambda: not self._busy, 90, "the end of all reads")
        self.restart_the_dead()
        until(lambda: not self._held, 60, "the end of all leases")
        row = [f"{elapsed / 60:.1f}", str(self.figures.reads["DONE"]), str(sum(self.figures.reads.values()))]
        for side, process in self.sides.items():
            now, seen = self._counted(side, process)
            row += [str(now.fds), str(now.threads), str(now.anonymous >> 20), "new" if seen else ""]
        self.samples.append(tuple(row))
        print("  ".join(row), flush=True)

    def _counted(self, side: str, process: SidecarProcess) -> tuple[Census, bool]:
        """What a sidecar holds at rest, after one read: its connections are made then."""
        first_read = self._publish_and_read()
        assert first_read, "no read works at rest"
        now = census(process)
        first = self._first.get(process.pid)
        if first is None:
            self._first[process.pid] = now
            return now, True
        deadline = time.monotonic() + 40  # as long as a vanished connection may stay
        while (leaks := first.leaks(now)) and time.monotonic() < deadline:
            time.sleep(0.2)
            now = census(process)
        self.figures.leaks += [f"{side}: {leak}" for leak in leaks]
        return now, False

    def _publish_and_read(self) -> bool:
        """A read that nothing disturbs; one that finds a broken connection is tried again."""
        for _ in range(4):
            with contextlib.suppress(grpc.RpcError):
                self.d.read(self.p, range(4), timeout=30)
                until(lambda: not self.sides["p"].status().counts.published, 30, "the release")
                return True
        return False

    def run(self, minutes: float) -> Figures:
        """All of it."""
        source = random.Random(self._seed)
        threads = [threading.Thread(target=self._work, args=(n,), daemon=True) for n in range(WORKERS)]
        threads.append(threading.Thread(target=self._reap, daemon=True))
        for thread in threads:
            thread.start()
        began = time.monotonic()
        self.rest(0.0)
        self._go.set()
        rested = time.monotonic()
        while (now := time.monotonic()) - began < minutes * 60 and not self._end.is_set():
            if now - rested > REST_EVERY:
                self.rest(now - began)
                rested = time.monotonic()
                self._go.set()
            self._end.wait(source.expovariate(1 / FAULT_EVERY))
            self.restart_the_dead()
            self.strike(source)
        if self.failure is None:
            self.rest(time.monotonic() - began)
        self._end.set()
        for thread in threads:
            thread.join(60)
        if self.failure is not None:
            raise self.failure
        return self.figures

    def report(self, minutes: float) -> str:
        """The figures, in Markdown."""
        f = self.figures
        counted = [
            ("minutes", f"{minutes:g}"),
            ("seed", str(self._seed)),
            ("reads DONE, every byte compared", str(f.reads["DONE"])),
            ("bytes compared", f"{f.bytes_compared / 2**30:.1f} GiB"),
            ("**wrong bytes accepted**", f"**{f.wrong}**"),
            ("**leaks**", f"**{len(f.leaks)}**" + (": " + "; ".join(f.leaks) if f.leaks else "")),
            *((f"reads that ended {k}", str(v)) for k, v in f.reads.most_common() if k != "DONE"),
            *((k, str(v)) for k, v in f.faults.most_common()),
            *((f"leases: {k}", str(v)) for k, v in f.leases.most_common()),
        ]
        head = ["minute", "DONE", "reads"]
        for side in ("P", "D"):
            head += [f"{side}: fds", "threads", "own memory, MiB", ""]
        return table(("what", "figure"), counted) + "\nAt rest:\n\n" + table(head, self.samples)


@contextlib.contextmanager
def soaking(seed: int) -> Iterator[Soak]:
    with sidecars(["p", "d"], SETTINGS, {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}) as (p, d):
        made = Soak(p, d, seed)
        try:
            yield made
        finally:
            for side in (p, d):
                wake(side.pid)
            for engine in (made.p, made.d):
                engine.close()
            for steady in made.steady.values():
                steady.channel.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="a document whose section `soak` gets the figures")
    options = parser.parse_args()
    with soaking(options.seed) as soak:
        figures = soak.run(options.minutes)
        text = soak.report(options.minutes)
        print("\n" + text, flush=True)
        if options.report:
            write_section(options.report, "soak", text)
    return 1 if figures.wrong or figures.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
