"""What is in flight, for peers whose transport does not count it itself: a window of messages, requests without their reply.

A transport of streams that has no way back is a :class:`WindowedPeer`: the consumer writes a byte for each message that it has
consumed into a pipe to its producer, whose loop reads it.
"""

from __future__ import annotations

import abc
import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Any, NamedTuple

import torch

from bench.messages import Answer, Cell, Header, Sink, Source
from bench.peers.peer import Peer

_ACKS_NBYTES = 4096  # at a time; a byte each

#: Stamps and sends the next message; returns what to await before more can be sent, if there is such a thing.
Send = Callable[[], Awaitable[object] | None]


class Window:
    """Counts messages in flight of one producer, of which there may be so many."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._in_flight = 0
        self._target = 0
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> None:
        """Waits until there is room for a message, and counts it."""
        if self._in_flight >= self._size:
            await self._wait_until(self._size - 1)
        self._in_flight += 1

    async def drain(self) -> None:
        if self._in_flight:
            await self._wait_until(0)

    def give(self, messages: int) -> None:
        """So many have been consumed."""
        self._in_flight -= messages
        assert self._in_flight >= 0, "more was acknowledged than sent"
        if self._waiter is not None and not self._waiter.done() and self._in_flight <= self._target:
            self._waiter.set_result(None)

    async def _wait_until(self, target: int) -> None:
        self._target = target
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Shared(NamedTuple):
    """What the processes of a windowed peer inherit."""

    own: Any  # what the transport itself needs
    # For each producer the end that it reads, and the one that the consumer writes to.
    pipes: list[tuple[Connection, Connection]]


class Intake:
    """What the consumer does with each message: it takes it, lets go of it, and says so to its producer."""

    def __init__(self, sink: Sink, shared: Shared) -> None:
        self.take = sink.take
        self._descriptors = [writer.fileno() for _, writer in shared.pipes]

    def acknowledge(self, header: Header) -> None:
        """The message has been taken, and nobody looks at its memory any more."""
        os.write(self._descriptors[header.producer], b"\0")


class WindowedPeer(Peer):
    """A transport of streams that does not say itself what has been consumed."""

    def create_own(self, context: SpawnContext) -> Any:
        """Makes what the transport itself needs in all processes, in their parent."""
        return None

    def close_own(self, own: Any) -> None:  # most have nothing to close
        """Removes it again."""

    def create_shared(self, context: SpawnContext, ends: int) -> Shared:
        return Shared(self.create_own(context), [context.Pipe(duplex=False) for _ in range(ends)])

    def close_shared(self, shared: Shared) -> None:
        self.close_own(shared.own)
        for end in (end for pipe in shared.pipes for end in pipe):
            end.close()

    def window(self, cell: Cell) -> int:
        """Returns how many messages of a producer may be in flight."""
        return cell.window

    @abc.abstractmethod
    def sending(self, cell: Cell, own: Any, source: Source) -> AbstractAsyncContextManager[Send]:
        """A producer's end: yields what sends its next message."""

    @abc.abstractmethod
    async def receive(self, cell: Cell, own: Any, intake: Intake, listening: Callable[[], None]) -> None:
        """The consumer's end: has all messages taken and acknowledged until the last of all has been."""

    async def produce(self, cell: Cell, shared: Shared, source: Source) -> None:
        loop, window = asyncio.get_running_loop(), Window(self.window(cell))
        descriptor = shared.pipes[source.producer][0].fileno()
        async with self.sending(cell, shared.own, source) as send:
            loop.add_reader(descriptor, lambda: window.give(len(os.read(descriptor, _ACKS_NBYTES))))
            try:
                while not source.finished:
                    await window.take()
                    if (writable := send()) is not None:
                        await writable
                await window.drain()
            finally:
                loop.remove_reader(descriptor)

    async def consume(self, cell: Cell, shared: Shared, sink: Sink, listening: Callable[[], None]) -> None:
        await self.receive(cell, shared.own, Intake(sink, shared), listening)


class Pending:
    """One client's requests that wait for their replies, by sequence number; sent as :data:`Send` does."""

    def __init__(self, send: Callable[[Header, torch.Tensor], Awaitable[object] | None]) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._futures: dict[int, asyncio.Future[Answer]] = {}
        self._error: BaseException | None = None

    async def ask(self, header: Header, tensor: torch.Tensor) -> Answer:
        """Sends a question and waits for its reply; raises what was said by :meth:`fail`."""
        if self._error is not None:
            raise self._error
        reply: asyncio.Future[Answer] = self._loop.create_future()
        self._futures[header.sequence] = reply
        if (sending := self._send(header, tensor)) is not None:
            await sending
        return await reply

    def settle(self, answer: Answer) -> None:
        """A reply has come. One that nobody waits for is an error of everybody: it is somebody else's, or came twice."""
        future = self._futures.pop(answer.header.sequence, None)
        if future is None:
            self.fail(ConnectionError(f"a reply to {tuple(answer.header)} came, which nobody waits for"))
        elif not future.done():
            future.set_result(answer)

    def fail(self, error: BaseException) -> None:
        """No reply will come any more; whoever waits, or asks from now on, gets the error."""
        self._error = self._error or error
        futures, self._futures = self._futures, {}
        for future in futures.values():
            if not future.done():
                future.set_exception(self._error)
