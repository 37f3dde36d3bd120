"""``python -m engine``: one engine process. It ends on SIGTERM and SIGINT, and with its parent if that is named."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys

import click
import torch
import uvloop

import shmring
from engine.core import EngineCore
from engine.executors import EXECUTORS, create_executor
from engine.scheduler import SchedulerConfig
from shmring.transport.liveness import ProcessWatch

logger = logging.getLogger("engine")


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--name", default="shmring", help="The engine's name, which frontends connect to.")
@click.option("--executor", default="features", type=click.Choice(sorted(EXECUTORS)), help="What computes.")
@click.option("--slab-nbytes", default="1GiB", help="Size of the slab in /dev/shm, in bytes or as 64MiB, 4GiB.")
@click.option("--reply-nbytes", default=None, help="The part of it kept for replies.  [default: a sixteenth]")
@click.option("--max-num-seqs", default=32, help="Requests in a step.")
@click.option("--max-batch-nbytes", default="256MiB", help="Bytes from which a step takes no further request.")
@click.option("--max-clients", default=256, help="Frontends at a time.")
@click.option("--socket-dir", default=None, help="Where the socket lives.  [default: the user's runtime directory]")
@click.option("--parent-pid", default=None, type=int, help="End when this process, the parent, has ended.")
@click.option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]), help="What to log.")
def main(
    name: str,
    executor: str,
    slab_nbytes: str,
    reply_nbytes: str | None,
    max_num_seqs: int,
    max_batch_nbytes: str,
    max_clients: int,
    socket_dir: str | None,
    parent_pid: int | None,
    log_level: str,
) -> None:
    """Runs an engine: it creates the slab, and executes what frontends submit."""
    if "OMP_NUM_THREADS" not in os.environ:
        # torch's threads spin while they wait for each other. With one for each core, whatever else runs there (the
        # frontends, decoding) keeps a step waiting: a third to a half of the throughput on two cores.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s engine: %(message)s", stream=sys.stderr)
    try:
        ring_config = shmring.RingConfig(
            slab_nbytes=slab_nbytes, reply_nbytes=reply_nbytes, max_clients=max_clients, socket_dir=socket_dir
        )
        scheduler_config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_batch_nbytes=shmring.config.parse_nbytes(max_batch_nbytes)
        )
        uvloop.run(_serve(name, executor, ring_config, scheduler_config, parent_pid))
    except (shmring.ShmringError, OSError, ValueError) as error:
        raise SystemExit(f"shmring engine: {error}") from None


async def _serve(
    name: str, executor: str, ring_config: shmring.RingConfig, scheduler_config: SchedulerConfig, parent_pid: int | None
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    watch = _watch_parent(parent_pid, stop)
    try:
        async with await EngineCore.create(name, create_executor(executor), ring_config, scheduler_config) as core:
            logger.info("%s is ready: executor %s, slab %d bytes", name, executor, core.ring.statistics().slab_nbytes)
            await _run_until(core, stop)
    finally:
        if watch is not None:
            watch.close()
    logger.info("%s has ended", name)


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
    if running.done():
        running.result()
        return
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


if __name__ == "__main__":
    main()
