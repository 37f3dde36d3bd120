"""The engine as frontends see it: what they may ask of it, and how that is done over a client of its ring.

Several engines that serve the same look like one: a request goes to one of them, control calls go to all. Only their states and
their counts are each engine's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

import shmring
from shmring.door import is_far
from shmring.engine.protocol import (
    Calls,
    EncodeReply,
    EncodeRequest,
    FrontendReport,
    GenerateReply,
    GenerateRequest,
    Medium,
    ModelDescription,
)
from shmring.service.distributions import Distribution
from shmring.service.tracing import current_headers

__all__ = ["EngineClient", "EngineState", "MediaMemory"]

#: How an engine is. ``"unhealthy"`` is what it says of itself; one that is ``"down"`` is not attached.
EngineState: TypeAlias = Literal["running", "paused", "unhealthy", "unresponsive", "down"]

_PAUSE_S = 1.0  # between attempts to hear of aborts
_OTHERS_S = 0.25  # for the states of those that are slower than the first that is well: who asks may wait a second at most

_Payload = TypeVar("_Payload", EncodeRequest, GenerateRequest)


class MediaMemory:
    """The slab of an engine, for media: all of a request's lie in one, and the request goes to that engine.

    What has to be waited for fails at once, with :class:`shmring.EngineDeadError`, if that engine is not attached: a frontend
    answers 503, or takes another engine, rather than keep its caller waiting for one that may never come.

    Attributes:
        name: of the engine.
    """

    def __init__(self, ring: shmring.Client, name: str) -> None:
        self.name = name
        self._ring = ring
        self._connection = ring.engines[name]

    @property
    def kept_nbytes(self) -> int:
        """How much of media that engine keeps at most."""
        return self._connection.kept_nbytes

    @property
    def epoch(self) -> int:
        """Which life of that engine this is; 0: it is not attached."""
        return self._connection.epoch

    async def slots(self, sizes: Sequence[int], *, timeout: float | None = None) -> list[shmring.Slot]:
        """Waits for memory for media, all at once; see :meth:`shmring.Client.slots`.

        Threads copy into it, and go on when their request is cancelled: a slot drains before its memory is used again.
        """
        self._check_attached()
        return await self._ring.slots(sizes, timeout=timeout, drain=True, engine=self.name)

    def check_capacity(self, *sizes: int) -> None:
        """Checks that there can be slots of these sizes at once; see :meth:`shmring.Client.check_capacity`.

        Raises:
            shmring.CapacityError: it can never fit the slab.
        """
        self._check_attached()
        self._ring.check_capacity(*sizes, engine=self.name)

    async def find(self, key: bytes) -> shmring.Kept[Medium] | None:
        """Looks for a medium that is kept (a :data:`shmring.engine.protocol.Medium`); see :meth:`shmring.Client.find`."""
        self._check_attached()
        return await self._ring.find(key, payload_type=Medium, engine=self.name)

    async def keep(self, key: bytes, medium: Medium) -> shmring.Kept[Any]:
        """Gives a medium to be kept, whose slot is not copied; see :meth:`shmring.Client.keep`."""
        self._check_attached()
        return await self._ring.keep(key, medium, engine=self.name)

    def _check_attached(self) -> None:
        if not self._connection.connected and not self._ring.closed:
            raise shmring.EngineDeadError(f"the engine {self.name!r} has gone; a new one is attached to as soon as it starts")


class EngineClient:
    """An engine, or several that serve the same, from a frontend. Made by :meth:`connect`; use it with ``async with``.

    Control calls raise, besides what they name, :class:`shmring.EngineDeadError` if there is no engine,
    :class:`shmring.RemoteError` if it refuses or fails, and ``TimeoutError`` if it does not answer in time.

    Source: vLLM's ``EngineClient`` protocol; names and meanings are kept where the operation makes sense here. ``engines``,
    ``abort_requests``, ``end_aborted``, ``copies``, ``kept_nbytes``, ``media_memory``, ``describe``, ``states``,
    ``statistics``, ``times`` and ``inspect`` are ours: media travel in slots.

    Attributes:
        ring: the client beneath.
        engines: the connection to each engine, by name.
        title: what engines call this client.
    """

    def __init__(self, ring: shmring.Client, retries: int = 0, title: str = "") -> None:
        self.ring = ring
        self.title = title
        self.engines: Mapping[str, shmring.EngineConnection] = ring.engines
        self._retries = retries
        self._is_far = any(map(is_far, ring.engines))
        self._described: dict[str, tuple[int, ModelDescription]] = {}  # with the life of the engine that said so

    @classmethod
    async def connect(
        cls,
        name: str | list[str],
        config: shmring.ClientConfig | None = None,
        *,
        description: str = "",
        retries: int = 0,
        **overrides: Any,
    ) -> EngineClient:
        """Attaches to the engine of a name, and to its successors when it is restarted.

        Args:
            name: or a list of names: requests go to the least loaded of these engines.
            config, description: as of :func:`shmring.connect`, and so are ``overrides``.
            retries: how often a request is sent to another engine because its own died before it had answered; of several.

        Raises:
            shmring.EngineDeadError: none answers within ``connect_timeout_s``.
        """
        ring = await shmring.connect(name, config, reconnect=True, description=description, **overrides)
        return cls(ring, 0 if isinstance(name, str) else retries, description)

    # -- how it is ----------------------------------------------------------------------------------------------------

    @property
    def copies(self) -> int:
        """How many tensors this process has copied for sending."""
        return sum(connection.copies for connection in self.engines.values())

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
        """Asks the engine; returns if it is well (if all of several are)."""
        await self._call(Calls.HEALTH, timeout=timeout)

    async def states(self, timeout: float = 2.0) -> dict[str, EngineState]:
        """Asks each engine how it is.

        Args:
            timeout: seconds. If one is well, the others have a quarter of a second more.
        """
        asking = {asyncio.create_task(self._state_of(name, timeout)): name for name in self.engines}
        try:
            pending = set(asking)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(task.result() in ("running", "paused") for task in done):
                    await asyncio.wait(asking, timeout=_OTHERS_S)
                    break
        finally:
            for task in asking:
                task.cancel()
        return {name: task.result() if task.done() else "unresponsive" for task, name in asking.items()}

    @property
    def description(self) -> ModelDescription | None:
        """What :meth:`describe` has returned in the life of an engine that is attached; None: it has not."""
        for name, (epoch, description) in self._described.items():
            if epoch == self.engines[name].epoch:
                return description
        return None

    async def describe(self, timeout: float = 2.0) -> ModelDescription:
        """Returns what the engine's executor does. It is asked once in an engine's life; of several, one is."""
        self._check_running()
        if (description := self.description) is not None:
            return description
        attached = [name for name, connection in self.engines.items() if connection.connected]
        name, epoch, answer = await self._first_description(attached, timeout)
        self._described[name] = epoch, msgspec.convert(answer, ModelDescription)
        return self._described[name][1]

    async def _first_description(self, attached: Sequence[str], timeout: float) -> tuple[str, int, dict[str, Any]]:
        """Asks engines, and returns what the first that answers says, with its name and its life."""

        async def ask(name: str) -> tuple[str, int, dict[str, Any]]:
            return name, self.engines[name].epoch, await self.ring.call(Calls.DESCRIBE, engine=name, timeout=timeout)

        if len(attached) == 1:
            return await ask(attached[0])
        asking = [asyncio.create_task(ask(name)) for name in attached]
        try:
            for answering in asyncio.as_completed(asking):
                try:
                    return await answering
                except (shmring.ShmringError, TimeoutError) as error:
                    failure = error
            raise failure
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def get_supported_tasks(self, timeout: float = 2.0) -> tuple[str, ...]:
        """Returns what the executor can be asked for: ``"encode"``, ``"generate"``."""
        return tuple((await self.describe(timeout)).tasks)

    async def statistics(self, timeout: float = 2.0, *, engine: str | None = None) -> dict[str, float]:
        """Returns an engine's counts by name.

        Args:
            timeout: seconds.
            engine: which one; ``None``: the only one.

        Raises:
            ValueError: there are several, and none is named.
        """
        if engine is None and len(self.engines) > 1:
            raise ValueError(f"several engines have statistics: name one of {', '.join(self.engines)}")
        name = engine or next(iter(self.engines))
        if not self.engines[name].connected and not self.ring.closed:
            raise self.dead_error
        return msgspec.convert(await self.ring.call(Calls.STATISTICS, engine=name, timeout=timeout), dict[str, float])

    async def times(self, timeout: float = 2.0, *, engine: str) -> dict[str, Distribution]:
        """Returns how long the parts of requests took in an engine, by name."""
        times = await self.ring.call(Calls.TIMES, engine=engine, timeout=timeout)
        parts = msgspec.convert(times, dict[str, tuple[list[int], float]])
        return {name: Distribution(counts, total) for name, (counts, total) in parts.items()}

    async def inspect(self, engine: str, timeout: float = 2.0) -> shmring.RingSnapshot:
        """Returns what an engine is doing now, for people; see :func:`shmring.inspect`.

        Raises:
            shmring.LocalProtocolError: it is on another host.
        """
        if is_far(engine):
            raise shmring.LocalProtocolError(f"{engine} is on another host: ask for `shmring inspect` there")
        return await shmring.inspect(engine, socket_dir=self.ring.config.socket_dir, timeout=timeout)

    async def load(self, timeout: float = 2.0) -> int:
        """Returns how many requests wait or run, in all engines that are attached, of all frontends."""
        self._check_running()
        names = [name for name, connection in self.engines.items() if connection.connected]
        if not names:
            raise shmring.EngineDeadError("no engine is attached")
        counts = await asyncio.gather(*(self.statistics(timeout, engine=name) for name in names))
        return int(sum(count["waiting_requests"] + count["running_requests"] for count in counts))

    async def do_log_stats(self, timeout: float = 2.0) -> None:
        """Has the engine log its counts."""
        await self._call(Calls.LOG_STATS, timeout=timeout)

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def kept_nbytes(self) -> int:
        """How much of media an engine keeps at most; 0: nothing, or no engine is attached."""
        return self.ring.kept_nbytes

    def media_memory(self) -> MediaMemory:
        """Returns where the media of a request that is about to be made lie: at the least loaded of several engines.

        Raises:
            shmring.EngineDeadError: no engine is attached.
        """
        self._check_running()
        return MediaMemory(self.ring, self.ring.choose())

    def generate(
        self, request: GenerateRequest, *, request_id: str = "", timeout: float | None = None
    ) -> AsyncGenerator[GenerateReply, None]:
        """Yields an answer, piece by piece. Leaving the loop early, or being cancelled, aborts the request.

        Pieces come as the engine makes them; for a caller that reads slowly, several become one, as for a request that says so
        (:attr:`GenerateRequest.stream`).

        Args:
            request: media that lie in a slot of this client are not copied.
            request_id: the caller's name for it, for :meth:`abort` and the engine's log.
            timeout: seconds for all of it. The engine gets it as a deadline, unless the request has one; one on another host,
                whose clock is another one, is told when they are over.

        Raises:
            shmring.RemoteError: the executor refused it or failed.
            shmring.AbortedError: :meth:`abort` was called.
            shmring.EngineDeadError: the engine went away.
            TimeoutError: it took longer.
        """
        self._check_running()
        return self.ring.stream(
            self._completed(request, timeout),
            timeout=timeout,
            reply_type=GenerateReply,
            request_id=request_id,
            retry=self._retries,
        )

    async def encode(
        self, request: EncodeRequest, *, request_id: str = "", timeout: float | None = None
    ) -> AsyncGenerator[EncodeReply, None]:
        """Yields the embeddings of a request, many of them in parts: the caller's own, and no views of the slab. Arguments and
        errors are those of :meth:`generate`."""
        self._check_running()
        inputs = len(request.inputs)  # now: the list is its caller's, who may empty it once it is sent
        replies = self.ring.stream(
            self._completed(request, timeout),
            timeout=timeout,
            reply_type=EncodeReply,
            request_id=request_id,
            retry=self._retries,
        )
        async with aclosing(replies):
            async for reply in replies:
                inputs -= len(reply.embeddings)
                reply.embeddings = reply.embeddings.clone()  # without its slot
                yield reply
        if inputs:
            raise shmring.RemoteError("NoReply", f"the engine ended the request without {inputs} of its embeddings")

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
        return all(await self._call(Calls.IS_PAUSED, timeout=timeout))

    async def abort_requests(self, request_ids: Sequence[str], timeout: float = 5.0) -> int:
        """Ends requests of all frontends, in the engine or on their way to it (:meth:`end_aborted`); their callers get an
        error. (:meth:`abort` is for this client's own.)

        Returns:
            How many there were.
        """
        return sum(await self._call(Calls.ABORT_REQUESTS, list(request_ids), timeout=timeout))

    async def tell_engines(self, report: FrontendReport, timeout: float = 2.0) -> None:
        """Tells the engines, for people, how this frontend is. A report holds for three seconds."""
        await self._call(Calls.TELL_ENGINES, msgspec.to_builtins(report), timeout=timeout)

    async def end_aborted(self, end: Callable[[Sequence[str]], int]) -> None:
        """Ends requests that no engine has yet, when an operator names them to an engine; goes on until it is cancelled.

        Args:
            end: ends the requests of these names that are not sent yet, and returns how many there were.
        """
        await asyncio.gather(*(self._end_aborted(name, end) for name in self.engines))

    async def _end_aborted(self, engine: str, end: Callable[[Sequence[str]], int]) -> None:
        token = ended = 0
        while not self.is_stopped:
            try:
                answer = await self.ring.call(Calls.NEXT_ABORTS, token, ended, engine=engine)
                token, names = msgspec.convert(answer, tuple[int, list[str]])
                ended = end(names)
            except (shmring.ShmringError, msgspec.ValidationError):  # it has gone, or is another program
                token = ended = 0
                await asyncio.sleep(_PAUSE_S)

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
            One result for each of the executor's workers, engine by engine.

        Raises:
            shmring.RemoteError: there is no such method, or it raised.
        """
        answers = await self._call(Calls.COLLECTIVE_RPC, method, list(args), dict(kwargs or {}), timeout=timeout)
        return [result for results in answers for result in results]

    async def start_profile(self, timeout: float | None = None) -> None:
        """Starts torch's profiler around the engine's steps; the engine needs ``--profiler-dir``."""
        await self._call(Calls.START_PROFILE, timeout=timeout)

    async def stop_profile(self, timeout: float | None = None) -> str:
        """Stops it, and returns the path of the trace, for ``chrome://tracing`` or Perfetto; of several engines, one a line."""
        return "\n".join(await self._call(Calls.STOP_PROFILE, timeout=timeout))

    async def _call(self, method: str, *arguments: object, timeout: float | None) -> list[Any]:
        """Calls a method of all engines that are attached; an engine that dies meanwhile counts as not attached."""
        self._check_running()
        names = [name for name, connection in self.engines.items() if connection.connected] or list(self.engines)
        if len(names) == 1:
            return [await self.ring.call(method, *arguments, engine=names[0], timeout=timeout)]
        calls = (self.ring.call(method, *arguments, engine=name, timeout=timeout) for name in names)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in errors:
            if not isinstance(error, shmring.EngineDeadError) or len(errors) == len(outcomes):
                raise error
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    def _check_running(self) -> None:
        """A frontend answers 503 at once rather than keep its caller waiting for an engine that may never come."""
        if self.errored:
            raise self.dead_error

    async def _state_of(self, name: str, timeout: float) -> EngineState:
        if not self.engines[name].connected:
            return "down"
        try:
            await self.ring.call(Calls.HEALTH, engine=name, timeout=timeout)
            return "paused" if await self.ring.call(Calls.IS_PAUSED, engine=name, timeout=timeout) else "running"
        except TimeoutError:
            return "unresponsive"
        except shmring.RemoteError:
            return "unhealthy"
        except shmring.ShmringError:
            return "down"

    def _completed(self, request: _Payload, timeout: float | None) -> _Payload:
        """Returns a request with its deadline, and with the context of its trace."""
        deadline = request.deadline
        if self._is_far:
            deadline = None
        elif deadline is None and timeout is not None:
            deadline = time.monotonic() + timeout
        return msgspec.structs.replace(request, deadline=deadline, trace_headers=current_headers())

    async def close(self) -> None:
        """Detaches."""
        await self.ring.close()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
