"""The engine as frontends see it: ``encode``, ``abort``, ``check_health``, over one ring client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from types import TracebackType
from typing import Any

import msgspec

import shmring
from engine.protocol import (
    CALL_DESCRIBE,
    CALL_HEALTH,
    CALL_STATISTICS,
    EncodeOutput,
    EncodeReply,
    EncodeRequest,
    ModelDescription,
)
from shmring.slot import AcquiringSlot

__all__ = ["EngineClient"]


class EngineClient:
    """An engine, from a frontend. Made by :meth:`connect`; use it with ``async with``.

    Attributes:
        ring: the ring client beneath, for its statistics.
    """

    def __init__(self, ring: shmring.RingClient) -> None:
        self.ring = ring

    @classmethod
    async def connect(
        cls, name: str, config: shmring.ClientConfig | None = None, *, description: str = "", **overrides: Any
    ) -> EngineClient:
        """Attaches to the engine of a name, and to its successors when it is restarted.

        Raises:
            shmring.EngineDeadError: none answers within ``connect_timeout_s``.
        """
        return cls(await shmring.connect(name, config, reconnect=True, description=description, **overrides))

    @property
    def is_running(self) -> bool:
        """Whether an engine is attached."""
        return self.ring.connected

    @property
    def errored(self) -> bool:
        """Whether the engine has gone, and no successor has come yet."""
        return not self.ring.connected

    def slot(self, nbytes: int, *, timeout: float | None = None) -> AcquiringSlot:
        """Waits for memory to decode a request's media into; see :meth:`shmring.RingClient.slot`.

        Threads decode, and go on when their request is cancelled: the slot drains before its memory is used again.

        Raises:
            shmring.EngineDeadError: no engine is attached.
        """
        self._check_running()
        return self.ring.slot(nbytes, timeout=timeout, drain=True)

    async def encode(
        self, request: EncodeRequest, *, request_id: str = "", timeout: float | None = None
    ) -> AsyncGenerator[EncodeOutput, None]:
        """Yields the embeddings of a request. Leaving the loop early, or being cancelled, aborts it.

        Args:
            request: pictures that lie in a slot of this client are not copied.
            request_id: the caller's name for it, for :meth:`abort` and the engine's log.
            timeout: seconds for all of it.

        Raises:
            shmring.RemoteError: the executor refused it or failed.
            shmring.AbortedError: :meth:`abort` was called.
            shmring.EngineDeadError: the engine went away.
            TimeoutError: it took longer.
        """
        self._check_running()
        reply: EncodeReply = await self.ring.request(request, timeout=timeout, reply_type=EncodeReply, request_id=request_id)
        yield EncodeOutput(request_id, reply.embeddings.clone(), finished=True)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Gives requests up; whoever waits for them gets :class:`shmring.AbortedError`."""
        self.ring.abort(request_id)

    async def check_health(self, timeout: float = 2.0) -> None:
        """Asks the engine.

        Raises:
            shmring.EngineDeadError: there is none.
            shmring.RemoteError: it says that it is not well.
            TimeoutError: it does not answer.
        """
        self._check_running()
        await self.ring.call(CALL_HEALTH, timeout=timeout)

    async def describe(self, timeout: float = 2.0) -> ModelDescription:
        """Returns what the engine's executor does. Errors as :meth:`check_health`."""
        self._check_running()
        return msgspec.convert(await self.ring.call(CALL_DESCRIBE, timeout=timeout), ModelDescription)

    async def statistics(self, timeout: float = 2.0) -> dict[str, float]:
        """Returns the engine's counts by name. Errors as :meth:`check_health`."""
        self._check_running()
        return msgspec.convert(await self.ring.call(CALL_STATISTICS, timeout=timeout), dict[str, float])

    def _check_running(self) -> None:
        """A frontend answers 503 at once rather than keep its caller waiting for an engine that may never come."""
        if not self.ring.connected:
            raise shmring.EngineDeadError("the engine has gone; a new one is attached to as soon as it starts")

    async def close(self) -> None:
        """Detaches."""
        await self.ring.close()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
