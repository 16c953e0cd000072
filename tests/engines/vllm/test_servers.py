"""vLLM's servers over HTTP, with a router in front of them and sidecars behind: crowds, aborts, prefix hits, deaths."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from kvxfer_client import Client, TransferState

if importlib.util.find_spec("vllm") is None:  # and aiohttp, which comes with it
    pytest.skip("vLLM is not installed here: run `make engines`", allow_module_level=True)

from tests.engines.vllm.baselines import Baselines
from tests.engines.vllm.conftest import Seen
from tests.engines.vllm.crowd import Said, complete, crowd, expected, said
from tests.engines.vllm.models import MODELS, Model
from tests.engines.vllm.pairs import PROMPTS, TOKENS, Workshop, registered
from tests.engines.vllm.proxy import PREFILL
from tests.engines.vllm.servers import Server
from tests.engines.vllm.settings import engine_args, flags, kvxfer
from tests.support.processes import SidecarProcess, sidecars, until

pytestmark = pytest.mark.timeout(900)

CLIENTS = 64
#: How long P holds blocks of which nobody comes to read them, seconds.
LEASE = 20.0


@dataclass
class Behind:
    """A server and its sidecar."""

    server: Server
    sidecar: SidecarProcess
    engine_id: str

    @cached_property
    def client(self) -> Client:
        return Client(str(self.sidecar.socket), engine_id=self.engine_id)

    def done(self) -> int:
        """Transfers that are DONE, of those that the sidecar remembers."""
        return sum(1 for _ in self.client.list_transfers([TransferState.DONE]))

    def left(self) -> dict[str, float]:
        """What is still taken: requests and blocks by vLLM's metrics, leases and transfers by the sidecar's lists."""
        counts = self.sidecar.status().counts
        found = {
            "running": self.server.metric("vllm:num_requests_running"),
            "waiting": self.server.metric("vllm:num_requests_waiting"),
            "blocks": self.server.metric("vllm:kv_cache_usage_perc"),
            "leases": sum(not lease.state.ended for lease in self.client.list_leases()),
            "transfers": sum(not (t.state.ended and t.quiesced) for t in self.client.list_transfers()),
            "posted": counts.prepared + counts.posted + counts.draining,
        }
        return {name: value for name, value in found.items() if value}


@dataclass
class Street:
    """A router, P and D."""

    model: Model
    router: Server
    p: Behind
    d: Behind

    def assert_nothing_left(self) -> None:
        for which in (self.p, self.d):
            until(lambda: not which.left(), LEASE + 60, f"that nothing is left at {which.engine_id} ({which.left()})")  # noqa: B023

    def hand_over(self, prompt: list[int]) -> dict[str, Any]:
        """The router's first step."""
        params = complete(self.p.server.url, prompt, TOKENS, **PREFILL)["kv_transfer_params"]
        assert params, f"P hands nothing over\n{self.p.server.log()}"
        return dict(params)

    def read(self, prompt: list[int], params: dict[str, Any]) -> Said:
        """Its second."""
        return said(complete(self.d.server.url, prompt, TOKENS, kv_transfer_params=params))

    def assert_read(self, prompt: list[int], right: Said) -> None:
        """A prompt is read again, by the third request at the latest: meanwhile D computes it itself.

        An engine without requests makes no steps, and P's scheduler learns with a step where its sidecar is now.
        """
        for _ in range(3):
            params = self.hand_over(prompt)
            assert self.read(prompt, params) == right
            if self.state_of(params) is TransferState.DONE:
                return
        raise AssertionError(f"nothing is read\n{self.p.server.log()}\n{self.d.server.log()}")

    def state_of(self, params: dict[str, Any]) -> TransferState | None:
        """Of the read, as D's sidecar tells it."""
        found = self.d.client.list_transfers()
        return next((t.state for t in found if t.request_id == params["remote_request_id"]), None)


@contextmanager
def street(workshop: Workshop, model: Model, module: str = "kvxfer.engines.vllm", **args: Any) -> Iterator[Street]:
    """Servers that are up."""
    with ExitStack() as stack:
        processes = stack.enter_context(sidecars(["p", "d"], {"drain_timeout": 2}, {"UCX_NET_DEVICES": "lo"}))
        found = []
        for sidecar in processes:
            name = f"{model.name}-{sidecar.name}-server"
            told = {"lease_ttl": LEASE, "read_timeout": 10.0}
            transfer = kvxfer(sidecar.socket, name, module=module, **told)
            line = flags(engine_args(model, str(workshop.directory / model.name), transfer, **args))
            images = str(workshop.directory / f"{name}.images")
            server = Server(
                workshop.forks,
                name,
                workshop.directory,
                "vllm.entrypoints.openai.api_server",
                line,
                KVXFER_TEST_IMAGES=images,
                VLLM_ENABLE_V1_MULTIPROCESSING="0",  # of an engine's worker: it lives in the engine's process
            )
            found.append(Behind(stack.enter_context(server), sidecar, name))
        p, d = found
        line = ["--prefill", p.server.url, "--decode", d.server.url]
        router = stack.enter_context(
            Server(workshop.forks, f"{model.name}-router", workshop.directory, "tests.engines.vllm.proxy", line)
        )
        for server in (p.server, d.server, router):
            server.ready()
        yield Street(model, router, p, d)
        for each in found:
            each.client.close()


# -- one request a step: batching can not change the numerics --------------------------------------------------------


@pytest.fixture(scope="module")
def alone(workshop: Workshop, baselines: Baselines) -> Iterator[tuple[Street, list[Said]]]:
    model = MODELS["qwen3"]
    right = [expected(answer) for answer in baselines.truth(model.name)]
    began = time.monotonic()
    with street(workshop, model, enable_prefix_caching=True, skip_tokenizer_init=False) as found:
        print(f"two servers up after {time.monotonic() - began:.1f} s")
        yield found, right


def test_a_prefix_hit(alone: tuple[Street, list[Said]], seen: Seen) -> None:
    """What D has in its own cache is not read again."""
    street, right = alone
    street.assert_read(PROMPTS[4], right[4])  # they have met
    for _ in range(2):
        assert said(complete(street.router.url, PROMPTS[3], TOKENS)) == right[3]
    second, first = [t for t in street.d.client.list_transfers() if t.bytes][:2]
    assert (first.skip_tokens, first.state) == (0, TransferState.DONE)
    assert second.state is TransferState.DONE
    assert second.skip_tokens == 384 and second.bytes < first.bytes
    seen.facts.append(
        ("the same prompt of 385 tokens again", f"{second.bytes:,} bytes read instead of {first.bytes:,}")
    )


def test_a_crowd(alone: tuple[Street, list[Said]], seen: Seen) -> None:
    street, right = alone
    before, began = street.d.done(), time.monotonic()
    found = crowd(street.router.url, PROMPTS, right, tokens=TOKENS, clients=CLIENTS, rounds=3)
    took = time.monotonic() - began
    assert not found.errors and not found.wrong, (found, found.errors, found.wrong[:3])
    assert found.finished >= 0.85 * CLIENTS * 3 and found.aborted >= 0.05 * CLIENTS * 3
    read = street.d.done() - before
    assert read >= found.finished / 2, f"only {read} of {found.finished} were read"
    street.assert_nothing_left()
    seen.facts.append(
        (f"{CLIENTS} clients, one request a step", f"{found} in {took:.0f} s; all equal, {read} read; nothing left")
    )


def test_ps_sidecar_dies_in_a_crowd(alone: tuple[Street, list[Said]], seen: Seen) -> None:
    """Nobody is told anything wrong, nobody waits for ever; when it is back it is used again."""
    street, right = alone
    killer = Timer(1.0, street.p.sidecar.kill)
    killer.start()
    try:
        found = crowd(street.router.url, PROMPTS, right, tokens=TOKENS, clients=16, rounds=3, seed=2)
    finally:
        killer.join()
    assert not found.errors and not found.wrong, (found, found.errors, found.wrong[:3])
    back(street.p)
    street.assert_read(PROMPTS[4], right[4])
    street.assert_nothing_left()
    seen.facts.append(("P's sidecar is killed while 16 clients ask, and restarted", f"{found}; all equal"))


def back(which: Behind) -> None:
    """Start a sidecar again that has been killed, and wait for its engine."""
    which.sidecar.start()
    which.sidecar.ready()
    until(lambda: which.engine_id in registered(which.sidecar), 60, f"{which.engine_id} to be registered again")


# -- real batching: the images of what is handed over ----------------------------------------------------------------


@pytest.fixture(scope="module")
def together(workshop: Workshop, baselines: Baselines) -> Iterator[tuple[Street, list[Said]]]:
    model = MODELS["nemotron_h"]
    right = [expected(answer) for answer in baselines.truth(model.name)]
    with street(workshop, model, "tests.engines.vllm.observer", max_num_seqs=16, skip_tokenizer_init=False) as found:
        yield found, right


def images(path: Path, what: str) -> dict[str, dict[str, str]]:
    """By request: digests by layer."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["request"]: line["images"] for line in lines if line["what"] == what}


def test_blocks_arrive_as_they_were(together: tuple[Street, list[Said]], workshop: Workshop, seen: Seen) -> None:
    street, _ = together
    found = crowd(street.router.url, PROMPTS, None, tokens=TOKENS, clients=CLIENTS, rounds=2, seed=3)
    assert not found.errors, found.errors
    street.assert_nothing_left()
    of_p, of_d = (workshop.directory / f"{each.engine_id}.images" for each in (street.p, street.d))
    published, ended, read = images(of_p, "published"), images(of_p, "ended"), images(of_d, "read")
    assert len(read) >= found.finished / 2
    for request, image in read.items():
        assert image == published[request], f"{request} has arrived otherwise than it was published"
    for request, image in ended.items():
        assert image == published[request], f"{request} was written while it was held"
    assert len({json.dumps(image) for image in read.values()}) >= len(PROMPTS)
    seen.facts.append(
        (f"{CLIENTS} clients, up to 16 requests a step", f"{found}; {len(read)} block images equal byte for byte")
    )


def test_ps_sidecar_is_killed_after_the_prefill(together: tuple[Street, list[Said]], seen: Seen) -> None:
    street, right = together
    params = street.hand_over(PROMPTS[1])
    street.p.sidecar.kill()
    began = time.monotonic()
    assert street.read(PROMPTS[1], params) == right[1]
    took = time.monotonic() - began
    assert street.state_of(params) is not TransferState.DONE
    back(street.p)
    street.assert_read(PROMPTS[2], right[2])
    seen.facts.append(("kill -9 of P's sidecar after the prefill", f"D has computed it itself, equal, in {took:.1f} s"))


def test_ps_engine_is_killed_after_the_prefill(together: tuple[Street, list[Said]], seen: Seen) -> None:
    """The last test: the memory is the sidecar's, and it keeps what has been published."""
    street, right = together
    params = street.hand_over(PROMPTS[3])
    until(lambda: any(not lease.state.ended for lease in street.p.client.list_leases()), 20, "the publication")
    street.p.server.kill()
    assert street.read(PROMPTS[3], params) == right[3]
    assert street.state_of(params) is TransferState.DONE
    until(lambda: street.p.engine_id not in registered(street.p.sidecar), 60, "the end of P's registration")
    until(lambda: not street.d.left(), 60, "that nothing is left at D")
    seen.facts.append(("kill -9 of P's engine after the prefill", "D has read it, equal"))
