"""A server of the run's own: ``shmring serve`` as a process, with a directory for all that it leaves on the disk.

It is told to stop in every way out of the block, and what does not stop is killed; if this process is killed, it sees the end
of its standard input. Its supervisor takes engine and frontends with it, also if it is killed itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from bench.children import BenchError
from bench.serving.plan import Load, ServerOptions

__all__ = ["Server", "ServerError", "serving"]

logger = logging.getLogger("bench.serving")

_PROGRAM = ("-P", "-m", "frontend.cli", "serve", "--stop-with-stdin")  # nothing is imported from the working directory
_READY = re.compile(r"serving on (?P<url>\S+) \(engines? pids? (?P<engine>[\d ]+), frontends pids (?P<frontends>[\d ]+)\)")
_PARTS = ("engine", "frontends")
_STOP_TIMEOUT_S = 15.0  # three seconds are what `shmring serve` may take; a busy machine reaps slowly
_LAST_WORDS_LENGTH = 2000  # of what a server that failed wrote to stderr
_LOOK_S = 0.02  # between two looks whether processes have gone


class ServerError(BenchError):
    """The server did not start, or did not last."""


class Server(msgspec.Struct):
    """A server that runs: its URL without ``/v1``, and its processes by part, which are no children of ours."""

    url: str
    processes: dict[str, list[psutil.Process]]

    def cpu_s(self) -> dict[str, float]:
        """Returns the CPU seconds, user and system, that its processes have used, by part.

        Raises:
            ServerError: one of them has ended.
        """
        if not all(map(_lives, self.every())):
            raise ServerError("a process of the server ended during the run")
        return {part: sum(sum(one.cpu_times()[:2]) for one in processes) for part, processes in self.processes.items()}

    def every(self) -> Iterator[psutil.Process]:
        return itertools.chain(*self.processes.values())


def _lives(process: psutil.Process) -> bool:
    """Whether a process runs. One that has ended does not, even if nobody has asked how."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


@contextlib.asynccontextmanager
async def serving(options: ServerOptions, load: Load) -> AsyncIterator[Server]:
    """Runs a server on a free port of the loopback interface, for a load; when the block is left, nothing of it is.

    Raises:
        ServerError: it did not start, ended before it was told to, or ended with an error.
    """
    # Not in the default place for temporary files: that may be too long a path for a socket.
    with tempfile.TemporaryDirectory(prefix=f"shmring-serve-{os.getpid()}-", dir="/tmp") as directory:
        errors = Path(directory, "stderr")
        process = await _start(_arguments(options, load, directory), directory, errors)
        server: Server | None = None
        try:
            server = await _until_ready(process, options.start_timeout_s, errors)
            yield server
            if process.returncode is not None:
                raise ServerError("the server ended during the run; it was not told to")
        finally:
            await _stop(process, [] if server is None else list(server.every()))
            if server is not None and (words := _last_words(errors)):
                logger.warning("the server wrote%s", words)
        if process.returncode != 0:
            raise ServerError(f"the server ended with exit code {process.returncode}")


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


async def _start(arguments: list[str], directory: str, errors: Path) -> asyncio.subprocess.Process:
    with errors.open("wb") as file:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *_PROGRAM,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=file,
            env=os.environ | {"TMPDIR": directory},  # frontends keep their counters in files
            start_new_session=True,  # Ctrl-C is for us, who then stop it
        )


async def _until_ready(process: asyncio.subprocess.Process, timeout_s: float, errors: Path) -> Server:
    assert process.stdout is not None, "it is a pipe"
    try:
        async with asyncio.timeout(timeout_s):
            line = (await process.stdout.readline()).decode(errors="replace")
    except TimeoutError:
        raise ServerError(f"the server was not ready within {timeout_s:g} s{_last_words(errors)}") from None
    ready = _READY.search(line)
    if ready is None:
        raise ServerError(f"the server did not start{_last_words(errors)}")
    try:
        pids = {part: map(int, ready[part].split()) for part in _PARTS}
        return Server(ready["url"], {part: list(map(psutil.Process, pids[part])) for part in _PARTS})
    except psutil.NoSuchProcess:
        raise ServerError(f"a process of the server ended at once{_last_words(errors)}") from None


async def _stop(supervisor: asyncio.subprocess.Process, processes: Sequence[psutil.Process]) -> None:
    """Ends a server; does not return before its processes are gone, unless it is cancelled: then they are killed."""

    async def gone() -> None:
        await supervisor.wait()
        while any(map(_lives, processes)):  # noqa: ASYNC110 # they end by themselves when their supervisor was killed
            await asyncio.sleep(_LOOK_S)

    def kill() -> None:
        for process in (supervisor, *processes):
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                process.kill()

    if supervisor.returncode is None:
        supervisor.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await gone()
    except TimeoutError:
        kill()
        await gone()
    except asyncio.CancelledError:
        kill()
        raise


def _last_words(errors: Path) -> str:
    words = errors.read_text(errors="replace").strip()[-_LAST_WORDS_LENGTH:]
    return f":\n{words}" if words else ""
