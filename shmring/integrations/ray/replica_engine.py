"""The engine of a replica of Ray Serve: it begins and ends with its frontend, whose node it shares.

It is an engine as any other: an actor with a name, which whoever is in the cluster may connect to. But it is made of the
settings of ``shmring engine``, it is not started again, and it ends in good order when the replica's process has ended, however
that did. (Ray would kill it some time later, without giving its socket back.)
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shmring.engine.core import EngineCore
from shmring.engine.executors import create_executor
from shmring.engine.executors.interface import ExecutorOptions
from shmring.engine.settings import EngineSettings
from shmring.integrations.ray.directory import NAMESPACE, Where, actor_name
from shmring.integrations.ray.engine import HostedEngine
from shmring.service.logs import configure_logging
from shmring.service.tracing import start_tracing, stop_tracing
from shmring.transport.liveness import ProcessId

__all__ = ["start_engine"]

_ENGINE_BUNDLE = 1  # of the replica's placement group; the frontend has the first one
_CLOSE_TIMEOUT_S = 10.0  # for a running step, when the replica's process has ended


class _ReplicaEngine(HostedEngine):
    """The actor."""

    async def __init__(self, name: str, settings: EngineSettings, replica: ProcessId) -> None:  # type: ignore[misc]
        configure_logging(settings.log_level, "engine", settings.log_format)
        if settings.executor_path is not None:
            sys.path.append(settings.executor_path)  # last: nothing that lies there is taken for something that is installed
        start_tracing(settings.otlp_traces_endpoint, f"engine {name}")
        self._settings = settings
        self._end_with_replica(replica)
        socket_dir = {} if settings.ring.socket_dir is None else {"socket_dir": settings.ring.socket_dir}
        await super().__init__(name, None, settings.executor, socket_dir)

    async def _make_core(self, ring_name: str, executor: str, options: dict[str, Any]) -> EngineCore:
        settings = self._settings
        executor_options = ExecutorOptions(
            model=settings.model, mm_processor_kwargs=settings.mm_processor_kwargs, options=settings.executor_options
        )
        made = await asyncio.to_thread(create_executor, executor, executor_options)
        return await EngineCore.create(
            ring_name,
            made,
            settings.ring,
            settings.scheduling(made.describe().max_batch_size),
            step_timeout_s=settings.step_timeout_s,
            profiler_dir=settings.profiler_dir,
            **options,
        )

    def _end_with_replica(self, replica: ProcessId) -> None:
        pidfd = replica.open()
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(pidfd)
            self._start(self._end_now())

        loop.add_reader(pidfd, ended)

    async def _end_now(self) -> None:
        """Ends the process: nobody is there who waits for an answer."""
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self.close()
        finally:
            os._exit(0)

    async def close(self) -> None:
        """Closes the ring and the executor. The replica calls it when its last request has ended."""
        if self._core is not None:
            await self._core.close()
        await asyncio.to_thread(stop_tracing)


async def start_engine(name: str, settings: EngineSettings) -> tuple[Any, Where]:
    """Starts the engine of this replica, in the second bundle of its placement group, with all that the bundle has.

    Returns:
        The actor's handle, and where it is. The engine ends with this process, or when its ``close`` is called.

    Raises:
        RuntimeError: it can't start, or the replica has no such placement group.
    """
    group = ray.util.get_current_placement_group()
    if group is None or group.bundle_count <= _ENGINE_BUNDLE:
        raise RuntimeError("placement_group_bundles of a replica are two: for the frontend, and for its engine")
    bundle = dict(group.bundle_specs[_ENGINE_BUNDLE])
    options = {
        "num_cpus": bundle.pop("CPU", 0),
        "num_gpus": bundle.pop("GPU", 0),
        "memory": bundle.pop("memory", None),
        "resources": bundle,
    }
    placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=_ENGINE_BUNDLE)
    actor = (
        ray.remote(_ReplicaEngine)
        .options(name=actor_name(name), namespace=NAMESPACE, scheduling_strategy=placed, max_restarts=0, **options)
        .remote(name, settings, ProcessId.own())
    )
    try:
        return actor, msgspec.msgpack.decode(await actor.where.remote(), type=Where)
    except RayError as error:
        raise RuntimeError(f"the engine of this replica can't start: {error}") from error
