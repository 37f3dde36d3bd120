"""``python -m engine``: one engine process. It ends on SIGTERM and SIGINT, and with its parent if that is named."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import click
import torch
import uvloop

import shmring
from engine.core import EngineCore
from engine.executors import EXECUTORS, create_executor
from engine.executors.interface import Executor, ExecutorDeadError, ExecutorOptions
from engine.logs import configure_logging
from engine.scheduler import SchedulerConfig
from shmring.transport.liveness import ProcessWatch

logger = logging.getLogger("engine")

_STOP_TIMEOUT_S = 10.0  # for a running step or call, when the process is told to end; a hung one must not keep it for ever


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """What was asked for."""

    name: str
    executor: str
    executor_options: ExecutorOptions
    ring: shmring.RingConfig
    max_num_seqs: int | None
    max_batch_nbytes: int
    max_waiting: int
    step_timeout_s: float
    profiler_dir: str | None
    parent_pid: int | None


if TYPE_CHECKING:
    _ObjectType = click.ParamType[dict[str, Any]]
else:
    _ObjectType = click.ParamType  # which older versions of click do not let be subscripted


class _JsonObject(_ObjectType):
    """A JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """Returns the object."""
        if isinstance(value, dict):
            return value
        try:
            decoded = json.loads(value)
        except ValueError as error:
            self.fail(f"{error}; write a JSON object such as '{{\"num_frames\": 8}}'", param, ctx)
        if not isinstance(decoded, dict):
            self.fail(f"a JSON object is needed, not {type(decoded).__name__}", param, ctx)
        return decoded


_POSITIVE = click.IntRange(min=1)


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--name", default="shmring", help="The engine's name, which frontends connect to.")
@click.option("--executor", default="fingerprints", help=f"What computes: {', '.join(sorted(EXECUTORS))}, or module:Class.")
@click.option("--model", default=None, help="A local path or a hub's name, for executors that load a model.")
@click.option("--executor-options", default="{}", type=_JsonObject(), help="Further options of the executor, as JSON.")
@click.option("--mm-processor-kwargs", default="{}", type=_JsonObject(), help="How media are prepared, as JSON.")
@click.option("--slab-nbytes", default="1GiB", help="Size of the slab in /dev/shm, in bytes or as 64MiB, 4GiB.")
@click.option("--reply-nbytes", default=None, help="The part of it kept for replies.  [default: a sixteenth]")
@click.option("--max-num-seqs", default=None, type=_POSITIVE, help="Requests in a step.  [default: what the executor takes]")
@click.option("--max-batch-nbytes", default="256MiB", help="Bytes of media from which a step admits no further request.")
@click.option("--max-waiting", default=SchedulerConfig().max_waiting, type=_POSITIVE, help="Requests that may wait for a step.")
@click.option("--max-clients", default=256, type=_POSITIVE, help="Frontends at a time.")
@click.option("--max-frame-nbytes", default="16MiB", help="The largest message; tensors in slots don't count.")
@click.option("--step-timeout", default=60.0, help="Seconds from which a running step makes the engine report ill health.")
@click.option("--profiler-dir", default=None, help="Where start_profile() writes traces.  [default: no profiling]")
@click.option("--socket-dir", default=None, help="Where the socket lives.  [default: the user's runtime directory]")
@click.option("--parent-pid", default=None, type=int, help="End when this process, the parent, has ended.")
@click.option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]), help="What to log.")
def main(
    name: str,
    executor: str,
    model: str | None,
    executor_options: dict[str, Any],
    mm_processor_kwargs: dict[str, Any],
    slab_nbytes: str,
    reply_nbytes: str | None,
    max_num_seqs: int | None,
    max_batch_nbytes: str,
    max_waiting: int,
    max_clients: int,
    max_frame_nbytes: str,
    step_timeout: float,
    profiler_dir: str | None,
    socket_dir: str | None,
    parent_pid: int | None,
    log_level: str,
) -> None:
    """Runs an engine: it creates the slab, and executes what frontends submit."""
    _leave_cores_to_others()
    configure_logging(log_level, "engine")
    try:
        options = _Options(
            name=name,
            executor=executor,
            executor_options=ExecutorOptions(model=model, mm_processor_kwargs=mm_processor_kwargs, options=executor_options),
            ring=shmring.RingConfig(
                slab_nbytes=slab_nbytes,
                reply_nbytes=reply_nbytes,
                max_clients=max_clients,
                max_frame_nbytes=max_frame_nbytes,
                socket_dir=socket_dir,
            ),
            max_num_seqs=max_num_seqs,
            max_batch_nbytes=shmring.config.parse_nbytes(max_batch_nbytes),
            max_waiting=max_waiting,
            step_timeout_s=step_timeout,
            profiler_dir=profiler_dir,
            parent_pid=parent_pid,
        )
        uvloop.run(_serve(options))
    except (shmring.ShmringError, ExecutorDeadError, ImportError, OSError, ValueError, TypeError) as error:
        raise SystemExit(f"shmring engine: {error}") from None
    _leave()


def _leave_cores_to_others() -> None:
    """Has torch use half of the cores, unless its own variable says otherwise.

    Its threads spin while they wait for each other. With one for each core, whatever else runs there (the frontends, decoding)
    keeps a step waiting: a third to a half of the throughput on two cores.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))


def _leave() -> None:
    """Ends the process without unloading torch, which takes most of a second. Everything of ours is closed by now."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _serve(options: _Options) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    watch = _watch_parent(options.parent_pid, stop)
    try:
        executor = await _load(options, stop)
        if executor is not None:
            await _run(options, executor, stop)
    finally:
        if watch is not None:
            watch.close()
    logger.info("%s has ended", options.name)


async def _load(options: _Options, stop: asyncio.Event) -> Executor | None:
    """Makes the executor on a thread, since that may load a model for minutes; None if the process is told to end."""
    loading = asyncio.ensure_future(asyncio.to_thread(create_executor, options.executor, options.executor_options))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        _leave()  # nothing is there to be closed, and a load can't be interrupted
    stopping.cancel()
    executor = loading.result()
    if stop.is_set():
        executor.close()
        return None
    return executor


async def _run(options: _Options, executor: Executor, stop: asyncio.Event) -> None:
    description = executor.describe()
    async with await EngineCore.create(
        options.name,
        executor,
        options.ring,
        SchedulerConfig(
            max_num_seqs=options.max_num_seqs or description.max_batch_size,
            max_batch_nbytes=options.max_batch_nbytes,
            max_waiting=options.max_waiting,
        ),
        step_timeout_s=options.step_timeout_s,
        profiler_dir=options.profiler_dir,
    ) as core:
        slab_nbytes = core.ring.statistics().slab_nbytes
        logger.info(
            "%s is ready: executor %s, model %s, slab %d bytes",
            options.name,
            description.executor,
            description.model,
            slab_nbytes,
        )
        await _run_until(core, stop)


def _watch_parent(parent_pid: int | None, stop: asyncio.Event) -> ProcessWatch | None:
    """Ends this process with its parent, also if that is killed."""
    if parent_pid is None:
        return None
    watch = ProcessWatch(asyncio.get_running_loop(), os.pidfd_open(parent_pid), stop.set)
    if os.getppid() != parent_pid:  # it ended before we watched, and its pid may be somebody else's by now
        stop.set()
    return watch


async def _run_until(core: EngineCore, stop: asyncio.Event) -> None:
    running = asyncio.ensure_future(core.run())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not running.done():
        asyncio.get_running_loop().call_later(_STOP_TIMEOUT_S, _give_up)
        running.cancel()
        await asyncio.wait([running])
    if not running.cancelled():
        running.result()


def _give_up() -> None:
    """Ends the process though its thread does not; frontends learn of it by their pidfd, and the slab goes with us."""
    logger.critical("what the executor was doing did not end within %g s; giving up on it", _STOP_TIMEOUT_S)
    logging.shutdown()
    os._exit(1)


if __name__ == "__main__":
    main()
