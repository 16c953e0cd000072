"""Every kind of memory that an engine and its sidecar can share, read over real NIXL."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
import uvloop

from kvxfer.config import Settings
from kvxfer.core.layout import CacheLayout, Rank
from kvxfer.memory.handles import FileHandle, OwnedBacking
from kvxfer.pb import transfer_pb2_grpc
from kvxfer.sidecar import Sidecar
from tests.support.engines import ArrayRegions, OwnedRegions, Regions, SharedRegions
from tests.support.fleet import Engine, MakeRegions
from tests.support.loopback import small_layout, small_lists
from tests.support.processes import SidecarProcess
from tests.truth import Labels, Want
from tests.xfer.nixl_processes import run

TOKENS = 10
ONE = [(Rank(), small_layout())]


def owned(backing: OwnedBacking) -> MakeRegions:
    def make(_directory: Path, _name: str, layout: CacheLayout) -> Regions:
        return OwnedRegions(layout, backing)

    return make


def read_and_compare(p: Engine, d: Engine) -> None:
    p_lists, d_lists = small_lists(TOKENS, 3), small_lists(TOKENS, 1)
    p.hold(p_lists)
    ticket = p.ticket(p_lists, TOKENS)
    d.read(0, p, ticket, d_lists, {g.name: Want(0, TOKENS) for g in d.groups})


MEMORY: dict[str, tuple[MakeRegions, MakeRegions]] = {
    "memfd to POSIX shared memory": (SharedRegions.memfds, SharedRegions.posix_shm),
    "POSIX shared memory to memfd": (SharedRegions.posix_shm, SharedRegions.memfds),
    "sidecar-owned files": (owned(OwnedBacking.FILE), owned(OwnedBacking.FILE)),
    "sidecar-owned memfds": (owned(OwnedBacking.MEMFD), owned(OwnedBacking.MEMFD)),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_of_every_kind(eight: list[SidecarProcess], name: str) -> None:
    p_memory, d_memory = MEMORY[name]
    labels = Labels()
    with Engine("p", ONE, eight[:1], labels, p_memory) as p, Engine("d", ONE, eight[1:2], labels, d_memory) as d:
        read_and_compare(p, d)


def test_owned_files_are_private_and_go_with_the_registration(eight: list[SidecarProcess]) -> None:
    with Engine("p", ONE, eight[:1], Labels(), owned(OwnedBacking.FILE)) as engine:
        regions = engine.members[0].regions
        assert isinstance(regions, OwnedRegions)
        (handle,) = regions.mapped
        assert isinstance(handle, FileHandle)
        path = Path(handle.path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.is_relative_to(eight[0].directory)
    assert not path.exists()


# -- embedded --------------------------------------------------------------------------------------------------------


class Remote(NamedTuple):
    """A sidecar that somebody else has started."""

    directory: Path
    stub: transfer_pb2_grpc.KvTransferStub


def start_embedded(sidecar: Sidecar) -> Callable[[], None]:
    """Run a sidecar on a uvloop thread; returns what stops it."""
    loop = uvloop.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(sidecar.start(), loop).result(30)

    def stop() -> None:
        asyncio.run_coroutine_threadsafe(sidecar.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)

    return stop


async def embedded() -> None:
    """D's sidecar lives in the engine's own process and takes plain addresses; P is another process."""
    directory = Path(os.environ["TEST_DIRECTORY"])
    socket = directory / "embedded.sock"
    settings = Settings.load(engine_socket=socket, allow_address=True, memory_directories=(str(directory),))
    stop = start_embedded(Sidecar(settings))
    with (
        grpc.insecure_channel(f"unix:{socket}") as mine,
        grpc.insecure_channel(f"unix:{os.environ['TEST_SOCKET']}") as theirs,
    ):
        here = Remote(directory, transfer_pb2_grpc.KvTransferStub(mine))
        there = Remote(directory, transfer_pb2_grpc.KvTransferStub(theirs))
        labels = Labels()

        def arrays(_directory: Path, _name: str, layout: CacheLayout) -> Regions:
            return ArrayRegions(layout)

        # Both ways: the embedded one reads, and is read from.
        for p_side, d_side in ((there, here), (here, there)):
            memory = [arrays if side is here else SharedRegions.files for side in (p_side, d_side)]
            with Engine("p", ONE, [p_side], labels, memory[0]) as p, Engine("d", ONE, [d_side], labels, memory[1]) as d:
                read_and_compare(p, d)
    stop()
    assert not socket.exists()


def test_embedded(eight: list[SidecarProcess]) -> None:
    run(embedded, {"TEST_DIRECTORY": str(eight[0].directory), "TEST_SOCKET": str(eight[0].socket)})
