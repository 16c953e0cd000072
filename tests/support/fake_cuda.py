"""A double of libcuda: device memory is a memfd, an IPC handle names its process and descriptor.

As strict as the driver where we have to be careful: nothing works without a context, a process cannot open what it has
exported itself, and memory is given back once.  ``FAKE_CUDA_GPUS`` are the GPUs that a process sees, each a letter that
stands for its UUID; ``FAKE_CUDA_BYTES`` is what one allocation may have.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK, INVALID_VALUE, OUT_OF_MEMORY, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400 };
typedef struct { char bytes[64]; } Handle;
typedef struct { int pid, fd; size_t size; } Name;
static struct { uint64_t address; size_t size; int fd, opened; } live[64];
static __thread int depth;

static const char *gpus(void) { const char *g = getenv("FAKE_CUDA_GPUS"); return g ? g : "A"; }
static int find(uint64_t a) {
    for (int i = 0; i < 64; i++)
        if (live[i].address && a >= live[i].address && a < live[i].address + live[i].size) return i;
    return -1;
}
static int add(int fd, size_t size, int opened, uint64_t *out) {
    void *p = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) return OUT_OF_MEMORY;
    for (int i = 0; i < 64; i++) if (!live[i].address) {
        live[i].address = (uint64_t)p; live[i].size = size; live[i].fd = fd; live[i].opened = opened;
        *out = (uint64_t)p;
        return OK;
    }
    return OUT_OF_MEMORY;
}
static int drop(uint64_t a, int opened) {
    int i = find(a);
    if (!depth) return INVALID_CONTEXT;
    if (i < 0 || live[i].address != a || live[i].opened != opened) return INVALID_VALUE;
    munmap((void *)a, live[i].size); close(live[i].fd); live[i].address = 0;
    return OK;
}
int fake_live(void) { int n = 0; for (int i = 0; i < 64; i++) n += live[i].address != 0; return n; }
int fake_depth(void) { return depth; }

int cuInit(unsigned f) { return *gpus() ? OK : NO_DEVICE; }
int cuGetErrorName(int e, const char **out) {
    *out = e == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : e == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE"
         : e == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : e == INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE"
         : "CUDA_ERROR_INVALID_VALUE";
    return OK;
}
int cuDeviceGetCount(int *n) { *n = (int)strlen(gpus()); return OK; }
int cuDeviceGet(int *d, int n) { if (n < 0 || n >= (int)strlen(gpus())) return INVALID_DEVICE; *d = n; return OK; }
int cuDeviceGetUuid_v2(char *u, int d) { memset(u, gpus()[d], 16); return OK; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)(intptr_t)(d + 1); return OK; }
int cuDevicePrimaryCtxRelease_v2(int d) { return OK; }
int cuCtxPushCurrent_v2(void *c) { if (!c) return INVALID_CONTEXT; depth++; return OK; }
int cuCtxPopCurrent_v2(void **c) { if (!depth) return INVALID_CONTEXT; depth--; return OK; }
int cuCtxSynchronize(void) { return depth ? OK : INVALID_CONTEXT; }
int cuMemAlloc_v2(uint64_t *out, size_t size) {
    const char *limit = getenv("FAKE_CUDA_BYTES");
    if (!depth) return INVALID_CONTEXT;
    if (limit && size > (size_t)atoll(limit)) return OUT_OF_MEMORY;
    int fd = memfd_create("fake-cuda", 0);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return OUT_OF_MEMORY;
    int code = add(fd, size, 0, out);
    if (code == OK) memset((void *)*out, 0xEE, size);
    return code;
}
int cuMemFree_v2(uint64_t a) { return drop(a, 0); }
int cuIpcCloseMemHandle(uint64_t a) { return drop(a, 1); }
static int copy(void *to, const void *from, size_t n) {
    if (!depth) return INVALID_CONTEXT;
    memcpy(to, from, n);
    return OK;
}
int cuMemsetD8_v2(uint64_t a, unsigned char v, size_t n) {
    if (!depth) return INVALID_CONTEXT;
    memset((void *)a, v, n);
    return OK;
}
int cuMemcpyHtoD_v2(uint64_t a, const void *p, size_t n) { return copy((void *)a, p, n); }
int cuMemcpyDtoH_v2(void *p, uint64_t a, size_t n) { return copy(p, (void *)a, n); }
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t a) {
    int i = find(a);
    if (!depth) return INVALID_CONTEXT;
    if (i < 0) return INVALID_VALUE;
    *base = live[i].address; *size = live[i].size;
    return OK;
}
int cuIpcGetMemHandle(Handle *h, uint64_t a) {
    int i = find(a);
    if (!depth) return INVALID_CONTEXT;
    if (i < 0 || live[i].opened) return INVALID_VALUE;
    Name name = {getpid(), live[i].fd, live[i].size};
    memset(h, 0, sizeof *h); memcpy(h, &name, sizeof name);
    return OK;
}
int cuIpcOpenMemHandle_v2(uint64_t *out, Handle h, unsigned flags) {
    Name name; char path[64];
    memcpy(&name, &h, sizeof name);
    if (!depth || name.pid == getpid()) return INVALID_CONTEXT;
    if (flags != 1) return INVALID_VALUE;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", name.pid, name.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    return fd < 0 ? INVALID_HANDLE : add(fd, name.size, 1, out);
}
"""


def build(directory: Path) -> Path:
    """Compile it; skips the test where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the double of libcuda cannot be built")
    source, library = directory / "fake_cuda.c", directory / "libfakecuda.so"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True, timeout=60)
    return library


#: Another process: opens the handle argv[2] (hex) of GPU argv[3] (hex), size argv[4], and says what is in there, then
#: writes what it reads from standard input into it.
OTHER = """
import sys
from kvxfer.memory import cuda
cuda.LIBRARY = sys.argv[1]
from kvxfer_client import CudaIpc, DeviceRegion
handle = CudaIpc(bytes.fromhex(sys.argv[2]), int(sys.argv[5]), int(sys.argv[4]), 0, bytes.fromhex(sys.argv[3]))
with DeviceRegion.map(handle) as region:
    driver = cuda.driver()
    print(region.device, driver.read(region.device, region.address, region.size).hex(), flush=True)
    driver.write(region.device, region.address, bytes.fromhex(sys.stdin.readline()))
print(driver._library.fake_live())
"""


def environment(gpus: str) -> dict[str, str]:
    """Of a process that sees these GPUs."""
    return {**os.environ, "FAKE_CUDA_GPUS": gpus}
