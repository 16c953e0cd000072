"""The engine's side of device memory; on a double of the driver.  The other side is in memory/test_cuda_ipc.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import CacheLayout, Group, GroupKind, MemoryKind, Region, UnitRange
from kvxfer.embedded import EmbeddedSidecar
from kvxfer.memory import cuda
from kvxfer.xfer.api import Span
from kvxfer.xfer.loopback import Fabric, LoopbackDriver, LoopbackEngine
from kvxfer_client import (
    Client,
    CudaIpc,
    DeviceRegion,
    Owned,
    OwnedBacking,
    grouped,
    layouts,
    make_ticket,
    new_lease_token,
)
from tests.support.fake_cuda import OTHER, build, environment

BLOCK = layouts.attention_block(UnitRange(0, 2, 2), head_dim=8, tokens=16, dtype="bfloat16")
LAYOUT = CacheLayout(
    (Region(BLOCK.size * 2, MemoryKind.VRAM, 1),),
    (Group("attention", GroupKind.ATTENTION, (BLOCK.view("0", 0, 2),), 16),),
)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    built = build(tmp_path)
    monkeypatch.setenv("FAKE_CUDA_GPUS", "AB")
    monkeypatch.setattr(cuda, "LIBRARY", str(built))
    cuda.driver.cache_clear()
    yield built
    assert cuda.driver()._library.fake_live() == 0
    cuda.driver.cache_clear()


def engine(library: Path, handle: object, writes: bytes) -> bytes:
    """An engine's process opens what its sidecar has made; what is in there before it writes."""
    assert isinstance(handle, CudaIpc)
    arguments = [str(library), handle.handle.hex(), handle.uuid.hex(), str(handle.size), str(handle.offset)]
    done = subprocess.run(
        [sys.executable, "-c", OTHER, *arguments],
        input=writes.hex(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment("B"),
    )
    return bytes.fromhex(done.stdout.split()[1])


def test_a_read_between_two_caches_on_gpus(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered, exported, written by an engine's process, read, and seen by another's: all but the copy itself is
    what would run on a GPU."""
    fabric, register = Fabric(), LoopbackDriver.register

    def register_as_host_memory(driver: LoopbackDriver, spans: Sequence[Span]) -> object:
        assert {(span.kind, span.device) for span in spans} == {(MemoryKind.VRAM, 1)}
        return register(driver, [replace(span, kind=MemoryKind.DRAM, device=0) for span in spans])

    monkeypatch.setattr(LoopbackDriver, "register", register_as_host_memory)

    def sidecar() -> EmbeddedSidecar:
        return EmbeddedSidecar(make_engine=lambda name, on: LoopbackEngine(name, fabric, on), allow_cuda=True)

    memory = [Owned(LAYOUT.regions[0].size, OwnedBacking.CUDA, 1)]
    with (
        sidecar() as p_side,
        sidecar() as d_side,
        Client(p_side.engine_address, engine_id="p") as p,
        Client(d_side.engine_address, engine_id="d") as d,
        p.session(LAYOUT, memory, compatibility_key="k") as p_session,
        d.session(LAYOUT, memory, compatibility_key="k") as d_session,
    ):
        here, there = p_session.wait_registered(), d_session.wait_registered()
        assert engine(library, here.exported[0], b"x" * BLOCK.size + b"y" * BLOCK.size) == bytes(2 * BLOCK.size)
        blocks, token = grouped([[1]], LAYOUT, 16), new_lease_token()
        p.publish("r", blocks, 16, token)
        ticket = make_ticket(
            engine_id="p",
            compatibility_key="k",
            ranks=[here.ticket_rank],
            request_id="r",
            blocks=blocks,
            num_tokens=16,
            lease_token=token,
            ttl=60,
        )
        d.read(ticket, grouped([[0]], LAYOUT, 16))
        assert engine(library, there.exported[0], b"") == b"y" * BLOCK.size + bytes(BLOCK.size)


def test_an_ordinary_sidecar_wants_to_be_told(library: Path) -> None:
    with (
        EmbeddedSidecar(make_engine=lambda name, on: LoopbackEngine(name, Fabric(), on)) as sidecar,
        Client(sidecar.engine_address, engine_id="p") as client,
        pytest.raises(KvxferError, match="allow_cuda") as caught,
    ):
        client.register(LAYOUT, [Owned(LAYOUT.regions[0].size, OwnedBacking.CUDA, 1)], compatibility_key="k")
    assert (caught.value.reason, caught.value.field) == (Reason.MEMORY_NOT_ALLOWED, "memory[0].owned.backing")


def test_a_handle_of_a_gpu_that_is_not_here(library: Path) -> None:
    with pytest.raises(KvxferError, match="none of the 2"):
        DeviceRegion.map(CudaIpc(bytes(64), 0, 10, uuid=b"Z" * 16))


def test_a_closed_region_has_no_address() -> None:
    region = DeviceRegion(CudaIpc(bytes(64), 4, 10), 0, 4096)
    assert (region.address, region.size) == (4100, 10)
    region._base = 0
    region.close()
    with pytest.raises(KvxferError, match="closed"):
        _ = region.address
