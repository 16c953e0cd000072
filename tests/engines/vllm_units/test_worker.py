"""Whole engines but for the model: P and D, their schedulers' and workers' sides, and sidecars between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.config import Settings
from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, Rank
from kvxfer.engines.vllm.groups import CacheGroup
from kvxfer.engines.vllm.handoff import Handoff
from kvxfer.engines.vllm.layout import AttentionPages, StatePages, layout_of
from kvxfer.engines.vllm.mover import Results
from kvxfer.engines.vllm.settings import settings_from
from kvxfer.engines.vllm.worker import WorkerCache, embedded_settings
from kvxfer.sidecar import Sidecar
from kvxfer.xfer.loopback import Fabric, LoopbackEngine
from kvxfer_client import prefill_params
from tests.engines.vllm_units.test_handoff import FakeRequest, Status

torch = pytest.importorskip("torch", reason="torch is not installed")

BLOCKS, TOKENS, PAGE = 16, 16, 16 * 2 * 8 * 2
SIZE = BLOCKS * PAGE
GROUPS = (CacheGroup("0.attention", TOKENS), CacheGroup("1.mamba1", 0))


def layout() -> CacheLayout:
    """An attention and a state layer over the same blocks."""
    attention = AttentionPages("a", 0, (BLOCKS, 2, TOKENS, 8), (PAGE, PAGE // 2, 16, 2), "float16")
    state = StatePages("m", 0, PAGE, "mamba1", ((16, 3), (16, 4)), ("float16", "float32"), "DS")
    return layout_of([(GROUPS[0], [attention]), (GROUPS[1], [state])], BLOCKS, SIZE, Rank())


@dataclass
class Engine:
    """One engine: what vLLM's scheduler and worker make of the connector."""

    name: str
    cache: WorkerCache
    told: Results = field(default_factory=Results)

    def __post_init__(self) -> None:
        self.handoff = Handoff(GROUPS, self.name, "key", 30.0)

    def allocate(self, context: Any = None) -> None:
        with self.cache.lent(SIZE) or nullcontext() if context is None else context:
            buffer = torch.zeros(SIZE, dtype=torch.int8, device="cpu")
        self.cache.register(layout(), buffer.data_ptr())
        self.memory = buffer.numpy().view("u1").reshape(BLOCKS, PAGE)
        self.tell()

    def tell(self) -> None:
        if (found := self.cache.mover.take_registered()) is not None:
            self.handoff.ranks[found.rank.number] = found.ticket_rank

    def step(self) -> None:
        """As often as vLLM does it."""
        self.tell()
        self.cache.mover.begin(self.handoff.step(), lambda: None)
        found = self.cache.mover.take()
        self.handoff.loaded(tuple(found.received))
        for name in ("sent", "received", "failed"):
            getattr(self.told, name).update(getattr(found, name))

    async def until(self, what: str, request_id: str) -> None:
        for _ in range(1000):
            await asyncio.to_thread(self.step)
            if request_id in getattr(self.told, what):
                return
            await asyncio.sleep(0.005)
        pytest.fail(f"request {request_id} is not among {what}: {self.told}")


@dataclass
class World:
    """Sidecars on one fabric."""

    directory: Path
    fabric: Fabric = field(default_factory=Fabric)
    sidecars: dict[str, Sidecar] = field(default_factory=dict)
    engines: list[Engine] = field(default_factory=list)

    async def start(self, name: str) -> None:
        settings = Settings(
            engine_socket=self.directory / f"{name}.sock",
            memory_directories=(str(self.directory / name),),
            engine_grace=2.0,
            publish_wait=2.0,
            drain_timeout=0.3,
        )
        (self.directory / name).mkdir(exist_ok=True)
        self.sidecars[name] = Sidecar(settings, lambda agent, notify: LoopbackEngine(agent, self.fabric, notify))
        await self.sidecars[name].start()

    async def engine(self, name: str, **settings: Any) -> Engine:
        await self.start(name)
        given = settings_from({"engine_socket": f"{self.directory}/{name}.sock", "ready_timeout": 5, **settings})
        cache = await asyncio.to_thread(WorkerCache, given, name, "key", Rank())
        self.engines.append(Engine(name, cache))
        await asyncio.to_thread(self.engines[-1].allocate)
        return self.engines[-1]

    async def pair(self, **settings: Any) -> tuple[Engine, Engine]:
        p, d = await self.engine("p", **settings), await self.engine("d", **settings)
        p.memory[:] = np.random.default_rng(7).integers(1, 255, p.memory.shape)
        return p, d


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    found = World(tmp_path)
    yield found
    found.fabric.let_go()
    for engine in found.engines:
        await asyncio.to_thread(engine.cache.close)
    for sidecar in found.sidecars.values():
        await sidecar.stop()


async def until(condition: Callable[[], object]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("the condition did not come true in time")


def prefilled(p: Engine) -> dict[str, Any]:
    """P has computed 39 tokens; what it answers."""
    request = FakeRequest(dict(prefill_params()), 39, 39, request_id="on p")
    kept, params = p.handoff.finished(request, [[4, 5, 6], [7]])
    assert kept and params is not None
    return params


def decode(d: Engine, params: dict[str, Any]) -> FakeRequest:
    """D allocates blocks for it."""
    request = FakeRequest(params, 40, 0, status=Status.RUNNING, request_id="on d")
    found = d.handoff.matched(request, 0)
    d.handoff.allocated(request, [[1, 2, 3], [9]], found)
    return request


def assert_arrived(p: Engine, d: Engine) -> None:
    cells = [m.memory.reshape(BLOCKS, 2, TOKENS, 16) for m in (p, d)]
    for theirs, mine, held in ((4, 1, 16), (5, 2, 16), (6, 3, 7)):
        assert (cells[0][theirs, :, :held] == cells[1][mine, :, :held]).all()
    assert (p.memory[7, :352] == d.memory[9, :352]).all()  # conv 16 x 3 x 2 B, ssm 16 x 4 x 4 B
    assert not d.memory[9, 352:].any() and not d.memory[[0, 4, 5, 6, 7, 8, 10]].any()


@pytest.mark.parametrize(
    "settings",
    [{}, {"memory": "shared"}, {"memory": "shared", "memory_directory": "{}"}],
    ids=["sidecar", "memfd", "file"],
)
async def test_a_request_goes_from_p_to_d(world: World, settings: dict[str, str]) -> None:
    p = await world.engine("p", **{k: v.format(world.directory / "p") for k, v in settings.items()})
    d = await world.engine("d", **{k: v.format(world.directory / "d") for k, v in settings.items()})
    p.memory[:] = np.random.default_rng(7).integers(1, 255, p.memory.shape)
    decode(d, prefilled(p))
    p.step()
    await d.until("received", "on d")
    assert not d.told.failed
    assert_arrived(p, d)
    await p.until("sent", "on p")
    for engine in (p, d):
        await asyncio.to_thread(engine.cache.close)
    # What the sidecar has made lives on for as long as leases may.
    await until(lambda: not list(world.directory.glob("*/*")))


async def test_what_p_does_not_hold_is_not_presented_as_good(world: World) -> None:
    p, d = await world.pair()
    params = prefilled(p)  # and P's workers never hear of it
    request = decode(d, params)
    await d.until("received", "on d")
    assert d.told.failed == {"on d"}
    assert d.handoff.matched(request, 0) == 0


@pytest.mark.parametrize("scheduled", [True, False])
async def test_p_s_blocks_are_free_when_d_does_not_want_them(world: World, scheduled: bool) -> None:
    """All is in D's own cache, or the request is given up before it got a place: P need not wait."""
    p, d = await world.pair()
    request = FakeRequest(prefilled(p), 40, 0, status=Status.FINISHED_ABORTED, request_id="on d")
    await asyncio.to_thread(p.step)
    if scheduled:
        d.handoff.allocated(request, [[1, 2, 3], [9]], 0)
    else:
        d.handoff.finished(request, [[], []])
    await asyncio.to_thread(d.step)
    await p.until("sent", "on p")
    assert not d.memory.any()


async def test_p_s_engine_dies_after_the_prefill(world: World) -> None:
    """Its memory is the sidecar's, and stays."""
    p, d = await world.pair()
    params = prefilled(p)
    await asyncio.to_thread(p.step)
    leases = world.sidecars["p"].registrations.get("p").leases
    await until(lambda: len(leases))
    p.cache.mover.close()
    p.cache.client.close()  # as its sockets are when a process has died
    await until(lambda: world.sidecars["p"].registrations.known("p").hold.over)  # type: ignore[union-attr]
    decode(d, params)
    await d.until("received", "on d")
    assert not d.told.failed
    assert_arrived(p, d)


async def test_p_s_sidecar_dies_after_the_prefill(world: World) -> None:
    p, d = await world.pair()
    params = prefilled(p)
    await asyncio.to_thread(p.step)
    await world.sidecars["p"].stop()
    decode(d, params)
    await d.until("received", "on d")
    assert d.told.failed == {"on d"}
    await p.until("sent", "on p")
    # It comes back, and the next one goes through, of which the scheduler has heard in time.
    await world.start("p")
    await until(lambda: p.cache.mover._fresh is not None)
    p.tell()
    d.told = Results()
    request = FakeRequest(prefilled(p), 40, 0, status=Status.RUNNING, request_id="again")
    d.handoff.allocated(request, [[1, 2, 3], [9]], d.handoff.matched(request, 0))
    await asyncio.to_thread(p.step)
    await d.until("received", "again")
    assert not d.told.failed


async def test_d_s_sidecar_dies(world: World) -> None:
    p, d = await world.pair()
    params = prefilled(p)
    await asyncio.to_thread(p.step)
    await world.sidecars["d"].stop()
    # A read that is sent before this is known waits for the next sidecar's word.
    await until(lambda: d.cache.mover.away)
    decode(d, params)
    await d.until("received", "on d")
    assert d.told.failed == {"on d"}


async def test_a_request_that_is_given_up_is_told_when_it_has_quiesced(world: World) -> None:
    p, d = await world.pair()
    params = prefilled(p)
    await asyncio.to_thread(p.step)
    request = decode(d, params)
    request.status = Status.FINISHED_ABORTED
    assert d.handoff.finished(request, [[1, 2, 3], [9]]) == (False, None)
    await d.until("received", "on d")
    await p.until("sent", "on p")


@pytest.mark.parametrize("lent", [False, True])
async def test_vllm_must_have_used_what_it_was_lent(world: World, lent: bool) -> None:
    await world.start("e")
    given = settings_from({"engine_socket": f"{world.directory}/e.sock"})
    cache = await asyncio.to_thread(WorkerCache, given, "e", "key", Rank())
    world.engines.append(Engine("e", cache))
    if lent:  # and then taken something else

        def take() -> None:
            with cache.lent(SIZE) or nullcontext():
                torch.zeros(SIZE, dtype=torch.int8)

        await asyncio.to_thread(take)
    with pytest.raises(KvxferError) as caught:
        await asyncio.to_thread(world.engines[0].allocate, nullcontext())
    assert caught.value.reason is Reason.UNSUPPORTED
    assert "get_mem_pool_context" in caught.value.message and "memory=embedded" in caught.value.message


def test_no_sidecar_says_how_to_start_one(tmp_path: Path) -> None:
    given = settings_from({"engine_socket": f"{tmp_path}/none.sock", "ready_timeout": 0.2})
    with pytest.raises(KvxferError) as caught:
        WorkerCache(given, "e", "key", Rank())
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    assert "kvxfer serve --engine-socket" in caught.value.message


def test_settings_of_a_sidecar_in_the_process() -> None:
    given = settings_from(
        {
            "memory": "embedded",
            "peer_host": "10.0.0.7",
            "peer_port": 7000,
            "engine_socket": "unix:///run/kvxfer/rank{rank}.sock",
            "sidecar": {"insecure_peer": True},
        }
    )
    assert embedded_settings(given, Rank(1, 2), 0) == {
        "peer_host": "10.0.0.7",
        "peer_port": 7001,
        "engine_socket": "/run/kvxfer/rank1.sock",
        "insecure_peer": True,
    }
    assert embedded_settings(settings_from({"memory": "embedded"}), Rank(), 0) == {"peer_host": "127.0.0.1"}
