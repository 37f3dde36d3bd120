"""CUDA as shmring uses it: a dozen calls, and the errors they end in.

Theory of operation: everything above this file calls :class:`Cuda`, a protocol that is narrow on purpose. Tests can make each
of its calls fail, on a machine without a GPU. The real one, :class:`TorchCuda`, calls torch: it uses the streams, the allocator
and the runtime of the code that computes in this process. The calls for every request go to the driver (:meth:`Cuda.gpu`), in
the context that torch uses.

Invariants:

- every call names its device, because the current one belongs to a thread: on a worker thread it is GPU 0, and a call
  there would make a context of some hundred megabytes on a GPU of another process (sglang #22662);
- no call of CUDA is made before a caller asks for one: importing this does nothing, and neither does making a
  :class:`TorchCuda`;
- a failed call raises a :class:`CudaError`, and leaves no pending error that the next kernel of this thread would report.

Queries of events and streams are not allowed on any thread while a graph is captured in CUDA's global mode: capture with
``capture_error_mode="thread_local"`` in a process that serves a ring.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Protocol

import torch

from shmring.core.compiled import Gpu
from shmring.gpu.driver import CudaError, Driver

__all__ = ["Cuda", "CudaError", "Stream", "TorchCuda", "cuda_index", "stream_number"]

# torch annotates some of these and not others, and not the same in every version.
_cuda: Any = torch.cuda

#: cudaHostRegisterPortable: pinned for the contexts of all GPUs, not for that of the device at hand alone.
_REGISTER_PORTABLE = 1


#: Work for a device that is done in order: torch's, or its number.
Stream = Any


class Cuda(Protocol):
    """The calls of CUDA that shmring needs. Every call is thread-safe, and raises :class:`CudaError` where it fails."""

    def unavailable(self) -> str | None:
        """Returns why CUDA can't be used in this process; ``None`` if it seems that it can."""

    def current_device(self) -> int:
        """Returns the index of this thread's device, without initialising CUDA for the answer."""

    def host_register(self, device_index: int, address: int, nbytes: int) -> None:
        """Pins a page-aligned range of this process's memory, for all devices. Blocks, for about 0.1 s a GB."""

    def host_unregister(self, device_index: int, address: int) -> None:
        """Takes back what :meth:`host_register` did at this address."""

    def clear_error(self, device_index: int) -> None:
        """Clears the error that a failed call left pending on this thread, so that no other code gets it.

        Raises:
            CudaError: it does not go away: the device itself is in trouble.
        """

    def allocate(self, device_index: int, nbytes: int) -> torch.Tensor:
        """Returns new device memory as bytes: ``uint8 (nbytes,)``."""

    def create_stream(self, device_index: int) -> Stream:
        """Returns a stream for copies, beside those for computing."""

    def current_stream(self, device_index: int) -> int:
        """Returns the number of the stream that this thread computes on."""

    def used_on(self, memory: torch.Tensor, stream: int) -> None:
        """Says that a stream uses memory of :meth:`allocate`, so that freeing it waits for what is queued there."""

    def gpu(self, device_index: int) -> Gpu:
        """Returns a GPU as its driver has it; the same one each time, after CUDA was initialised."""

    def device_index_of(self, uuid: str) -> int | None:
        """Returns the index under which this process sees a GPU; None if it does not."""

    def uuid(self, device_index: int) -> str:
        """Returns the name of a GPU that is the same in every process."""


def cuda_index(cuda: Cuda, device: torch.device | str | int) -> int:
    """Returns the index of a CUDA device; ``"cuda"`` is this thread's current one.

    Raises:
        ValueError: it is no CUDA device.
    """
    index = _index_of(device)
    return cuda.current_device() if index is None else index


@functools.lru_cache(maxsize=64)
def _index_of(device: torch.device | str | int) -> int | None:
    wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if wanted.type != "cuda":
        raise ValueError(f"{wanted} is no CUDA device; on the host, use the payload where it lies")
    return wanted.index


class _calling:  # a function to whoever uses it; as a generator it would take longer than some of the calls
    """Turns what torch raises into a :class:`CudaError`."""

    __slots__ = ("_call", "_nbytes")

    def __init__(self, call: str, nbytes: int | None = None) -> None:
        self._call = call
        self._nbytes = nbytes

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, (RuntimeError, AssertionError)):  # AssertionError: torch was built without CUDA
            first_line = (str(error).splitlines() or [type(error).__name__])[0]  # advice for debugging kernels follows
            raise CudaError(f"{self._call} failed: {first_line}", call=self._call, nbytes=self._nbytes) from None


class TorchCuda:
    """CUDA by way of torch. Makes no call before one is asked for."""

    def unavailable(self) -> str | None:
        if torch.version.cuda is None:
            return "this torch was built without CUDA"
        if not _cuda.is_available():
            return "torch finds no CUDA device"
        return None

    def current_device(self) -> int:
        # Choosing another device initialises CUDA.
        return int(torch._C._cuda_getDevice()) if _cuda.is_initialized() else 0

    def host_register(self, device_index: int, address: int, nbytes: int) -> None:
        with _calling("cudaHostRegister", nbytes), _cuda.device(device_index):
            _check("cudaHostRegister", _cuda.cudart().cudaHostRegister(address, nbytes, _REGISTER_PORTABLE), nbytes)

    def host_unregister(self, device_index: int, address: int) -> None:
        with _calling("cudaHostUnregister"), _cuda.device(device_index):
            _check("cudaHostUnregister", _cuda.cudart().cudaHostUnregister(address), None)

    def clear_error(self, device_index: int) -> None:
        # torch binds no cudaGetLastError, and a libcudart found by name may not be the one it calls, so that one's last
        # error would be another. But the check behind each of its kernels takes what is pending, and reports it.
        with contextlib.suppress(RuntimeError, AssertionError):
            self._launch(device_index)
        with _calling("clearing the pending error"):
            self._launch(device_index)

    @staticmethod
    def _launch(device_index: int) -> None:
        torch.full((1,), 1, dtype=torch.uint8, device=torch.device("cuda", device_index))

    def allocate(self, device_index: int, nbytes: int) -> torch.Tensor:
        with _calling("allocating device memory", nbytes):
            return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device_index))

    def create_stream(self, device_index: int) -> Stream:
        with _calling("creating a stream"):
            return _cuda.Stream(torch.device("cuda", device_index))

    def current_stream(self, device_index: int) -> int:
        try:
            return int(torch._C._cuda_getCurrentRawStream(device_index))
        except (RuntimeError, AttributeError) as error:  # AttributeError: torch was built without CUDA
            raise CudaError(f"asking for the current stream failed: {error}", call="current_stream") from None

    def used_on(self, memory: torch.Tensor, stream: int) -> None:
        device = memory.device
        with _calling("recording a use"):
            memory.record_stream(_cuda.ExternalStream(stream, device) if stream else _cuda.default_stream(device))

    def gpu(self, device_index: int) -> Gpu:
        with _calling("initialising CUDA"):
            _cuda.init()
        return _gpu(device_index)

    def device_index_of(self, uuid: str) -> int | None:
        with _calling("asking for the devices"):
            devices = range(_cuda.device_count())
        return next((device for device in devices if self.uuid(device) == uuid), None)

    def uuid(self, device_index: int) -> str:
        with _calling("asking for a device's properties"):
            return str(_cuda.get_device_properties(device_index).uuid)


_driver = Driver()


@functools.cache
def _gpu(device_index: int) -> Gpu:
    return _driver.gpu(device_index)


def stream_number(stream: Stream) -> int:
    """Returns what CUDA calls a stream of torch's."""
    return stream if isinstance(stream, int) else int(stream.cuda_stream)


def _check(call: str, result: Any, nbytes: int | None) -> None:
    """Raises if a call of the runtime did not return 0; torch's enumeration names no other value."""
    code = int(result)
    if code:
        text = _cuda.cudart().cudaGetErrorString(result)
        raise CudaError(f"{call} failed: {text} (error {code})", call=call, code=code, nbytes=nbytes)
