"""kill -9 and SIGSTOP of P's and D's engines and sidecars, in every phase of a read: the table in cases.py."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import grpc
import pytest

from kvxfer.pb import transfer_pb2 as pb
from kvxfer.wire.status import from_status
from kvxfer.wire.tickets import Ticket
from tests.chaos.cases import (
    CASES,
    DONE,
    DRAIN_LIMIT,
    GONE,
    READ_GRANT,
    SLACK,
    UNKNOWN,
    Case,
    Fault,
    Phase,
    Who,
)
from tests.chaos.engines import FINAL, NO_ANSWER, Pending
from tests.chaos.report import Row
from tests.chaos.stage import Play, Stage, is_connected
from tests.support.processes import until
from tests.support.stopping import wake

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]

#: How long a phase may take to be reached.
REACH = 30.0


def listed() -> list[Any]:
    marks = {True: (), False: (pytest.mark.chaos_all,)}
    return [pytest.param(case, id=str(case), marks=marks[case.ci]) for case in CASES]


class Run:
    """One case, from the first read to the last count."""

    def __init__(self, case: Case, stage: Stage) -> None:
        self.case, self.stage = case, stage
        self.play = Play(stage, mortal_p=case.who is Who.P_ENGINE, mortal_d=case.who is Who.D_ENGINE)
        self.fault_at = 0.0
        self.remarks: list[str] = []

    def __call__(self) -> Row:
        case, play = self.case, self.play
        if case.phase is not Phase.HANDSHAKE:
            play.read_again()  # the link is there
        ticket, pending = self.in_its_phase()
        self.strike()
        third = play.serve_a_third("d") if case.who is Who.P_SIDECAR else 0.0
        self.let_the_others_go_on(ticket)
        saw, after = self.what_d_was_told(pending)
        if case.who is Who.D_SIDECAR:
            third = self.third_at_p()
        elif case.who is not Who.P_SIDECAR:
            third = play.serve_a_third("d")
        self.check_quiescence()
        if case.who is Who.P_SIDECAR:
            wake(self.stage.p.pid)
            if case.fault is Fault.STOP:
                self.third_at_p()  # where UCX aborts it as it wakes, that has happened then
        lease = self.how_the_lease_ended(ticket)
        if case.who is Who.D_SIDECAR:
            saw, after = self.what_d_finds(saw, after)
        self.mend()
        return Row(
            f"{case.fault.value} of {case.who.value}",
            case.phase.value,
            saw,
            after,
            lease,
            third,
            "; ".join(self.remarks),
        )

    # -- before ----------------------------------------------------------------------------------------------------

    def in_its_phase(self) -> tuple[Ticket, Pending]:
        """Have the read begin, and bring it to its phase; once more where it was over before it was held half done."""
        case, play = self.case, self.play
        for _ in range(5):
            ticket = play.make_ticket()
            if case.phase is not Phase.OPEN:
                play.publish(ticket, case.hold)
            pending = self.reach(ticket)
            # What is still in sockets is less than the rest.
            if case.phase is not Phase.HALF or play.arrived() < 0.75:
                return ticket, pending
            for side in (self.stage.p, self.stage.d):
                wake(side.pid)
            until(play.final, REACH, "the end of the read")
            play.transfer_id += "-again"
        raise AssertionError("the read was always over before it could be held half done")

    def reach(self, ticket: Ticket) -> Pending:
        """Bring the read to its phase, where it stays until the fault."""
        case, play = self.case, self.play
        # D's sidecar is struck where it works, not where it waits for a P that would have to be woken after it is gone.
        holding = case.phase is Phase.HANDSHAKE or case.who is not Who.D_SIDECAR
        if holding and case.phase in (Phase.HANDSHAKE, Phase.POSTED):
            os.kill(self.stage.p.pid, signal.SIGSTOP)
        patience = 3.0 if case.caller else case.read + 5
        pending = play.start(ticket, case.read, patience)
        if case.phase is Phase.HANDSHAKE:
            address = play.p.member.registered.peer_address
            until(lambda: is_connected(self.stage.d, address), REACH, "D's connection to P")
        elif case.phase is Phase.OPEN:
            # Where nobody will publish, P may have refused it by now.
            over = case.who is Who.P_ENGINE
            until(lambda: play.opened() or (over and pending.settled), REACH, "OpenRead")
        elif case.phase is Phase.POSTED:
            until(play.posted, REACH, "posting")
            assert not (holding and play.begun()), "a stopped P has sent something"
        elif case.phase is Phase.HALF:
            until(play.begun, REACH, "the first byte")
            os.kill((self.stage.p if holding else self.stage.d).pid, signal.SIGSTOP)
        else:
            assert pending.outcome(REACH) == ""
        return pending

    def strike(self) -> None:
        case, play = self.case, self.play
        number = signal.SIGKILL if case.fault is Fault.KILL else signal.SIGSTOP
        self.fault_at = time.monotonic()
        if case.who in (Who.P_ENGINE, Who.D_ENGINE):
            calls = (play.p if case.who is Who.P_ENGINE else play.d).calls
            assert calls is not None
            calls.send_signal(number)
            if case.fault is Fault.KILL:
                calls.process.join(10)
        elif case.fault is Fault.KILL:
            (self.stage.p if case.who is Who.P_SIDECAR else self.stage.d).kill()
        else:
            os.kill((self.stage.p if case.who is Who.P_SIDECAR else self.stage.d).pid, signal.SIGSTOP)
        if case.phase is Phase.HALF:
            assert not play.complete(), "the read was over before the fault"

    # -- after -----------------------------------------------------------------------------------------------------

    def let_the_others_go_on(self, ticket: Ticket) -> None:
        case = self.case
        if case.who is Who.P_SIDECAR:
            return
        wake(self.stage.p.pid)
        if case.phase is Phase.OPEN and case.who is not Who.P_ENGINE:
            self.play.publish(ticket, case.hold)

    def third_at_p(self) -> float:
        """P serves somebody else; unless it was aborted, where the table has that."""
        try:
            return self.play.serve_a_third("p")
        except grpc.RpcError:
            if GONE not in self.case.lease:
                raise
            self.stage.p.process.wait(10)
            return 0.0

    def note_the_abort(self) -> None:
        """P's sidecar has ended though nobody has killed it: by UCX's own hand, or it is a bug of ours."""
        case, status = self.case, self.stage.p.process.returncode
        if (case.who, case.fault) == (Who.P_SIDECAR, Fault.KILL):
            return
        assert status == -signal.SIGABRT, f"P's sidecar ended {status}:\n{self.stage.p.log()[-3000:]}"
        print(self.stage.p.log()[-3000:])
        why = "as it woke" if case.who is Who.P_SIDECAR else "over a reader that was gone"
        self.remarks.append(f"UCX aborted P's sidecar {why}; restarted")

    def what_d_was_told(self, pending: Pending) -> tuple[str, float]:
        case, play = self.case, self.play
        if case.who is Who.D_ENGINE and case.phase is not Phase.CLOSING:
            if UNKNOWN in case.d:
                until(lambda: not self.stage.d.status().counts.prepared, case.within, "nothing under way")
                found = play.large()
                assert found is None, found
                return UNKNOWN, self.since()
            until(play.final, case.within, "the end of the read")
            return self.outcome_at_d(), self.since()
        saw = pending.outcome(case.within + 30) or DONE
        after = max(0.0, pending.at - self.fault_at)
        assert saw in (case.caller or case.d), f"D's engine was told {saw} after {after:.2f} s"
        # Where nobody answered, the time was the caller's own.
        assert saw == NO_ANSWER or after <= case.within, f"D's engine was told {saw} after {after:.2f} s only"
        if saw == DONE:
            assert play.right(), "wrong bytes were accepted"
        return saw, after

    def outcome_at_d(self) -> str:
        """The outcome of the read as D's sidecar tells it."""
        found = self.play.large()
        if found is None:
            return UNKNOWN
        assert found.state in FINAL and found.quiesced
        if found.state == pb.TRANSFER_STATE_DONE:
            assert self.play.right(), "wrong bytes were accepted"
            return DONE
        return from_status(found.error).reason.value

    def check_quiescence(self) -> None:
        """D's blocks are free in time, also where P is still stopped."""
        if self.case.who is not Who.P_SIDECAR or self.play.large() is None:
            return
        until(self.play.final, DRAIN_LIMIT + SLACK, "quiescence")
        if self.case.d != {DONE}:
            self.remarks.append(f"D's blocks free after {self.since():.2f} s")

    def how_the_lease_ended(self, ticket: Ticket) -> str:
        """Released, expired, or gone with P's sidecar."""
        case, play = self.case, self.play
        lease = ""

        def ended() -> bool:
            nonlocal lease
            try:
                lease, over = play.lease(ticket)
            except grpc.RpcError:
                # It is no use asking a process that is about to be dead.
                self.stage.p.process.wait(10)
                return True
            return over

        until(ended, case.hold + READ_GRANT + SLACK, "the end of the lease")
        if self.stage.p.process.poll() is not None:
            lease = GONE
            self.note_the_abort()
        assert lease in case.lease, f"P's lease is {lease}"
        return lease if lease not in ("EXPIRED", "RELEASED") else f"{lease} after {self.since():.2f} s"

    def since(self) -> float:
        """Seconds since the fault."""
        return time.monotonic() - self.fault_at

    def what_d_finds(self, saw: str, after: float) -> tuple[str, float]:
        """P re-uses the blocks, and D's sidecar wakes up, where it was only stopped."""
        case, play = self.case, self.play
        play.reuse()
        if case.fault is Fault.KILL:
            return saw, after
        wake(self.stage.d.pid)
        woken = time.monotonic()
        if case.phase is Phase.CLOSING:
            return saw, after
        try:
            until(play.final, DRAIN_LIMIT + case.within, "the end of the read")
        except AssertionError:
            if play.large() is not None or UNKNOWN not in case.d:
                raise
        found = self.outcome_at_d()
        assert found in case.d, f"D's sidecar says {found}"
        self.remarks.append(f"slept {woken - self.fault_at:.1f} s; P had re-used the blocks")
        return f"no answer while it slept, then {found}", time.monotonic() - woken

    def mend(self) -> None:
        """What died comes back and works; nobody who survived has lost anything."""
        case, play, stage = self.case, self.play, self.stage
        survivors = [side for side in stage if side.process.poll() is None and side.pid in play.before]
        if case.who in (Who.P_ENGINE, Who.D_ENGINE):
            engine = play.p if case.who is Who.P_ENGINE else play.d
            if case.fault is Fault.KILL:
                play.restart(engine)
            else:
                assert engine.calls is not None
                engine.calls.send_signal(signal.SIGCONT)
        dead = [side for side in stage if side not in survivors]
        stage.repair()
        for engine in play.engines:
            if engine.side in dead:
                engine.register()
        if first := play.read_again():
            self.remarks.append(f"the next read: {first} once, then as ever")
        play.finish(survivors)


@pytest.mark.parametrize("case", listed())
def test_fault(case: Case, stage: Stage, rows: dict[str, list[Row]]) -> None:
    run = Run(case, stage)
    try:
        row = run()
    finally:
        run.play.close()
    rows.setdefault("processes", []).append(row)
    print(row)


def test_the_table_names_every_fault_in_every_phase_once() -> None:
    named = [(case.who, case.fault, case.phase) for case in CASES]
    assert sorted(named) == sorted((who, fault, phase) for who in Who for fault in Fault for phase in Phase)
