"""The engine as a process: loads the executor, serves frontends, ends on SIGTERM, SIGINT and SIGHUP and with its supervisor.

When a signal tells it to end, it drains for ``shutdown_timeout_s``: frontends with several engines send new requests to the
others, and the requests that it has, or that still come, are carried out. A second signal ends it at once; so does the end of
the supervisor, with which the frontends end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import NoReturn

import torch
import uvloop

import shmring
from shmring.core.loggers import logger_of
from shmring.engine.core import EngineCore, ServerFacts
from shmring.engine.executors import create_executor
from shmring.engine.executors.interface import Executor, ExecutorDeadError, ExecutorOptions
from shmring.engine.settings import EngineSettings, server_name
from shmring.service.logs import ending, leave
from shmring.service.supervision import Stop, SupervisorLink, seldom_look_for_garbage
from shmring.service.tracing import start_tracing, stop_tracing

__all__ = ["run"]

logger = logger_of("shmring.engine")

_STOP_TIMEOUT_S = 10.0  # for a running step or call, when the process is told to end; a hung one must not keep it for ever


def run(settings: EngineSettings, link: SupervisorLink | None = None) -> NoReturn:
    """Runs an engine until it is told to end, and ends the process.

    Args:
        settings: what it is to be.
        link: to the supervisor, if there is one; the engine ends with it.

    Raises:
        SystemExit: it can't start, or had to end; says why.
    """
    _leave_cores_to_others(settings.data_parallel_size)
    if settings.executor_path is not None:
        sys.path.append(settings.executor_path)  # last: nothing that lies there is taken for something that is installed
    try:
        start_tracing(settings.otlp_traces_endpoint, f"engine {settings.name}")
        uvloop.run(_serve(settings, link))
    except (shmring.ShmringError, ExecutorDeadError, ImportError, OSError, ValueError, TypeError) as error:
        raise ending(f"shmring engine: {error}") from None
    finally:
        stop_tracing()
    leave()


def _leave_cores_to_others(engines: int) -> None:
    """Has torch use half of the cores, or this engine's part of that half, unless its own variable says otherwise.

    Its threads spin while they wait for each other. With one for each core, whatever else runs there (the frontends, decoding)
    keeps a step waiting: a third to a half of the throughput on two cores.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2 // engines))


async def _serve(settings: EngineSettings, link: SupervisorLink | None) -> None:
    stop = Stop()
    stop.heed_signals()
    async with link.held(stop.tell_at_once) if link is not None else contextlib.nullcontext():
        executor = await _load(settings, stop)
        if executor is not None:
            await _run(settings, executor, stop, link)
    logger.info("%s has ended", settings.name)


async def _load(settings: EngineSettings, stop: Stop) -> Executor | None:
    """Makes the executor on a thread, since that may load a model for minutes; None if the process is told to end."""
    options = ExecutorOptions(
        model=settings.model, mm_processor_kwargs=settings.mm_processor_kwargs, options=settings.executor_options
    )
    loading = asyncio.ensure_future(asyncio.to_thread(create_executor, settings.executor, options))
    stopping = asyncio.ensure_future(stop.told.wait())
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        leave()  # nothing is there to be closed, and a load can't be interrupted
    stopping.cancel()
    executor = loading.result()
    if stop.told.is_set():
        executor.close()
        return None
    return executor


async def _run(settings: EngineSettings, executor: Executor, stop: Stop, link: SupervisorLink | None) -> None:
    description = executor.describe()
    size = settings.data_parallel_size
    server = None if link is None else ServerFacts(server_name(settings.name, size), size, os.getppid())
    async with await EngineCore.create(
        settings.name,
        executor,
        settings.ring,
        settings.scheduling(description.max_batch_size),
        step_timeout_s=settings.step_timeout_s,
        profiler_dir=settings.profiler_dir,
        server=server,
        **settings.listening.arguments(),
    ) as core:
        slab_nbytes = core.ring.statistics().slab_nbytes
        logger.info(
            "%s is ready: executor %s, model %s, slab %d bytes",
            settings.name,
            description.executor,
            description.model,
            slab_nbytes,
        )
        if core.ring.address:
            logger.info("frontends on other hosts connect to %s", core.ring.address)
        seldom_look_for_garbage()
        if link is not None:
            link.is_stuck = lambda: bool(core.complaint())
            link.say_ready()
        await _run_until(core, stop, settings.shutdown_timeout_s)


async def _run_until(core: EngineCore, stop: Stop, shutdown_timeout_s: float) -> None:
    running = asyncio.ensure_future(core.run())
    draining = asyncio.ensure_future(_drain(core, stop, shutdown_timeout_s))
    await asyncio.wait([running, draining], return_when=asyncio.FIRST_COMPLETED)
    draining.cancel()
    if not running.done():
        asyncio.get_running_loop().call_later(_STOP_TIMEOUT_S, _give_up)
        running.cancel()
        await asyncio.wait([running])
    if not running.cancelled():
        running.result()


async def _drain(core: EngineCore, stop: Stop, timeout_s: float) -> None:
    """Returns when the process was told to end, and all requests have ended, the time is over, or there is a hurry."""
    await stop.told.wait()
    draining, hurrying = asyncio.ensure_future(core.drain(timeout_s)), asyncio.ensure_future(stop.hurry.wait())
    try:
        await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
        if draining.done() and not draining.result():
            logger.warning("requests that have not ended within %g s are aborted", timeout_s)
    finally:
        draining.cancel()
        hurrying.cancel()


def _give_up() -> None:
    """Ends the process though its thread does not; frontends learn of it by their pidfd, and the slab goes with us."""
    try:
        logger.critical("what the executor was doing did not end within %g s; giving up on it", _STOP_TIMEOUT_S)
    finally:
        leave(1)
