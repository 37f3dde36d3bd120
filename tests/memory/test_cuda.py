"""The calls of torch behind the narrow interface: which device they are made on, and what becomes of their failures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shmring.errors import SlabError
from shmring.gpu import cuda as cuda_module
from shmring.gpu.cuda import CudaError, TorchCuda, cuda_index, stream_number
from tests.tables import for_each


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

    def device_count(self) -> int:
        return 3

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(uuid=f"GPU-{device}")

    def is_initialized(self) -> bool:
        return self.initialised

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

    def ExternalStream(self, stream: int, device: torch.device) -> tuple[int, torch.device]:
        return stream, device

    def default_stream(self, device: torch.device) -> tuple[str, torch.device]:
        return "default", device


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


@for_each("call", ["cudaHostRegister", "cudaHostUnregister"])
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


@for_each("error", [AssertionError("Torch not compiled"), RuntimeError("forked\nhow to debug kernels")])
def test_what_torch_raises_becomes_the_same_error(torch_cuda: TorchDotCuda, error: Exception) -> None:
    torch_cuda.error = error
    with pytest.raises(CudaError, match=rf"^cudaHostRegister failed: {str(error).splitlines()[0]}$") as caught:
        TorchCuda().host_register(0, 0, 4096)
    assert (caught.value.code, caught.value.nbytes) == (None, 4096)


def test_the_current_device_is_not_asked_for_before_cuda_is_in_use(
    torch_cuda: TorchDotCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_cuda.initialised = False
    assert TorchCuda().current_device() == 0
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 5, raising=False)
    torch_cuda.initialised = True
    assert TorchCuda().current_device() == 5


def test_gpus_are_found_by_their_name(torch_cuda: TorchDotCuda) -> None:
    assert TorchCuda().uuid(2) == "GPU-2"
    assert TorchCuda().device_index_of("GPU-1") == 1
    assert TorchCuda().device_index_of("GPU-7") is None


def test_torchs_allocator_is_told_of_streams_by_their_numbers(torch_cuda: TorchDotCuda) -> None:
    memory = Recorded()
    TorchCuda().used_on(memory, 7)
    TorchCuda().used_on(memory, 0)
    assert memory.log == [(7, "where it is"), ("default", "where it is")]
    with pytest.raises(CudaError, match="recording a use failed: broken"):
        TorchCuda().used_on(Recorded(RuntimeError("broken")), 7)


def test_a_stream_is_its_number() -> None:
    assert stream_number(5) == 5
    assert stream_number(SimpleNamespace(cuda_stream=6)) == 6


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
    """Memory that notes which streams use it."""

    device = "where it is"

    def __init__(self, error: Exception | None = None) -> None:
        self.log: list[Any] = []
        self.error = error

    def record_stream(self, stream: Any) -> None:
        if self.error is not None:
            raise self.error
        self.log.append(stream)


@for_each(("device", "index"), [("cuda", 4), ("cuda:1", 1), (2, 2), (torch.device("cuda", 3), 3)])
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
        lambda: real.gpu(0),
        lambda: real.clear_error(0),
    ):
        with pytest.raises(CudaError):
            call()
