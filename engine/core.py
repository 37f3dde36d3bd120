"""The engine core: ring, scheduler and executor in one loop.

Each turn claims what waits, up to what a step may hold, and executes it on a thread, so that the event loop goes on
handling frontends, leases and aborts. When the step ends, the slots of all its requests are released, those of aborted
requests too: nobody reuses memory that a step is reading. Then the requests are answered.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

import shmring
from engine.metrics import EngineMetrics
from engine.protocol import (
    CALL_DESCRIBE,
    CALL_HEALTH,
    CALL_STATISTICS,
    EncodeReply,
    EncodeRequest,
    Executor,
)
from engine.request import EngineRequest
from engine.scheduler import Scheduler, SchedulerConfig

__all__ = ["EngineCore"]

logger = logging.getLogger("engine.core")


class EngineCore:
    """Executes what the ring brings. Use :meth:`run`; ``async with`` closes ring and executor.

    Attributes:
        ring: where requests come from.
        metrics: counters.
    """

    def __init__(self, executor: Executor, scheduler_config: SchedulerConfig) -> None:
        self.metrics = EngineMetrics()
        self._executor = executor
        self._scheduler = Scheduler(scheduler_config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-step")
        self._answering: set[asyncio.Task[None]] = set()
        self._ring: shmring.Ring | None = None

    @property
    def ring(self) -> shmring.Ring:
        assert self._ring is not None, "the core is open inside `async with`"
        return self._ring

    @classmethod
    async def create(
        cls,
        name: str,
        executor: Executor,
        ring_config: shmring.RingConfig | None = None,
        scheduler_config: SchedulerConfig | None = None,
        **overrides: Any,
    ) -> EngineCore:
        """Opens the ring of a name for an executor; ``overrides`` are fields of the ring's configuration.

        Raises:
            shmring.ShmringError, PermissionError, ValueError, TypeError: as :func:`shmring.serve`.
        """
        core = cls(executor, scheduler_config or SchedulerConfig(max_num_seqs=executor.describe().max_batch_size))
        calls = {CALL_HEALTH: core.health, CALL_DESCRIBE: core.describe, CALL_STATISTICS: core.statistics}
        core._ring = await shmring.serve(name, ring_config, payload_type=EncodeRequest, calls=calls, **overrides)
        return core

    async def run(self) -> None:
        """Executes steps until the ring is closed. Cancelling it waits for the running step."""
        loop = asyncio.get_running_loop()
        async for claim in self.ring:
            batch = self._scheduler.fill(EngineRequest(claim, loop.time()), self._take_next)
            del claim
            await self._step(batch)

    def _take_next(self) -> EngineRequest | None:
        try:
            return EngineRequest(self.ring.claim_nowait(), asyncio.get_running_loop().time())
        except shmring.WouldBlock:
            return None

    async def _step(self, batch: list[EngineRequest]) -> None:
        outputs = await self._execute(batch)
        for request, output in zip(batch, outputs, strict=True):
            self.metrics.failed_requests += isinstance(output, Exception)
            try:
                request.answer_nowait(output)
            except shmring.WouldBlock:
                assert not isinstance(output, Exception)
                self._answer_later(request, output)
            except shmring.CapacityError as error:
                request.claim.fail(error)

    async def _execute(self, batch: list[EngineRequest]) -> Sequence[EncodeReply | Exception]:
        """Runs one step on the thread. What it raises fails the batch, and the engine goes on."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        self.metrics.running_requests = len(batch)
        step = loop.run_in_executor(self._thread, _execute, self._executor, batch)
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            # The slots may be released only when nobody reads them: the step first, then the cancellation.
            await asyncio.wait([step])
            for request in batch:
                request.claim.fail(asyncio.CancelledError("the engine is stopping"))
            raise
        finally:
            self.metrics.running_requests = 0
            self.metrics.steps += 1
            self.metrics.step_requests += len(batch)
            self.metrics.step_seconds += loop.time() - started

    def _answer_later(self, request: EngineRequest, output: EncodeReply) -> None:
        """A frontend that reads slowly keeps nobody but itself waiting."""
        task = asyncio.get_running_loop().create_task(request.answer(output))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    # -- control calls -----------------------------------------------------------------------------------------------

    async def health(self) -> None:
        """The loop that answers this is the loop that steps are started from."""

    async def describe(self) -> dict[str, Any]:
        """Says what the executor does."""
        description: dict[str, Any] = msgspec.to_builtins(self._executor.describe())
        return description

    async def statistics(self) -> dict[str, float]:
        """Returns all counters by name."""
        return self.metrics.collect(self.ring.statistics())

    # -- the end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Closes the ring, waits for the running step, and closes the executor."""
        await self.ring.close()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown, wait=True)
        self._executor.close()

    async def __aenter__(self) -> EngineCore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _execute(executor: Executor, batch: list[EngineRequest]) -> Sequence[EncodeReply | Exception]:
    try:
        outputs = executor.execute([request.payload for request in batch])
    except Exception as error:  # noqa: BLE001 - whatever an executor raises fails its batch, and nothing else
        # As text, and without its traceback: its frames would keep the batch's slots for as long as anybody keeps it.
        logger.error("the executor failed a batch of %d\n%s", len(batch), traceback.format_exc())
        return [error.with_traceback(None)] * len(batch)
    if len(outputs) != len(batch):
        return [RuntimeError(f"the executor answered {len(outputs)} of {len(batch)} requests")] * len(batch)
    return outputs
