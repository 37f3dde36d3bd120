"""The queues of multiprocessing and of torch: requests to the engine by one queue, replies by a queue for each client.

How their users use them: vLLM's ``torch_shm`` transport sends tensors by one ``torch.multiprocessing.Queue`` to each
engine: the frontend calls ``tensor.share_memory_()``, which copies the tensor into a new segment, and ``queue.put``, from
its event loop; the queue's feeder thread pickles the descriptor; sharing is by ``file_descriptor``, torch's default on
Linux, so the engine fetches each descriptor from a thread of the client. ``multiprocessing.Queue`` is what one takes
without torch: its feeder pickles the array itself. Neither can be awaited, so both ends have a thread that blocks in
``get``. A client's hands each reply to its loop with ``call_soon_threadsafe``; the engine's answers by itself, which spares
these peers a hop through the engine's loop and back. Replies, which are small, are numpy arrays, pickled.

``share_memory_`` moves a tensor's own storage, and each of vLLM's is a new one. Here each is a new storage over the same
memory (``torch.from_numpy``), which is moved for the price of one copy and leaves the source where it was.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from multiprocessing.context import SpawnContext
from multiprocessing.util import get_temp_dir
from typing import Any, NamedTuple

import torch
import torch.multiprocessing

from bench.request.peers.peer import Ask, Peer
from bench.request.peers.pending import Pending
from bench.request.questions import Answer, Cell, Desk, Header

__all__ = ["MultiprocessingRequest", "TorchRequest"]

_torch_multiprocessing: Any = torch.multiprocessing  # it is not annotated

_STRATEGY = "file_descriptor"


class _Shared(NamedTuple):
    requests: Any  # a queue, whose class exists only in a context
    replies: list[Any]


class _QueueRequest(Peer):
    """Both queues; None in one of them ends the thread that reads it."""

    def prepare(self) -> None:
        """What each process does before it uses a queue. Nothing, usually."""
        return

    @abc.abstractmethod
    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns what to put into the queue for a tensor."""

    @abc.abstractmethod
    def unpack(self, content: Any) -> torch.Tensor:
        """Returns the tensor of what came out of it."""

    async def serve(self, cell: Cell, shared: _Shared, desk: Desk, listening: Callable[[], None]) -> None:
        self.prepare()
        answering = asyncio.get_running_loop().run_in_executor(None, self._answer_all, shared, desk)
        listening()
        try:
            await asyncio.shield(answering)
        finally:
            if not answering.done():
                shared.requests.put(None)
                await answering

    def _answer_all(self, shared: _Shared, desk: Desk) -> None:
        while (request := shared.requests.get()) is not None:
            header, content = Header(*request[0]), request[1]
            reply = desk.answer(header, self.unpack(content))
            del request, content  # the tensor's memory goes with them
            shared.replies[header.client].put((tuple(header), reply.numpy()))

    @contextlib.asynccontextmanager
    async def connect(self, cell: Cell, shared: _Shared, client: int) -> AsyncIterator[Ask]:
        self.prepare()
        pending, replies = Pending(), shared.replies[client]

        async def ask(header: Header, tensor: torch.Tensor) -> Answer:
            reply = pending.open(header.sequence)
            shared.requests.put((tuple(header), self.pack(tensor)))
            return await reply

        receiving = asyncio.get_running_loop().run_in_executor(None, _receive, replies, asyncio.get_running_loop(), pending)
        receiving.add_done_callback(functools.partial(_pass_on, pending))
        try:
            yield ask
        finally:
            replies.put(None)
            await asyncio.wait([receiving])


def _receive(replies: Any, loop: asyncio.AbstractEventLoop, pending: Pending) -> None:
    while (reply := replies.get()) is not None:
        loop.call_soon_threadsafe(pending.settle, Answer(Header(*reply[0]), torch.from_numpy(reply[1])))


def _pass_on(pending: Pending, receiving: asyncio.Future[None]) -> None:
    if not receiving.cancelled() and (error := receiving.exception()) is not None:
        pending.fail(error)


class TorchRequest(_QueueRequest):
    """See the head of this file."""

    name = "torch-queue"
    title = "torch.multiprocessing.Queue"

    def create_shared(self, context: SpawnContext, clients: int) -> _Shared:
        get_temp_dir()  # made by the parent, children inherit it: one that is killed leaves none of its own behind
        requests = _torch_multiprocessing.get_context("spawn").Queue()
        return _Shared(requests, [context.Queue() for _ in range(clients)])

    def prepare(self) -> None:
        _torch_multiprocessing.set_sharing_strategy(_STRATEGY)

    def pack(self, tensor: torch.Tensor) -> Any:
        again: Any = torch.from_numpy(tensor.numpy())
        return again.share_memory_()

    def unpack(self, content: Any) -> torch.Tensor:
        assert isinstance(content, torch.Tensor)
        return content


class MultiprocessingRequest(_QueueRequest):
    """See the head of this file."""

    name = "multiprocessing-queue"
    title = "multiprocessing.Queue"

    def create_shared(self, context: SpawnContext, clients: int) -> _Shared:
        return _Shared(context.Queue(), [context.Queue() for _ in range(clients)])

    def pack(self, tensor: torch.Tensor) -> Any:
        return tensor.numpy()

    def unpack(self, content: Any) -> torch.Tensor:
        return torch.from_numpy(content)
