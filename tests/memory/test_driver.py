"""The driver's calls, against a library of the same interface that is compiled for the test and hands out host memory."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from shmring.gpu.cuda import CudaError
from shmring.gpu.driver import IPC_HANDLE_NBYTES, Driver

# The signatures are those of cuda.h. Every call checks the context, and the handle carries an address, by value.
SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#define FAR (1ull << 62) /* a program's own heap may begin below 4 GiB */
typedef int CUresult; typedef int CUdevice; typedef void *CUcontext; typedef unsigned long long CUdeviceptr;
typedef struct { char reserved[64]; } CUipcMemHandle;
static int initialised; int synchronised;
static _Thread_local intptr_t stack[8]; static _Thread_local int depth; int retained; int log_device = -1;
CUresult cuInit(unsigned flags) { initialised = 1; return flags; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal + 10; return initialised && ordinal < 2 ? 0 : 101; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    retained++; *context = (CUcontext)(intptr_t)(0x7f0000000000 + device); return 0; }
CUresult cuCtxPushCurrent_v2(CUcontext context) { stack[depth++] = (intptr_t)context; return 0; }
CUresult cuCtxPopCurrent_v2(CUcontext *context) { *context = (CUcontext)stack[--depth]; return 0; }
int context_depth(void) { return depth; }
static int in_context(void) { if (!depth) return 201; log_device = (int)(stack[depth - 1] - 0x7f0000000000) - 10; return 0; }
CUresult cuCtxSynchronize(void) { synchronised++; return in_context(); }
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t nbytes) {
    if (nbytes > (1ull << 40)) return 2;
    *address = (CUdeviceptr)malloc(nbytes) | FAR; return in_context(); }
CUresult cuMemFree_v2(CUdeviceptr address) { free((void *)(address & ~FAR)); return in_context(); }
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    memset(handle, 0x5a, sizeof *handle); memcpy(handle->reserved + 56, &address, 8); return in_context(); }
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    memcpy(address, handle.reserved + 56, 8); return flags == 1 && handle.reserved[0] == 0x5a ? in_context() : 1; }
CUresult cuIpcCloseMemHandle(CUdeviceptr address) { return address && synchronised ? in_context() : 1; }
CUresult cuGetErrorString(CUresult code, const char **text) { *text = code == 2 ? "out of memory" : NULL; return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    place = tmp_path_factory.mktemp("driver")
    source, library = place / "driver.c", place / "libcuda.so.1"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return library


@pytest.fixture
def driver(library: Path) -> Driver:
    return Driver(str(library))


def test_memory_goes_to_another_process_and_back(driver: Driver, library: Path) -> None:
    address = driver.allocate(1, 4096)
    assert address > 1 << 32, "addresses have 64 bits"
    handle = driver.export(1, address)
    assert len(handle) == IPC_HANDLE_NBYTES
    assert driver.open(1, handle) == address
    driver.close(1, address)
    driver.free(1, address)
    stub = ctypes.CDLL(str(library))
    assert ctypes.c_int.in_dll(stub, "log_device").value == 1
    assert stub.context_depth() == 0, "the thread's context is as it was"


def test_a_context_is_retained_once_for_a_device(library: Path) -> None:
    retained = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "retained")
    before = retained.value
    driver = Driver(str(library))
    for _ in range(3):
        driver.free(0, driver.allocate(0, 16))
    assert retained.value == before + 1


def test_what_the_driver_refuses_is_said_in_its_words(driver: Driver, library: Path) -> None:
    with pytest.raises(CudaError, match=r"^cuMemAlloc_v2 failed: out of memory \(error 2\)$") as caught:
        driver.allocate(0, 1 << 41)
    assert (caught.value.call, caught.value.code) == ("cuMemAlloc_v2", 2)
    with pytest.raises(CudaError, match=r"cuIpcOpenMemHandle_v2 failed: unknown error \(error 1\)"):
        driver.open(0, bytes(IPC_HANDLE_NBYTES))
    with pytest.raises(CudaError, match="cuDeviceGet failed"):
        driver.allocate(7, 16)
    assert ctypes.CDLL(str(library)).context_depth() == 0


def test_a_machine_without_a_driver_says_so() -> None:
    with pytest.raises(CudaError, match="the driver's library can't be loaded"):
        Driver("libcuda-that-is-not-there.so.1").allocate(0, 16)
