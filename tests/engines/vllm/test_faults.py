"""A load that has failed is never presented as good: each fault of the reliability work, with engines in the loop.

P's blocks are zeroed before the fault, so that whatever D might have got would be noticed.  D must say what one engine
says, because it has computed the prompt itself, and in time; the next request must be read again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import numpy as np
import pytest

from kvxfer_client import LeaseState, Ticket, TransferState, ticket_from_params, ticket_to_params
from tests.chaos.cases import SETTINGS
from tests.chaos.namespaces import Network, why_not
from tests.engines.vllm.conftest import Seen
from tests.engines.vllm.models import Model
from tests.engines.vllm.pairs import PROMPTS, TOKENS, Pair, Side, Workshop, hand_over, pair, registered, side
from tests.engines.vllm.processes import Answer, free_port
from tests.engines.vllm.report import Fault
from tests.support.processes import SidecarProcess, shared_directory, until
from tests.support.stopping import stopped

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.parametrize("model", ["nemotron_h"], indirect=True),
]

#: Of D's connector, seconds: a fault that nobody notices costs so much.
READ_TIMEOUT = 5.0
#: Until D has answered, whatever happens: a read's deadline, its drain, the computation.
PATIENCE = 20.0
KEY = "tiny"
#: How long P holds what is never read, seconds: no case takes longer.
LEASE = 20.0

Params = dict[str, Any]


@dataclass
class Scene:
    """P and D, with a network to break between their sidecars, and a third sidecar for another P.

    :param supervisor: starts sidecars while D is busy; its thread outlives them, because they end with it.
    """

    workshop: Workshop
    pair: Pair
    network: Network
    third: SidecarProcess
    supervisor: ThreadPoolExecutor

    def restart(self, which: Side) -> None:
        """Start a sidecar again that has been killed, and wait for its engine."""
        which.sidecar.start()
        which.sidecar.ready()
        self.wait_registered(which)

    def wait_registered(self, which: Side) -> None:
        """Again, with the sidecar that has taken the place of its own."""
        until(lambda: which.engine_id in registered(which.sidecar), 60, f"{which.engine_id} to be registered again")


@pytest.fixture(scope="module")
def scene(workshop: Workshop, model: Model) -> Iterator[Scene]:
    """Engines outside, sidecars in network namespaces of their own: they meet through Unix sockets."""
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        supervisor = stack.enter_context(ThreadPoolExecutor(1))
        directory = stack.enter_context(shared_directory())
        network = Network(["p", "d", "third"])
        stack.callback(network.close)
        processes = []
        for host in network.hosts.values():
            place = {"peer_host": host.address, "peer_port": free_port(), "insecure_peer": True}
            ucx = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
            processes.append(SidecarProcess(directory, host.name, {**SETTINGS, **place}, ucx, host.prefix))
            stack.callback(processes[-1].discard)
        for process in processes:
            process.ready()
        common: Params = {"compatibility_key": KEY}
        of_d = {**common, "read_timeout": READ_TIMEOUT}
        of_p = {**common, "lease_ttl": LEASE}
        engines = stack.enter_context(pair(workshop, model, processes, p=of_p, d=of_d, leave_none=False))
        yield Scene(workshop, engines, network, processes[2], supervisor)


# -- faults: before D reads, and while it does -----------------------------------------------------------------------


Source = Callable[[Scene], AbstractContextManager[Side]]


def the_usual_p(scene: Scene) -> AbstractContextManager[Side]:
    return nullcontext(scene.pair.p)


def another_p(dtype: str = "", **settings: Any) -> Source:
    """One that is set up differently."""

    @contextmanager
    def start(scene: Scene) -> Iterator[Side]:
        model = replace(scene.pair.model, dtype=dtype or scene.pair.model.dtype)
        told = {"compatibility_key": KEY, **settings}
        with side(scene.workshop, "other-p", model, scene.third, told, leave_none=False) as found:
            found.engine.ready()
            yield found

    return start


@dataclass(frozen=True)
class Case:
    """A fault.

    :param told: what D's sidecar may tell of the read.
    :param before: what happens before D has the ticket; returns what D is given.
    :param meanwhile: what lasts while D reads.
    :param source: who is P.
    """

    what: str
    told: tuple[str, ...]
    before: Callable[[Scene, Side, Params], Params] = lambda _scene, _source, params: params
    meanwhile: Callable[[Scene], AbstractContextManager[object]] = lambda _: nullcontext()
    source: Source = the_usual_p

    def __str__(self) -> str:
        return self.what


def altered(**changes: Any) -> Callable[[Scene, Side, Params], Params]:
    """Something else stands in the ticket."""

    def alter(_scene: Scene, _source: Side, params: Params) -> Params:
        ticket = ticket_from_params(params)
        found = {name: value(ticket) if callable(value) else value for name, value in changes.items()}
        return dict(ticket_to_params(replace(ticket, **found)))

    return alter


def other_blocks(ticket: Ticket) -> Any:
    return tuple(replace(each, ids=np.asarray(each.ids) + 1) for each in ticket.blocks)


def one_token_less(ticket: Ticket) -> Any:
    return ticket.num_tokens - 1


def nobody_listens(ticket: Ticket) -> Any:
    address = f"{ticket.ranks[0].address.rpartition(':')[0]}:1"
    return tuple(replace(rank, address=address) for rank in ticket.ranks)


def withdrawn(_scene: Scene, source: Side, params: Params) -> Params:
    ticket = ticket_from_params(params)
    until(lambda: lease_of(source, ticket) is not None, what="the publication")
    source.client.withdraw(ticket.request_id, ticket.lease_token)
    return params


def expired(_scene: Scene, source: Side, params: Params) -> Params:
    ticket = ticket_from_params(params)
    until(lambda: lease_of(source, ticket) is LeaseState.EXPIRED, what="the lease's end")
    return params


def lease_of(where: Side, ticket: Ticket) -> LeaseState | None:
    return next((i.state for i in where.client.list_leases() if i.request_id == ticket.request_id), None)


def restarted(scene: Scene, source: Side, params: Params) -> Params:
    source.sidecar.kill()
    scene.restart(source)
    return params


def spoilt(_scene: Scene, _source: Side, params: Params) -> Params:
    return {**params, "kvxfer_ticket": params["kvxfer_ticket"][:-8]}


def contradicted(_scene: Scene, _source: Side, params: Params) -> Params:
    return {**params, "remote_block_ids": [[block + 1 for block in group] for group in params["remote_block_ids"]]}


@contextmanager
def p_killed(scene: Scene) -> Iterator[None]:
    scene.pair.p.sidecar.kill()
    yield
    scene.restart(scene.pair.p)


@contextmanager
def d_away(scene: Scene) -> Iterator[None]:
    """From when D knows it, its sidecar is not asked."""
    d = scene.pair.d
    d.sidecar.kill()
    until(lambda: d.engine.call("sidecar_is_away"), what="that D misses its sidecar")
    yield
    scene.restart(d)


@contextmanager
def d_killed(scene: Scene) -> Iterator[None]:
    """While it reads, D waits for it: nobody else can say that nothing is written into its blocks any more."""
    d = scene.pair.d

    def kill_and_restart() -> None:
        until(lambda: any(not transfer.state.ended for transfer in d.transfers()), what="the read")
        d.sidecar.kill()
        Event().wait(2.0)
        d.sidecar.start()

    with scene.network.cut("p", "d"):
        restarted = scene.supervisor.submit(kill_and_restart)
        yield
        assert restarted.done(), "D has not waited"
        restarted.result()
    d.sidecar.ready()
    scene.wait_registered(d)


@contextmanager
def p_stopped(scene: Scene) -> Iterator[None]:
    """UCX aborts it in many cases as it wakes: it is killed instead."""
    with stopped(scene.pair.p.sidecar.pid):
        yield
        scene.pair.p.sidecar.kill()
    scene.restart(scene.pair.p)


UNMET = ("PEER_UNREACHABLE", "PEER_LOST")
SILENT = (*UNMET, "DEADLINE_EXCEEDED")
CASES = (
    Case("P has withdrawn the blocks", ("LEASE_EXPIRED", "LEASE_UNKNOWN"), withdrawn),
    Case("their lease has expired", ("LEASE_EXPIRED",), expired, source=another_p(lease_ttl=1.0)),
    Case("a request that P does not know", ("LEASE_UNKNOWN",), altered(request_id="unheard-of")),
    Case("another lease token", ("LEASE_TOKEN_MISMATCH",), altered(lease_token=b"0123456789abcdef")),
    Case("other blocks than P has published", ("LEASE_UNKNOWN",), altered(blocks=other_blocks)),
    Case("another number of tokens", ("STATE_POSITION_MISMATCH",), altered(num_tokens=one_token_less)),
    Case("another compatibility key", ("INCOMPATIBLE_PEER",), altered(compatibility_key="another")),
    Case("caches of another data type", ("LAYOUT_MISMATCH",), source=another_p("bfloat16", lease_ttl=10.0)),
    Case("a ticket that is cut off", ("FIELD_INVALID",), spoilt),
    Case("block IDs of another request beside the ticket", ("FIELD_INVALID",), contradicted),
    Case("an address where nobody listens", UNMET, altered(ranks=nobody_listens)),
    Case("P's sidecar was restarted", ("STALE_INCARNATION",), restarted),
    Case("P's sidecar is killed", UNMET, meanwhile=p_killed),
    Case("P's sidecar is stopped", SILENT, meanwhile=p_stopped),
    Case("the network is cut", SILENT, meanwhile=lambda scene: scene.network.cut("p", "d")),
    Case("D's sidecar is dead", ("PEER_UNREACHABLE",), meanwhile=d_away),
    Case("D's sidecar is killed while it reads, and restarted after 2 s", ("PEER_UNREACHABLE", ""), meanwhile=d_killed),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fault(case: Case, scene: Scene, truth: list[Answer], seen: Seen) -> None:
    d = scene.pair.d
    with case.source(scene) as source:
        params = hand_over(source.engine, PROMPTS[0])
        for component in scene.pair.model.components:
            source.engine.zero(component, params["remote_block_ids"])
        params = case.before(scene, source, params)
        log = d.engine.log_size()
        with case.meanwhile(scene):
            began = time.monotonic()
            answer = d.engine.generate(PROMPTS[0], TOKENS, params, seconds=PATIENCE)
            took = time.monotonic() - began
        told = reason_told(d.engine.log_since(log))
    assert answer.said == truth[0].said
    assert told in case.told, d.engine.log_since(log)
    seen.faults.append(Fault(case.what, told or "(nobody could)", "equal", took))
    assert_reads_again(scene, truth)


def reason_told(log: str) -> str:
    """The reason in what D's connector has logged of a request."""
    found = re.findall(r"request \S+?:? (?:is not read|could not be read|its ticket is of no use): ([A-Z_]+)", log)
    return found[-1] if found else ""


def assert_reads_again(scene: Scene, truth: list[Answer]) -> None:
    """And it is read, not computed."""
    params = scene.pair.hand_over(PROMPTS[1])
    assert scene.pair.read(PROMPTS[1], params).said == truth[1].said
    transfer = scene.pair.transfer_of(params)
    assert transfer is not None and transfer.state is TransferState.DONE, transfer
