"""The calls of torch behind the narrow interface: which device they are made on, and what becomes of their failures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shmring.errors import SlabError
from shmring.gpu import cuda as cuda_module
from shmring.gpu.cuda import CudaError, DeviceBytes, TorchCuda, cuda_index


class Code:
    """An error code as torch's binding returns it: an enumeration that names success only."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __int__(self) -> int:
        return self._code


class Runtime:
    """What torch.cuda.cudart() returns."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.code = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Code:
        self.log.append(("register", address, nbytes, flags))
        return Code(self.code)

    def cudaHostUnregister(self, address: int) -> Code:
        self.log.append(("unregister", address))
        return Code(self.code)

    def cudaGetErrorString(self, code: Code) -> str:
        return f"text of {int(code)}"


class TorchDotCuda:
    """As much of torch.cuda as is called."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.runtime = Runtime(self.log)
        self.initialised = True
        self.error: Exception | None = None

    class Event:
        """An event that notes how it was made."""

        def __init__(self, log: list[Any], **options: Any) -> None:
            self.log = log
            log.append(("event", options))

        def record(self, stream: Any) -> None:
            self.log.append(("record", stream))

        def ipc_handle(self) -> bytearray:
            return bytearray(b"handle")

        @staticmethod
        def from_ipc_handle(device: torch.device, handle: bytes) -> tuple[torch.device, bytes]:
            return device, handle

    def make_events(self) -> None:
        made, log = self.Event, self.log

        class Event(made):  # type: ignore[misc, valid-type]
            def __init__(self, **options: Any) -> None:
                super().__init__(log, **options)

        self.Event = Event  # type: ignore[misc]

    def device_count(self) -> int:
        return 3

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(uuid=f"GPU-{device}")

    def is_initialized(self) -> bool:
        return self.initialised

    def current_device(self) -> int:
        self.log.append("current_device")
        return 5

    def cudart(self) -> Runtime:
        if self.error is not None:
            raise self.error
        return self.runtime

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        self.log.append(("device", device))
        try:
            yield
        finally:
            self.log.append(("leave", "device"))

    def current_stream(self, device: int) -> str:
        self.log.append(("current_stream", device))
        return f"the stream of {device}"

    def set_stream(self, stream: Any) -> None:
        self.log.append(("set_stream", stream))


@pytest.fixture
def torch_cuda(monkeypatch: pytest.MonkeyPatch) -> TorchDotCuda:
    stub = TorchDotCuda()
    monkeypatch.setattr(cuda_module, "_cuda", stub)
    return stub


def test_making_one_asks_cuda_nothing(torch_cuda: TorchDotCuda) -> None:
    TorchCuda()
    assert torch_cuda.log == []


def test_memory_is_registered_portably_on_the_device_that_was_named(torch_cuda: TorchDotCuda) -> None:
    TorchCuda().host_register(3, 0x1000, 4096)
    TorchCuda().host_unregister(3, 0x1000)
    assert torch_cuda.log == [
        ("device", 3), ("register", 0x1000, 4096, 1), ("leave", "device"),
        ("device", 3), ("unregister", 0x1000), ("leave", "device"),
    ]  # fmt: skip


@pytest.mark.parametrize("call", ["cudaHostRegister", "cudaHostUnregister"])
def test_a_code_that_is_returned_becomes_an_error(torch_cuda: TorchDotCuda, call: str) -> None:
    torch_cuda.runtime.code = 2
    calls: dict[str, Callable[[], None]] = {
        "cudaHostRegister": lambda: TorchCuda().host_register(0, 0, 4096),
        "cudaHostUnregister": lambda: TorchCuda().host_unregister(0, 0),
    }
    with pytest.raises(CudaError, match=rf"^{call} failed: text of 2 \(error 2\)$") as caught:
        calls[call]()
    assert (caught.value.call, caught.value.code) == (call, 2)
    assert isinstance(caught.value, SlabError)


@pytest.mark.parametrize("error", [AssertionError("Torch not compiled"), RuntimeError("forked\nhow to debug kernels")])
def test_what_torch_raises_becomes_the_same_error(torch_cuda: TorchDotCuda, error: Exception) -> None:
    torch_cuda.error = error
    with pytest.raises(CudaError, match=rf"^cudaHostRegister failed: {str(error).splitlines()[0]}$") as caught:
        TorchCuda().host_register(0, 0, 4096)
    assert (caught.value.code, caught.value.nbytes) == (None, 4096)


def test_the_current_device_is_not_asked_for_before_cuda_is_in_use(torch_cuda: TorchDotCuda) -> None:
    torch_cuda.initialised = False
    assert TorchCuda().current_device() == 0
    assert torch_cuda.log == []
    torch_cuda.initialised = True
    assert TorchCuda().current_device() == 5


def test_events_sleep_and_shared_ones_are_for_other_processes(torch_cuda: TorchDotCuda) -> None:
    torch_cuda.make_events()
    TorchCuda().record("copies")
    shared = TorchCuda().record_shared("writes", None)
    assert TorchCuda().record_shared("again", shared) is shared
    assert torch_cuda.log == [
        ("event", {"blocking": True}), ("record", "copies"),
        ("event", {"interprocess": True}), ("record", "writes"), ("record", "again"),
    ]  # fmt: skip
    assert TorchCuda().export_event(shared) == b"handle"
    assert TorchCuda().open_event(2, b"handle") == (torch.device("cuda", 2), b"handle")


def test_gpus_are_found_by_their_name(torch_cuda: TorchDotCuda) -> None:
    assert TorchCuda().uuid(2) == "GPU-2"
    assert TorchCuda().device_index_of("GPU-1") == 1
    assert TorchCuda().device_index_of("GPU-7") is None


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_enters_its_device_before_its_stream(torch_cuda: TorchDotCuda, fails: bool) -> None:
    """And leaves both, whatever happens: the thread's current stream is that of whoever computes on it."""
    target, source = torch.zeros(8, dtype=torch.uint8), np.arange(7 if fails else 8, dtype=np.uint8)
    copies = SimpleNamespace(device_index=2)
    with pytest.raises(CudaError, match="a copy to the device failed") if fails else contextlib.nullcontext():
        TorchCuda().copy_to_device(target, source, copies)
    entered = [("device", 2), ("current_stream", 2), ("set_stream", copies)]
    assert torch_cuda.log == [*entered, ("set_stream", "the stream of 2"), ("leave", "device")]
    assert target.tolist() == ([0] * 8 if fails else list(range(8)))


def test_the_pending_error_is_taken_by_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = [RuntimeError("CUDA error: out of memory")]
    launched: list[int] = []

    def launch(device: int) -> None:
        launched.append(device)
        if pending:
            raise pending.pop()

    monkeypatch.setattr(TorchCuda, "_launch", staticmethod(launch))
    TorchCuda().clear_error(2)
    assert launched == [2, 2], "the second one proves that it is gone"
    pending.extend([RuntimeError("again"), RuntimeError("again")])
    with pytest.raises(CudaError, match="clearing the pending error failed: again"):
        TorchCuda().clear_error(2)


class Recorded:
    """An event or a stream that notes what is done with it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.log: list[Any] = []
        self.error = error

    def _did(self, what: Any) -> bool:
        if self.error is not None:
            raise self.error
        self.log.append(what)
        return True

    def query(self) -> bool:
        return self._did("query")

    def synchronize(self) -> None:
        self._did("synchronize")

    def wait_event(self, event: Any) -> None:
        self._did(("wait", event))


def test_events_and_streams_are_torchs() -> None:
    event, stream = Recorded(), Recorded()
    assert TorchCuda().query(event)
    TorchCuda().synchronize(event)
    TorchCuda().wait_event(stream, event)
    assert (event.log, stream.log) == (["query", "synchronize"], [("wait", event)])


@pytest.mark.parametrize("call", ["query", "synchronize"])
def test_an_event_that_fails_is_a_cuda_error(call: str) -> None:
    with pytest.raises(CudaError, match="an event failed: CUDA error: unspecified launch failure"):
        getattr(TorchCuda(), call)(Recorded(RuntimeError("CUDA error: unspecified launch failure\nCompile with ...")))
    with pytest.raises(CudaError, match="in a stream failed: broken"):
        TorchCuda().wait_event(Recorded(RuntimeError("broken")), "event")


def test_bytes_on_the_device_show_themselves_and_keep_their_memory() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    lent = DeviceBytes(memory, memory.data_ptr() + 16, 8)
    shown = lent.__cuda_array_interface__
    assert shown["data"] == (memory.data_ptr() + 16, False)
    assert (shown["shape"], shown["typestr"], shown["strides"]) == ((8,), "|u1", None)
    assert lent._memory is memory


@pytest.mark.parametrize(("device", "index"), [("cuda", 4), ("cuda:1", 1), (2, 2), (torch.device("cuda", 3), 3)])
def test_devices_are_named_in_all_of_torchs_ways(cuda: Any, device: Any, index: int) -> None:
    cuda.select(4)
    assert cuda_index(cuda, device) == index


def test_the_host_is_no_cuda_device(cuda: Any) -> None:
    with pytest.raises(ValueError, match="cpu is no CUDA device"):
        cuda_index(cuda, "cpu")


@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="this torch knows CUDA")
def test_without_cuda_it_says_so_and_fails_as_it_should() -> None:
    real = TorchCuda()
    assert real.unavailable() == "this torch was built without CUDA"
    assert real.current_device() == 0
    for call in (
        lambda: real.host_register(0, 4096, 4096),
        lambda: real.allocate(0, 4096),
        lambda: real.create_stream(0),
        lambda: real.current_stream(0),
        lambda: real.record("stream"),
        lambda: real.clear_error(0),
    ):
        with pytest.raises(CudaError):
            call()
