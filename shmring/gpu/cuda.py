"""CUDA as shmring uses it: a dozen calls, and the errors they end in.

Theory of operation: everything above this file speaks to :class:`Cuda`, a protocol that is narrow on purpose. What it
leaves out can't go wrong, and what it holds can be made to fail, call by call, on a machine without a GPU. The real
one, :class:`TorchCuda`, is torch's: its streams and its allocator are those of whoever computes in this process, and its
runtime is the one whose errors they would see.

Invariants:

- every call names its device, because the current one belongs to a thread: on a worker thread it is GPU 0, and a call
  there would make a context of some hundred megabytes on a GPU that is somebody else's (sglang #22662);
- no call of CUDA is made before somebody asks for one: importing this does nothing, and neither does making a
  :class:`TorchCuda`;
- what CUDA refuses is a :class:`CudaError`, and leaves no error pending for the next kernel of this thread to report.

Event queries are not allowed on any thread while a graph is captured in CUDA's global mode: capture with
``capture_error_mode="thread_local"`` in a process that serves a ring.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from shmring.errors import SlabError

__all__ = ["Cuda", "CudaError", "DeviceBytes", "Event", "Stream", "TorchCuda", "cuda_index"]

# torch annotates some of these and not others, and not the same in every version.
_cuda: Any = torch.cuda

#: cudaHostRegisterPortable: pinned for the contexts of all GPUs, not for that of the device at hand alone.
_REGISTER_PORTABLE = 1


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


#: A point in a stream, and work for a device that is done in order. To everybody above, they are what :class:`Cuda` takes.
Event = Any
Stream = Any


class _ArrayInterface(TypedDict):
    shape: tuple[int]
    typestr: str
    data: tuple[int, bool]  # address, whether read-only
    strides: None
    version: int


class DeviceBytes:
    """A range of device memory that somebody lent out. Tensors made of it keep it alive, so its death is theirs.

    Args:
        memory: whatever it is a part of; kept for as long as somebody uses the part.
        address, nbytes: which part; at least one byte.

    Source: numba's CUDA array interface, version 3; without a ``stream``, as whoever lends orders the streams.
    """

    __slots__ = ("__cuda_array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: object, address: int, nbytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__: _ArrayInterface = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class Cuda(Protocol):
    """What shmring needs of CUDA. Every call is thread-safe, and raises :class:`CudaError` where it fails."""

    def unavailable(self) -> str | None:
        """Returns why CUDA can't be used in this process; ``None`` if it can, as far as one knows before trying."""

    def current_device(self) -> int:
        """Returns the index of this thread's device, without initialising CUDA for the answer."""

    def host_register(self, device_index: int, address: int, nbytes: int) -> None:
        """Pins a page-aligned range of this process's memory, for all devices. Blocks, for about 0.1 s a GB."""

    def host_unregister(self, device_index: int, address: int) -> None:
        """Takes back what :meth:`host_register` did at this address."""

    def clear_error(self, device_index: int) -> None:
        """Takes the error that a failed call left pending on this thread, so that nobody else meets it.

        Raises:
            CudaError: it does not go away: the device itself is in trouble.
        """

    def allocate(self, device_index: int, nbytes: int) -> torch.Tensor:
        """Returns new device memory as bytes: ``uint8 (nbytes,)``."""

    def view(self, device_index: int, lent: DeviceBytes) -> torch.Tensor:
        """Returns a range of device memory as bytes, ``uint8 (nbytes,)``, that keep ``lent`` alive."""

    def create_stream(self, device_index: int) -> Stream:
        """Returns a stream for copies, beside those for computing."""

    def current_stream(self, device_index: int) -> Stream:
        """Returns the stream that this thread computes on."""

    def used_on(self, memory: torch.Tensor, stream: Stream) -> None:
        """Says that a stream uses memory of :meth:`allocate`, so that freeing it waits for what is queued there."""

    def copy_to_device(self, target: torch.Tensor, source: NDArray[np.uint8], stream: Stream) -> None:
        """Queues a copy of host bytes. Returns at once if they are pinned, else when they have left ``source``."""

    def record(self, stream: Stream) -> Event:
        """Returns a new event behind all that is queued in a stream."""

    def record_shared(self, stream: Stream, event: Event | None) -> Event:
        """Records an event that other processes can wait for: a new one, or again one that was made by this."""

    def export_event(self, event: Event) -> bytes:
        """Returns the handle by which other processes open an event of :meth:`record_shared`."""

    def open_event(self, device_index: int, handle: bytes) -> Event:
        """Returns another process's event. Not to be called twice for one handle, nor in the process that made it."""

    def device_index_of(self, uuid: str) -> int | None:
        """Returns the index under which this process sees a GPU; None if it does not."""

    def uuid(self, device_index: int) -> str:
        """Returns what a GPU is called in every process, whatever they count it as."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Has all later work of a stream wait for an event. Returns at once."""

    def query(self, event: Event) -> bool:
        """Returns whether the device has come to an event. Does not wait."""

    def synchronize(self, event: Event) -> None:
        """Waits until the device has come to an event; releases the interpreter lock, and the core."""


def cuda_index(cuda: Cuda, device: torch.device | str | int) -> int:
    """Returns the index of a CUDA device; ``"cuda"`` is this thread's current one.

    Raises:
        ValueError: it is no CUDA device.
    """
    wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if wanted.type != "cuda":
        raise ValueError(f"{wanted} is no CUDA device; on the host, use the payload where it lies")
    return cuda.current_device() if wanted.index is None else wanted.index


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
        if torch.version.cuda is None and torch.version.hip is None:
            return "this torch was built without CUDA"
        if not _cuda.is_available():
            return "torch finds no CUDA device"
        return None

    def current_device(self) -> int:
        # Whoever chose another device has initialised CUDA by that.
        return _cuda.current_device() if _cuda.is_initialized() else 0

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

    def view(self, device_index: int, lent: DeviceBytes) -> torch.Tensor:
        with _calling("viewing device memory"):
            view = torch.as_tensor(lent, device=torch.device("cuda", device_index))
        # A copy would not keep what it was made of, and its place would be lent out again under whoever writes there.
        assert view.data_ptr() == lent.__cuda_array_interface__["data"][0], "torch copied what it was to view"
        return view

    def create_stream(self, device_index: int) -> Stream:
        with _calling("creating a stream"):
            return _cuda.Stream(torch.device("cuda", device_index))

    def current_stream(self, device_index: int) -> Stream:
        with _calling("asking for the current stream"):
            return _cuda.current_stream(device_index)

    def used_on(self, memory: torch.Tensor, stream: Stream) -> None:
        with _calling("recording a use"):
            memory.record_stream(stream)

    def copy_to_device(self, target: torch.Tensor, source: NDArray[np.uint8], stream: Stream) -> None:
        # torch.cuda.stream() asks for the current device four times, which takes longer than to start a copy. The device comes
        # first: to go back to one that this thread has not used would make a context there.
        index = stream.device_index
        with _calling("a copy to the device", source.nbytes), _cuda.device(index):
            current = _cuda.current_stream(index)
            _cuda.set_stream(stream)
            try:
                target.copy_(torch.from_numpy(source), non_blocking=True)
            finally:
                _cuda.set_stream(current)

    def record(self, stream: Stream) -> Event:
        with _calling("recording an event"):
            event = _cuda.Event(blocking=True)  # a thread that waits for it sleeps, and leaves its core alone
            event.record(stream)
            return event

    def record_shared(self, stream: Stream, event: Event | None) -> Event:
        with _calling("recording a shared event"):
            shared = _cuda.Event(interprocess=True) if event is None else event
            shared.record(stream)
            return shared

    def export_event(self, event: Event) -> bytes:
        with _calling("exporting an event"):
            return bytes(event.ipc_handle())

    def open_event(self, device_index: int, handle: bytes) -> Event:
        with _calling("opening an event"):
            return _cuda.Event.from_ipc_handle(torch.device("cuda", device_index), handle)

    def device_index_of(self, uuid: str) -> int | None:
        with _calling("asking for the devices"):
            devices = range(_cuda.device_count())
        return next((device for device in devices if self.uuid(device) == uuid), None)

    def uuid(self, device_index: int) -> str:
        with _calling("asking for a device's properties"):
            return str(_cuda.get_device_properties(device_index).uuid)

    def wait_event(self, stream: Stream, event: Event) -> None:
        with _calling("waiting for an event in a stream"):
            stream.wait_event(event)

    def query(self, event: Event) -> bool:
        with _calling("asking after an event"):
            return bool(event.query())

    def synchronize(self, event: Event) -> None:
        with _calling("waiting for an event"):
            event.synchronize()


def _check(call: str, result: Any, nbytes: int | None) -> None:
    """Raises if a call of the runtime did not return 0; torch's enumeration names no other value."""
    code = int(result)
    if code:
        text = _cuda.cudart().cudaGetErrorString(result)
        raise CudaError(f"{call} failed: {text} (error {code})", call=call, code=code, nbytes=nbytes)
