"""Requests that wait for their replies, by sequence number, for peers whose transport does not keep them itself."""

from __future__ import annotations

import asyncio

from bench.request.questions import Answer

__all__ = ["Pending"]


class Pending:
    """One client's requests in flight; used in its loop."""

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
