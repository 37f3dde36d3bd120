"""Control calls of one session: methods of the engine, by name.

Invariant: at most as many calls are in flight as the engine allows, including those whose caller no longer waits.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec

from shmring.client.life import SessionLife
from shmring.client.sending import Sending
from shmring.core.compiled import check_count, decode_values
from shmring.core.messages import Call, CallResult
from shmring.core.printable import printable, printable_lines
from shmring.errors import CapacityError, RemoteError, RemoteProtocolError
from shmring.transport.link import Link

__all__ = ["CallsInFlight"]

_CALL_NBYTES = 1280  # at most, of a call around its arguments


class CallsInFlight:
    """The calls that a session makes.

    Args:
        life: of the engine.
        link: to it.
        sending: of the session.
    """

    def __init__(self, life: SessionLife, link: Link, sending: Sending) -> None:
        self._life = life
        self._link = link
        self._sending = sending
        self._ids = itertools.count(1)
        self._free = asyncio.Semaphore(life.welcome.max_calls)
        self._results: dict[int, asyncio.Future[Any]] = {}

    async def call(self, method: str, arguments: tuple[object, ...]) -> Any:
        """Calls a method of the engine and waits for its result."""
        welcome = self._life.welcome
        encoded = msgspec.msgpack.encode(arguments)
        capacity = welcome.max_record_nbytes - _CALL_NBYTES
        if len(encoded) > capacity:
            raise CapacityError(
                f"the arguments of {method} take {len(encoded)} bytes, and have to fit a message of "
                f"{welcome.max_record_nbytes}",
                needed=len(encoded),
                capacity=capacity,
            )
        check_count(f"the arguments of {method}", encoded, welcome.max_values)
        await self._free.acquire()  # until the engine has answered, even if the caller no longer waits
        try:
            await self._sending.writable()
            self._life.check_alive()
            call_id = next(self._ids)
            self._link.send(Call(call_id, method, encoded))
        except BaseException:
            self._free.release()
            raise
        future = self._results[call_id] = self._life.loop.create_future()
        try:
            return await future
        finally:
            del future  # it holds its error, whose traceback holds this frame

    def ended(self, result: CallResult) -> None:
        """The engine has answered.

        Raises:
            RemoteProtocolError: the call is not in flight, or this is no result.
        """
        future = self._results.get(result.call_id)
        if future is None:
            raise RemoteProtocolError(f"call {result.call_id} ended, which is not in flight")
        try:
            value = None if result.error is not None else decode_values(result.result, self._life.welcome.max_values)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RemoteProtocolError(f"the result of call {result.call_id} is not msgpack: {error}") from error
        del self._results[result.call_id]  # not before: the waiting task gets the error if the result breaks the rules
        self._free.release()
        if future.done():
            return  # its caller stopped waiting
        if result.error is not None:
            type_name, text = result.error
            future.set_exception(RemoteError(printable(type_name), printable_lines(text)))
        else:
            future.set_result(value)

    def lose(self) -> list[asyncio.Future[Any]]:
        """The session has ended; returns the futures that tasks wait for."""
        waiting: list[asyncio.Future[Any]] = [*self._results.values()]
        for _ in waiting:
            self._free.release()
        self._results.clear()
        return waiting
