"""From a submission in one process until its data is usable on the engine's stream in another.

- **Host slot**: written into a slot of the pinned slab in place; the engine calls ``claim.to``.
- **Device slab**: written into a slot on the GPU in place (``client.slot(nbytes, device="cuda")``); the engine's claim holds it
  where it lies.
- **CUDA IPC per tensor**: a new tensor on the GPU for each request, sent through ``torch.multiprocessing.Queue`` and
  received by a thread that blocks in it, which is how vLLM's ``v1/engine/tensor_ipc.py`` does it. The frontend keeps the
  tensor until the engine has answered. torch orders the streams, by an event for each tensor. The thread uses the tensor
  itself, which spares this route the hop to the engine's loop.

All write the marks, and wait until the GPU has, before the clock starts: making the content is no part of handing it over. A
message is handed over when the one before was answered: what is measured is the hand-over's own time, and no queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.multiprocessing

import shmring
from bench.children import Child, Children, Parent, described
from bench.gpu.device import DTYPE, ITEM_NBYTES, Gpu, Numbers, Openers, check, enter_all, marks, pinned_slab, sample

_torch_multiprocessing: Any = torch.multiprocessing  # it is not annotated

SPAWN = get_context("spawn")  # CUDA can't be used in a process that was forked

_OPEN_LIMIT_S = 180.0  # a context, and pinned memory, on a machine that does much else
_END_LIMIT_S = 30.0  # to unpin and unmap
_ANSWER_LIMIT_S = 30.0  # a thousand times what the slowest takes
_STOP_S = 0.2  # between two looks of the engine's thread whether it is to end
_SLOTS = 3  # that there is room for: the one that is being written, and those whose release is on its way
_SPARE_NBYTES = 16 << 20  # of a lease, and of a slab that has none
_numbers = itertools.count(1)  # of all messages of this process, so that none can be taken for an earlier one
_WARM_UP = 5  # messages: a slot's first use, an event's first opening, a clock that had slowed down

#: Hands so many bytes over, with this number, and returns how many nanoseconds later they were usable.
Ask = Callable[[int, int], Awaitable[int]]


class _Usable(NamedTuple):
    """What the engine answers: when the data was usable, on the clock that all processes share, and samples of it."""

    at_ns: int
    samples: list[int]


def _use(gpu: Gpu, tensor: torch.Tensor) -> _Usable:
    """Reads a tensor with one small kernel, and waits for its end."""
    samples = sample(tensor)
    gpu.finish()
    return _Usable(time.monotonic_ns(), samples.tolist())


class _Slots:
    """Slots of the pinned slab in host memory, or of the device slab.

    As every route it has two ends, each for the time of a ``with``: ``answering`` is the engine's, which is there before
    ``asking``, the frontend's. Both get the GPU, a directory for sockets, what ``create_shared`` made in their parent, and the
    bytes of the largest tensor.
    """

    def __init__(self, title: str, *, on_gpu: bool) -> None:
        self.title = title
        self._on_gpu = on_gpu
        self._ring_name = f"bench-{'device' if on_gpu else 'host'}"

    def create_shared(self) -> Any:
        return None

    @contextlib.asynccontextmanager
    async def answering(self, gpu: Gpu, directory: str, shared: Any, nbytes: int) -> AsyncIterator[None]:
        async def answer(claim: shmring.Claim) -> None:
            payload = claim.payload if self._on_gpu else await claim.to("cuda")
            await claim.reply(_use(gpu, payload.pop("x")))

        options = pinned_slab(_leased(nbytes))
        if self._on_gpu:
            options = {"device_slab_nbytes": _leased(nbytes), "slab_nbytes": 2 * _SPARE_NBYTES, "pin": "off"}
        async with gpu.serve(self._ring_name, socket_dir=directory, **options) as ring:
            running = asyncio.create_task(ring.run(answer, max_concurrency=1))
            try:
                yield
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def asking(self, gpu: Gpu, directory: str, shared: Any, nbytes: int) -> AsyncIterator[Ask]:
        where: dict[str, Any] = {"device": "cuda"} if self._on_gpu else {}
        # One lease for all slots: asking the engine for another one is no part of a hand-over.
        async with gpu.connect(self._ring_name, lease_nbytes=_leased(nbytes), socket_dir=directory) as client:

            async def ask(nbytes: int, number: int) -> int:
                async with client.slot(nbytes, timeout=_ANSWER_LIMIT_S, **where) as slot:
                    tensor = slot.tensor((nbytes // ITEM_NBYTES,), DTYPE)
                    marks(tensor).fill_(number)
                    if self._on_gpu:
                        gpu.finish()
                    started_ns = time.monotonic_ns()
                    answer = await client.request({"x": tensor}, timeout=_ANSWER_LIMIT_S, reply_type=_Usable)
                    del tensor  # or the slot would wait for the next message to let go of it
                check(answer.samples, number)
                return int(answer.at_ns - started_ns)

            yield ask


def _leased(nbytes: int) -> int:
    return _SLOTS * nbytes + _SPARE_NBYTES


class CudaIpc:
    """A new tensor for each request, through ``torch.multiprocessing.Queue``, in which a thread of the engine blocks.

    It uses a tensor, and answers through a pipe.
    """

    title = "torch CUDA IPC per tensor"

    def create_shared(self) -> Any:
        return _torch_multiprocessing.get_context("spawn").Queue(), *SPAWN.Pipe(duplex=False)

    @contextlib.asynccontextmanager
    async def answering(self, gpu: Gpu, directory: str, shared: Any, nbytes: int) -> AsyncIterator[None]:
        tensors, _, answers = shared
        stop = threading.Event()
        receiving = asyncio.create_task(asyncio.to_thread(_receive, gpu, tensors, answers, stop))
        try:
            yield
        finally:
            stop.set()
            await receiving

    @contextlib.asynccontextmanager
    async def asking(self, gpu: Gpu, directory: str, shared: Any, nbytes: int) -> AsyncIterator[Ask]:
        tensors, answers, _ = shared

        async def ask(nbytes: int, number: int) -> int:
            tensor = torch.empty(nbytes // ITEM_NBYTES, dtype=DTYPE, device=gpu.device)
            marks(tensor).fill_(number)
            gpu.finish()
            started_ns = time.monotonic_ns()
            tensors.put(tensor, timeout=_ANSWER_LIMIT_S)
            return _answered(answers, number) - started_ns

        yield ask


def _answered(answers: Any, number: int) -> int:
    """Waits for an answer, checks it, and returns when the data was usable. Nothing else is to be done here meanwhile."""
    if not answers.poll(_ANSWER_LIMIT_S):
        raise TimeoutError(f"no answer within {_ANSWER_LIMIT_S:g} s")
    answer = answers.recv()
    if not isinstance(answer, _Usable):
        raise RuntimeError(f"the engine's thread: {answer}")
    check(answer.samples, number)
    return answer.at_ns


def _receive(gpu: Gpu, tensors: Any, answers: Any, stop: threading.Event) -> None:
    """The engine's thread: says of each tensor when it was usable, or what of CUDA has failed: the frontend has to know."""

    def receive_one() -> _Usable | str:  # a function, so that the tensor is dropped before anything is said of it
        try:
            return _use(gpu, tensors.get(timeout=_STOP_S))
        except RuntimeError as error:
            return described(error)

    while not stop.is_set():
        with contextlib.suppress(queue.Empty):
            answers.send(receive_one())


HOST_SLOT, DEVICE_SLAB = "host-slot", "device-slab"

ROUTES: dict[str, _Slots | CudaIpc] = {
    HOST_SLOT: _Slots("host slot, claim.to", on_gpu=False),
    DEVICE_SLAB: _Slots("device slab", on_gpu=True),
    "cuda-ipc": CudaIpc(),
}
"""By name, in the order of tables."""


def openers(end: str, directory: str, nbytes: int, shared: Mapping[str, Any], gpu: Gpu) -> Openers:
    """Returns an end, ``answering`` or ``asking``, of each route that something is shared for; of tensors up to that size."""
    return {name: functools.partial(getattr(ROUTES[name], end), gpu, directory, shared[name], nbytes) for name in shared}


async def measure(gpu: Gpu, ask: Ask, nbytes: int, messages: int) -> Numbers:
    """Returns the microseconds of so many hand-overs."""
    times_ns = [await ask(nbytes, next(_numbers)) for _ in range(_WARM_UP + messages)]
    return {"us": [time_ns / 1e3 for time_ns in times_ns[_WARM_UP:]]}


class Engine(Children):
    """The engine, in a process of its own: answers on every route that something is shared for, of tensors up to a size."""

    def __init__(self, directory: str, nbytes: int, shared: Mapping[str, Any]) -> None:
        super().__init__("GPU")
        self.children.append(Child(SPAWN, "engine", "gpu", functools.partial(_answer, directory, nbytes, dict(shared))))

    def open(self) -> dict[str, str]:
        """Waits until it has opened everything; returns what could not be opened, and why, by name."""
        self.start()
        absent: dict[str, str] = self._told(SimpleNamespace(limit_s=None), _OPEN_LIMIT_S, "opening")
        return absent

    def finish(self) -> None:
        self._told(None, _END_LIMIT_S, "closing")

    def _told(self, message: object, limit_s: float, what: str) -> Any:
        with self._playing(limit_s) as deadline:
            self._tell(self.children, message, what)
            (answer,) = self._hear(self.children, deadline, what)
        return answer


async def _answer(directory: str, nbytes: int, shared: Mapping[str, Any], parent: Parent, _: object) -> None:
    """In the engine's process."""
    async with contextlib.AsyncExitStack() as stack:
        _, absent = await enter_all(stack, openers("answering", directory, nbytes, shared, Gpu()))
        parent.tell(absent)
        await parent.hear()
