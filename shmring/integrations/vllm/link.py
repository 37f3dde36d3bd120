"""An API server's connection to one engine core's ring, and what that engine core keeps of its tensors."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from shmring.config import ClientConfig
from shmring.errors import ShmringError
from shmring.integrations.vllm.kept import Book
from shmring.integrations.vllm.on_gpu import OnGpu, gpu_of, place_in
from shmring.integrations.vllm.settings import Settings

if TYPE_CHECKING:
    import torch

    from shmring import Client, Submission
    from shmring.threads import Client as ThreadClient

__all__ = ["LONGEST_IN_LOOP_NBYTES", "AsyncLink", "ThreadLink", "client_config"]

logger = logging.getLogger("vllm.shmring")

_CONNECT_S = 10.0  # an engine core has its ring before vLLM says that it is ready, but may answer late on a busy machine
_ANSWER_S = 5.0  # of an engine core whose other threads are busy
LONGEST_IN_LOOP_NBYTES = 4 << 20  # a millisecond's copy; a longer one is made on a thread while the loop does other things
_SLOWEST_COPY = 5e8  # bytes a second, on a busy machine: what a copy is given beside the time to wait for space


def client_config(settings: Settings, api_servers: int) -> ClientConfig:
    """Each API server has its part of half the slab to itself, and asks for the rest when it needs it."""
    return ClientConfig(
        lease_nbytes=settings.slab_nbytes // 2 // api_servers,
        copy_offload_nbytes=LONGEST_IN_LOOP_NBYTES,
        connect_timeout_s=_CONNECT_S,
    )


def _patience(wait_s: float, nbytes: int) -> float:
    """Seconds for a tensor's way into the slab: to wait for space, and for the copy itself."""
    return wait_s + nbytes / _SLOWEST_COPY


class AsyncLink:
    """In the event loop of an API server.

    Args:
        name: the ring's.
        config: of the client.
        settings: of the plug-in.
        keep_nbytes: what the engine core may keep of this API server's tensors; 0: nothing.

    Attributes:
        book: of what it keeps; None: nothing.
        placing: tensors that are being copied to be kept, by id; a second request with such a tensor waits for the first.
        on_gpu: the way of tensors on a GPU; there when it is connected.
    """

    on_gpu: OnGpu

    def __init__(self, name: str, config: ClientConfig, settings: Settings, keep_nbytes: int) -> None:
        self.name = name
        self.book: Book | None = None
        self.placing: dict[int, asyncio.Event] = {}
        self._config = config
        self._settings = settings
        self._keep_nbytes = keep_nbytes
        self._client: Client | None = None
        self._has_tried = False

    async def connect(self) -> None:
        """Connects; where that fails, says so, and tensors go inline."""
        import shmring

        try:
            self._client = await shmring.connect(self.name, self._config, description="vLLM")
            report = await self.report()
            self.on_gpu = OnGpu(self.name, report)
        except (ShmringError, OSError, ValueError) as error:
            logger.warning("shmring: tensors go inline, since the ring %s is not reached: %s", self.name, error)
            await self.close()
            self._client = None
        else:
            if self._keep_nbytes and not report["copies"]:
                self.book = Book(self._keep_nbytes)
        finally:
            self._has_tried = True

    @property
    def is_connecting(self) -> bool:
        """Whether it is not known yet if there is a ring."""
        return not self._has_tried

    @property
    def is_connected(self) -> bool:
        """Whether tensors can be sent."""
        return self._has_tried and self._client is not None and self._client.connected

    @property
    def client_id(self) -> int:
        """What the engine core calls this API server."""
        return 0 if self._client is None else self._client.client_id

    def submit_now(self, tensor: torch.Tensor) -> Submission:
        """Copies a tensor to the slab, in the loop; or has a GPU copy it to the device slab.

        Raises:
            WouldBlock: there is no space now.
            TypeError, CapacityError, PeerLostError, ClosedError, NotOnThisGpuError: it can't be sent.
        """
        assert self._client is not None
        gpu = gpu_of(tensor)
        if gpu is None:
            return self._client.submit_nowait([tensor], ask=False)
        with self.on_gpu.sending(), self._client.slot_nowait(tensor.nbytes, device=gpu, ask=False) as slot:
            return self._client.submit_nowait([place_in(slot, tensor, gpu)], ask=False)

    async def submit(self, tensor: torch.Tensor) -> Submission:
        """The same, on a thread if that takes long, waiting for space as long as a request may.

        Raises:
            TimeoutError: there was no space.
            TypeError, CapacityError, PeerLostError, ClosedError, NotOnThisGpuError: it can't be sent.
        """
        assert self._client is not None
        gpu = gpu_of(tensor)
        async with asyncio.timeout(_patience(self._settings.wait_s, tensor.nbytes)):
            if gpu is None:
                return await self._client.submit([tensor])
            with self.on_gpu.sending():
                async with self._client.slot(tensor.nbytes, device=gpu) as slot:
                    return await self._client.submit([place_in(slot, tensor, gpu)])

    async def report(self) -> dict[str, Any]:
        """Returns what the engine core's end counts.

        Raises:
            TimeoutError, PeerLostError, ClosedError: it does not answer.
        """
        assert self._client is not None
        report: dict[str, Any] = await self._client.call("report", timeout=_ANSWER_S)
        return report

    async def close(self) -> None:
        """Disconnects: what this API server has in the slab is free at once."""
        if self._client is not None:
            await self._client.close()


class ThreadLink:
    """For code without an event loop (vLLM's ``LLM``): the client's loop runs in a thread of its own, and nothing is kept."""

    book: Book | None = None
    is_connecting = False
    on_gpu: OnGpu  # when it is connected

    def __init__(self, name: str, config: ClientConfig, settings: Settings) -> None:
        from shmring import threads

        self.name = name
        self._settings = settings
        self._client: ThreadClient | None = None
        try:
            client = threads.connect(name, config, description="vLLM")
            try:
                self.on_gpu = OnGpu(name, client.call("report", timeout=_ANSWER_S))
            except BaseException:
                client.close()
                raise
            self._client = client
        except (ShmringError, OSError, ValueError) as error:
            logger.warning("shmring: tensors go inline, since the ring %s is not reached: %s", name, error)

    @property
    def is_connected(self) -> bool:
        """Whether tensors can be sent."""
        return self._client is not None

    @property
    def client_id(self) -> int:
        """What the engine core calls this process."""
        return 0 if self._client is None else self._client.client_id

    def submit_now(self, tensor: torch.Tensor) -> Any:
        """Copies a tensor to the slab, or has a GPU copy it to the device slab, waiting for space as long as a request may.

        Raises:
            TimeoutError: there was no space.
            TypeError, CapacityError, PeerLostError, ClosedError, NotOnThisGpuError: it can't be sent.
        """
        assert self._client is not None
        gpu, timeout_s = gpu_of(tensor), _patience(self._settings.wait_s, tensor.nbytes)
        if gpu is None:
            return self._client.submit([tensor], timeout=timeout_s)
        with self.on_gpu.sending(), self._client.slot(tensor.nbytes, device=gpu, timeout=timeout_s) as slot:
            return self._client.submit([place_in(slot, tensor, gpu)], timeout=timeout_s)

    def close(self) -> None:
        """Disconnects."""
        if self._client is not None:
            self._client.close()
