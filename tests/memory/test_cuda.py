"""The driver's functions as we call them, on a double of the library: nothing here has seen a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.core.errors import KvxferError, Reason
from kvxfer.memory.cuda import GRANULE, Cuda, number_of
from tests.support.fake_cuda import build


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def cuda(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    monkeypatch.setenv("FAKE_CUDA_GPUS", "AB")
    made = Cuda(str(library))
    yield made
    assert made._library.fake_live() == 0
    assert made._library.fake_depth() == 0


def test_memory_is_zeroed_and_of_whole_granules(cuda: Cuda) -> None:
    address = cuda.allocate(1, 5)
    assert cuda.read(1, address, 5) == bytes(5)
    cuda.write(1, address, b"hello")
    assert cuda.read(1, address, GRANULE) == b"hello" + bytes(GRANULE - 5)
    handle, offset = cuda.export(1, address + 3)
    assert (len(handle), offset) == (64, 3)
    cuda.free(1, address)


def test_what_the_driver_refuses_is_named(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_BYTES", "1000")
    with pytest.raises(KvxferError, match="cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY") as caught:
        cuda.allocate(0, 10)
    assert caught.value.reason is Reason.MEMORY_LIMIT
    with pytest.raises(KvxferError, match="cuDeviceGet failed") as caught:
        cuda.allocate(7, 10)
    assert caught.value.reason is Reason.MEMORY_HANDLE_INVALID
    with pytest.raises(KvxferError, match="has 64 bytes, this has 3"):
        cuda.open(0, b"abc")
    with pytest.raises(KvxferError, match="cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_INVALID_HANDLE"):
        cuda.open(0, b"\1" + bytes(63))


def test_a_process_cannot_open_its_own(cuda: Cuda) -> None:
    address = cuda.allocate(0, 10)
    with pytest.raises(KvxferError, match="CUDA_ERROR_INVALID_CONTEXT"):
        cuda.open(0, cuda.export(0, address)[0])
    cuda.free(0, address)


def test_which_gpu_is_meant(cuda: Cuda) -> None:
    assert cuda.devices() == (b"A" * 16, b"B" * 16)
    assert (number_of(cuda, b"", 1), number_of(cuda, b"B" * 16, 0)) == (1, 1)
    for uuid, device in ((b"C" * 16, 0), (b"", 2)):
        with pytest.raises(KvxferError, match="none of the 2 that this process may use") as caught:
            number_of(cuda, uuid, device)
        assert caught.value.field == "device_uuid"


def test_without_a_driver_or_a_gpu(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KvxferError, match=r"driver cannot be used: .*nothing\.so") as caught:
        Cuda(str(tmp_path / "nothing.so"))
    assert caught.value.reason is Reason.UNSUPPORTED
    with pytest.raises(KvxferError, match=r"driver cannot be used: .*cuInit"):
        Cuda("libc.so.6")
    monkeypatch.setenv("FAKE_CUDA_GPUS", "")
    with pytest.raises(KvxferError, match="cuInit failed: CUDA_ERROR_NO_DEVICE") as caught:
        Cuda(str(library))
    assert caught.value.reason is Reason.UNSUPPORTED
