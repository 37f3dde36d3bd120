"""One run: servers, loads on them in turn, and what they have shown.

All servers run all the time, of which those that are not asked sleep, and get the same load one after the other, again and
again (A B A B ...): whatever else the machine does meets all, and ratios are taken within each repetition. Requests and media
are the same for all, and made before.

A server (:mod:`shmring.frontend.serve_process`) has a directory for all that it leaves on the disk. It is stopped in every way
out of the block.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import platform
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.children import BenchError
from bench.meter import process_cpu_s
from bench.serving.client import Client
from bench.serving.load import WARM_UP_REQUESTS, Body, Measurement, play, request_body, warm_up
from bench.serving.media import media_parts
from bench.serving.plan import Load, ServerOptions
from shmring.frontend import serve_process
from shmring.frontend.serve_process import ServerProcess

logger = logging.getLogger("bench.serving")

LOAD = "the load"  # the one case of a run

_PROGRAM = serve_process.PROGRAM
_START_LIMIT_S = 120.0  # importing torch in each process takes 10 s on a busy machine
_STOP_LIMIT_S = 30.0  # `shmring serve` kills sooner what does not end; a busy machine reaps slowly
_REQUEST_TIMEOUT_S = 600.0


# -- a server ----------------------------------------------------------------------------------------------------------


class ServerError(BenchError):
    """The server did not start, or did not last."""


def cpu_s(server: ServerProcess) -> dict[str, float]:
    """Returns the CPU seconds, user and system, that a server's processes have used, by part.

    Raises:
        ServerError: one of them has ended.
    """
    if not server.is_whole:
        raise ServerError("a process of the server ended during the run")
    parts = {"engine": server.engines, "frontends": server.frontends}
    return {part: sum(map(process_cpu_s, pids)) for part, pids in parts.items()}


@contextlib.asynccontextmanager
async def serving(options: ServerOptions) -> AsyncIterator[ServerProcess]:
    """Runs a server on a free port of the loopback interface; when the block is left, nothing of it is.

    Raises:
        ServerError: it did not start, ended before it was told to, or ended with an error.
    """
    # Not in the default place for temporary files: that may be too long a path for a socket.
    with tempfile.TemporaryDirectory(prefix=f"shmring-serve-{os.getpid()}-", dir="/tmp") as directory:
        process = ServerProcess.start(
            _arguments(options, directory),
            program=_PROGRAM,
            environment=os.environ | {"TMPDIR": directory},  # frontends keep their counters in files
            errors=Path(directory, "stderr"),
            stop_limit_s=_STOP_LIMIT_S,
            start_new_session=True,  # Ctrl-C is for us, who then stop it
        )
        with process:
            try:
                await process.until_ready(_START_LIMIT_S)
            except serve_process.ServerError as error:
                raise ServerError(str(error)) from None
            try:
                yield process
                if process.process.returncode is not None:
                    raise ServerError("the server ended during the run; it was not told to")
            finally:
                code = process.stop()
                if words := process.last_words:
                    logger.warning("the server wrote:\n%s", words)
        if code != 0:
            raise ServerError(f"the server ended with exit code {code}")


def _arguments(options: ServerOptions, directory: str) -> list[str]:
    return [
        "--host=127.0.0.1",
        "--port=0",
        "--name=bench",
        f"--socket-dir={directory}",
        f"--api-server-count={options.api_servers}",
        f"--data-parallel-size={options.engines}",
        f"--slab-nbytes={options.slab_nbytes}",
        f"--executor={options.executor}",
        f"--executor-options={options.executor_options}",
        "--shutdown-timeout=0",  # nothing is in flight, or nobody wants to wait for it
        *["--mm-processor-cache-gb=0"] * (not options.kept),
        *["--disable-mm-shm"] * options.copied,
        *options.further,
    ]


# -- a run -------------------------------------------------------------------------------------------------------------


class Results(msgspec.Struct, frozen=True):
    """A run.

    Attributes:
        client: what sent the requests.
        request_nbytes: of the first one's body.
        measured: each load on each server, in the order in which they were sent.
        counters: what frontends have counted, by server.
        warm_up_requests: that were sent to each server before.
    """

    client: str
    request_nbytes: int
    measured: dict[str, list[Measurement]]
    counters: dict[str, dict[str, int]]
    warm_up_requests: int = WARM_UP_REQUESTS


class _Target(NamedTuple):
    client: Client
    body: Body
    server: ServerProcess


def steps(servers: Mapping[str, ServerOptions], repetitions: int) -> int:
    """Returns how often :func:`run` reports progress."""
    return 3 + len(servers) * (1 + repetitions)


async def run(load: Load, servers: Mapping[str, ServerOptions], repetitions: int, progress: Callable[[str], None]) -> Results:
    """Loads servers in turn, with a line before each step. When this returns or raises, no process and no file of it is left.

    Raises:
        BenchError, OSError: a server did not start, did not last, or can't be asked.
    """
    progress("making media")
    parts = await asyncio.to_thread(media_parts, load)
    progress(f"starting {len(servers)} servers")
    async with _targets(load, servers, parts) as targets:
        for name, target in targets.items():
            progress(f"{name}: warming up")
            await warm_up(load, target.client, target.body)
        measured: dict[str, list[Measurement]] = {name: [] for name in targets}
        for repetition in range(repetitions):
            for name, target in targets.items():
                progress(f"{name}: {load.requests:,} requests, {repetition + 1} of {repetitions}")
                before_s = cpu_s(target.server)
                measurement = await play(load, target.client, target.body)
                used_s = {part: after - before_s[part] for part, after in cpu_s(target.server).items()}
                measured[name].append(msgspec.structs.replace(measurement, cpu_s=used_s))
        progress("reading the servers' counters")
        counters = await asyncio.gather(*(target.client.counters() for target in targets.values()))
        return Results(
            client=f"aiohttp {version('aiohttp')}, uvloop {version('uvloop')}, Python {platform.python_version()}",
            request_nbytes=max(len(target.body(0)) for target in targets.values()),
            measured=measured,
            counters=dict(zip(targets, counters, strict=True)),
        )


@contextlib.asynccontextmanager
async def _targets(
    load: Load, servers: Mapping[str, ServerOptions], parts: list[msgspec.Raw]
) -> AsyncIterator[Mapping[str, _Target]]:
    """Has whoever is to be asked, by name; starts them together, since each takes some seconds."""
    async with contextlib.AsyncExitStack() as stack:

        async def target(options: ServerOptions) -> _Target:
            server = await stack.enter_async_context(serving(options))
            client = Client(server.url, load.endpoint, _REQUEST_TIMEOUT_S)
            await stack.enter_async_context(client)
            return _Target(client, functools.partial(request_body, load, await client.model(), parts), server)

        # Waits for all of them whatever happens, so that each server is either the stack's or has been stopped.
        started = await asyncio.gather(*map(target, servers.values()), return_exceptions=True)
        targets = {}
        for name, result in zip(servers, started, strict=True):
            if isinstance(result, BaseException):
                raise result
            targets[name] = result
        yield targets
