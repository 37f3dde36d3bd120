"""The supervisor: what it refuses to start, whom it waits for, and how it ends. Its children here are real processes with small
programs of their own; whole servers are in tests/integration."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import fcntl
import itertools
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shmring.config import RingConfig
from shmring.engine.settings import EngineSettings
from shmring.frontend.processes import supervisor
from shmring.frontend.processes.child import Child, end_children
from shmring.frontend.processes.memory_checks import Check
from shmring.frontend.processes.supervisor import ServeError, ServeOptions, Serving, serve
from shmring.frontend.settings import FrontendSettings, ProcessSettings
from shmring.service import supervision
from shmring.service.supervision import FrontendState, Orders
from tests.tables import for_each
from tests.waiting import eventually, turns

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
OBEDIENT = "import time; print('ready', flush=True); time.sleep(600)"

# As engines and frontends: what comes last is the descriptor of the socket to the supervisor, by way of sys.argv.
LINK = "import os, socket, sys, time; link = socket.socket(fileno=int(sys.argv[1])); "
SLEEP = LINK + "time.sleep(600)"
GET_READY = LINK + "link.send(b'r'); time.sleep(600)"
BEAT = LINK + "link.send(b'r')\nwhile True: time.sleep(0.01); link.send(b'.')"
IGNORE_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
GET_ORDERS = "orders = link.makefile('rb').readline().decode(); "


SETTINGS = ProcessSettings(name="test", port=0)


def options(frontend_settings: dict[str, Any] | None = None, **changes: Any) -> ServeOptions:
    fields: dict[str, Any] = {
        "engines": [EngineSettings(name="test")],
        "frontend": dataclasses.replace(SETTINGS, **(frontend_settings or {})),
        "frontends": 1,
        "start_timeout_s": 60.0,
        "heartbeat_timeout_s": 0.0,
    }
    return ServeOptions(**(fields | changes))


# -- what it refuses to start -------------------------------------------------------------------------------------------


def test_where_it_can_not_listen_is_one_clear_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for place, reason in (
            ({"port": port}, rf"127.0.0.1 port {port}: Address already in use; stop .* choose another --port$"),
            ({"host": "192.0.2.1"}, r"192\.0\.2\.1 port 0"),
        ):
            with pytest.raises(ServeError, match=f"^can't listen on {reason}"):
                serve(options(place))


def test_a_name_that_can_not_be_is_one_clear_message() -> None:
    with pytest.raises(ServeError, match="can't name an engine"):
        serve(options(engines=[EngineSettings(name="../elsewhere")]))


def test_a_directory_of_sockets_that_can_not_be_is_refused_before_a_process_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Child, "start", None)
    (tmp_path / "a-file").touch()
    ring = RingConfig(socket_dir=str(tmp_path / "a-file"))
    with pytest.raises(ServeError, match=r"a-file is not a directory"):
        serve(options(engines=[EngineSettings(name="test", ring=ring)]))


async def test_a_name_that_a_living_engine_has_is_one_clear_message(serve: Any, socket_dir: Path) -> None:
    await serve()  # a ring named "test"
    with pytest.raises(ServeError, match=rf"an engine named 'test' listens at {socket_dir}/test.sock already"):
        supervisor.serve(options(engines=[EngineSettings(name="test", ring=RingConfig(socket_dir=str(socket_dir)))]))


def test_the_listening_socket_can_be_taken_over_at_once() -> None:
    with supervisor._listen(SETTINGS) as listening:
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        assert not os.get_inheritable(listening.fileno())  # only who is handed it has it


def test_slabs_that_can_not_be_had_are_refused_before_a_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Child, "start", None)
    engines = [EngineSettings(name=f"test-{rank}", ring=RingConfig(slab_nbytes="10TiB")) for rank in range(2)]
    with pytest.raises(ServeError, match=r"^slabs of 20 TiB can't be had: .* of the machine's .*; lower --slab-nbytes"):
        serve(options(engines=engines))


def test_slabs_that_may_be_too_large_are_a_line_for_whoever_starts_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Mapping[str, int]] = []

    def checks(needs: Mapping[str, int]) -> list[Check]:
        asked.append(needs)
        return [Check("memory", "problem", "1 MiB of 2 GiB are available", "take more"), Check("cgroup memory", "ok", "", "")]

    monkeypatch.setattr(supervisor, "memory_checks", checks)
    supervisor._check_memory(serving := options(engines=[EngineSettings(name="test", ring=RingConfig(slab_nbytes="6MiB"))]))
    assert asked == [serving.memory_needs()]
    assert capsys.readouterr().err == "shmring: memory: 1 MiB of 2 GiB are available; take more\n"


# -- the disk -----------------------------------------------------------------------------------------------------------


@for_each(("configured", "expected"), [("/dev/shm", "/var/tmp"), ("/dev/shm/deeper", "/var/tmp"), ("/tmp", "/tmp")])
def test_temporary_files_keep_off_the_shared_memory(monkeypatch: pytest.MonkeyPatch, configured: str, expected: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", configured)
    assert supervisor._disk() == expected


def test_what_killed_supervisors_left_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = 2**22 + 1  # more than any pid can be
    names = (f"{dead}-left", f"{dead}-locked", f"{os.getpid()}-living", "old")
    left, locked, *kept = (tmp_path / f"shmring-metrics-{name}" for name in names)
    kept.append(tmp_path / f"another-{dead}-x")
    for directory in (left, locked, *kept):
        directory.mkdir()
        (directory / "counter_1.db").write_bytes(b"x")
    kept.append(tmp_path / f"shmring-metrics-{dead}-file")
    kept[-1].write_bytes(b"x")
    fd = os.open(locked, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with supervisor._metrics_directory() as ours:
        assert ours is not None
        assert Path(ours).parent == tmp_path
        assert set(tmp_path.iterdir()) == {locked, *kept, Path(ours)}
        os.close(fd)
        supervisor._sweep_metrics(tmp_path)
        assert set(tmp_path.iterdir()) == {*kept, Path(ours)}
    assert not Path(ours).exists()


def test_a_disk_that_takes_no_directory_for_numbers_keeps_no_server_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with supervisor._metrics_directory() as ours:
        assert ours is None
    said = (
        "shmring: no directory for numbers can be made, so each frontend's /metrics shows its own: No such file or directory\n"
    )
    assert capsys.readouterr().err == said


def test_a_running_supervisor_s_directory_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with supervisor._metrics_directory() as ours:
        assert ours is not None
        fd = os.open(ours, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)


# -- children -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[Child]]]:
    """``await start(program)``: a child that runs, and has said so."""
    children: list[Child] = []

    async def run(program: str) -> Child:
        reading, writing = os.pipe()
        with os.fdopen(reading) as words:
            children.append(
                await Child.start("the child", ("-c", f"import os; os.dup2({writing}, 1)\n{program}", ""), pass_fds=(writing,))
            )
            os.close(writing)
            assert await asyncio.to_thread(words.readline) == "ready\n"
        return children[-1]

    yield run
    for child in children:
        child.process.send(signal.SIGKILL)
        await child.process.ended()
        child.close()


async def test_children_end_at_a_signal(start: Any) -> None:
    child = await start(OBEDIENT)
    await end_children([child], 30, asyncio.Event())
    assert child.describe_end() == f"the child (pid {child.pid}) was killed by signal 15 (Terminated)"


async def test_children_that_do_not_end_are_killed_in_time(start: Any) -> None:
    loop = asyncio.get_running_loop()
    children = [await start(STUBBORN), await start(OBEDIENT)]
    started = loop.time()
    await end_children(children, 0.2, asyncio.Event())
    assert loop.time() - started < 5
    assert [child.process.returncode for child in children] == [-9, -15]


async def test_children_are_killed_at_once_when_there_is_a_hurry(start: Any) -> None:
    child = await start(STUBBORN)
    hurry = asyncio.Event()
    ending = asyncio.create_task(end_children([child], 600, hurry))
    hurry.set()
    await asyncio.wait_for(ending, 10)
    assert child.process.returncode == -9


async def test_children_that_have_ended_need_nothing(start: Any) -> None:
    child = await start("print('ready', flush=True); raise SystemExit(3)")
    await child.process.ended()
    await end_children([child], 0, asyncio.Event())
    assert child.describe_end() == f"the child (pid {child.pid}) ended with exit code 3"


async def test_children_have_a_process_group_of_their_own(start: Any) -> None:
    child = await start(OBEDIENT)
    assert os.getpgid(child.pid) == child.pid  # Ctrl-C in a terminal must not reach them


# -- servers ------------------------------------------------------------------------------------------------------------


class Supervised(supervisor._Supervisor):
    """A supervisor whose engine and frontends are programs of the test.

    Attributes:
        running: the task that runs it.
    """

    engine_program = SLEEP
    frontend_program = GET_READY
    running: asyncio.Task[None]

    def _engine_command(self) -> Sequence[str]:
        return "-c", self.engine_program, ""

    def _frontend_command(self) -> Sequence[str]:
        return "-c", self.frontend_program, ""

    def children(self) -> list[Child]:
        """All that there are, the engines first."""
        return [*self._engines.values(), *self._frontends.values()]

    def pids(self) -> list[int]:
        return [child.pid for child in self.children()]

    def return_codes(self) -> list[int | None]:
        return [child.process.returncode for child in self.children()]

    def has_begun(self) -> bool:
        """Whether all frontends are ready, and all engines whose program gets there."""
        engines = [self._engines.get(rank) for rank in range(len(self._options.engines))]
        are_ready = self.engine_program.endswith(SLEEP) or all(engine and engine.ready.is_set() for engine in engines)
        return are_ready and all(ready.is_set() for ready in self._ready)

    async def ended(self) -> None:
        await asyncio.wait_for(self.running, 30)

    async def fails(self, match: str) -> str:
        """Waits for it to fail, and returns with what words."""
        with pytest.raises(ServeError, match=match) as caught:
            await self.ended()
        return str(caught.value)


@pytest.fixture
async def supervise(tmp_path: Path) -> AsyncIterator[Callable[..., Supervised]]:
    """``supervise(engine=..., frontend=..., **options)``: a supervisor that runs. Nothing of it is left.

    In its programs, PLACE is a directory of the test.
    """
    started: list[tuple[Supervised, socket.socket]] = []

    def run(engine: str = SLEEP, frontend: str = GET_READY, **changes: Any) -> Supervised:
        listening = supervisor._listen(SETTINGS)
        server = Supervised(options(**changes), listening, str(tmp_path))
        server.engine_program, server.frontend_program = (
            program.replace("PLACE", str(tmp_path)) for program in (engine, frontend)
        )
        server.running = asyncio.create_task(server.run())
        started.append((server, listening))
        return server

    yield run
    for server, listening in started:
        server.running.cancel()
        await asyncio.wait([server.running])
        listening.close()
        assert not [pid for pid in server.pids() if Path("/proc", str(pid)).exists()]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().remove_signal_handler(number)


@pytest.fixture
async def serving(supervise: Any) -> Callable[..., Awaitable[Supervised]]:
    """As many words as ``supervise`` has, and then the server has begun."""

    async def run(**arguments: Any) -> Supervised:
        server: Supervised = supervise(**arguments)
        await eventually(server.has_begun, 30)
        return server

    return run


ENGINES = [EngineSettings(name=f"test-{rank}", data_parallel_size=2) for rank in range(2)]
KILL_ITSELF = "import os; os.kill(os.getpid(), {})"
#: The first process of this program does what follows; another one does what is behind an "else: ".
ONE_OF_TWO = "import os, time\ntry: os.mkdir('PLACE/first')\nexcept FileExistsError: "


@pytest.mark.parametrize(
    ("how", "error"),
    [
        (
            {"frontend": SLEEP, "start_timeout_s": 0.3},
            r"not ready within 0\.3 s \(--start-timeout\): the engine .* is still star",
        ),
        (
            {
                "engine": GET_READY,
                "frontend": f"{ONE_OF_TWO}time.sleep(600)\n{GET_READY}",
                "frontends": 2,
                "start_timeout_s": 3.0,
            },
            r"the engine is ready, but frontend [01] is not yet",
        ),
        ({"frontend": "raise SystemExit(7)"}, r"frontend 0 \(pid \d+\) ended with exit code 7 before it was ready"),
        (
            {"frontend": KILL_ITSELF.format(9)},
            r"was killed by signal 9 \(Killed\) before it was ready; nobody here did that: (?!.*above)",
        ),
        (
            {"engine": KILL_ITSELF.format(7), "frontend": SLEEP},
            r"\(Bus error\) before the server was ready; memory .*: /dev/shm, or the memory of the",
        ),
        (
            {"engine": f"{ONE_OF_TWO}raise SystemExit(3)\n{GET_READY}", "engines": ENGINES},
            r"the engine test-. \(pid \d+\) ended with exit code 3 before the server was ready",
        ),
        ({"engines": ENGINES, "start_timeout_s": 0.5}, r"the engine test-0 .* is still starting"),
    ],
    ids=["engine hangs", "frontend hangs", "frontend ends", "frontend killed", "bus error", "one engine ends", "engines hang"],
)
async def test_what_does_not_start_ends_the_server(supervise: Any, how: dict[str, Any], error: str) -> None:
    await supervise(**how).fails(error)


async def test_who_is_killed_at_the_start_is_explained_by_what_the_kernel_says(
    supervise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter(range(100))
    monkeypatch.setattr(supervisor, "oom_kills", lambda: next(kills))
    monkeypatch.setattr(supervisor, "describe_kill", lambda before: f"the kernel, since {before}")
    server = supervise(engine=KILL_ITSELF.format(9), frontend=SLEEP)
    await server.fails(r"\(Killed\) before the server was ready; the kernel, since 0$")


@for_each(
    ("frontends", "said"),
    [
        (1, "but frontend 0 is not yet"),
        (2, "but frontends 0 and 1 are not yet"),
        (4, "but frontends 0, 1, 2 and 3 are not yet"),
    ],
)
async def test_all_frontends_that_are_late_are_named(tmp_path: Path, frontends: int, said: str) -> None:
    server = Supervised(options(frontends=frontends), socket.socket(), str(tmp_path))
    assert server._describe_delay().endswith(said)
    server._listening.close()


def test_a_socket_that_a_killed_engine_left_is_no_engine(tmp_path: Path) -> None:
    path = tmp_path / "left.sock"
    assert not supervisor._listens(path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        assert supervisor._listens(path)
    assert path.exists()
    assert not supervisor._listens(path)


def test_an_engine_for_which_as_many_wait_as_can_is_one(tmp_path: Path) -> None:
    """It is stopped, say; it was taken for the file that a killed engine leaves."""
    path = tmp_path / "stopped.sock"
    with socket.socket(socket.AF_UNIX) as listening, contextlib.ExitStack() as waiting:
        listening.bind(str(path))
        listening.listen(0)
        while True:
            client = waiting.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            if client.connect_ex(str(path)) == errno.EAGAIN:
                break
        assert supervisor._listens(path)


async def test_an_engine_that_ends_ends_the_server(serving: Any) -> None:
    server = await serving(frontends=2)
    os.kill(server._engines[0].pid, signal.SIGKILL)
    await server.fails(r"the engine \(pid \d+\) was killed by signal 9 \(Killed\)$")


async def test_a_frontend_that_hangs_when_it_is_started_again_is_replaced(
    serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FRONTEND_START_TIMEOUT_S", 0.5)
    frontend = (
        "import os, time\nwith open('PLACE/starts', 'a') as file: file.write('x')\n"
        f"if os.path.getsize('PLACE/starts') != 2: {GET_READY}\n{SLEEP}"  # the second one hangs
    )
    server = await serving(frontend=frontend)
    os.kill(server._frontends[0].pid, signal.SIGKILL)
    await eventually(lambda: (tmp_path / "starts").stat().st_size == 3, 30)
    assert not server.running.done()


@for_each(("ending", "level"), [("raise SystemExit(0)", "INFO"), ("raise SystemExit(3)", "WARNING")])
async def test_only_an_end_that_nobody_asked_for_is_a_warning(
    serving: Any, caplog: pytest.LogCaptureFixture, ending: str, level: str
) -> None:
    end = f"import signal\ndef end(*_): {ending}\nsignal.signal(signal.SIGUSR2, end)\n"
    with caplog.at_level("INFO", "shmring.frontend.processes.supervisor"):
        server = await serving(frontend=f"{LINK}{end}link.send(b'r'); time.sleep(600)")
        victim = server._frontends[0]
        os.kill(victim.pid, signal.SIGUSR2)
        await eventually(lambda: server._frontends[0] is not victim, 30)
    assert [record.levelname for record in caplog.records if "starting another" in record.getMessage()] == [level]
    caplog.clear()
    server.running.cancel()
    await asyncio.wait([server.running])


async def test_a_frontend_that_replaces_another_has_time_to_say_that_it_does_not_reach_the_engine(
    serving: Any, tmp_path: Path
) -> None:
    """It gives up before it is killed. The first one may wait for as long as the server may take to start."""
    frontend = f"{LINK}{GET_ORDERS}\nwith open('PLACE/told', 'a') as file: file.write(orders)\nlink.send(b'r'); time.sleep(600)"
    server = await serving(frontend=frontend, frontend_settings={"connect_timeout_s": 600.0})

    def timeouts() -> list[float]:
        lines = (tmp_path / "told").read_text().splitlines()
        return [msgspec.json.decode(line)["settings"]["connect_timeout_s"] for line in lines]

    os.kill(server._frontends[0].pid, signal.SIGKILL)
    await eventually(lambda: len(timeouts()) == 2, 30)
    assert timeouts()[0] == 600.0
    assert timeouts()[1] < supervisor._FRONTEND_START_TIMEOUT_S


@pytest.mark.parametrize("engines", [[EngineSettings(name="test")], ENGINES], ids=["one engine", "two engines"])
async def test_it_says_that_it_is_ready_and_ends_at_a_signal(
    supervise: Any, capsys: pytest.CaptureFixture[str], engines: list[EngineSettings]
) -> None:
    reading, writing = os.pipe()
    server = supervise(engine=GET_READY, engines=engines, frontends=2, ready_fd=writing)
    output = ""

    def announced() -> bool:
        nonlocal output
        output += capsys.readouterr().out
        return output.endswith("\n")

    await eventually(announced, 30)
    address = server._listening.getsockname()
    *engine_pids, first, second = server.pids()
    url = f"http://127.0.0.1:{address[1]}"
    named = f"engine pid{'s' * (len(engines) > 1)} {' '.join(map(str, engine_pids))}, frontend pids {first} {second}"
    assert output == f"shmring: serving on {url} ({named}); {url}/status shows what it does\n"
    titles = ["the engine"] if len(engines) == 1 else ["the engine test-0", "the engine test-1"]
    assert [child.title for child in server._engines.values()] == titles
    with os.fdopen(reading) as word:  # which ends: nobody has the descriptor any more
        assert msgspec.json.decode(word.read(), type=Serving) == Serving(url, engine_pids, [first, second])
    os.kill(os.getpid(), signal.SIGTERM)
    await server.ended()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


async def test_a_descriptor_that_can_not_be_written_to_is_one_clear_message(supervise: Any) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    await supervise(ready_fd=reading).fails(
        rf"can't say on descriptor {reading} \(--ready-fd\) that the server is ready: Bad file"
    )
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(reading)


async def test_a_program_that_does_not_read_that_it_is_ready_ends_no_server(
    supervise: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    server = supervise(ready_fd=writing)
    said = ""

    def told() -> bool:
        nonlocal said
        said += "".join(capsys.readouterr())
        return f"no program reads descriptor {writing} (--ready-fd)" in said

    await eventually(told, 30)
    assert not server.running.done()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(writing)


async def test_it_stops_when_the_program_that_started_it_ends(serving: Any) -> None:
    """SIGKILL closes the other end too; tests/frontend/demo/test_demo.py has that with real processes."""
    lifeline, other_end = socket.socketpair()
    with lifeline, other_end:
        server = await serving(lifeline_fd=lifeline.fileno())
        other_end.send(b"means nothing\n")
        await eventually(lambda: not select.select([lifeline], [], [], 0)[0])  # it was read
        assert not server.running.done()
        assert not server._stop.told.is_set()
        other_end.close()
        await server.ended()


async def test_it_stops_at_once_when_the_program_that_started_it_has_ended_already(supervise: Any) -> None:
    lifeline, other_end = socket.socketpair()
    other_end.close()
    with lifeline:
        await supervise(engine=GET_READY, lifeline_fd=lifeline.fileno()).ended()


async def test_a_standard_input_that_never_ends_is_one_clear_message(supervise: Any) -> None:
    lifeline_fd = os.open(os.devnull, os.O_RDONLY)
    server = supervise(lifeline_fd=lifeline_fd)
    await server.fails("standard input is no pipe, socket or terminal, as --stop-with-stdin needs")
    os.close(lifeline_fd)
    assert server.pids() == []


async def test_the_port_is_closed_before_requests_have_ended(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_SAME_SIGNAL_S", -1.0)
    closing = (  # as frontends do
        "import json, signal\n"
        "listen_fd = json.loads(orders)['settings']['listen_fd']\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.close(listen_fd))\n"
    )
    frontend = f"{LINK}{GET_ORDERS}\n{closing}link.send(b'r')\nwhile True: time.sleep(600)"
    server = await serving(frontend=frontend, frontend_settings={"shutdown_timeout_s": 600.0})
    address = server._listening.getsockname()
    os.kill(os.getpid(), signal.SIGTERM)

    def is_refused() -> bool:
        with socket.socket() as connecting:
            return connecting.connect_ex(address) == errno.ECONNREFUSED

    await eventually(is_refused)
    assert server._frontends[0].process.returncode is None
    os.kill(os.getpid(), signal.SIGTERM)
    await server.fails("told twice to stop")


DEAF = f"{IGNORE_SIGTERM}open('PLACE/is-deaf', 'x'); {SLEEP}"


async def test_a_second_signal_kills(serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_SAME_SIGNAL_S", 600.0)
    server = await serving(engine=DEAF, frontend=IGNORE_SIGTERM + GET_READY, frontend_settings={"shutdown_timeout_s": 600.0})
    await eventually((tmp_path / "is-deaf").exists, 30)
    os.kill(os.getpid(), signal.SIGTERM)
    await eventually(server._stop.told.is_set)
    os.kill(os.getpid(), signal.SIGTERM)  # as `timeout` and `tini -g` do: to a process, and then to its group
    await turns()  # the signal was delivered, to this thread, when it was sent
    assert not server._stop.hurry.is_set()
    monkeypatch.setattr(supervision, "_SAME_SIGNAL_S", -1.0)
    os.kill(os.getpid(), signal.SIGINT)
    await server.fails("told twice to stop")
    assert server.return_codes() == [-9, -9]


async def test_who_does_not_end_is_killed_when_the_time_is_up(
    serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FRONTENDS_GRACE_S", 0.2)
    monkeypatch.setattr(supervisor, "_ENGINES_GRACE_S", 0.2)
    monkeypatch.setattr(supervisor, "_FREEING_S_PER_GIB", 0.0)
    server = await serving(engine=DEAF, frontend=IGNORE_SIGTERM + GET_READY, frontend_settings={"shutdown_timeout_s": 0.0})
    await eventually((tmp_path / "is-deaf").exists, 30)
    started = asyncio.get_running_loop().time()
    os.kill(os.getpid(), signal.SIGTERM)
    await server.ended()
    assert 0.4 <= asyncio.get_running_loop().time() - started < 10
    assert server.return_codes() == [-9, -9]


async def test_an_engine_has_its_own_time_and_more_for_a_large_slab(
    serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FRONTENDS_GRACE_S", 0.2)
    monkeypatch.setattr(supervisor, "_ENGINES_GRACE_S", 0.0)
    monkeypatch.setattr(supervisor, "_FREEING_S_PER_GIB", 20.0)
    slow = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(7))); "
    server = await serving(
        engine=f"{slow}open('PLACE/is-slow', 'x'); {SLEEP}",
        frontend=IGNORE_SIGTERM + GET_READY,
        engines=[EngineSettings(name="test", ring=RingConfig(slab_nbytes="3GiB"))],
        frontend_settings={"shutdown_timeout_s": 0.0},
    )
    await eventually((tmp_path / "is-slow").exists, 30)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(server.running, 60)
    assert server.return_codes() == [7, -9]


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_during_the_start_is_heeded(supervise: Any, number: signal.Signals) -> None:
    server = supervise(frontend=SLEEP)
    await eventually(lambda: len(server.pids()) == 2, 30)
    os.kill(os.getpid(), number)
    await server.ended()
    assert server.return_codes() == [-15, -15]


@pytest.mark.usefixtures("hangups")
async def test_a_hangup_that_is_ignored_stays_so(serving: Any) -> None:
    """As ``nohup`` has it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    server = await serving()
    os.kill(os.getpid(), signal.SIGHUP)
    await turns()
    assert not server._stop.told.is_set()
    assert not server.running.done()


# -- settings and states for children -----------------------------------------------------------------------------------


async def test_settings_come_through_the_socket_and_not_where_others_can_read_them(
    serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMRING_API_KEY", "a-secret")
    monkeypatch.setenv("SHMRING_ADMIN_KEY", "a-secret")
    note = LINK + GET_ORDERS + "open('PLACE/{}', 'w').write(orders); link.send(b'r'); time.sleep(600)"
    settings = {"shutdown_timeout_s": 0.25, "http": FrontendSettings(api_keys=("a-secret", "another"))}
    server = await serving(
        engine=note.format("engine"), frontend=note.format("frontend"), frontend_settings=settings, heartbeat_timeout_s=5.0
    )
    orders = msgspec.json.decode((tmp_path / "frontend").read_bytes(), type=Orders[ProcessSettings])
    assert orders.heartbeat_s == 0.5
    told = dataclasses.replace(orders.settings, listen_fd=None, responses_fd=None, index=None)
    assert told == dataclasses.replace(SETTINGS, **settings)
    fd = f"/proc/{server._frontends[0].pid}/fd/{orders.settings.listen_fd}"
    assert os.path.samestat(os.stat(fd), os.fstat(server._listening.fileno()))
    ordered = msgspec.json.decode((tmp_path / "engine").read_bytes(), type=Orders[EngineSettings])
    assert ordered.settings == EngineSettings(name="test")
    for pid in server.pids():
        for name in ("cmdline", "environ"):
            assert b"a-secret" not in Path(f"/proc/{pid}/{name}").read_bytes()


async def test_children_import_nothing_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "platform.py").write_text("raise SystemExit('the trap')")
    for path in ("", ":/does/not/exist", "/does/not/exist:", "/does/not/exist::/nor/this"):
        monkeypatch.setenv("PYTHONPATH", path)
        child = await Child.start("the child", ("-c", "import platform, sys; sys.exit('' in sys.path)", ""))
        assert await child.process.ended() == 0, path
        child.close()


# -- signs of life ------------------------------------------------------------------------------------------------------


async def test_a_stopped_frontend_is_replaced_and_the_others_learn_its_state(
    serving: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listening = (
        LINK + "link.send(b'r'); link.settimeout(0.01)\n"
        "while True:\n"
        "    try: words = link.recv(65536)\n"
        "    except TimeoutError: words = b''\n"
        "    link.send(b'.')\n"
        "    with open('PLACE/said' + str(os.getpid()), 'ab') as file: file.write(words)\n"
    )
    server = await serving(engine=BEAT, frontend=listening, frontends=2, heartbeat_timeout_s=1.0)

    def heard_by(index: int) -> list[list[FrontendState]]:
        path = tmp_path / f"said{server._frontends[index].pid}"
        lines = path.read_bytes().splitlines() if path.exists() else []
        return [msgspec.json.decode(line, type=list[FrontendState]) for line in lines if line.startswith(b"[")]

    def states(index: int) -> list[str]:
        return [heard[index].state for heard in heard_by(1 - index) if len(heard) == 2]

    await eventually(lambda: states(0)[-1:] == ["serving"], 30)
    stopped = server._frontends[0].pid
    os.kill(stopped, signal.SIGSTOP)
    await eventually(lambda: heard_by(1)[-1][0].restarts == 1 and states(0)[-1] == "serving", 30)
    changes = [state for state, _ in itertools.groupby(states(0))]
    assert changes[-3:] == ["unresponsive", "restarting", "serving"]
    assert heard_by(1)[-1][0].pid == server._frontends[0].pid != stopped
    assert f"frontend 0 (pid {stopped}) showed no sign of life for 1 s" in caplog.text
    assert not server.running.done()
    assert not set(states(1)) - {"starting", "serving"}


async def test_a_stopped_engine_ends_the_server(serving: Any) -> None:
    server = await serving(engine=BEAT, frontend=BEAT, heartbeat_timeout_s=1.0)
    os.kill(server._engines[0].pid, signal.SIGSTOP)
    await server.fails(r"the engine \(pid \d+\) showed no sign of life for 1 s \(--heartbeat-timeout\) and was killed")


async def test_a_process_that_is_not_ready_need_not_show_that_it_lives(start: Any) -> None:
    """Loading a model may keep the interpreter for longer than any heartbeat."""
    child = await start(OBEDIENT)
    for _ in range(3):
        child.count_heartbeat()
    assert child.silent_heartbeats == 0
    child.ready.set()
    for _ in range(3):
        child.count_heartbeat()
    assert child.silent_heartbeats == 3


async def test_heartbeats_that_were_not_waited_for_are_not_missed(serving: Any) -> None:
    """A supervisor that was stopped must not take the others for dead when it goes on."""
    server = await serving(engine=BEAT, frontend=BEAT, heartbeat_timeout_s=0.5)
    time.sleep(1.0)  # the loop stands still for longer than anybody may be silent
    for _ in range(20):
        await asyncio.sleep(0)
    assert max(child.silent_heartbeats for child in server.children()) <= 1
    assert not server.running.done()


# -- several engines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "options"),
    [(signal.SIGKILL, {"engine": GET_READY}), (signal.SIGSTOP, {"engine": BEAT, "frontend": BEAT, "heartbeat_timeout_s": 1.0})],
)
async def test_one_of_several_engines_that_ends_or_hangs_is_replaced_and_the_rest_goes_on(
    serving: Any, number: signal.Signals, options: dict[str, Any]
) -> None:
    server = await serving(engines=ENGINES, **options)
    others = server.children()[1:]
    for _ in range(2):
        victim = server._engines[0]
        os.kill(victim.pid, number)
        await eventually(lambda victim=victim: server._engines[0] is not victim and server._engines[0].ready.is_set(), 30)
        assert ("showed no sign of life" in victim.describe_end()) is (number == signal.SIGSTOP)
    assert server.children()[1:] == others
    assert not server.running.done()
