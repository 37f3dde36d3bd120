"""What is in flight, for peers whose transport does not count it itself: a window of messages, requests without their reply.

A peer whose transport has no way back counts through :class:`Acknowledgements`: a pipe for each producer, which its loop reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext

from bench.request.questions import Answer

__all__ = ["Acknowledgements", "Pending", "Window"]

_ACKS_NBYTES = 4096  # at a time; a byte each


class Window:
    """Counts messages in flight; for one producer.

    Args:
        size: how many there may be.
    """

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
        """Waits until nothing is in flight."""
        if self._in_flight:
            await self._wait_until(0)

    def give(self, messages: int) -> None:
        """So many have been consumed."""
        self._in_flight -= messages
        assert self._in_flight >= 0, "more was acknowledged than sent"
        if self._waiter is not None and not self._waiter.done() and self._in_flight <= self._target:
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """Nothing will be acknowledged any more; whoever waits gets the error."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    async def _wait_until(self, target: int) -> None:
        self._target = target
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Acknowledgements:
    """A pipe from the consumer to each producer, with a byte for each message that has been consumed.

    Args:
        pipes: for each producer the end it reads, and the end that the consumer writes to.
    """

    def __init__(self, pipes: list[tuple[Connection, Connection]]) -> None:
        self._pipes = pipes

    @classmethod
    def create(cls, context: SpawnContext, producers: int) -> Acknowledgements:
        return cls([context.Pipe(duplex=False) for _ in range(producers)])

    def close(self) -> None:
        """Closes this process's ends."""
        for reader, writer in self._pipes:
            reader.close()
            writer.close()

    @contextlib.contextmanager
    def counted(self, producer: int, size: int) -> Iterator[Window]:
        """Yields the window of a producer, which the running loop keeps true."""
        loop = asyncio.get_running_loop()
        window = Window(size)
        descriptor = self._pipes[producer][0].fileno()
        loop.add_reader(descriptor, lambda: window.give(len(os.read(descriptor, _ACKS_NBYTES))))
        try:
            yield window
        finally:
            loop.remove_reader(descriptor)

    def givers(self) -> list[Callable[[], object]]:
        """Returns what the consumer calls when it has consumed a message, for each producer."""
        return [_giver(writer.fileno()) for _, writer in self._pipes]


def _giver(descriptor: int) -> Callable[[], object]:
    return lambda: os.write(descriptor, b"\0")


class Pending:
    """One client's requests that wait for their replies, by sequence number; used in its loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._futures: dict[int, asyncio.Future[Answer]] = {}
        self._error: BaseException | None = None

    def open(self, sequence: int) -> asyncio.Future[Answer]:
        """Returns what to await for a reply.

        Raises:
            ConnectionError: or whatever else was said by :meth:`fail`.
        """
        if self._error is not None:
            raise self._error
        future = self._futures[sequence] = self._loop.create_future()
        return future

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
