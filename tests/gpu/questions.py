"""Three ways to have a cache on a GPU, each with two processes: who has made the memory, and who reads with NIXL.

A *holder* is a process with memory on GPU 0 that is filled with a pattern and offered to readers; the test reads it
over NIXL into memory of its own GPU, and looks at every byte.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvxfer.core.errors import KvxferError
from kvxfer.core.layout import MemoryKind
from kvxfer.memory.cuda import GRANULE, Cuda
from kvxfer.xfer.api import Span
from kvxfer.xfer.environment import hard_exit
from kvxfer.xfer.nixl import NixlEngine, preload

SIZE = 4 * GRANULE
SPAWN = multiprocessing.get_context("spawn")


def why_no_gpu() -> str:
    """Why the driver can be used by nobody here; empty where it can."""
    try:
        return "" if Cuda().devices() else "the driver knows no GPU"
    except KvxferError as error:
        return str(error)


def pattern(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8).tobytes()


# -- where the memory comes from ---------------------------------------------------------------------------------------


@contextmanager
def sidecar_owned(cuda: Cuda) -> Iterator[int]:
    """(a) cuMemAlloc here, exported, and *written by another process* that has opened it."""
    address = cuda.allocate(0, SIZE)
    handle, _ = cuda.export(0, address)
    ours, theirs = SPAWN.Pipe()
    engine = SPAWN.Process(target=_write, args=(theirs, handle))
    engine.start()
    assert ours.recv() == "written"
    yield address
    ours.send("close")
    engine.join(30)
    cuda.free(0, address)


def _write(pipe: Connection, handle: bytes) -> None:
    cuda = Cuda()
    address, _ = cuda.open(0, handle)
    cuda.write(0, address, pattern(1))
    pipe.send("written")
    pipe.recv()
    cuda.close(0, address)


@contextmanager
def imported(cuda: Cuda) -> Iterator[int]:
    """(b) cuMemAlloc in another process, opened here by CUDA IPC."""
    ours, theirs = SPAWN.Pipe()
    engine = SPAWN.Process(target=_export, args=(theirs,))
    engine.start()
    address, _ = cuda.open(0, ours.recv())
    yield address
    cuda.close(0, address)
    ours.send("free")
    engine.join(30)


def _export(pipe: Connection) -> None:
    cuda = Cuda()
    address = cuda.allocate(0, SIZE)
    cuda.write(0, address, pattern(1))
    pipe.send(cuda.export(0, address)[0])
    pipe.recv()
    cuda.free(0, address)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@contextmanager
def virtual_memory(cuda: Cuda) -> Iterator[int]:
    """(c) cuMemCreate and cuMemMap, as torch's expandable segments and engines' sleep modes use them."""
    library, u64, size_t = cuda._library, ctypes.c_uint64, ctypes.c_size_t
    here = _Location(1, 0)  # CU_MEM_LOCATION_TYPE_DEVICE
    made = _Properties(1, 1, here, None, 0, 1, 0)  # pinned; POSIX descriptors; for GPUDirect RDMA
    handle, address = u64(), u64()

    def call(name: str, *arguments: Any) -> None:
        assert (code := getattr(library, name)(*arguments)) == 0, f"{name}: {code}"

    with cuda._context(0):
        call("cuMemCreate", ctypes.byref(handle), size_t(SIZE), ctypes.byref(made), u64(0))
        call("cuMemAddressReserve", ctypes.byref(address), size_t(SIZE), size_t(0), u64(0), u64(0))
        call("cuMemMap", address, size_t(SIZE), size_t(0), handle, u64(0))
        call("cuMemSetAccess", address, size_t(SIZE), ctypes.byref(_Access(here, 3)), size_t(1))
    cuda.write(0, address.value, pattern(1))
    yield address.value
    with cuda._context(0):
        call("cuMemUnmap", address, size_t(SIZE))
        call("cuMemAddressFree", address, size_t(SIZE))
        call("cuMemRelease", handle)


WAYS: dict[str, Callable[[Cuda], Any]] = {
    "a: made by the sidecar, exported": sidecar_owned,
    "b: made by the engine, imported": imported,
    "c: virtual memory": virtual_memory,
}

# -- who is read from, and who reads -----------------------------------------------------------------------------------


def hold(pipe: Connection, way: str, environment: dict[str, str]) -> None:
    """A process that is read from."""
    os.environ.update(environment)
    preload()
    try:
        with WAYS[way](Cuda()) as address:
            asyncio.run(_serve(pipe, address))
    except Exception as error:  # noqa: BLE001  the test tells it
        pipe.send(("failed", repr(error)))
        hard_exit(1)
    hard_exit(0)


async def _serve(pipe: Connection, address: int) -> None:
    engine = NixlEngine("holder")
    await engine.start()
    await engine.register([Span(address, SIZE, MemoryKind.VRAM, 0)])
    with engine.serving():
        pipe.send(("metadata", await engine.metadata(), address))
        await asyncio.to_thread(pipe.recv)
    await engine.close()


def read(pipe: Connection, way: str, environment: dict[str, str]) -> None:
    """A process that reads all of a holder's memory into its own GPU's; says what came, and how."""
    os.environ.update(environment)
    preload()
    ours, theirs = SPAWN.Pipe()
    holder = SPAWN.Process(target=hold, args=(theirs, way, environment))
    holder.start()
    try:
        pipe.send(asyncio.run(_read(ours)))
        ours.send("end")
        holder.join(30)
    except Exception as error:  # noqa: BLE001  the test tells it
        pipe.send(f"{error!r}")
        holder.kill()
    hard_exit(0)


async def _read(holder: Connection) -> str:
    told = await asyncio.to_thread(holder.recv)
    if told[0] == "failed":
        return f"holder: {told[1]}"
    _, metadata, there = told
    cuda = Cuda()
    here = cuda.allocate(0, SIZE)
    engine = NixlEngine("reader")
    await engine.start()
    await engine.register([Span(here, SIZE, MemoryKind.VRAM, 0)])
    peer = await engine.add_peer(metadata, "holder", spans=[Span(there, SIZE, MemoryKind.VRAM, 0)])
    rows = [np.array([[start, SIZE, 0, SIZE, 1]], dtype=np.uint64) for start in (here, there)]
    local = await engine.prepare_local(rows[0], MemoryKind.VRAM, peer)
    remote = await engine.prepare_remote(rows[1], MemoryKind.VRAM, peer)
    number = np.zeros(1, dtype=np.int32)
    result = await engine.post(await engine.make_read(local, number, remote, number, b""))
    wrong = "" if cuda.read(0, here, SIZE) == pattern(1) else ", and the bytes are wrong"
    await engine.close()
    cuda.free(0, here)
    return f"{result.bytes} bytes{wrong}"


def ask(way: str, environment: dict[str, str], seconds: float = 60.0) -> str:
    """Try one way; what came of it, in words."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=read, args=(theirs, way, environment))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return f"nothing within {seconds:g} s"
        answer: str = ours.recv()
        return answer
    except EOFError:
        process.join(5)
        return f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
