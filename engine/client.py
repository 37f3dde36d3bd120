"""The engine as frontends see it: what they may ask of it, and how that is done over one ring client."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Protocol, TypeVar

import msgspec
import torch

import shmring
from engine.protocol import (
    Calls,
    EncodeReply,
    EncodeRequest,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Medium,
    ModelDescription,
)

__all__ = ["EncodeOutput", "EngineClient", "EngineClientProtocol", "GenerateOutput"]

_Payload = TypeVar("_Payload", EncodeRequest, GenerateRequest)


class EncodeOutput(msgspec.Struct):
    """What :meth:`EngineClientProtocol.encode` yields.

    Attributes:
        request_id: the caller's name of the request.
        embeddings: shape (inputs, embedding size), float32; the caller's own, not a view of the slab.
        prompt_tokens: of the request.
        finished: whether it is the last.
    """

    request_id: str
    embeddings: torch.Tensor
    prompt_tokens: int
    finished: bool


class GenerateOutput(msgspec.Struct):
    """What :meth:`EngineClientProtocol.generate` yields: a piece of the answer, as in :class:`GenerateReply`."""

    request_id: str
    text: str
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason | None
    finished: bool


class EngineClientProtocol(Protocol):
    """What a frontend may ask of an engine; frontends are annotated with it, and :class:`EngineClient` is one.

    Source: vLLM's ``EngineClient`` protocol; names and meanings are kept where the operation makes sense here. ``ring``,
    ``slots``, ``check_capacity``, ``kept_nbytes``, ``find``, ``keep``, ``describe`` and ``statistics`` are ours: media travel
    in slots.
    """

    @property
    def ring(self) -> shmring.RingClient:
        """The ring client beneath, for its statistics."""

    @property
    def is_running(self) -> bool:
        """Whether an engine is attached."""

    @property
    def is_stopped(self) -> bool:
        """Whether this client was closed."""

    @property
    def errored(self) -> bool:
        """Whether the engine has gone, and no successor has come yet."""

    @property
    def dead_error(self) -> BaseException:
        """What requests fail with while :attr:`errored`."""

    def generate(
        self, request: GenerateRequest, *, request_id: str = "", timeout: float | None = None
    ) -> AsyncGenerator[GenerateOutput, None]:
        """Yields an answer, piece by piece."""

    def encode(
        self, request: EncodeRequest, *, request_id: str = "", timeout: float | None = None
    ) -> AsyncGenerator[EncodeOutput, None]:
        """Yields the embeddings of a request."""

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Gives requests up."""

    async def slots(self, sizes: Sequence[int], *, timeout: float | None = None) -> list[shmring.Slot]:
        """Waits for memory of the slab for a request's media, all at once."""

    def check_capacity(self, *sizes: int) -> None:
        """Raises :class:`shmring.CapacityError` if there can never be slots of these sizes at once."""

    @property
    def kept_nbytes(self) -> int:
        """How much of media the engine keeps at most; 0: nothing."""

    async def find(self, key: bytes) -> shmring.Kept | None:
        """Returns a medium that the engine keeps under a key; its payload is a :data:`engine.protocol.Medium`."""

    async def keep(self, key: bytes, medium: Medium) -> shmring.Kept:
        """Gives the engine a medium to keep under a key."""

    async def check_health(self, timeout: float = ...) -> None:
        """Raises if the engine is not well."""

    async def describe(self, timeout: float = ...) -> ModelDescription:
        """Returns what the engine's executor does."""

    async def statistics(self, timeout: float = ...) -> dict[str, float]:
        """Returns the engine's counts by name."""

    async def pause_generation(self, *, wait_for_inflight_requests: bool = False) -> None:
        """Executes nothing more, for all frontends. What runs is finished first, or else aborted; what comes waits."""

    async def resume_generation(self) -> None:
        """Goes on."""

    async def is_paused(self) -> bool:
        """Whether it is paused."""

    async def reset_mm_cache(self) -> None:
        """Has the executor forget what it keeps of media."""

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of the executor between two steps, with msgpack arguments; one result for each of its workers."""

    async def get_supported_tasks(self, timeout: float = ...) -> tuple[str, ...]:
        """Returns what the executor can be asked for."""

    async def do_log_stats(self) -> None:
        """Has the engine log its counters."""

    async def start_profile(self) -> None:
        """Starts torch's profiler around the engine's steps."""

    async def stop_profile(self) -> str:
        """Stops it, and returns the path of the trace, for ``chrome://tracing`` or Perfetto."""


class EngineClient:
    """An engine, from a frontend. Made by :meth:`connect`; use it with ``async with``.

    Control calls raise, besides what they name, :class:`shmring.EngineDeadError` if there is no engine,
    :class:`shmring.RemoteError` if it refuses or fails, and ``TimeoutError`` if it does not answer in time.

    Attributes:
        ring: the ring client beneath, for its statistics.
    """

    def __init__(self, ring: shmring.RingClient) -> None:
        self.ring = ring
        self._described: tuple[int, ModelDescription] | None = None

    @classmethod
    async def connect(
        cls, name: str, config: shmring.ClientConfig | None = None, *, description: str = "", **overrides: Any
    ) -> EngineClient:
        """Attaches to the engine of a name, and to its successors when it is restarted.

        Raises:
            shmring.EngineDeadError: none answers within ``connect_timeout_s``.
        """
        return cls(await shmring.connect(name, config, reconnect=True, description=description, **overrides))

    # -- how it is ----------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether an engine is attached."""
        return self.ring.connected

    @property
    def is_stopped(self) -> bool:
        """Whether this client was closed."""
        return self.ring.closed

    @property
    def errored(self) -> bool:
        """Whether the engine has gone, and no successor has come yet."""
        return not self.ring.connected and not self.ring.closed

    @property
    def dead_error(self) -> shmring.EngineDeadError:
        """What requests fail with while :attr:`errored`: why the engine went, as far as it is known."""
        reason = self.ring.lost_error or "the engine has gone"
        return shmring.EngineDeadError(f"{reason}; a new one is attached to as soon as it starts")

    async def check_health(self, timeout: float = 2.0) -> None:
        """Asks the engine; returns if it is well."""
        await self._call(Calls.HEALTH, timeout=timeout)

    async def describe(self, timeout: float = 2.0) -> ModelDescription:
        """Returns what the engine's executor does. It is asked once in an engine's life."""
        epoch = self.ring.statistics().epoch
        if self._described is None or self._described[0] != epoch:
            answer = await self._call(Calls.DESCRIBE, timeout=timeout)
            self._described = epoch, msgspec.convert(answer, ModelDescription)
        return self._described[1]

    async def get_supported_tasks(self, timeout: float = 2.0) -> tuple[str, ...]:
        """Returns what the executor can be asked for: ``"encode"``, ``"generate"``."""
        return tuple((await self.describe(timeout)).tasks)

    async def statistics(self, timeout: float = 2.0) -> dict[str, float]:
        """Returns the engine's counts by name."""
        return msgspec.convert(await self._call(Calls.STATISTICS, timeout=timeout), dict[str, float])

    async def do_log_stats(self, timeout: float = 2.0) -> None:
        """Has the engine log its counts."""
        await self._call(Calls.LOG_STATS, timeout=timeout)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def slots(self, sizes: Sequence[int], *, timeout: float | None = None) -> list[shmring.Slot]:
        """Waits for memory of the slab for a request's media, all at once; see :meth:`shmring.RingClient.slots`.

        Threads copy into it, and go on when their request is cancelled: a slot drains before its memory is used again.

        Raises:
            shmring.EngineDeadError: no engine is attached.
        """
        self._check_running()
        return await self.ring.slots(sizes, timeout=timeout, drain=True)

    @property
    def kept_nbytes(self) -> int:
        """How much of media the engine keeps at most; 0: nothing, or no engine is attached."""
        return self.ring.kept_nbytes

    async def find(self, key: bytes) -> shmring.Kept | None:
        """Looks for a medium that the engine keeps; see :meth:`shmring.RingClient.find`.

        Raises:
            shmring.EngineDeadError: no engine is attached.
        """
        self._check_running()
        return await self.ring.find(key, payload_type=Medium)

    async def keep(self, key: bytes, medium: Medium) -> shmring.Kept:
        """Gives the engine a medium to keep, whose slot is not copied; see :meth:`shmring.RingClient.keep`.

        Raises:
            shmring.EngineDeadError: no engine is attached.
        """
        self._check_running()
        return await self.ring.keep(key, medium)

    def check_capacity(self, *sizes: int) -> None:
        """Checks that there can be slots of these sizes at once; see :meth:`shmring.RingClient.check_capacity`.

        Raises:
            shmring.CapacityError: it can never fit the slab.
            shmring.EngineDeadError: no engine is attached.
        """
        self._check_running()
        self.ring.check_capacity(*sizes)

    async def generate(
        self, request: GenerateRequest, *, request_id: str = "", timeout: float | None = None
    ) -> AsyncGenerator[GenerateOutput, None]:
        """Yields an answer, piece by piece. Leaving the loop early, or being cancelled, aborts the request.

        Pieces come as the engine makes them; for a caller that reads slowly, several become one.

        Args:
            request: media that lie in a slot of this client are not copied.
            request_id: the caller's name for it, for :meth:`abort` and the engine's log.
            timeout: seconds for all of it. The engine gets it as a deadline, unless the request has one.

        Raises:
            shmring.RemoteError: the executor refused it or failed.
            shmring.AbortedError: :meth:`abort` was called.
            shmring.EngineDeadError: the engine went away.
            TimeoutError: it took longer.
        """
        self._check_running()
        replies = self.ring.stream(
            _with_deadline(request, timeout), timeout=timeout, reply_type=GenerateReply, request_id=request_id
        )
        async with aclosing(replies):
            async for reply in replies:
                yield GenerateOutput(
                    request_id,
                    reply.text,
                    reply.token_ids,
                    reply.prompt_tokens,
                    reply.completion_tokens,
                    reply.finish_reason,
                    finished=reply.finish_reason is not None,
                )

    async def encode(
        self, request: EncodeRequest, *, request_id: str = "", timeout: float | None = None
    ) -> AsyncGenerator[EncodeOutput, None]:
        """Yields the embeddings of a request. Arguments and errors are those of :meth:`generate`."""
        self._check_running()
        reply: EncodeReply = await self.ring.request(
            _with_deadline(request, timeout), timeout=timeout, reply_type=EncodeReply, request_id=request_id
        )
        yield EncodeOutput(request_id, reply.embeddings.clone(), reply.prompt_tokens, finished=True)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Gives requests up; whoever waits for them gets :class:`shmring.AbortedError`. Unknown ones are ignored."""
        self.ring.abort(request_id)

    # -- control ------------------------------------------------------------------------------------------------------

    async def pause_generation(self, *, wait_for_inflight_requests: bool = False, timeout: float | None = None) -> None:
        """Executes nothing more, for all frontends, until :meth:`resume_generation`. What comes meanwhile waits.

        Returns when nothing runs: between two steps, such as to load other weights by :meth:`collective_rpc`.

        Args:
            wait_for_inflight_requests: let what runs finish. Otherwise it fails with ``PausedError``, as the
                ``type_name`` of a :class:`shmring.RemoteError`.
            timeout: seconds to wait. The engine stays paused if they pass.
        """
        await self._call(Calls.PAUSE, wait_for_inflight_requests, timeout=timeout)

    async def resume_generation(self, timeout: float = 2.0) -> None:
        """Goes on executing."""
        await self._call(Calls.RESUME, timeout=timeout)

    async def is_paused(self, timeout: float = 2.0) -> bool:
        """Whether the engine is paused."""
        return bool(await self._call(Calls.IS_PAUSED, timeout=timeout))

    async def reset_mm_cache(self, timeout: float | None = None) -> None:
        """Has the executor forget what it keeps of media, if it keeps anything. Waits for the running step."""
        await self._call(Calls.RESET_MM_CACHE, timeout=timeout)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a public method of the executor between two steps.

        Args:
            method: its name.
            timeout: seconds to wait, for the running step too.
            args, kwargs: its arguments: whatever msgpack can hold. Nothing is pickled.

        Returns:
            One result for each of the executor's workers.

        Raises:
            shmring.RemoteError: there is no such method, or it raised.
        """
        answer = await self._call(Calls.COLLECTIVE_RPC, method, list(args), dict(kwargs or {}), timeout=timeout)
        return list(answer)

    async def start_profile(self, timeout: float | None = None) -> None:
        """Starts torch's profiler around the engine's steps; the engine needs ``--profiler-dir``."""
        await self._call(Calls.START_PROFILE, timeout=timeout)

    async def stop_profile(self, timeout: float | None = None) -> str:
        """Stops it, and returns the path of the trace, for ``chrome://tracing`` or Perfetto."""
        return str(await self._call(Calls.STOP_PROFILE, timeout=timeout))

    async def _call(self, method: str, *arguments: object, timeout: float | None) -> Any:
        self._check_running()
        return await self.ring.call(method, *arguments, timeout=timeout)

    def _check_running(self) -> None:
        """A frontend answers 503 at once rather than keep its caller waiting for an engine that may never come."""
        if self.errored:
            raise self.dead_error

    async def close(self) -> None:
        """Detaches."""
        await self.ring.close()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def _with_deadline(request: _Payload, timeout: float | None) -> _Payload:
    if timeout is None or request.deadline is not None:
        return request
    return msgspec.structs.replace(request, deadline=time.monotonic() + timeout)
