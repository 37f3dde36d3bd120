"""An API server's connection to one engine core's ring, and what that engine core keeps of its tensors.

Theory of operation: an engine core says by vLLM's own way, in a call of its API server, what its ring is called, and which life
of an engine that is (:class:`Where`). So no other server's ring is taken for it, whatever that is called. An engine core that
does not answer, or has no ring yet, is asked again, for as long as the link is open: tensors go inline meanwhile, and nobody
waits.

A connection that is lost ends with all that belongs to it: the client, its number, what is kept. The next one begins anew.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from shmring.config import ClientConfig
from shmring.core.loggers import logger_of
from shmring.errors import ClosedError
from shmring.integrations.reaching import KeptConnection, Reach, check_epoch
from shmring.integrations.traffic import Reason
from shmring.integrations.vllm.kept import Book
from shmring.integrations.vllm.on_gpu import OnGpu, gpu_of, place_in
from shmring.integrations.vllm.settings import Settings

if TYPE_CHECKING:
    import torch

    from shmring import Client, Submission
    from shmring.threads import Client as ThreadClient

__all__ = ["LONGEST_IN_LOOP_NBYTES", "AsyncLink", "NoRingError", "ThreadLink", "Where", "client_config"]

logger = logger_of("vllm.shmring")

_CONNECT_S = 5.0  # an engine core has its ring before it says so, but may answer late on a busy machine; it is tried again
_ANSWER_S = 5.0  # of an engine core whose other threads are busy; then it is "not reached", and waited for all the same
LONGEST_IN_LOOP_NBYTES = 4 << 20  # a millisecond's copy; a longer one is made on a thread while the loop does other things
_SLOWEST_COPY = 5e8  # bytes a second, on a busy machine: what a copy is given beside the time to wait for space


class NoRingError(Exception):
    """An engine core has no ring now, and says why."""


@dataclasses.dataclass(frozen=True)
class Where:
    """Which ring an engine core has.

    Attributes:
        name: of the ring.
        epoch: which life of an engine it is; 0: whichever has the name.
    """

    name: str
    epoch: int = 0

    @classmethod
    def of(cls, answer: Any) -> Where:
        """Reads what an engine core has answered (:meth:`~shmring.integrations.vllm.engine.Receiver.where`).

        Raises:
            NoRingError: it has none now.
        """
        if isinstance(answer, str):
            raise NoRingError(answer)
        name, epoch = answer
        return cls(str(name), int(epoch))


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


class AsyncLink(KeptConnection):
    """In the event loop of an API server.

    Args:
        number: of the engine core.
        find: asks it what its ring is; raises where it has none.
        config: of the client.
        settings: of the plug-in.
        keep_nbytes: what the engine core may keep of this API server's tensors; 0: nothing.

    Attributes:
        name: of the ring; empty: it was not reached yet.
        book: of what the engine core keeps; None: nothing, or there is no connection.
        placing: tensors that are being copied to be kept, by id; a second request with such a tensor waits for the first.
        on_gpu: the way of tensors on a GPU; there when it is connected.
        came: set with each request to this engine core.
    """

    on_gpu: OnGpu

    def __init__(
        self, number: int, find: Callable[[], Awaitable[Where]], config: ClientConfig, settings: Settings, keep_nbytes: int
    ) -> None:
        super().__init__(f"engine core {number}", logger)
        self.name = ""
        self.book: Book | None = None
        self.placing: dict[int, asyncio.Event] = {}
        self.came = asyncio.Event()
        self._find = find
        self._config = config
        self._settings = settings
        self._keep_nbytes = keep_nbytes
        self._question: asyncio.Future[Where] | None = None  # one at a time, also of an engine core that does not answer

    async def _connect(self) -> Client:
        import shmring

        where = await self._ask()
        client = await shmring.connect(where.name, self._config, description="vLLM")
        try:
            check_epoch(client.epoch, where.epoch, where.name)
            report = await client.call("report", timeout=_ANSWER_S)
        except BaseException:
            await client.close()
            raise
        self.name, self.on_gpu = where.name, OnGpu(where.name, report)
        self.book = Book(self._keep_nbytes) if self._keep_nbytes and not report["copies"] else None
        return client

    def _connected(self) -> None:
        _say_what_is_on(self, self._settings)

    def _lost(self) -> None:
        self.book = None

    async def _ask(self) -> Where:
        question = self._question
        if question is None:
            question = self._question = asyncio.ensure_future(self._find())
        done, _ = await asyncio.wait([question], timeout=_ANSWER_S)
        if not done:
            raise TimeoutError(f"it has not answered for {_ANSWER_S:g} s")
        self._question = None
        return question.result()

    def submit_now(self, tensor: torch.Tensor) -> Submission:
        """Copies a tensor to the slab, in the loop; or has a GPU copy it to the device slab.

        Raises:
            WouldBlock: there is no space now.
            TypeError, CapacityError, PeerLostError, ClosedError, NotOnThisGpuError: it can't be sent.
        """
        client, gpu = self.client, gpu_of(tensor)
        if gpu is None:
            return client.submit_nowait([tensor], ask=False)
        with self.on_gpu.sending(), client.slot_nowait(tensor.nbytes, device=gpu, ask=False) as slot:
            return client.submit_nowait([place_in(slot, tensor, gpu)], ask=False)

    async def submit(self, tensor: torch.Tensor) -> Submission:
        """Sends a tensor: copies it on a thread if that takes long, and waits for space as long as a request may.

        Raises:
            TimeoutError: there was no space.
            TypeError, CapacityError, PeerLostError, ClosedError, NotOnThisGpuError: it can't be sent.
        """
        client, gpu = self.client, gpu_of(tensor)
        async with asyncio.timeout(_patience(self._settings.wait_s, tensor.nbytes)):
            if gpu is None:
                return await client.submit([tensor])
            with self.on_gpu.sending():
                async with client.slot(tensor.nbytes, device=gpu) as slot:
                    return await client.submit([place_in(slot, tensor, gpu)])

    async def report(self) -> dict[str, Any]:
        """Returns what the engine core's end counts.

        Raises:
            TimeoutError, PeerLostError, ClosedError: it does not answer.
        """
        report: dict[str, Any] = await self.client.call("report", timeout=_ANSWER_S)
        return report

    async def close(self) -> None:
        """Disconnects: what this API server has in the slab is free at once."""
        await super().close()
        if self._question is not None:
            self._question.cancel()


class ThreadLink:
    """For code without an event loop (vLLM's ``LLM``): the client's loop runs in a thread of its own, and nothing is kept.

    Args:
        number: of the engine core.
        ask: sends the question what its ring is, in the caller's thread, and returns what will have the answer. Only that
            thread may use vLLM's socket, so an engine core without a ring is asked again with a later request.
        config: of the client.
        settings: of the plug-in.

    Attributes:
        name, on_gpu: as of :class:`AsyncLink`.
    """

    book: Book | None = None
    on_gpu: OnGpu

    def __init__(self, number: int, ask: Callable[[], Future[Any]], config: ClientConfig, settings: Settings) -> None:
        self.name = ""
        self._ask = ask
        self._config = config
        self._settings = settings
        self._reach = Reach(f"engine core {number}", logger)
        self._client: ThreadClient | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()  # of the client, for who connects and who closes

    def keep_trying(self) -> None:
        """Goes on trying to connect, on a thread, unless it is connected. Twice is once; for each request, in vLLM's thread."""
        if self.is_connected or self._closing.is_set() or (self._thread is not None and self._thread.is_alive()):
            return
        try:
            question = self._ask()
        except Exception as error:  # noqa: BLE001 - vLLM's client has ended, and raises the same for the request itself
            self._reach.failed(error)
            return
        self._thread = threading.Thread(target=self._try, args=(question,), daemon=True, name="shmring connecting")
        self._thread.start()

    def wait_tried(self) -> None:
        """Waits until it is connected, or an attempt has failed; not for an engine core that does not answer."""
        self._reach.tried.wait(_ANSWER_S)

    def _try(self, question: Future[Any]) -> None:
        lost, self._client = self._client, None
        if lost is not None:
            lost.close()
            self._reach.failed(lost.lost_error or "the connection was lost")
        while True:
            try:
                where = self._answer(question)
                self._connect(where)
            except Exception as error:  # noqa: BLE001 - as in AsyncLink
                pause_s = self._reach.failed(error)
            else:
                self._reach.reached()
                _say_what_is_on(self, self._settings)
                return
            if self._closing.wait(pause_s) or (question.done() and not _has_ring(question)):
                return

    def _answer(self, question: Future[Any]) -> Where:
        try:
            return Where.of(question.result(_ANSWER_S))
        except TimeoutError:
            raise TimeoutError(f"it has not answered for {_ANSWER_S:g} s") from None

    def _connect(self, where: Where) -> None:
        from shmring import threads

        client = threads.connect(where.name, self._config, description="vLLM")
        try:
            check_epoch(client.epoch, where.epoch, where.name)
            on_gpu = OnGpu(where.name, client.call("report", timeout=_ANSWER_S))
            with self._lock:
                if self._closing.is_set():
                    raise ClosedError("this link is closed")
                self.name, self.on_gpu = where.name, on_gpu
                self._client = client
        except BaseException:
            client.close()
            raise

    @property
    def reason(self) -> Reason:
        """Why tensors go inline while it is not connected."""
        return self._reach.reason

    @property
    def is_connected(self) -> bool:
        """Whether tensors can be sent."""
        client = self._client
        return client is not None and client.connected

    @property
    def client_id(self) -> int:
        """What the engine core calls this process."""
        client = self._client
        return 0 if client is None else client.client_id

    @property
    def epoch(self) -> int:
        """Which life of an engine is connected; 0: none."""
        client = self._client
        return 0 if client is None else client.epoch

    def submit_now(self, tensor: torch.Tensor) -> Any:
        """Copies a tensor to the slab, or has a GPU copy it to the device slab, waiting for space as long as a request may.

        Raises:
            TimeoutError: there was no space.
            TypeError, CapacityError, PeerLostError, ClosedError, NotOnThisGpuError: it can't be sent.
        """
        client = self._client
        if client is None:
            raise ClosedError("the connection was lost")
        gpu, timeout_s = gpu_of(tensor), _patience(self._settings.wait_s, tensor.nbytes)
        if gpu is None:
            return client.submit([tensor], timeout=timeout_s)
        with self.on_gpu.sending(), client.slot(tensor.nbytes, device=gpu, timeout=timeout_s) as slot:
            return client.submit([place_in(slot, tensor, gpu)], timeout=timeout_s)

    def close(self) -> None:
        """Disconnects."""
        with self._lock:
            self._closing.set()
            client = self._client
        if client is not None:
            client.close()


def _has_ring(question: Future[Any]) -> bool:
    """Whether the answer to a question names a ring."""
    return question.exception() is None and not isinstance(question.result(), str)


def _say_what_is_on(link: AsyncLink | ThreadLink, settings: Settings) -> None:
    """Says which way tensors go, now that an engine core is reached."""
    logger.info(
        "shmring: tensors of %d bytes and more go through shared memory (%s); %s; %s",
        settings.min_nbytes,
        link.name,
        f"up to {link.book.budget_nbytes >> 20} MiB of them stay there" if link.book is not None else "none of them stay there",
        link.on_gpu,
    )
