"""The little of CUDA's driver that sharing device memory takes: ``libcuda.so.1`` by ctypes.

The driver and not the runtime or torch: it comes with the machine and not with a wheel, so the sidecar's image needs no
CUDA toolkit of the engine's version.  Everything happens in a device's *primary context*, which is the one that
the runtime, and so torch, uses in the same process.

**Never run on a GPU yet** (``docs/decisions/0016-gpu-memory.md``); the tests run it against a double of the library.
Names and meanings of the functions: CUDA Driver API reference, sections 6.6 (primary context), 6.13 (memory), 6.14
(IPC).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Final

from kvxfer.core.errors import KvxferError, Reason

#: What is loaded.
LIBRARY: Final = "libcuda.so.1"
#: Bytes of an IPC handle, and of a device's UUID.
HANDLE_BYTES: Final = 64
UUID_BYTES: Final = 16
#: Smaller allocations may share a block with others, and exporting one would export them too (CUDA Runtime API,
#: cudaIpcGetMemHandle).
GRANULE: Final = 2 * 1024 * 1024

_OUT_OF_MEMORY: Final = 2
_LAZY_PEER_ACCESS: Final = 1  # the only flag there is, and required


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", c_ubyte * UUID_BYTES),)


# CUdevice is an int, CUcontext a pointer, CUdeviceptr 64 bits.
_SIGNATURES: Final = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (POINTER(_Uuid), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemsetD8_v2": (c_uint64, c_ubyte, c_size_t),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuIpcGetMemHandle": (POINTER(_IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
}


class Cuda:
    """The driver.  Every method may block; call them off the event loop.

    :param path: the library.
    :raises KvxferError: UNSUPPORTED where there is none, it is too old, or there is no GPU.
    """

    def __init__(self, path: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(path)
            for name, types in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = types, c_int
        except (OSError, AttributeError) as error:
            raise KvxferError(
                Reason.UNSUPPORTED, f"NVIDIA's driver cannot be used: {error}", field="", library=path
            ) from None
        self._call("cuInit", 0, reason=Reason.UNSUPPORTED)

    def devices(self) -> tuple[bytes, ...]:
        """The UUID of every GPU that this process may use, by number."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        found = []
        for number in range(count.value):
            uuid = _Uuid()
            self._call("cuDeviceGetUuid_v2", byref(uuid), self._device(number))
            found.append(bytes(uuid.bytes))
        return tuple(found)

    def allocate(self, device: int, size: int) -> int:
        """New memory of at least ``size`` bytes, zeroed; its address.

        :raises KvxferError: MEMORY_LIMIT where there is not so much; MEMORY_HANDLE_INVALID where there is no such GPU.
        """
        whole = -(-size // GRANULE) * GRANULE
        with self._context(device):
            address = c_uint64()
            self._call("cuMemAlloc_v2", byref(address), whole)
            try:
                self._call("cuMemsetD8_v2", address, 0, whole)
                self._call("cuCtxSynchronize")
            except KvxferError:
                self._library.cuMemFree_v2(address)
                raise
        return address.value

    def free(self, device: int, address: int) -> None:
        """Give memory back.  Who has it open by IPC must have closed it: the driver calls anything else undefined."""
        with self._context(device):
            self._call("cuMemFree_v2", address)

    def export(self, device: int, address: int) -> tuple[bytes, int]:
        """An IPC handle of the allocation that ``address`` lies in, and the offset in there."""
        base, size, handle = c_uint64(), c_size_t(), _IpcHandle()
        with self._context(device):
            self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
            self._call("cuIpcGetMemHandle", byref(handle), base)
        return bytes(handle), address - base.value

    def open(self, device: int, handle: bytes) -> tuple[int, int]:
        """Another process's allocation: address here, and bytes.

        :raises KvxferError: MEMORY_HANDLE_INVALID where it is none of that GPU, or of this very process.
        """
        if len(handle) != HANDLE_BYTES:
            raise KvxferError(
                Reason.MEMORY_HANDLE_INVALID,
                f"a CUDA IPC handle has {HANDLE_BYTES} bytes, this has {len(handle)}",
                field="handle",
            )
        given, address, base, size = _IpcHandle.from_buffer_copy(handle), c_uint64(), c_uint64(), c_size_t()
        with self._context(device):
            self._call("cuIpcOpenMemHandle_v2", byref(address), given, _LAZY_PEER_ACCESS)
            try:
                self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
            except KvxferError:
                self._library.cuIpcCloseMemHandle(address)
                raise
        return address.value, size.value

    def close(self, device: int, address: int) -> None:
        """Close what :meth:`open` gave."""
        with self._context(device):
            self._call("cuIpcCloseMemHandle", address)

    def read(self, device: int, address: int, size: int) -> bytes:
        """Bytes of device memory."""
        data = ctypes.create_string_buffer(size)
        with self._context(device):
            self._call("cuMemcpyDtoH_v2", data, address, size)
        return data.raw

    def write(self, device: int, address: int, data: bytes) -> None:
        """Put bytes into device memory."""
        with self._context(device):
            self._call("cuMemcpyHtoD_v2", address, data, len(data))

    @contextmanager
    def _context(self, device: int) -> Iterator[None]:
        """In here the device's primary context is the thread's.

        Retained for good, once for each device: where nobody has it memory would not outlive the call.
        """
        self._call("cuCtxPushCurrent_v2", self._primary(device))
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(byref(c_void_p()))

    @functools.cached_property
    def _primary(self) -> Callable[[int], c_void_p]:
        def retain(device: int) -> c_void_p:
            context = c_void_p()
            self._call("cuDevicePrimaryCtxRetain", byref(context), self._device(device))
            return context

        return functools.cache(retain)

    def _device(self, number: int) -> int:
        device = c_int()
        self._call("cuDeviceGet", byref(device), number)
        return device.value

    def _call(self, name: str, *arguments: object, reason: Reason = Reason.MEMORY_HANDLE_INVALID) -> None:
        code = getattr(self._library, name)(*arguments)
        if code == 0:
            return
        text = c_char_p()
        self._library.cuGetErrorName(code, byref(text))
        told = (text.value or b"").decode("ascii", "replace") or str(code)
        why = Reason.MEMORY_LIMIT if code == _OUT_OF_MEMORY else reason
        raise KvxferError(why, f"{name} failed: {told}", field="", action=name, cuda=told)


@functools.cache
def driver() -> Cuda:
    """The driver of this machine.

    :raises KvxferError: UNSUPPORTED.
    """
    return Cuda(LIBRARY)


def number_of(cuda: Cuda, uuid: bytes, device: int) -> int:
    """Which of this process's GPUs a handle means: containers number them as they like, so its UUID decides.

    :param uuid: empty where it was not told: then it is ``device``.
    :raises KvxferError: MEMORY_HANDLE_INVALID where this process may not use it.
    """
    here = cuda.devices()
    if not uuid and device < len(here):
        return device
    if uuid in here:
        return here.index(uuid)
    name = uuid.hex() or f"number {device}"
    raise KvxferError(
        Reason.MEMORY_HANDLE_INVALID,
        f"GPU {name} is none of the {len(here)} that this process may use",
        field="device_uuid",
        device=name,
        devices=len(here),
    )
