"""Faults of the network: links that go down, packets that vanish, networks that are slow.  Real namespaces and veth.

P and D are hosts of their own, and so is a third that D reads from while the way to P is broken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import pytest

from tests.chaos.cases import DONE, DRAIN_LIMIT, LONG_HOLD, LOST, READ_GRANT, SETTINGS, SLACK, outcomes
from tests.chaos.census import assert_no_leaks
from tests.chaos.namespaces import Network, run, why_not
from tests.chaos.report import Row
from tests.chaos.stage import LARGE, Play, Stage
from tests.support.processes import SidecarProcess, shared_directory, until

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(150)]

#: UCX listens here, so that its connections can be told from those of the peer service.
UCX_PORTS = "21000-21999"
#: A rate at which the large read takes much longer than one grant.
SLOW, SLOW_SECONDS = "200mbit", LARGE * 8.388608 / 200

#: Seconds until a silent network is noticed: by UCX (three seconds, see kvxfer/xfer/environment.py).
SILENCE = 3.0


#: Seconds that a read has which gets no answer, not as long as gRPC waits; and then until UCX has given up its
#: connection, idle as it is.
BRIEF, FORGOTTEN = SILENCE + 0.5, 1.0

#: Seconds until the peer listener drops a connection whose other end has vanished (see kvxfer/sidecar.py).
KEEPALIVE = 40.0


class MakeFault(Protocol):
    def __call__(self, network: Network) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Case:
    """One fault.

    :param fault: what happens to the network.
    :param phase: when: in the ``handshake`` (before D has met P), ``before the grant`` (D has, and begins to read),
        ``half done``, or ``idle`` (D and P have a connection that nobody uses).
    :param d: the outcome of the read at D.
    :param within: seconds from the fault until D's engine has it.
    :param lease: how P's lease ends.
    :param lasts: seconds after which the network is whole again by itself; 0: once D has its outcome.
    :param slow: P's link is slow, so that a read takes a while.
    :param ci: whether it is in the short run.
    """

    name: str
    fault: MakeFault
    phase: str
    d: frozenset[str]
    within: float
    lease: frozenset[str]
    lasts: float = 0.0
    slow: bool = True
    ci: bool = False

    def __str__(self) -> str:
        return f"{self.name}-{self.phase}".replace(" ", "-").replace(",", "")


def link_down(network: Network) -> AbstractContextManager[None]:
    return network.link_down("p")


def nothing_passes(network: Network) -> AbstractContextManager[None]:
    return network.cut("p", "d")


def nothing_from_p(network: Network) -> AbstractContextManager[None]:
    return network.drop("p", "d")


def nothing_to_p(network: Network) -> AbstractContextManager[None]:
    return network.drop("d", "p")


@contextmanager
def ucx_ports_of_both(network: Network) -> Iterator[None]:
    with network.cut("p", "d", UCX_PORTS), network.cut("d", "p", UCX_PORTS):
        yield


def loses_packets(network: Network, share: float = 0.05) -> AbstractContextManager[None]:
    return network.loss("d", share)


def nothing(network: Network) -> AbstractContextManager[None]:
    return nullcontext()


OK = outcomes(DONE)
UNMET = outcomes("PEER_UNREACHABLE DEADLINE_EXCEEDED PEER_LOST")
#: A read that failed is closed with "may read again": the hold goes on until its time is over.
HELD = outcomes("HELD EXPIRED")
RELEASED = outcomes("RELEASED")
NOTICED = 2 * SILENCE + SLACK
HANDSHAKE = 3.0 + 5.0 + SLACK

CASES = (
    Case("link down", link_down, "half done", LOST, NOTICED, HELD, ci=True),
    Case("link down", link_down, "handshake", UNMET, HANDSHAKE, HELD),
    Case("link down for 5 s", link_down, "idle", OK, 30, RELEASED, lasts=5.0),
    Case("all packets dropped", nothing_passes, "half done", LOST, NOTICED, HELD),
    Case("all packets dropped", nothing_passes, "handshake", UNMET, HANDSHAKE, HELD, ci=True),
    Case("all packets dropped", nothing_passes, "before the grant", UNMET, NOTICED, HELD),
    Case("all packets dropped for 0.5 s", nothing_passes, "half done", OK, 60, RELEASED, lasts=0.5, ci=True),
    Case("half-open, nothing from P", nothing_from_p, "half done", LOST, NOTICED, HELD),
    Case("half-open, nothing to P", nothing_to_p, "half done", LOST, NOTICED, HELD, ci=True),
    Case("half-open, nothing to P", nothing_to_p, "handshake", UNMET, HANDSHAKE, HELD),
    Case("UCX ports closed, peer port open", ucx_ports_of_both, "half done", LOST, NOTICED, HELD),
    Case("UCX ports closed, peer port open", ucx_ports_of_both, "handshake", UNMET, HANDSHAKE, HELD, ci=True),
    Case("5% of packets lost", loses_packets, "half done", OK, 120, RELEASED, slow=False),
    Case(f"slow link ({SLOW}), {READ_GRANT:g} s granted at a time", nothing, "half done", OK, 60, RELEASED, ci=True),
)


def listed() -> list[Any]:
    marks = {True: (), False: (pytest.mark.chaos_all,)}
    return [pytest.param(case, id=str(case), marks=marks[case.ci]) for case in CASES]


@dataclass
class Scene:
    stage: Stage
    network: Network


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        directory = stack.enter_context(shared_directory())
        network = Network(["p", "d", "t"])
        stack.callback(network.close)
        ucx = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0", "UCX_TCP_PORT_RANGE": UCX_PORTS}
        processes = []
        for host in network.hosts.values():
            settings = {**SETTINGS, "peer_host": host.address, "insecure_peer": True}
            processes.append(SidecarProcess(directory, host.name, settings, ucx, host.prefix))
            stack.callback(processes[-1].discard)
        yield Scene(Stage([process.ready() for process in processes]), network)
        for process in processes:
            process.stop()


def wait_out(seconds: float) -> None:
    """The fault itself is so long."""
    end = time.monotonic() + seconds
    until(lambda: time.monotonic() >= end, seconds + 1)


@pytest.mark.parametrize("case", listed())
def test_fault(case: Case, scene: Scene, rows: dict[str, list[Row]]) -> None:
    play = Play(scene.stage)
    try:
        with ExitStack() as slowness:
            if case.slow and case.phase == "half done":
                slowness.enter_context(scene.network.slow("p", SLOW))
            row = try_it(case, scene, play, slowness)
        rows.setdefault("network", []).append(row)
        print(row)
    finally:
        play.close()


def try_it(case: Case, scene: Scene, play: Play, slowness: ExitStack) -> Row:
    remarks = []
    ticket = play.make_ticket()
    if case.phase != "handshake":
        play.read_again()
    play.serve_a_third("d")  # a link that the fault does not concern
    play.publish(ticket, LONG_HOLD)
    if case.phase == "half done" and case.lasts:
        # Longer ago than P's answer may take: else nobody can say that the read began afterwards, and it must fail.
        wait_out(2 * case.lasts)
    start = partial(play.start, ticket, 60.0, 70.0)
    pending = None
    if case.phase == "half done":
        pending = start()
        until(play.begun, 30, "the first byte")
    struck = time.monotonic()
    with case.fault(scene.network):
        if case.lasts:
            wait_out(case.lasts)
        if case.phase == "handshake":
            pending = start()
        elif case.phase == "before the grant":
            pending = play.start(ticket, BRIEF, 70.0)
        if not case.lasts:
            assert pending is not None
            third = play.serve_a_third("d")
            saw = pending.outcome(case.within + 5) or DONE
            if case.d != OK and case.phase != "handshake":
                until(play.final, DRAIN_LIMIT + SLACK, "quiescence")
                remarks.append(f"D's blocks free after {time.monotonic() - struck:.2f} s")
            if case.phase == "before the grant":
                wait_out(FORGOTTEN)
    if case.lasts:
        third = play.serve_a_third("d")
        saw = "" if pending is None else pending.outcome(case.within) or DONE
        if pending is None:
            # A connection that broke while nobody used it: it may be found out by the first who does.
            if first := play.read_again():
                remarks.append(f"the first read: {first} once, then as ever")
            pending = start()
            saw = pending.outcome(case.within) or DONE
    assert pending is not None
    after = pending.at - struck
    assert saw in case.d, f"D's engine was told {saw} after {after:.2f} s"
    assert after <= case.within + case.lasts, f"D's engine was told {saw} after {after:.2f} s only"
    assert third < 5.0, f"a third took {third:.2f} s"
    if saw == DONE:
        assert play.right(), "wrong bytes were accepted"
        until(lambda: play.lease(ticket)[1], 10, "the end of the lease")
    if case.fault is nothing:
        assert after > 2 * READ_GRANT, f"the read took {after:.1f} s: it needed no renewal"
    lease = play.lease(ticket)[0]
    assert lease in case.lease, f"P's lease is {lease}"
    slowness.close()
    if first := play.read_again():
        assert case.phase != "before the grant", f"the next read was the first to find out: {first}"
        remarks.append(f"the next read: {first} once, then as ever")
    play.finish(list(scene.stage), KEEPALIVE + SLACK)
    return Row(case.name, case.phase, saw, after, lease, third, "; ".join(remarks))


@pytest.mark.chaos_all
@pytest.mark.parametrize("phase", ["half done", "idle"])
def test_a_reader_that_vanishes(phase: str, scene: Scene, rows: dict[str, list[Row]]) -> None:
    """Its machine is gone, and nothing ever says so: P must find out by itself, and keep nothing."""
    play = Play(scene.stage)
    try:
        play.read_again()
        with scene.network.slow("p", SLOW):
            if phase == "half done":
                ticket = play.make_ticket()
                play.publish(ticket, LONG_HOLD)
                play.start(ticket, 60.0, 70.0)
                until(play.begun, 30, "the first byte")
            cut = ExitStack()
            cut.enter_context(scene.network.cut("p", "d"))
        with cut:
            scene.stage.d.kill()
            struck = time.monotonic()
            third = play.serve_a_third("p")
            play.third.unregister()
            play.p.unregister()  # once what it has granted is over
            for side in (scene.stage.p, scene.stage.third):
                assert_no_leaks(side, play.before[side.pid], KEEPALIVE + SLACK)
            after = time.monotonic() - struck
        lease = "ended with the grant" if phase == "half done" else ""
        row = Row("D's machine vanishes", phase, "nothing is left of D at P", after, lease, third)
        rows.setdefault("network", []).append(row)
        print(row)
    finally:
        scene.stage.repair()
        play.close()


def test_no_namespace_is_left_after_a_failure_in_the_middle() -> None:
    if reason := why_not():
        pytest.skip(reason)
    before = run("ip", "netns")
    with pytest.raises(OSError, match="x" * 200):
        Network(["a", "x" * 250])
    assert run("ip", "netns") == before
