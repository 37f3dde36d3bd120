"""A client whose engine is on another node: its requests are calls of the engine's actor.

Theory of operation: a payload becomes a :class:`~shmring.memory.bundles.Bundle`, the one argument of a call that holds tensors.
Ray moves it to the engine's node in its object store, without pickling tensors, and the engine views it there. Replies come in
the same way. How many bytes are on their way is bounded here (``flight.py``). Cancelling a call, or its timeout, cancels it at
the engine, which aborts the request.

What Ray says of a call becomes the error that a client of the ring would get (:func:`_translated`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Iterable
from typing import Any, TypeVar

import msgspec
import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    PendingCallsLimitExceeded,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
)

from shmring.errors import AbortedError, CapacityError, ClosedError, EngineDeadError, RemoteError, WouldBlock, fresh
from shmring.integrations.ray.directory import Where
from shmring.integrations.ray.flight import Flight
from shmring.memory.bundles import Bundle, bundle

__all__ = ["FarClient"]

_Result = TypeVar("_Result")

_PUT_NBYTES = 100_000  # Ray sends smaller arguments along with the call
_THREAD_NBYTES = 1 << 20  # a longer copy into the object store is made beside the loop; it takes seconds if the store is full


class _Sending:
    """A request on its way. Its steps are waited for here, so that a deadline or an abort ends any of them.

    Args:
        name: the caller's own name for it.
        until_s: the deadline, in the loop's time; None: there is none.
        timeout: that the deadline was made of, for the error's text.
    """

    def __init__(self, engine: str, name: str, until_s: float | None, timeout: float | None) -> None:
        self._engine = engine
        self.name = name
        self._until_s = until_s
        self._timeout = timeout
        self._scope: asyncio.Timeout | None = None
        self._error: Exception | None = None

    def abort(self, error: Exception) -> None:
        """Whoever waits for it, now or later, gets the error."""
        self._error = error
        if self._scope is not None:
            self._scope.reschedule(0)

    async def wait(self, step: Awaitable[_Result]) -> _Result:
        """Waits for a step.

        Raises:
            TimeoutError: its time is over.
            Exception: it was aborted with this error.
        """
        scope = asyncio.timeout_at(self._until_s if self._error is None else 0)
        try:
            async with scope:
                self._scope = scope
                return await step
        except TimeoutError:
            if not scope.expired():
                raise
            if self._error is not None:
                raise self._error from None
            raise TimeoutError(
                f"it took longer than the {self._timeout:g} s it was given: at {self._engine!r}, on another node"
            ) from None
        finally:
            self._scope = None


class FarClient:
    """See above. Made by :meth:`enter`.

    Args:
        name: the engine's.
        actor: its actor.
        where: what it says of itself.
        max_nbytes: of tensors in flight.

    Attributes:
        flight: what is in flight.
    """

    def __init__(self, name: str, actor: Any, where: Where, max_nbytes: int) -> None:
        self.flight = Flight(where.max_inflight, max_nbytes)
        self._name = name
        self._actor = actor
        self._where = where
        self._id = secrets.token_hex(8)
        self._lifeline: Any = None
        self._sending: defaultdict[str, set[_Sending]] = defaultdict(set)

    @classmethod
    async def enter(cls, name: str, actor: Any, where: Where, max_nbytes: int, description: str) -> FarClient:
        """Makes one that the engine knows.

        Raises:
            EngineDeadError: the engine has gone.
        """
        client = cls(name, actor, where, max_nbytes)
        client._lifeline = actor.hold.remote()
        try:
            await actor.enter.remote(client._id, description, [client._lifeline])
        except RayError as error:
            raise client._translated(error) from error
        return client

    async def request(
        self, payload: object, *, until_s: float | None, timeout: float | None, reply_type: Any, request_id: str
    ) -> Any:
        """See :meth:`Client.request`."""
        with self._sent(request_id, until_s, timeout) as sending:
            packed = self._pack(payload)
            del payload
            nbytes = _size(packed)
            await sending.wait(self.flight.begin(nbytes))
            try:
                argument = await sending.wait(self._argument(packed))
                del packed
                reference = self._actor.request.remote(self._id, request_id, argument)
                del argument
                replies = await self._outcome(sending, reference, reference)
            except RayError as error:
                raise self._translated(error, nbytes) from error
            finally:
                self.flight.end(nbytes)
            return _opened(replies[0], reply_type)

    async def stream(
        self, payload: object, *, until_s: float | None, timeout: float | None, reply_type: Any, request_id: str
    ) -> AsyncGenerator[Any, None]:
        """See :meth:`Client.stream`."""
        with self._sent(request_id, until_s, timeout) as sending:
            packed = self._pack(payload)
            del payload
            nbytes = _size(packed)
            await sending.wait(self.flight.begin(nbytes))
            generator = None
            try:
                argument = await sending.wait(self._argument(packed))
                del packed
                generator = self._actor.stream.options(num_returns="streaming").remote(self._id, request_id, argument)
                del argument
                while True:
                    try:
                        reference = await sending.wait(anext(generator))
                    except StopAsyncIteration:
                        generator = None
                        return
                    for reply in await self._outcome(sending, reference, generator):
                        yield _opened(reply, reply_type)
            except RayError as error:
                generator = None
                raise self._translated(error, nbytes) from error
            finally:
                if generator is not None:  # its caller has left, or was cancelled
                    ray.cancel(generator)
                self.flight.end(nbytes)

    @contextlib.contextmanager
    def _sent(self, request_id: str, until_s: float | None, timeout: float | None) -> Any:
        sending = _Sending(self._name, request_id, until_s, timeout)
        self._sending[request_id].add(sending)
        try:
            yield sending
        finally:
            self._sending[request_id].discard(sending)
            if not self._sending[request_id]:
                del self._sending[request_id]

    def _pack(self, payload: object) -> Bundle:
        where = self._where
        return bundle(
            payload,
            max_tensors=where.max_tensors,
            max_payload_nbytes=where.max_payload_nbytes,
            max_values=where.max_values,
        )

    async def _argument(self, packed: Bundle) -> Any:
        nbytes = _size(packed)
        if nbytes < _PUT_NBYTES:
            return packed
        if nbytes < _THREAD_NBYTES:
            return ray.put(packed)
        return await asyncio.to_thread(ray.put, packed)

    async def _outcome(self, sending: _Sending, reference: Any, call: Any) -> list[Bundle]:
        """Returns the replies that a reference stands for. Whoever waits for them no longer cancels the call."""
        try:
            replies, error = await sending.wait(reference)
        except (asyncio.CancelledError, AbortedError, ClosedError, TimeoutError):
            ray.cancel(call)
            raise
        if error is not None:
            raise error
        bundles: list[Bundle] = replies
        return bundles

    def _translated(self, error: RayError, nbytes: int = 0) -> Exception:
        """Returns what an error of Ray means to a client of an engine."""
        if isinstance(error, RayTaskError):  # the engine's program: what its arguments are made of is not there, for example
            return RemoteError(type(error.cause).__name__, str(error.cause))
        if isinstance(error, TaskCancelledError):
            return AbortedError(f"the call was cancelled: {error}")
        if isinstance(error, ObjectStoreFullError | OutOfDiskError):
            return CapacityError(
                f"Ray's object store can't take {nbytes} bytes: {error}", needed=nbytes, capacity=self._where.store_nbytes
            )
        if isinstance(error, PendingCallsLimitExceeded):
            return WouldBlock(f"engine {self._name!r}: {error}")
        if isinstance(error, GetTimeoutError):
            return TimeoutError(str(error))
        if isinstance(error, RayActorError | ObjectLostError):
            return EngineDeadError(f"engine {self._name!r}, on another node: {error}", engine=self._name)
        return RemoteError(type(error).__name__, str(error))

    def abort(self, names: Iterable[str]) -> int:
        """See :meth:`Client.abort`."""
        sendings = [sending for name in names for sending in self._sending.get(name, ())]
        for sending in sendings:
            sending.abort(AbortedError(f"request {sending.name!r} was aborted", request_id=sending.name))
        return len(sendings)

    async def call(self, method: str, arguments: tuple[object, ...]) -> Any:
        """See :meth:`Client.call`."""
        try:
            result, error = await self._actor.call.remote(method, arguments)
        except RayError as ray_error:
            raise self._translated(ray_error) from ray_error
        if error is not None:
            raise error
        return result

    async def close(self, why: Exception | None = None) -> None:
        """Ends what is in flight, and says goodbye.

        Args:
            why: the error of what is in flight; None: this client was closed.
        """
        with contextlib.suppress(RayError):  # the engine may have gone
            self._actor.leave.remote(self._id)
            ray.cancel(self._lifeline)
        for sending in [sending for sendings in self._sending.values() for sending in sendings]:
            sending.abort(ClosedError("the client was closed") if why is None else fresh(why))


def _opened(reply: Bundle, reply_type: Any) -> Any:
    try:
        return reply.open(reply_type)
    except msgspec.ValidationError as error:
        raise RemoteError("UnexpectedReply", f"the reply is not of reply_type: {error}") from error


def _size(packed: Bundle) -> int:
    return packed.nbytes + len(packed.payload)
