"""Memory of a GPU as regions, between processes; on a double of the driver."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.core.layout import MemoryKind
from kvxfer.memory import cuda
from kvxfer.memory.api import MemoryPolicy, open_region, take_region
from kvxfer.memory.cuda import Cuda
from kvxfer.memory.handles import CudaIpc, Owned, OwnedBacking
from tests.support.fake_cuda import OTHER, build, environment

ALLOWED = MemoryPolicy(allow_cuda=True)
SIZE = 1000

#: Exports 4 MiB of GPU 0, holding the bytes 0, 1, 2, ...
EXPORTER = """
import sys
from kvxfer.memory import cuda
driver = cuda.Cuda(sys.argv[1])
address = driver.allocate(0, 4 << 20)
driver.write(0, address, bytes(i % 251 for i in range(4 << 20)))
handle, offset = driver.export(0, address + 512)
print(handle.hex(), offset, driver.devices()[0].hex(), flush=True)
sys.stdin.readline()
print(driver.read(0, address + 512, 4).hex())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(autouse=True)
def driver(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    monkeypatch.setenv("FAKE_CUDA_GPUS", "AB")
    monkeypatch.setattr(cuda, "LIBRARY", str(library))
    cuda.driver.cache_clear()
    yield cuda.driver()
    assert cuda.driver()._library.fake_live() == 0
    cuda.driver.cache_clear()


def test_memory_of_the_sidecar_is_opened_by_an_engine_that_counts_gpus_differently(driver: Cuda, library: Path) -> None:
    region = take_region(Owned(SIZE, OwnedBacking.CUDA, device=1), ALLOWED)
    assert (region.kind, region.device, region.size) == (MemoryKind.VRAM, 1, SIZE)
    handle = region.export()
    assert isinstance(handle, CudaIpc)
    assert handle.uuid == b"B" * 16
    driver.write(1, region.address, b"from the sidecar")
    arguments = [str(library), handle.handle.hex(), handle.uuid.hex(), str(SIZE), str(handle.offset)]
    done = subprocess.run(
        [sys.executable, "-c", OTHER, *arguments],
        input=b"from the engine!".hex(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment("BA"),
    )
    number, data, left = done.stdout.split()
    assert (number, left) == ("0", "0")
    assert bytes.fromhex(data) == b"from the sidecar" + bytes(SIZE - 16)
    assert driver.read(1, region.address, 16) == b"from the engine!"
    region.close()
    region.close(keep=True)


def test_memory_of_the_engine(driver: Cuda, library: Path) -> None:
    command = [sys.executable, "-c", EXPORTER, str(library)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        raw, offset, uuid = engine.stdout.readline().split()
        given: dict[str, Any] = {"handle": bytes.fromhex(raw), "offset": int(offset), "uuid": bytes.fromhex(uuid)}
        region = open_region(CudaIpc(size=SIZE, **given), ALLOWED)
        assert driver.read(region.device, region.address, 4) == bytes(i % 251 for i in range(512, 516))
        assert region.export() is None
        assert region.identity.meets(open_and_close(CudaIpc(size=1, **given)).identity)
        driver.write(region.device, region.address, b"back")
        with pytest.raises(KvxferError, match="the allocation has 4194304 bytes") as caught:
            open_region(CudaIpc(size=4 << 20, **given), ALLOWED)
        assert caught.value.reason is Reason.REGION_TOO_SMALL
        region.close()
        region.close()
        engine.stdin.write("\n")
        engine.stdin.flush()
        assert bytes.fromhex(engine.stdout.readline()) == b"back"


def open_and_close(handle: CudaIpc) -> Any:
    region = open_region(handle, ALLOWED)
    region.close()
    return region


@pytest.mark.parametrize("handle", [Owned(10, OwnedBacking.CUDA), CudaIpc(bytes(64), 0, 10)])
def test_it_has_to_be_allowed(handle: Any) -> None:
    with pytest.raises(KvxferError, match="allow_cuda") as caught:
        open_region(handle, MemoryPolicy())
    assert caught.value.reason is Reason.MEMORY_NOT_ALLOWED
    with pytest.raises(KvxferError) as caught:
        open_region(handle, MemoryPolicy(allow_cuda=True, max_region_bytes=9))
    assert caught.value.reason is Reason.MEMORY_LIMIT


def test_what_cannot_be_exported_is_freed(driver: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KvxferError(Reason.MEMORY_HANDLE_INVALID, "no")

    monkeypatch.setattr(driver, "export", fails)
    with pytest.raises(KvxferError, match="no"):
        open_region(Owned(10, OwnedBacking.CUDA), ALLOWED)
