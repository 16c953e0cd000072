"""Every way to hand memory over, read from end to end; and the service inside an engine's own process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import uvloop

from kvxfer.config import Settings
from kvxfer.core.layout import CacheLayout, Rank
from kvxfer.memory.handles import Address, Handle, Owned, OwnedBacking
from kvxfer.sidecar import Sidecar
from kvxfer.wire.handles import handle_from_pb
from kvxfer_client import Client, SharedRegion, attention_blocks
from tests.integration.test_deaths import TOKENS, engine, layout, read
from tests.support.engines import Bytes, SharedRegions, as_bytes, make_lists, registration
from tests.support.fleet import Engine
from tests.support.processes import SidecarProcess, sidecars
from tests.truth import Labels

SEGMENTS = layout().regions


@pytest.fixture(scope="module")
def pair() -> Iterator[list[SidecarProcess]]:
    with sidecars(["p", "d"]) as processes:
        yield processes


def shm(directory: Path, name: str, shape: CacheLayout) -> SharedRegions:
    return SharedRegions(SharedRegion.create_shm(r.size) for r in shape.regions)


def memfds(directory: Path, name: str, shape: CacheLayout) -> SharedRegions:
    return SharedRegions(SharedRegion.create_memfd(r.size) for r in shape.regions)


class OwnedRegions:
    """Memory that the sidecar makes, and the engine maps afterwards."""

    def __init__(self, backing: OwnedBacking, shape: CacheLayout) -> None:
        self.handles: tuple[Handle, ...] = tuple(Owned(r.size, backing) for r in shape.regions)
        self.arrays: list[Bytes] = []
        self._mapped: list[SharedRegion] = []

    def map(self, handles: list[Handle]) -> None:
        self._mapped = [SharedRegion.map(h) for h in handles]  # type: ignore[arg-type]
        self.arrays = [r.numpy(np.uint8, (r.size,)) for r in self._mapped]

    def close(self) -> None:
        self.arrays.clear()
        for region in self._mapped:
            region.close()


@pytest.mark.parametrize("make", [shm, memfds, SharedRegions.files])
def test_memory_that_the_engine_makes(
    pair: list[SidecarProcess], make: Callable[[Path, str, CacheLayout], SharedRegions]
) -> None:
    labels = Labels()
    shape = [(Rank(), layout())]
    with Engine("p", shape, pair[:1], labels, make) as p, Engine("d", shape, pair[1:], labels, make) as d:
        read(d, p)


@pytest.mark.parametrize("backing", OwnedBacking)
def test_memory_that_the_sidecar_makes(pair: list[SidecarProcess], backing: OwnedBacking) -> None:
    labels = Labels()
    shape = [(Rank(), layout())]
    engines = []
    for letter, process in zip("pd", pair, strict=True):
        made = Engine(letter, shape, [process], labels, lambda _d, _n, s: OwnedRegions(backing, s))
        member = made.members[0]
        answer = process.stub.RegisterCache(registration(made.engine_id, member), timeout=30)
        assert [e.region for e in answer.exported] == list(range(len(SEGMENTS)))
        regions = member.regions
        assert isinstance(regions, OwnedRegions)
        regions.map([handle_from_pb(e.handle, "handle") for e in answer.exported])
        member.registered = answer
        member.write()
        engines.append(made)
    p, d = engines
    read(d, p)
    for made in engines:
        made.unregister()
        made.close()
    left = [f for f in os.listdir(pair[0].directory) if not f.endswith((".sock", ".log"))]
    assert left == [], "the sidecar's files outlive the registration"


def test_the_service_inside_an_engine(pair: list[SidecarProcess], tmp_path: Path) -> None:
    """Embedded: the cache is plain memory of this process, by address."""
    labels = Labels()
    p = engine("p", pair[0], labels)
    p_lists, _ = make_lists(p.groups, TOKENS, 3)
    p.hold(p_lists)
    shape = layout()
    memory = [np.zeros(r.size, dtype=np.uint8) for r in shape.regions]
    socket = pair[0].directory / "embedded.sock"
    sidecar = Sidecar(Settings(engine_socket=socket, allow_address=True, memory_directories=(str(tmp_path),)))
    started, ending = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await sidecar.start()
        started.set()
        await ending.wait()
        await sidecar.stop()

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    try:
        assert started.wait(30)
        with Client(f"unix:{socket}", engine_id="embedded") as client:
            handles = [Address(m.ctypes.data, m.nbytes) for m in memory]
            client.register(shape, handles, compatibility_key="model@rev/fp8")
            wanted = list(range(TOKENS // 16))
            done = client.read(p.ticket(p_lists, TOKENS), [attention_blocks("attention", wanted)])
            client.unregister()
    finally:
        loops[0].call_soon_threadsafe(ending.set)
        thread.join(60)
    source = p.members[0].regions.arrays
    for mine, theirs in zip(memory, source, strict=True):
        blocks = np.asarray(theirs).reshape(-1, len(mine) // 64)
        expected = blocks[list(p_lists["attention"].ids)]
        assert np.array_equal(mine.reshape(blocks.shape)[: len(wanted)], expected)
        assert not mine.reshape(blocks.shape)[len(wanted) :].any()
    assert done.bytes == 2 * len(wanted) * (len(memory[0]) // 64)
    assert as_bytes(p.members[0].model.image).any()
    p.unregister()
    p.close()
