"""``shmring serve``: one engine process, or several, and several frontend processes behind one port.

The supervisor binds the port and gives the listening socket to every frontend. The kernel then gives each new connection to one
of them, and the port stays open when a frontend dies. The supervisor has nothing else to do with requests.

What happens when a process dies:

- a frontend: it is started again, after a pause. The pause doubles each time; it is short again when a frontend has lived for a
  while;
- a frontend that never served, or a process that is not ready in time: the server ends with an error;
- a frontend whose event loop shows no sign of life (it was stopped, or hangs): it is killed after ``heartbeat_timeout_s``, so
  that its callers get an error, and replaced. After a third of that time, the other frontends show it in ``/health``;
- the only engine, or its event loop: the server ends with an error. The slab and all requests are lost, and the program that
  started the server decides whether to start another one. (A long step does not stop the event loop: it runs on a thread.);
- one of several engines, or its event loop: it is started again, as a frontend is. Meanwhile the frontends send its requests to
  the others. If it never served, the server ends with an error;
- the supervisor, even by SIGKILL: engine and frontends notice that the other end of their socket is closed
  (:mod:`shmring.service.supervision`), and end. The next supervisor removes the files that this one has left;
- a program that started the supervisor with ``--stop-with-stdin``, and holds the other end of its standard input: the
  supervisor notices this in the same way, and stops the server.

Children import nothing from the working directory (``python -P``). They get their settings as JSON through their socket,
because other users can read command lines, and sometimes environments.

A stop (SIGTERM, SIGINT, SIGHUP) reaches frontends first: their ``/ready`` says so, and after ``shutdown_delay_s`` the port
closes. Frontends may finish the requests in flight, for ``shutdown_timeout_s`` at most; then the engine ends, which has as long
for the requests of other programs. Both have some seconds more than they need: a process that still runs then is killed. A
second signal kills at once. Children have process groups of their own, so that Ctrl-C in a terminal reaches the supervisor
alone.

A frontend, or one of several engines, that gets such a signal itself ends in the same way (``shmring drain``), and another one
is started when it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import fcntl
import gc
import logging
import math
import os
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import msgspec

from shmring.core.loggers import logger_of
from shmring.engine.settings import EngineSettings
from shmring.frontend.http.listening import listen, place_of, url_of
from shmring.frontend.openai.response_memory import ResponseMemory
from shmring.frontend.operator.number_files import DIRECTORY_VARIABLE
from shmring.frontend.processes.accelerators import count_gpus, environment_of
from shmring.frontend.processes.child import Child, end_children
from shmring.frontend.processes.liveness import EngineLife, Life, answering
from shmring.frontend.processes.memory_checks import describe_kill, memory_checks, needs_of, oom_kills, slabs_nbytes_of
from shmring.frontend.settings import ProcessSettings
from shmring.memory.available import lack_of_memory
from shmring.memory.limits import check_open_files
from shmring.processes.child import say_ready
from shmring.service.flags import NO_OPTION, Flag
from shmring.service.logs import dropped_lines
from shmring.service.supervision import FrontendState, Orders, Stop
from shmring.transport.listener import make_directory, socket_path

if TYPE_CHECKING:
    from shmring.frontend.callers.key_usage import UsageTable

__all__ = ["ServeError", "ServeOptions", "Serving", "serve"]

logger = logger_of("shmring.frontend.processes.supervisor")

# Beside --shutdown-timeout. In this time a frontend answers the requests that it aborts (0.5 s at most, see server.py)
# and disconnects: 0.2 s, or 1 s if other processes want twice as many cores as there are. Busier machines get three times that.
_FRONTENDS_GRACE_S = 3.0
# An engine ends in the same time, and then the kernel frees its slab: 0.17 s for each GiB, on a core that has nothing else to
# do. SIGKILL would not make that faster. This time begins when the frontends have ended.
_ENGINES_GRACE_S = 3.0
_FREEING_S_PER_GIB = 0.5
_FRONTEND_START_TIMEOUT_S = (
    60.0  # of a frontend that replaces another; the engine runs already. On a busy machine, importing torch takes 10
)
_REPLACEMENT_CONNECT_S = 30.0  # of that time; then it ends, and says why it did not reach the engine
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_STEADY_S = 10.0  # a process that lived this long did not die of its start
_PATIENCE_S = 1.5  # from which somebody who presses Ctrl-C is told what it waits for
_PROGRESS_S, _LONGEST_PROGRESS_S = 5.0, 60.0  # between two lines that say what a start waits for; it grows
_SHORTEST_HEARTBEAT_TIMEOUT_S = 1.0  # on a busy machine, a process may wait for a core for tenths of a second
_LONGEST_HEARTBEAT_S = 1.0  # each takes a process some 20 us; the more there are, the sooner one that hangs is noticed
_HEARTBEATS = 10  # that a process has to miss before it is killed: one alone may be late
_WORRYING_SHARE = 1 / 3  # of the timeout: then the other frontends are told
# For the process that needs most, a frontend: 31, 3 for each engine, 5 for each decoder, and some connections. The supervisor
# has 2 for each process, an engine 2 for each frontend.
_OPEN_FILES = 100
_OPEN_FILES_PER_PROCESS = 4
_LIFELINE_NBYTES = 4096  # read and dropped at a time
_METRICS_PREFIX = "shmring-metrics-"
_METRICS_DIRECTORY = re.compile(rf"{_METRICS_PREFIX}(\d+)-.+")


class ServeError(Exception):
    """The server can't start, or can't go on. The text is for the user who has started it."""


class Serving(msgspec.Struct, frozen=True):
    """What a server says on ``--ready-fd``: where it serves, the pids of its processes, and where ``--health-port`` is."""

    url: str
    engines: list[int]
    frontends: list[int]
    health_url: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What to run.

    Attributes:
        engines: the engines.
        frontend: each frontend; where it listens, all do.
        frontends: Frontend processes that share the port.
        start_timeout_s: Seconds until all processes must be ready. Loading a large model takes minutes.
        heartbeat_timeout_s: Seconds without a sign of life of its event loop after which a process is killed and replaced; a
            single engine ends the server. 0: never, for debugging.
        lifeline_fd: a pipe, socket or terminal; the server stops when its other end is closed. None: there is none.
        ready_fd: Write a line of JSON to this inherited descriptor, and close it, when the server is ready: its url, and the
            pids of its engines and frontends.
        health_port: Answer GET /health at this port of --host, too: by the supervisor, which says whether only a restart helps,
            in time however busy the frontends are. 0 is any free port.
        notice: a line for whoever starts it; empty: none.
    """

    engines: Annotated[Sequence[EngineSettings], NO_OPTION]
    frontend: Annotated[ProcessSettings, NO_OPTION]
    frontends: Annotated[int, Flag(names=("--api-server-count",))] = 2
    start_timeout_s: float = 600.0
    heartbeat_timeout_s: Annotated[float, Flag(least=0, parse=_parse_heartbeat_timeout)] = 30.0
    lifeline_fd: Annotated[int | None, NO_OPTION] = None
    ready_fd: Annotated[int | None, Flag(least=3, parse=_parse_ready_fd)] = None
    health_port: Annotated[int | None, Flag(least=0, most=65535)] = None
    notice: Annotated[str, NO_OPTION] = ""

    @property
    def heartbeat_s(self) -> float:
        """How often each process shows that it lives; 0: never."""
        return min(_LONGEST_HEARTBEAT_S, self.heartbeat_timeout_s / _HEARTBEATS)

    def memory_needs(self) -> dict[str, int]:
        """Returns the bytes of memory that the server takes, by what takes them (:func:`needs_of`)."""
        return needs_of(self.engines, self.frontend.http, self.frontends)


def _parse_ready_fd(fd: int | None) -> int | None:
    if fd is not None:
        try:
            mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        except OSError:
            raise ValueError(f"{fd} is no open descriptor: start the server with one, such as {fd}>ready.json") from None
        if mode == os.O_RDONLY:
            raise ValueError(f"descriptor {fd} can only be read")
    return fd


def _parse_heartbeat_timeout(timeout_s: float) -> float:
    if 0 < timeout_s < _SHORTEST_HEARTBEAT_TIMEOUT_S:
        raise ValueError(f"{timeout_s:g} is neither 0 nor at least {_SHORTEST_HEARTBEAT_TIMEOUT_S:g} s")
    return timeout_s


def serve(options: ServeOptions) -> None:
    """Runs the server until it is told to stop.

    Raises:
        ServeError: it can't start, its engine has ended, or it was told twice to stop.
    """
    for engine in options.engines:
        try:
            path = socket_path(engine.name, engine.ring.socket_dir)
        except ValueError as error:
            raise ServeError(str(error)) from None
        if _listens(path):  # our engine would refuse to start, but our frontends might have joined that one before
            raise ServeError(f"an engine named {engine.name!r} listens at {path} already; stop it, or choose another --name")
    processes = len(options.engines) + options.frontends
    try:
        make_directory(path.parent)
        check_open_files(_OPEN_FILES + _OPEN_FILES_PER_PROCESS * processes, "shmring serve")
    except OSError as error:
        raise ServeError(error.strerror or str(error)) from None
    _check_memory(options)
    with (
        _listen(options.frontend) as listening,
        _listen_for_probes(options) as probed,
        _metrics_directory() as metrics_dir,
    ):
        _say_what_starts(options, listening)
        asyncio.run(_Supervisor(options, listening, metrics_dir, probed).run())


def _check_memory(options: ServeOptions) -> None:
    """Says what ``shmring doctor`` says about memory, if there may be too little.

    Raises:
        ServeError: slabs take more than there is, so the kernel would kill a process.
    """
    needs = options.memory_needs()
    if lack := lack_of_memory(needs["slabs"], "slabs", "--slab-nbytes"):
        raise ServeError(lack)
    for check in memory_checks(needs):
        if check.status != "ok":
            _say(f"{check.name}: {check.finding}; {check.advice}")


def _listen(frontend: ProcessSettings) -> socket.socket:
    try:
        return listen(frontend)
    except OSError as error:
        raise ServeError(f"can't listen on {place_of(frontend)}: {error.strerror or error}") from None


def _listen_for_probes(options: ServeOptions) -> contextlib.AbstractContextManager[socket.socket | None]:
    if options.health_port is None:
        return contextlib.nullcontext()
    return _listen(dataclasses.replace(options.frontend, port=options.health_port, uds=None))


def _say_what_starts(options: ServeOptions, listening: socket.socket) -> None:
    """Says what begins: until torch is imported and a model is loaded, there is nothing else to see."""
    if options.notice:
        _say(options.notice)
    engine = options.engines[0]
    model = "" if engine.model is None else f", model {engine.model}"
    engines = "an engine" if len(options.engines) == 1 else f"{len(options.engines)} engines"
    count = "a frontend" if options.frontends == 1 else f"{options.frontends} frontends"
    _say(f"starting {engines} (executor {engine.executor}{model}) and {count} for {url_of(listening, options.frontend.tls)}")


def _say(line: str) -> None:
    """Tells the user how it goes, on stderr. The only line on stdout is that the server is ready."""
    click.echo(f"shmring: {line}", err=True)


def _disk() -> str:
    """Where temporary directories go: never to ``/dev/shm``, whose memory the slabs need."""
    usual = tempfile.gettempdir()
    return "/var/tmp" if Path(usual).is_relative_to("/dev/shm") else usual


@contextlib.contextmanager
def _metrics_directory() -> Iterator[str | None]:
    """A directory for the frontends' counters; None if the disk takes none. Removes those of supervisors that were killed.

    It is locked for as long as this process lives: supervisors in several containers may share the disk, and do not see each
    other's pids.
    """
    try:
        place = Path(_disk())
        _sweep_metrics(place)
        temporary = tempfile.TemporaryDirectory(prefix=f"{_METRICS_PREFIX}{os.getpid()}-", dir=place)
    except OSError as error:
        _say(f"no directory for numbers can be made, so each frontend's /metrics shows its own: {error.strerror or error}")
        yield None
        return
    with temporary as directory:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield directory
        finally:
            os.close(fd)


def _sweep_metrics(place: Path) -> None:
    for path in place.glob(f"{_METRICS_PREFIX}*"):
        named = _METRICS_DIRECTORY.fullmatch(path.name)
        if named is None or Path("/proc", named[1]).exists():  # a new one is not locked yet
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # it is another user's, or was just removed
        try:
            if os.fstat(fd).st_uid == os.getuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue  # its supervisor lives in another container
        finally:
            os.close(fd)


class _Supervisor:
    """See the head of this file."""

    def __init__(
        self, options: ServeOptions, listening: socket.socket, metrics_dir: str | None, probed: socket.socket | None = None
    ) -> None:
        self._options = options
        self._listening = listening
        self._probed = probed
        self._url = url_of(listening, options.frontend.tls)
        self._metrics_dir = metrics_dir
        self._gpus = count_gpus()
        self._oom_kills = oom_kills()
        self._usage: UsageTable | None = None
        if owners := options.frontend.http.key_owners:
            from shmring.frontend.callers.key_usage import UsageTable  # it imports Starlette

            self._usage = UsageTable(len(owners), options.frontends, os.memfd_create("shmring-keys"))
        self._responses_fd: int | None = None
        if options.frontend.http.response_lifetime_s:
            self._responses_fd = ResponseMemory.create(options.frontend.http.response_store_nbytes, options.frontends)
        self._engines: dict[int, Child] = {}
        self._engines_ready = [asyncio.Event() for _ in options.engines]
        self._frontends: dict[int, Child] = {}
        self._restarts = [0] * options.frontends
        self._ready = [asyncio.Event() for _ in range(options.frontends)]
        self._stop = Stop()

    async def run(self) -> None:
        """Starts everything, keeps it running, and ends it.

        Raises:
            ServeError: as :func:`serve`.
        """
        self._stop.heed_signals()
        gc.freeze()  # what was imported stays
        async with contextlib.nullcontext() if self._probed is None else answering(self._probed, self._life):
            await self._run()

    async def _run(self) -> None:
        if self._options.lifeline_fd is not None:
            self._watch_lifeline(self._options.lifeline_fd)
        tasks: list[asyncio.Task[None]] = []
        try:
            for rank in range(len(self._options.engines)):  # frontends would wait for them
                await self._start_engine(rank)
            tasks = [
                asyncio.create_task(self._wait_for_stop()),
                *(asyncio.create_task(self._keep_engine(rank, child)) for rank, child in self._engines.items()),
                asyncio.create_task(self._watch_start()),
                asyncio.create_task(self._watch_heartbeats()),
                *(asyncio.create_task(self._keep_frontend(index)) for index in range(self._options.frontends)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not self._stop.told.is_set():
                next(task for task in tasks if task.done()).result()
        finally:
            await self._end_all(tasks)
        if self._stop.hurry.is_set():
            raise ServeError("told twice to stop: whatever was still running was killed")

    def _watch_lifeline(self, fd: int) -> None:
        """Stops the server when the other end of a descriptor is closed. What somebody writes to it is ignored."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            data = b""
            with contextlib.suppress(OSError):  # a terminal has hung up, or a socket was reset
                data = os.read(fd, _LIFELINE_NBYTES)
            if not data:
                loop.remove_reader(fd)
                self._stop.told.set()
                logger.warning("whoever started the server has gone, so it stops")

        try:
            loop.add_reader(fd, read)
        except OSError:  # epoll refuses files and /dev/null
            raise ServeError("standard input is no pipe, socket or terminal, as --stop-with-stdin needs") from None

    async def _wait_for_stop(self) -> None:
        await self._stop.told.wait()

    async def _end_all(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        settings = self._options.frontend
        # Frontends close theirs, too: then connections are refused, and do not wait.
        closing = asyncio.get_running_loop().call_later(settings.shutdown_delay_s, self._listening.close)
        told = f"running requests may go on for {settings.shutdown_timeout_s:g} s; a second signal ends them"
        saying = asyncio.get_running_loop().call_later(settings.shutdown_delay_s + _PATIENCE_S, _say, told)
        frontends_s = settings.shutdown_delay_s + settings.shutdown_timeout_s + _FRONTENDS_GRACE_S
        await end_children(self._frontends.values(), frontends_s, self._stop.hurry)
        for timer in (closing, saying):
            timer.cancel()
        self._listening.close()
        slabs_gib = slabs_nbytes_of(self._options.engines) / 2**30
        engines_s = settings.shutdown_timeout_s + _ENGINES_GRACE_S + slabs_gib * _FREEING_S_PER_GIB
        await end_children(self._engines.values(), engines_s, self._stop.hurry)

    async def _watch_start(self) -> None:
        """Says how the start goes, and that the server is ready. Fails if the start takes too long."""
        timeout_s = self._options.start_timeout_s
        progress = asyncio.create_task(self._say_progress())
        try:
            async with asyncio.timeout(timeout_s):
                # A frontend is ready when it has found one engine. All of them have to be there.
                for ready in (*self._ready, *(self._engines_ready if len(self._engines) > 1 else ())):
                    await ready.wait()
        except TimeoutError:
            raise ServeError(f"not ready within {timeout_s:g} s (--start-timeout): {self._describe_delay()}") from None
        finally:
            progress.cancel()
        pids = f"{_pids('engine', self._engines)}, {_pids('frontend', self._frontends)}"
        click.echo(f"shmring: serving on {self._url} ({pids}); {self._url}/status shows what it does")
        if self._options.ready_fd is not None:
            self._say_ready(self._options.ready_fd)
        await self._stop.told.wait()

    def _say_ready(self, fd: int) -> None:
        engines, frontends = (
            [child.pid for _, child in sorted(children.items())] for children in (self._engines, self._frontends)
        )
        try:
            health_url = None if self._probed is None else f"{url_of(self._probed, None)}/health"
            say_ready(fd, Serving(self._url, engines, frontends, health_url))
        except BrokenPipeError:
            _say(f"ready, but no program reads descriptor {fd} (--ready-fd) any more")
        except OSError as error:
            raise ServeError(f"can't say on descriptor {fd} (--ready-fd) that the server is ready: {error.strerror}") from None

    async def _say_progress(self) -> None:
        loop = asyncio.get_running_loop()
        started_at, pause_s = loop.time(), _PROGRESS_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PROGRESS_S)
            _say(f"after {loop.time() - started_at:.0f} s: {self._describe_delay()}")

    def _describe_delay(self) -> str:
        model = self._options.engines[0].model
        for engine in self._engines.values():
            if not engine.ready.is_set():
                return f"{engine.title} (pid {engine.pid}) is still {'starting' if model is None else f'loading {model}'}"
        engines = "the engine is" if len(self._engines) == 1 else "the engines are"
        *late, last = [str(index) for index, ready in enumerate(self._ready) if not ready.is_set()]
        frontends = f"frontends {', '.join(late)} and {last} are" if late else f"frontend {last} is"
        return f"{engines} ready, but {frontends} not yet"

    async def _keep_engine(self, rank: int, child: Child) -> None:
        """Watches an engine. If there are several, one that ends is started again, unless it was never ready.

        Raises:
            ServeError: it is the only one, and has ended; or it was never ready.
        """
        pause = _Pause()
        while True:
            await self._await_end_of(rank, child)
            child.close()
            is_single = len(self._engines) == 1
            if is_single or not self._engines_ready[rank].is_set():
                started = is_single and all(ready.is_set() for ready in self._ready)
                raise ServeError(self._describe_end(child, "" if started else " before the server was ready"))
            await pause.before_another(child)
            child = await self._start_engine(rank)

    def _describe_end(self, child: Child, when: str) -> str:
        """Says how a process ended and, as far as one can know, why.

        Args:
            child: the process.
            when: " before it was ready", for example; empty: later. (Early ones often say themselves why they end.)
        """
        code = child.process.returncode
        how = f"{child.describe_end()}{when}"
        if child.killed_because:
            return how
        if code == -signal.SIGKILL and (when or oom_kills() > self._oom_kills):
            return f"{how}; {describe_kill(self._oom_kills)}"
        if code == -signal.SIGBUS:
            return f"{how}; memory that it had mapped could not be had: /dev/shm, or the memory of the container, is full"
        return f"{how}; its own message is above" if when and code is not None and code > 0 else how

    async def _await_end_of(self, rank: int, child: Child) -> None:
        """Returns when an engine has ended. Kills one that was started again and is not ready in time."""
        timeout_s = self._options.start_timeout_s if self._engines_ready[rank].is_set() else None
        await child.wait_until_ready(timeout_s)
        if child.ready.is_set():
            self._engines_ready[rank].set()
        await child.process.ended()

    async def _start_engine(self, rank: int) -> Child:
        engines = self._options.engines
        child = self._engines[rank] = await Child.start(
            "the engine" if len(engines) == 1 else f"the engine {engines[rank].name}",
            self._engine_command(),
            msgspec.json.encode(Orders(self._options.heartbeat_s, engines[rank])) + b"\n",
            environment=environment_of(rank, len(engines), os.environ, self._gpus),
        )
        return child

    def _engine_command(self) -> Sequence[str]:
        return "-m", "shmring.engine", "--supervisor-fd="

    async def _watch_heartbeats(self) -> None:
        """Kills processes without signs of life. It counts heartbeats, not time: while this one is stopped, none is missed."""
        heartbeat_s = self._options.heartbeat_s
        if not heartbeat_s:
            await self._stop.told.wait()
            return
        limit = math.ceil(self._options.heartbeat_timeout_s / heartbeat_s)
        while True:
            await asyncio.sleep(heartbeat_s)
            for child in (*self._engines.values(), *self._frontends.values()):
                if not child.lives or child.killed_because:
                    continue
                child.count_heartbeat()
                if child.silent_heartbeats > limit:
                    child.kill(f"showed no sign of life for {self._options.heartbeat_timeout_s:g} s (--heartbeat-timeout)")
            self._inform_frontends()

    def _life(self) -> Life:
        names = [engine.name for engine in self._options.engines]
        engines = {name: self._life_of(rank) for rank, name in enumerate(names)}
        return Life.of(engines, self._states(), dropped_lines())

    def _life_of(self, rank: int) -> EngineLife:
        child = self._engines.get(rank)
        if child is None or not child.lives or not child.ready.is_set():
            return "restarting" if self._engines_ready[rank].is_set() else "starting"
        return "unresponsive" if self._is_silent(child) else "stuck" if child.is_stuck else "running"

    def _states(self) -> list[FrontendState]:
        return [self._state_of(index, child) for index, child in sorted(self._frontends.items())]

    def _is_silent(self, child: Child) -> bool:
        return child.silent_heartbeats * self._options.heartbeat_s > self._options.heartbeat_timeout_s * _WORRYING_SHARE

    def _inform_frontends(self) -> None:
        states = self._states()
        for child in self._frontends.values():
            child.inform_of(states)

    def _state_of(self, index: int, child: Child) -> FrontendState:
        restarts = self._restarts[index]
        if not child.lives or not child.ready.is_set():
            return FrontendState(index, child.pid, "restarting" if restarts or not child.lives else "starting", restarts)
        return FrontendState(index, child.pid, "unresponsive" if self._is_silent(child) else "serving", restarts)

    async def _keep_frontend(self, index: int) -> None:
        """Keeps a frontend running. Fails if the first one was never ready."""
        pause = _Pause()
        while True:
            child = await self._start_frontend(index)
            self._inform_frontends()
            await child.process.ended()
            child.close()
            if self._usage is not None:
                self._usage.forget(index)
            if not self._ready[index].is_set():
                raise ServeError(self._describe_end(child, " before it was ready"))
            self._inform_frontends()
            # Or its gauges would stay in the sums for ever.
            if self._metrics_dir is not None:
                await asyncio.to_thread(_forget_gauges, child.pid, self._metrics_dir)
            await pause.before_another(child)
            self._restarts[index] += not child.ended_in_order

    async def _start_frontend(self, index: int) -> Child:
        """Starts a frontend, and returns when it serves or has failed to."""
        fd = self._listening.fileno()
        settings = dataclasses.replace(self._options.frontend, listen_fd=fd, index=index)
        fds = [fd]
        # The first one waits for the engine: then the time of the whole start counts.
        timeout_s = None
        if self._ready[index].is_set():
            timeout_s = _FRONTEND_START_TIMEOUT_S
            settings = dataclasses.replace(settings, connect_timeout_s=min(settings.connect_timeout_s, _REPLACEMENT_CONNECT_S))
        if self._usage is not None:
            settings = dataclasses.replace(settings, usage_fd=self._usage.fd)
            fds.append(self._usage.fd)
        if self._responses_fd is not None:
            settings = dataclasses.replace(settings, responses_fd=self._responses_fd)
            fds.append(self._responses_fd)
        child = await Child.start(
            f"frontend {index}",
            self._frontend_command(),
            msgspec.json.encode(Orders(self._options.heartbeat_s, settings)) + b"\n",
            pass_fds=fds,
            environment={} if self._metrics_dir is None else {DIRECTORY_VARIABLE: self._metrics_dir},
        )
        self._frontends[index] = child
        await child.wait_until_ready(timeout_s)
        if child.ready.is_set():
            self._ready[index].set()
        return child

    def _frontend_command(self) -> Sequence[str]:
        return "-m", "shmring.frontend", "--supervisor-fd="


class _Pause:
    """The pause before a process is started again: twice as long as the last one, unless the process has lived for long."""

    def __init__(self) -> None:
        self._seconds = _FIRST_PAUSE_S

    async def before_another(self, child: Child) -> None:
        """Waits."""
        if asyncio.get_running_loop().time() - child.started_at >= _STEADY_S:
            self._seconds = _FIRST_PAUSE_S
        level = logging.INFO if child.ended_in_order else logging.WARNING
        logger.log(level, "%s; starting another in %g s", child.describe_end(), self._seconds)
        await asyncio.sleep(self._seconds)
        self._seconds = min(self._seconds * 2, _LONGEST_PAUSE_S)


def _pids(noun: str, children: Mapping[int, Child]) -> str:
    pids = [str(child.pid) for _, child in sorted(children.items())]
    return f"{noun} pid{'s' if len(pids) > 1 else ''} {' '.join(pids)}"


def _listens(path: Path) -> bool:
    """Says whether a process listens on a Unix socket. (The file alone may be left from one that was killed.)

    EAGAIN: as many connections wait for it as may. It is stopped, say.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(os.fspath(path)) in (0, errno.EAGAIN)


def _forget_gauges(pid: int, metrics_dir: str) -> None:
    """Removes the gauges of a frontend that has ended from the sums."""
    from prometheus_client.multiprocess import mark_process_dead  # takes a fifth of what `shmring serve --help` does

    mark_process_dead(pid, metrics_dir)  # type: ignore[no-untyped-call]  # it ships no annotation for this
