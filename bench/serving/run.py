"""One run: servers, loads on them in turn, and what they have shown.

All servers run all the time, of which those that are not asked sleep, and get the same load one after the other, again and
again (:mod:`bench.plan`). Requests and media are the same for all, and made before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from bench.children import BenchError
from bench.command_line import until_terminated
from bench.meter import cpu_s_of
from bench.plan import Runs
from bench.serving.client import Client
from bench.serving.load import Measurement, Requests
from bench.serving.media import media_parts
from bench.serving.plan import PRESETS, Load, Server
from shmring.frontend.commands import serve_process
from shmring.frontend.commands.serve_process import ServerProcess

logger = logging.getLogger("bench.serving")

_MODEL = "bench"

_PROGRAM = serve_process.PROGRAM
_START_LIMIT_S = 120.0  # importing torch in each process takes 10 s on a busy machine
_STOP_LIMIT_S = 30.0  # `shmring serve` kills sooner what does not end; a busy machine reaps slowly
_REQUEST_TIMEOUT_S = 600.0

_Answer = TypeVar("_Answer")


# -- a server ----------------------------------------------------------------------------------------------------------


def cpu_s(server: ServerProcess) -> dict[str, float]:
    """Returns the CPU seconds, user and system, that a server's processes have used, by part."""
    if not server.is_whole:
        raise BenchError("a process of the server ended during the run")
    parts = {"engine": server.engines, "frontends": server.frontends}
    return {part: cpu_s_of(pids) for part, pids in parts.items()}


@contextlib.contextmanager
def serving(*arguments: Server) -> Iterator[list[ServerProcess]]:
    """Runs servers on free ports of the loopback interface; when the block is left, nothing of them is.

    They are started together, since each takes some seconds. Raises BenchError if one did not start, ended too early, or ended
    with an error.
    """
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(_started(each)) for each in arguments]
        for server in servers:
            try:
                server.wait_until_ready(_START_LIMIT_S)
            except serve_process.ServerError as error:
                raise BenchError(str(error)) from None
        yield servers


@contextlib.contextmanager
def _started(arguments: Server) -> Iterator[ServerProcess]:
    # Not in the default place for temporary files: that may be too long a path for a socket.
    with tempfile.TemporaryDirectory(prefix=f"shmring-serve-{os.getpid()}-", dir="/tmp") as directory:
        server = ServerProcess.start(
            # Nothing is in flight when it is stopped, or nobody wants to wait for it.
            ["--host=127.0.0.1", "--port=0", "--name=bench", f"--socket-dir={directory}", "--shutdown-timeout=0", *arguments],
            program=_PROGRAM,
            environment=os.environ | {"TMPDIR": directory},  # frontends keep their counters in files
            errors=Path(directory, "stderr"),
            stop_limit_s=_STOP_LIMIT_S,
            start_new_session=True,  # Ctrl-C is for us, who then stop it
        )
        with server:
            try:
                yield server
                if server.process.returncode is not None:
                    raise BenchError("the server ended during the run; it was not told to")
            finally:
                code = server.stop()
                if words := server.last_words:
                    logger.warning("the server wrote:\n%s", words)
        if code != 0:
            raise BenchError(f"the server ended with exit code {code}")


# -- a run -------------------------------------------------------------------------------------------------------------


def run(runs: Runs, preset: str) -> None:
    """Loads a preset's servers in turn. Whether it returns or raises, no process and no file is left."""
    load, servers = PRESETS[preset].load, PRESETS[preset].servers
    click.echo("making media", err=True)
    requests = Requests(load, _MODEL, media_parts(load))
    click.echo(f"starting {len(servers)} servers", err=True)
    with serving(*((*server, f"--served-model-name={_MODEL}") for server in servers.values())) as started:
        running = dict(zip(servers, started, strict=True))
        for name, server in running.items():
            click.echo(f"{name}: warming up", err=True)
            _ask(server, load, requests.warm_up)
        runs.measure(lambda _, name: _measure(requests, running[name]), [preset])


def _measure(requests: Requests, server: ServerProcess) -> Measurement:
    before_s = cpu_s(server)
    measurement = _ask(server, requests.load, requests.play)
    used_s = {part: after - before_s[part] for part, after in cpu_s(server).items()}
    return msgspec.structs.replace(measurement, cpu_s=used_s)


def _ask(server: ServerProcess, load: Load, ask: Callable[[Client], Coroutine[Any, Any, _Answer]]) -> _Answer:
    """Asks a server, on a loop and on connections that end with that."""

    async def connected() -> _Answer:
        async with Client(server.url, load.endpoint, _REQUEST_TIMEOUT_S) as client:
            return await ask(client)

    return until_terminated(connected())
