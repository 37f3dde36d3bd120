"""CUDA's driver: what torch does not offer of it, and the addresses of what is called for every copy.

What torch does not offer is plain device memory, and handing it to another process.

torch's own allocator does not give memory out whose handle means exactly that memory: what it returns is a part of a larger
block, or mapped page by page (``expandable_segments``), and sharing it goes through reference counts in files of its own under
``/dev/shm``. The driver library has one name and one interface for all versions of the runtime, so there is no question of
which of them this process uses.

Invariants: a call leaves the thread's current context as it was, and no error pending (the driver has no such thing).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator

from shmring.core.compiled import Gpu
from shmring.errors import SlabError

__all__ = ["CudaError", "Driver", "IPC_HANDLE_NBYTES", "driver_error"]

IPC_HANDLE_NBYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


_ON_CUDA = 2  # as DLPack numbers it


class CudaError(SlabError):
    """A call of CUDA failed, or there is no CUDA here.

    Attributes:
        call: what was called.
        code: CUDA's error code, where it was returned; ``None`` where torch said it in words.
    """

    def __init__(self, message: str, *, call: str, code: int | None = None, nbytes: int | None = None) -> None:
        super().__init__(message, nbytes=nbytes)
        self.call = call
        self.code = code


def driver_error(call: str, code: int, text: str) -> CudaError:
    """Returns the error of a driver's call that has returned a code."""
    return CudaError(f"{call} failed: {text} (error {code})", call=call, code=code)


class _Handle(ctypes.Structure):
    """CUipcMemHandle: passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_NBYTES),)


_SIGNATURES: dict[str, tuple[type[object], ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.c_void_p, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.c_void_p, ctypes.c_int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (ctypes.c_void_p, ctypes.c_size_t),
    "cuMemFree_v2": (ctypes.c_uint64,),
    "cuIpcGetMemHandle": (ctypes.c_void_p, ctypes.c_uint64),
    "cuIpcOpenMemHandle_v2": (ctypes.c_void_p, _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (ctypes.c_uint64,),
    "cuGetErrorString": (ctypes.c_int, ctypes.c_void_p),
}

#: What a :class:`Gpu` calls by itself.
_OF_GPU = (
    *("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuMemcpyHtoDAsync_v2", "cuGetErrorString"),
    *("cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventSynchronize", "cuStreamWaitEvent", "cuStreamQuery"),
    *("cuIpcGetEventHandle", "cuIpcOpenEventHandle"),
)


class Driver:
    """The driver library of this process. Loads it at the first call. Thread-safe."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._name = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()

    def allocate(self, device_index: int, nbytes: int) -> int:
        """Returns the address of new memory."""
        address = ctypes.c_uint64()
        with self._current(device_index):
            self._call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def free(self, device_index: int, address: int) -> None:
        """Frees what :meth:`allocate` returned. Waits for the device."""
        with self._current(device_index):
            self._call("cuMemFree_v2", address)

    def export(self, device_index: int, address: int) -> bytes:
        """Returns the handle by which other processes open memory of :meth:`allocate`."""
        handle = _Handle()
        with self._current(device_index):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.reserved)

    def open(self, device_index: int, handle: bytes) -> int:
        """Returns where another process's memory is mapped here."""
        address = ctypes.c_uint64()
        with self._current(device_index):
            self._call(
                "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_ENABLE_PEER_ACCESS
            )
        return address.value

    def close(self, device_index: int, address: int) -> None:
        """Unmaps what :meth:`open` returned. The memory itself is its owner's. Waits for the device."""
        with self._current(device_index):
            self._call("cuCtxSynchronize")  # that unmapping waits, as freeing does, is written nowhere
            self._call("cuIpcCloseMemHandle", address)

    def gpu(self, device_index: int) -> Gpu:
        """Returns a GPU as this process has it. Makes its context if torch has not."""
        context = self._context(device_index).value
        assert context is not None
        functions = {name: ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0 for name in _OF_GPU}
        return Gpu((_ON_CUDA, device_index), context, functions, driver_error)

    @functools.cached_property
    def _library(self) -> ctypes.CDLL:
        try:
            library = ctypes.CDLL(self._name)
        except OSError as error:
            raise CudaError(f"the driver's library can't be loaded: {error}", call="dlopen") from None
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        return library

    @contextlib.contextmanager
    def _current(self, device_index: int) -> Iterator[None]:
        """Makes the primary context of a device, torch's own, this thread's current one."""
        self._call("cuCtxPushCurrent_v2", self._context(device_index))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, device_index: int) -> ctypes.c_void_p:
        with self._lock:
            if device_index not in self._contexts:
                self._call("cuInit", 0)
                number, context = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuDeviceGet", ctypes.byref(number), device_index)
                # Retained until the process ends: what is mapped in it must not go with whoever else releases it.
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number.value)
                self._contexts[device_index] = context
            return self._contexts[device_index]

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode(errors="replace")
            raise driver_error(name, code, reason)
