"""``shmring serve``: one engine process and several frontend processes behind one port.

The supervisor binds the port and hands the listening socket to every frontend, so the kernel gives each new connection
to one of them, and a frontend that dies takes no port with it. It does nothing else with requests.

What happens when somebody dies:

- a frontend: it is started again, after a pause that doubles each time and starts anew once one has lived for a while;
- a frontend before it ever served, or anybody who is not ready in time: everything ends with an error;
- the engine: everything ends with an error. Its slab and all requests are gone with it, and whoever started the server
  decides whether to start another one;
- the supervisor, even by SIGKILL: engine and frontends watch it (a pidfd), and end themselves. What it leaves on the disk, the
  next one removes.

A stop (SIGTERM, SIGINT) closes the port, lets frontends finish what is in flight for as long as they are allowed to, then ends
the engine, and takes at most three seconds more than that: who is not done by then is killed. A second signal kills at once.
Children have process groups of their own: Ctrl-C in a terminal reaches the supervisor alone, which ends them in that order.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from prometheus_client.multiprocess import mark_process_dead

from shmring.transport.endpoint import socket_path

__all__ = ["ServeError", "ServeOptions", "serve"]

logger = logging.getLogger("frontend.supervisor")

_BACKLOG = 2048  # connections that wait to be accepted; the kernel caps it (net.core.somaxconn)
# Beyond --shutdown-timeout. A frontend then answers what it aborts (0.5 s at most, see frontend/server.py) and leaves the
# engine; on two overloaded cores that was measured to take 0.3 s, and the engine's end 0.3 s. Of the 3 s that a stop may take,
# the rest is for reaping what had to be killed: a second on such a machine.
_SAME_SIGNAL_S = 0.5  # `timeout` and `tini -g` signal a process and then its group: that is one request to end, not two
_FRONTENDS_GRACE_S = 1.2
_GRACE_S = 2.0
_FRONTEND_START_TIMEOUT_S = (
    60.0  # of one that replaces another: the engine is there; importing torch on a busy machine takes 10
)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_STEADY_S = 10.0  # a frontend that lived this long did not die of its start
_METRICS_PREFIX = "shmring-metrics-"
_METRICS_DIRECTORY = re.compile(rf"{_METRICS_PREFIX}(\d+)-.+")


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
        log_level: of all processes.
        start_timeout_s: how long until all of them are ready. Loading a model takes minutes.
        shutdown_timeout_s: how long requests may go on after the server was told to stop.
        engine_arguments: further options of the engine, as they are written.
        frontend_arguments: further options of the frontends, as they are written.
        frontend_environment: what their environment has besides; keys are there, since command lines can be read by anybody.
    """

    host: str
    port: int
    frontends: int
    name: str
    socket_dir: str | None
    log_level: str
    start_timeout_s: float
    shutdown_timeout_s: float
    engine_arguments: tuple[str, ...]
    frontend_arguments: tuple[str, ...]
    frontend_environment: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)

    def shared_arguments(self) -> tuple[str, ...]:
        """Returns what engine and frontends must agree on, as it is written."""
        place = () if self.socket_dir is None else (f"--socket-dir={self.socket_dir}",)
        return f"--name={self.name}", f"--log-level={self.log_level}", *place


def serve(options: ServeOptions) -> None:
    """Runs the server until it is told to stop.

    Raises:
        ServeError: it can't start, its engine has ended, or it was told twice to stop.
    """
    try:
        path = socket_path(options.name, options.socket_dir)
    except ValueError as error:
        raise ServeError(str(error)) from None
    if _listens(path):  # our engine would refuse to start, but our frontends might have joined that one before
        raise ServeError(f"an engine named {options.name!r} listens at {path} already; stop it, or choose another --name")
    with _listen(options) as listening, _metrics_directory() as metrics_dir:
        asyncio.run(_Supervisor(options, listening, metrics_dir).run())


def _listen(options: ServeOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=_BACKLOG)  # sets SO_REUSEADDR
    except OSError as error:
        raise ServeError(f"can't listen on {options.host} port {options.port}: {error.strerror or error}") from None


def _disk() -> str:
    """Where temporary directories go: anywhere but among the shared memory that slabs need."""
    usual = tempfile.gettempdir()
    return "/var/tmp" if Path(usual).is_relative_to("/dev/shm") else usual


@contextlib.contextmanager
def _metrics_directory() -> Iterator[str]:
    """A directory for the frontends' counters; removes those that supervisors left which were killed.

    Ours is locked for as long as this process lives: supervisors that share the disk need not see each other's pids.
    """
    place = Path(_disk())
    _sweep_metrics(place)
    with tempfile.TemporaryDirectory(prefix=f"{_METRICS_PREFIX}{os.getpid()}-", dir=place) as directory:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield directory
        finally:
            os.close(fd)


def _sweep_metrics(place: Path) -> None:
    for path in place.glob(f"{_METRICS_PREFIX}*"):
        named = _METRICS_DIRECTORY.fullmatch(path.name)
        if named is None or Path("/proc", named[1]).exists():  # between its making and its locking, only the pid protects it
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # somebody else's, or gone meanwhile
        try:
            if os.fstat(fd).st_uid == os.getuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue  # its supervisor lives where its pid can't be seen
        finally:
            os.close(fd)


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

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal, if it still lives."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def describe_end(self) -> str:
        """Says how it ended."""
        code = self.process.returncode
        assert code is not None
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"{self.title} (pid {self.pid}) {how}"


async def _end(children: Iterable[_Child], deadline: float, hurry: asyncio.Event) -> None:
    """Tells children to end, and kills those that have not by a time of the loop's clock, or when there is a hurry."""
    living = [child for child in children if child.process.returncode is None]
    if not living:
        return
    waiting: asyncio.Future[Any] = asyncio.gather(*(child.process.wait() for child in living))
    hurrying: asyncio.Future[Any] = asyncio.ensure_future(hurry.wait())
    for child in living:
        child.send(signal.SIGTERM)
    time_left_s = max(0.0, deadline - asyncio.get_running_loop().time())
    await asyncio.wait([waiting, hurrying], timeout=time_left_s, return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    for child in living:
        if child.process.returncode is None:
            logger.warning("%s (pid %d) did not end in time and is killed", child.title, child.pid)
            child.send(signal.SIGKILL)
    await waiting


class _Supervisor:
    """See the head of this file."""

    def __init__(self, options: ServeOptions, listening: socket.socket, metrics_dir: str) -> None:
        self._options = options
        self._listening = listening
        self._metrics_dir = metrics_dir
        self._engine: _Child | None = None
        self._frontends: dict[int, _Child] = {}
        self._ready = [asyncio.Event() for _ in range(options.frontends)]
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._told_at = 0.0

    async def run(self) -> None:
        """Starts everything, keeps it running, and ends it.

        Raises:
            ServeError: as :func:`serve`.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._told_to_stop)
        tasks: list[asyncio.Task[None]] = []
        try:
            self._engine = await self._start_engine()
            tasks = [
                asyncio.create_task(self._wait_for_stop()),
                asyncio.create_task(self._watch_engine(self._engine)),
                asyncio.create_task(self._watch_start(self._engine)),
                *(asyncio.create_task(self._keep_frontend(index)) for index in range(self._options.frontends)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not self._stop.is_set():
                next(task for task in tasks if task.done()).result()
        finally:
            await self._end_all(tasks)
        if self._hurry.is_set():
            raise ServeError("told twice to stop: whatever was still running was killed")

    def _told_to_stop(self) -> None:
        now = asyncio.get_running_loop().time()
        if not self._stop.is_set():
            self._told_at = now
            self._stop.set()
        elif now - self._told_at > _SAME_SIGNAL_S:
            self._hurry.set()

    async def _wait_for_stop(self) -> None:
        await self._stop.wait()

    async def _end_all(self, tasks: list[asyncio.Task[None]]) -> None:
        self._listening.close()  # frontends close theirs: from then on connections are refused, not left waiting
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        deadline = asyncio.get_running_loop().time() + self._options.shutdown_timeout_s
        await _end(self._frontends.values(), deadline + _FRONTENDS_GRACE_S, self._hurry)
        if self._engine is not None:
            await _end([self._engine], deadline + _GRACE_S, self._hurry)

    async def _watch_start(self, engine: _Child) -> None:
        """Says when the server is ready; fails if that takes too long."""
        address = self._listening.getsockname()
        timeout_s = self._options.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                for ready in self._ready:
                    await ready.wait()
        except TimeoutError:
            raise ServeError(f"not ready within {timeout_s:g} s (--start-timeout): {self._describe_delay(engine)}") from None
        self._announce(engine, address)
        await self._stop.wait()

    def _describe_delay(self, engine: _Child) -> str:
        if not _listens(socket_path(self._options.name, self._options.socket_dir)):
            return f"the engine (pid {engine.pid}) does not listen yet; it may be loading its model, or hang"
        late = [str(index) for index, ready in enumerate(self._ready) if not ready.is_set()]
        return f"the engine listens, but of the frontends {', '.join(late)} did not get ready"

    def _announce(self, engine: _Child, address: tuple[str, int]) -> None:
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        pids = " ".join(str(child.pid) for _, child in sorted(self._frontends.items()))
        click.echo(f"shmring: serving on http://{host}:{address[1]} (engine pid {engine.pid}, frontends pids {pids})")

    async def _start_engine(self) -> _Child:
        options = self._options
        return await _Child.start("the engine", ("-m", "engine", *options.shared_arguments(), *options.engine_arguments))

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
        reading, writing = os.pipe()
        try:
            child = await _Child.start(
                f"frontend {index}",
                self._frontend_command(writing),
                pass_fds=(self._listening.fileno(), writing),
                environment={"PROMETHEUS_MULTIPROC_DIR": self._metrics_dir, **self._options.frontend_environment},
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._frontends[index] = child
        # The first one may have to wait for the engine as long as everybody has for the start.
        timeout_s = _FRONTEND_START_TIMEOUT_S if self._ready[index].is_set() else None
        try:
            async with asyncio.timeout(timeout_s):
                if await _reads_a_byte(reading):
                    self._ready[index].set()
        except TimeoutError:
            logger.error("%s (pid %d) was not ready within %g s and is killed", child.title, child.pid, timeout_s)
            child.send(signal.SIGKILL)
        return child

    def _frontend_command(self, ready_fd: int) -> tuple[str, ...]:
        options = self._options
        return (
            "-m",
            "frontend",
            f"--listen-fd={self._listening.fileno()}",
            f"--ready-fd={ready_fd}",
            f"--connect-timeout={options.start_timeout_s}",
            f"--shutdown-timeout={options.shutdown_timeout_s}",
            *options.shared_arguments(),
            *options.frontend_arguments,
        )


def _listens(path: Path) -> bool:
    """Says whether a process listens on a Unix socket: the file alone may be what a killed one left."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(os.fspath(path)) == 0


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
