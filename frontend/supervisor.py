"""``shmring serve``: one engine process and several frontend processes behind one port.

The supervisor binds the port and hands the listening socket to every frontend, so the kernel gives each new connection
to one of them, and a frontend that dies takes no port with it. It does nothing else with requests.

What happens when somebody dies:

- a frontend: it is started again, after a pause that doubles each time and starts anew once one has lived for a while;
- the engine: everything ends with an error. Its slab and all requests are gone with it, and whoever started the server
  decides whether to start another one;
- the supervisor, even by SIGKILL: engine and frontends watch it (a pidfd), and end themselves.

A stop (SIGTERM, SIGINT) lets frontends finish what is in flight, then ends the engine, and takes at most five seconds. Children
have process groups of their own: Ctrl-C in a terminal reaches the supervisor alone, which then ends them in that order.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import click
from prometheus_client.multiprocess import mark_process_dead

from shmring.transport.endpoint import socket_path

__all__ = ["ServeError", "ServeOptions", "serve"]

logger = logging.getLogger("frontend.supervisor")

_BACKLOG = 2048  # connections that wait to be accepted; the kernel caps it (net.core.somaxconn)
_FRONTENDS_GRACE_S = 3.5  # 2 s for requests in flight (see frontend/__main__.py), 1 s to leave the engine and to unload torch
_GRACE_S = 4.8  # for all: what frontends leave of it is the engine's, for its step and for unloading torch
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_STEADY_S = 10.0  # a frontend that lived this long did not die of its start


class ServeError(Exception):
    """The server can't start, or can't go on; the text is for whoever started it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What to run.

    Attributes:
        host, port: where to listen; port 0 is any free one.
        frontends: how many frontend processes.
        name: the engine's name.
        socket_dir: where its socket lies; None: the default.
        slab_nbytes: its slab.
        executor: what computes in it.
        log_level: of all processes.
        frontend_arguments: further options of the frontends, as they are written.
    """

    host: str
    port: int
    frontends: int
    name: str
    socket_dir: str | None
    slab_nbytes: int
    executor: str
    log_level: str
    frontend_arguments: tuple[str, ...]

    def shared_arguments(self) -> tuple[str, ...]:
        """Returns what engine and frontends must agree on, as it is written."""
        place = () if self.socket_dir is None else (f"--socket-dir={self.socket_dir}",)
        return f"--name={self.name}", f"--log-level={self.log_level}", *place


def serve(options: ServeOptions) -> None:
    """Runs the server until it is told to stop.

    Raises:
        ServeError: it can't start, or its engine has ended.
    """
    try:
        socket_path(options.name, options.socket_dir)
    except ValueError as error:
        raise ServeError(str(error)) from None
    with _listen(options) as listening, tempfile.TemporaryDirectory(prefix="shmring-metrics-", dir=_disk()) as metrics_dir:
        asyncio.run(_Supervisor(options, listening, metrics_dir).run())


def _listen(options: ServeOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=_BACKLOG)  # sets SO_REUSEADDR
    except OSError as error:
        raise ServeError(f"can't listen on {options.host} port {options.port}: {error.strerror or error}") from None


def _disk() -> str | None:
    """Where temporary directories go: anywhere but among the shared memory that slabs need."""
    return "/var/tmp" if Path(tempfile.gettempdir()).is_relative_to("/dev/shm") else None


class _Child:
    """A process that we started."""

    def __init__(self, title: str, process: asyncio.subprocess.Process) -> None:
        self.title = title
        self.process = process
        self.started_at = asyncio.get_running_loop().time()

    @classmethod
    async def start(
        cls, title: str, arguments: Iterable[str], *, pass_fds: Iterable[int] = (), environment: dict[str, str] | None = None
    ) -> _Child:
        """Starts ``python`` with these arguments."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            f"--parent-pid={os.getpid()}",
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=tuple(pass_fds),
            env=os.environ | (environment or {}),
            process_group=0,
        )
        return cls(title, process)

    @property
    def pid(self) -> int:
        """Its pid, which stays its own until it has been waited for."""
        return self.process.pid

    def describe_end(self) -> str:
        """Says how it ended."""
        code = self.process.returncode
        assert code is not None
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"{self.title} (pid {self.pid}) {how}"


async def _end(children: Iterable[_Child], deadline: float) -> None:
    """Tells children to end, and kills those that have not by a time of the loop's clock."""
    living = [child for child in children if child.process.returncode is None]
    if not living:
        return
    waiting = [asyncio.ensure_future(child.process.wait()) for child in living]
    for child in living:
        with contextlib.suppress(ProcessLookupError):
            child.process.terminate()
    _, late = await asyncio.wait(waiting, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
    if not late:
        return
    for child in living:
        if child.process.returncode is None:
            logger.warning("%s (pid %d) did not end in time and is killed", child.title, child.pid)
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()
    await asyncio.wait(waiting)


class _Supervisor:
    """See the head of this file."""

    def __init__(self, options: ServeOptions, listening: socket.socket, metrics_dir: str) -> None:
        self._options = options
        self._listening = listening
        self._metrics_dir = metrics_dir
        self._engine: _Child | None = None
        self._frontends: dict[int, _Child] = {}
        self._ready = [asyncio.Event() for _ in range(options.frontends)]

    async def run(self) -> None:
        """Starts everything, keeps it running, and ends it."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        tasks: list[asyncio.Task[None]] = []
        try:
            self._engine = await self._start_engine()
            tasks = [
                asyncio.create_task(_wait_for(stop)),
                asyncio.create_task(self._watch_engine(self._engine)),
                *(asyncio.create_task(self._keep_frontend(index)) for index in range(self._options.frontends)),
            ]
            announcing = asyncio.create_task(self._announce(self._engine))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks.append(announcing)
            if not stop.is_set():
                next(task for task in tasks if task.done() and task is not announcing).result()
        finally:
            await self._end_all(tasks)

    async def _end_all(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        now = asyncio.get_running_loop().time()
        await _end(self._frontends.values(), now + _FRONTENDS_GRACE_S)
        if self._engine is not None:
            await _end([self._engine], now + _GRACE_S)

    async def _announce(self, engine: _Child) -> None:
        for ready in self._ready:
            await ready.wait()
        address = self._listening.getsockname()
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        pids = " ".join(str(child.pid) for _, child in sorted(self._frontends.items()))
        click.echo(f"shmring: serving on http://{host}:{address[1]} (engine pid {engine.pid}, frontends pids {pids})")

    async def _start_engine(self) -> _Child:
        options = self._options
        return await _Child.start(
            "the engine",
            (
                "-m",
                "engine",
                f"--slab-nbytes={options.slab_nbytes}",
                f"--executor={options.executor}",
                *options.shared_arguments(),
            ),
        )

    async def _watch_engine(self, engine: _Child) -> None:
        await engine.process.wait()
        started = all(ready.is_set() for ready in self._ready)
        hint = "" if started else " before the server was ready; its own message is above"
        raise ServeError(f"{engine.describe_end()}{hint}")

    async def _keep_frontend(self, index: int) -> None:
        """Starts a frontend, again and again; gives up if it fails before it was ever ready."""
        pause = _FIRST_PAUSE_S
        while True:
            child = await self._start_frontend(index)
            await child.process.wait()
            if not self._ready[index].is_set():
                raise ServeError(f"{child.describe_end()} before it was ready; its own message is above")
            # Its gauges of the moment would otherwise be added to those of the living for ever.
            await asyncio.to_thread(mark_process_dead, child.pid, self._metrics_dir)
            if asyncio.get_running_loop().time() - child.started_at >= _STEADY_S:
                pause = _FIRST_PAUSE_S
            logger.warning("%s; starting another in %g s", child.describe_end(), pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _start_frontend(self, index: int) -> _Child:
        """Starts a frontend, and returns when it serves or has failed to."""
        options = self._options
        reading, writing = os.pipe()
        try:
            child = await _Child.start(
                f"frontend {index}",
                (
                    "-m",
                    "frontend",
                    f"--listen-fd={self._listening.fileno()}",
                    f"--ready-fd={writing}",
                    *options.shared_arguments(),
                    *options.frontend_arguments,
                ),
                pass_fds=(self._listening.fileno(), writing),
                environment={"PROMETHEUS_MULTIPROC_DIR": self._metrics_dir},
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._frontends[index] = child
        if await _reads_a_byte(reading):
            self._ready[index].set()
        return child


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()


async def _reads_a_byte(fd: int) -> bool:
    """Waits for a byte from a pipe, or for its end. Takes the descriptor over."""
    reader = asyncio.StreamReader(limit=1)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        return bool(await reader.read(1))
    finally:
        transport.close()
