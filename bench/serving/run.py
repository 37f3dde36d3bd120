"""One run: servers, loads on them in turn, and what they have shown.

In a comparison two servers run all the time, of which the one that is not asked sleeps, and get the same load one after the
other, again and again (A B A B ...): whatever else the machine does meets both, and the ratio is taken within each repetition.
Requests, media and arrival times are the same for both, and made before.

A server of the run's own (:mod:`shmring.frontend.serve_process`) has a directory for all that it leaves on the disk. It is
stopped in every way out of the block.
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
from bench.machine import Machine
from bench.meter import process_cpu_s
from bench.results import Planned
from bench.serving.client import Client
from bench.serving.load import Body, Measurement, play, request_body, warm_up
from bench.serving.media import media_parts
from bench.serving.plan import Load, Plan, ServerOptions
from shmring.frontend import serve_process
from shmring.frontend.serve_process import ServerProcess

# -- a server ----------------------------------------------------------------------------------------------------------


logger = logging.getLogger("bench.serving")

_PROGRAM = serve_process.PROGRAM
_STOP_LIMIT_S = 30.0  # `shmring serve` kills sooner what does not end; a busy machine reaps slowly


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
async def serving(options: ServerOptions, load: Load) -> AsyncIterator[ServerProcess]:
    """Runs a server on a free port of the loopback interface, for a load; when the block is left, nothing of it is.

    Raises:
        ServerError: it did not start, ended before it was told to, or ended with an error.
    """
    # Not in the default place for temporary files: that may be too long a path for a socket.
    with tempfile.TemporaryDirectory(prefix=f"shmring-serve-{os.getpid()}-", dir="/tmp") as directory:
        process = ServerProcess.start(
            _arguments(options, load, directory),
            program=_PROGRAM,
            environment=os.environ | {"TMPDIR": directory},  # frontends keep their counters in files
            errors=Path(directory, "stderr"),
            stop_limit_s=_STOP_LIMIT_S,
            start_new_session=True,  # Ctrl-C is for us, who then stop it
        )
        with process:
            try:
                await process.until_ready(options.start_timeout_s)
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


def _arguments(options: ServerOptions, load: Load, directory: str) -> list[str]:
    arguments = [
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
    ]
    if options.executor == "synthetic" and "video" in load.media.kinds:
        # It would take ten frames of each, whatever was sent.
        arguments.append(f'--mm-processor-kwargs={{"num_frames": {load.media.video_frames}}}')
    if not options.kept:
        arguments.append("--mm-processor-cache-gb=0")
    if options.copied:
        arguments.append("--disable-mm-shm")
    return [*arguments, *options.further]


# -- a run -------------------------------------------------------------------------------------------------------------


LOAD = "the load"  # the one case of a run

COPIED = "copied"
SLAB = "slab"
URL = "url"
KEPT = "kept"
NOT_KEPT = "not kept"


class Results(msgspec.Struct, frozen=True):
    """A run.

    Attributes:
        client: what sent the requests.
        plan: what was asked for, without its key.
        request_nbytes: of the first one's body.
        slab_nbytes: that went through the slab for each request, by server; empty for one that was there before.
        copied_nbytes, decoded: bytes that were copied for sending, and media that were decoded, likewise, of all requests.
        measurements: every load, in the order in which they were sent.
    """

    machine: Machine
    client: str
    plan: Plan
    request_nbytes: int
    slab_nbytes: dict[str, int]
    measurements: list[Measurement]
    copied_nbytes: dict[str, int] = {}
    decoded: dict[str, int] = {}

    def of(self, variant: str) -> list[Measurement]:
        """Returns the measurements of one server, repetition by repetition."""
        return [measurement for measurement in self.measurements if measurement.variant == variant]

    @property
    def variants(self) -> list[str]:
        """The servers, in the order in which they were asked."""
        return list(dict.fromkeys(measurement.variant for measurement in self.measurements))


class _Target(NamedTuple):
    client: Client
    body: Body
    server: ServerProcess | None

    def cpu_s(self) -> dict[str, float]:
        return {} if self.server is None else cpu_s(self.server)


def steps(plan: Plan) -> int:
    """Returns how often :func:`run` reports progress."""
    return 2 + len(_wanted(plan)) * (1 + plan.repetitions) + (plan.url is None)


async def run(plan: Plan, progress: Callable[[str], None]) -> Results:
    """Carries a plan out, with a line before each step. When this returns or raises, no process and no file of it is left.

    Raises:
        BenchError, OSError: a server did not start, did not last, or can't be asked.
    """
    progress("making media")
    parts = await asyncio.to_thread(media_parts, plan.load)
    measurements: list[Measurement] = []
    if plan.url is None:
        progress("starting two servers" if plan.compares else "starting a server")
    async with _targets(plan, parts) as targets:
        request_nbytes = max(len(target.body(0)) for target in targets.values())
        for variant, target in targets.items():
            progress(f"{variant}: warming up")
            await warm_up(plan.load, target.client, target.body)
        for repetition in range(plan.repetitions):
            for variant, target in targets.items():
                progress(f"{variant}: {plan.load.requests:,} requests, {repetition + 1} of {plan.repetitions}")
                before_s = target.cpu_s()
                measurement = await play(variant, plan.load, target.client, target.body)
                used_s = {part: after - before_s[part] for part, after in target.cpu_s().items()}
                measurements.append(msgspec.structs.replace(measurement, cpu_s=used_s))
        progress("reading the servers' counters")
        requests = plan.load.warm_up_requests + plan.repetitions * plan.load.requests
        ours = {name: target.client for name, target in targets.items() if target.server is not None}
        counted = dict(zip(ours, await asyncio.gather(*(client.counters() for client in ours.values())), strict=True))
    return Results(
        machine=Machine.here(),
        client=f"aiohttp {version('aiohttp')}, uvloop {version('uvloop')}, Python {platform.python_version()}",
        plan=msgspec.structs.replace(plan, api_key=None),
        request_nbytes=request_nbytes,
        slab_nbytes={name: counters["slab_bytes"] // requests for name, counters in counted.items()},
        measurements=measurements,
        copied_nbytes={name: counters["copied_bytes"] for name, counters in counted.items()},
        decoded={name: counters["media_decoded"] for name, counters in counted.items()},
    )


def planned(plan: Plan) -> list[Planned]:
    """Returns the case of a plan."""
    return [Planned(LOAD, list(_wanted(plan)), plan.repetitions)]


@contextlib.asynccontextmanager
async def _targets(plan: Plan, parts: list[msgspec.Raw]) -> AsyncIterator[Mapping[str, _Target]]:
    """Has whoever is to be asked, by name; starts them together, since each takes some seconds."""
    async with contextlib.AsyncExitStack() as stack:

        async def target(options: ServerOptions | None) -> _Target:
            server = None if options is None else await stack.enter_async_context(serving(options, plan.load))
            url = plan.url if server is None else server.url
            assert url is not None, "there is a URL or a server"
            client = Client(url, plan.load.endpoint, plan.load.request_timeout_s, plan.api_key)
            await stack.enter_async_context(client)
            model = await client.model() if plan.model is None else plan.model
            return _Target(client, functools.partial(request_body, plan.load, model, parts), server)

        wanted = _wanted(plan)
        # Waits for all of them whatever happens, so that each server is either the stack's or has been stopped.
        started = await asyncio.gather(*map(target, wanted.values()), return_exceptions=True)
        targets = {}
        for name, result in zip(wanted, started, strict=True):
            if isinstance(result, BaseException):
                raise result
            targets[name] = result
        yield targets


def _wanted(plan: Plan) -> dict[str, ServerOptions | None]:
    """The servers of a plan, by name; None for one that runs already."""
    if plan.url is not None:
        return {URL: None}
    if plan.compare_engines:
        return {
            f"{count} engine{'s' if count > 1 else ''}": msgspec.structs.replace(plan.server, engines=count)
            for count in (plan.compare_engines, 1)
        }
    if plan.compare_kept:
        return {name: msgspec.structs.replace(plan.server, kept=name == KEPT) for name in (KEPT, NOT_KEPT)}
    if plan.compare:
        return {name: msgspec.structs.replace(plan.server, copied=name == COPIED) for name in (SLAB, COPIED)}
    return {COPIED if plan.server.copied else SLAB: plan.server}
