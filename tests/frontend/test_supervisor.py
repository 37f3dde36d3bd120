"""The supervisor: what it refuses to start, whom it waits for, and how it ends. Its children here are real processes with small
programs of their own; whole servers are in tests/integration."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from frontend import supervisor
from frontend.supervisor import ServeError, ServeOptions, serve

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
OBEDIENT = "import time; print('ready', flush=True); time.sleep(600)"

# As engines and frontends: the latter get the descriptor on which they say that they are ready.
SLEEP = "import time; time.sleep(600)"
LISTEN = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind({path!r}); s.listen(); time.sleep(600)"
GET_READY = "import os, time; os.write({ready_fd}, b'x'); os.close({ready_fd}); time.sleep(600)"
IGNORE_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


def options(**changes: Any) -> ServeOptions:
    fields: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "frontends": 1,
        "name": "test",
        "socket_dir": None,
        "log_level": "warning",
        "start_timeout_s": 60.0,
        "shutdown_timeout_s": 2.0,
        "engine_arguments": (),
        "frontend_arguments": (),
    }
    return ServeOptions(**(fields | changes))


# -- what it refuses to start -------------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_clear_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=rf"can't listen on 127.0.0.1 port {port}: .*in use"):
            serve(options(port=port))


def test_an_address_that_is_not_ours_is_one_clear_message() -> None:
    with pytest.raises(ServeError, match=r"can't listen on 192\.0\.2\.1 port 0"):
        serve(options(host="192.0.2.1"))


def test_a_name_that_can_not_be_is_one_clear_message() -> None:
    with pytest.raises(ServeError, match="can't name an engine"):
        serve(options(name="../elsewhere"))


async def test_a_name_that_a_living_engine_has_is_one_clear_message(serve: Any, socket_dir: Path) -> None:
    await serve()  # a ring named "test"
    with pytest.raises(ServeError, match=rf"an engine named 'test' listens at {socket_dir}/test.sock already"):
        supervisor.serve(options(socket_dir=str(socket_dir)))


def test_the_listening_socket_can_be_taken_over_at_once() -> None:
    with supervisor._listen(options()) as listening:
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        assert not os.get_inheritable(listening.fileno())  # only who is handed it has it


def test_both_ends_get_what_they_must_agree_on() -> None:
    assert options().shared_arguments() == ("--name=test", "--log-level=warning")
    assert options(socket_dir="/somewhere").shared_arguments()[-1] == "--socket-dir=/somewhere"


# -- the disk -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured", "expected"), [("/dev/shm", "/var/tmp"), ("/dev/shm/deeper", "/var/tmp"), ("/tmp", "/tmp")]
)
def test_temporary_files_keep_off_the_shared_memory(monkeypatch: pytest.MonkeyPatch, configured: str, expected: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", configured)
    assert supervisor._disk() == expected


def test_what_killed_supervisors_left_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = 2**22 + 1  # more than any pid can be
    left, locked, living, plain, foreign, file = (
        tmp_path / name
        for name in (
            f"shmring-metrics-{dead}-left",
            f"shmring-metrics-{dead}-locked",
            f"shmring-metrics-{os.getpid()}-living",
            "shmring-metrics-old",
            f"another-{dead}-x",
            f"shmring-metrics-{dead}-file",
        )
    )
    for directory in (left, locked, living, plain, foreign):
        directory.mkdir()
        (directory / "counter_1.db").write_bytes(b"x")
    file.write_bytes(b"x")
    fd = os.open(locked, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with supervisor._metrics_directory() as ours:
        assert Path(ours).parent == tmp_path
        assert set(tmp_path.iterdir()) == {locked, living, plain, foreign, file, Path(ours)}
        os.close(fd)
        supervisor._sweep_metrics(tmp_path)
        assert set(tmp_path.iterdir()) == {living, plain, foreign, file, Path(ours)}
    assert not Path(ours).exists()


def test_a_running_supervisor_s_directory_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with supervisor._metrics_directory() as ours:
        fd = os.open(ours, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)


# -- children -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[supervisor._Child]]]:
    """``await start(program)``: a child that runs, and has said so."""
    children: list[supervisor._Child] = []

    async def run(program: str) -> supervisor._Child:
        reading, writing = os.pipe()
        with os.fdopen(reading) as words:
            children.append(
                await supervisor._Child.start(
                    "the child", ("-c", f"import os; os.dup2({writing}, 1)\n{program}"), pass_fds=(writing,)
                )
            )
            os.close(writing)
            assert await asyncio.to_thread(words.readline) == "ready\n"
        return children[-1]

    yield run
    for child in children:
        if child.process.returncode is None:
            child.process.kill()
        await child.process.wait()


async def test_children_are_told_to_end(start: Any) -> None:
    child = await start(OBEDIENT)
    await supervisor._end([child], asyncio.get_running_loop().time() + 30, asyncio.Event())
    assert child.describe_end() == f"the child (pid {child.pid}) was killed by signal 15 (Terminated)"


async def test_children_that_do_not_end_are_killed_in_time(start: Any) -> None:
    loop = asyncio.get_running_loop()
    children = [await start(STUBBORN), await start(OBEDIENT)]
    started = loop.time()
    await supervisor._end(children, started + 0.2, asyncio.Event())
    assert loop.time() - started < 5
    assert [child.process.returncode for child in children] == [-9, -15]


async def test_children_are_killed_at_once_when_there_is_a_hurry(start: Any) -> None:
    loop = asyncio.get_running_loop()
    child = await start(STUBBORN)
    hurry = asyncio.Event()
    ending = asyncio.create_task(supervisor._end([child], loop.time() + 600, hurry))
    hurry.set()
    await asyncio.wait_for(ending, 10)
    assert child.process.returncode == -9


async def test_children_that_have_ended_need_nothing(start: Any) -> None:
    child = await start("print('ready', flush=True); raise SystemExit(3)")
    await child.process.wait()
    await supervisor._end([child], asyncio.get_running_loop().time(), asyncio.Event())
    assert child.describe_end() == f"the child (pid {child.pid}) ended with exit code 3"


async def test_children_have_a_process_group_of_their_own(start: Any) -> None:
    child = await start(OBEDIENT)
    assert os.getpgid(child.pid) == child.pid  # Ctrl-C in a terminal must not reach them


async def test_a_pipe_s_byte_is_told_from_its_end(eventually: Any) -> None:
    for words, expected in ((b"\n", True), (b"", False)):
        reading, writing = os.pipe()
        os.write(writing, words)
        os.close(writing)
        assert await supervisor._reads_a_byte(reading) is expected
        descriptor = Path(f"/proc/self/fd/{reading}")
        await eventually(lambda: not descriptor.exists())  # noqa: B023 - it is awaited here


# -- servers ------------------------------------------------------------------------------------------------------------


class Supervised(supervisor._Supervisor):
    """A supervisor whose engine and frontends are programs of the test."""

    engine_program = SLEEP
    frontend_program = GET_READY

    async def _start_engine(self) -> supervisor._Child:
        return await supervisor._Child.start("the engine", ("-c", self.engine_program))

    def _frontend_command(self, ready_fd: int) -> tuple[str, ...]:
        return "-c", self.frontend_program.format(ready_fd=ready_fd, listen_fd=self._listening.fileno())

    def pids(self) -> list[int]:
        """All children there are."""
        return [child.pid for child in (self._engine, *self._frontends.values()) if child is not None]


@pytest.fixture
async def supervise(tmp_path: Path) -> AsyncIterator[Callable[..., tuple[Supervised, asyncio.Task[None]]]]:
    """``supervise(engine=..., frontend=..., **options)``: a supervisor, and the task that runs it. Nothing of it is left."""
    started: list[tuple[Supervised, asyncio.Task[None], socket.socket]] = []

    def run(engine: str = SLEEP, frontend: str = GET_READY, **changes: Any) -> tuple[Supervised, asyncio.Task[None]]:
        listening = supervisor._listen(options())
        server = Supervised(options(socket_dir=str(tmp_path), **changes), listening, str(tmp_path))
        server.engine_program, server.frontend_program = engine, frontend
        running = asyncio.create_task(server.run())
        started.append((server, running, listening))
        return server, running

    yield run
    for server, running, listening in started:
        running.cancel()
        await asyncio.wait([running])
        listening.close()
        assert not [pid for pid in server.pids() if Path("/proc", str(pid)).exists()]
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


async def test_an_engine_that_hangs_at_the_start_is_given_up(supervise: Any) -> None:
    server, running = supervise(frontend=SLEEP, start_timeout_s=0.3)
    with pytest.raises(ServeError, match=r"not ready within 0\.3 s \(--start-timeout\): the engine .* does not listen yet"):
        await asyncio.wait_for(running, 30)
    assert len(server.pids()) == 2


async def test_a_frontend_that_hangs_at_the_start_is_given_up(supervise: Any, tmp_path: Path) -> None:
    first_only = f"import os, time\ntry: os.mkdir({str(tmp_path / 'first')!r})\nexcept FileExistsError: time.sleep(600)\n"
    engine = LISTEN.format(path=str(tmp_path / "test.sock"))
    _, running = supervise(engine=engine, frontend=first_only + GET_READY, frontends=2, start_timeout_s=3.0)
    with pytest.raises(ServeError, match=r"the engine listens, but of the frontends [01] did not get ready"):
        await asyncio.wait_for(running, 30)


def test_a_socket_that_a_killed_engine_left_is_no_engine(tmp_path: Path) -> None:
    path = tmp_path / "left.sock"
    assert not supervisor._listens(path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        assert supervisor._listens(path)
    assert path.exists()
    assert not supervisor._listens(path)


async def test_a_frontend_that_can_not_start_ends_the_server(supervise: Any) -> None:
    _, running = supervise(frontend="raise SystemExit(7)")
    with pytest.raises(ServeError, match=r"frontend 0 \(pid \d+\) ended with exit code 7 before it was ready"):
        await asyncio.wait_for(running, 30)


async def test_an_engine_that_ends_ends_the_server(supervise: Any, eventually: Any) -> None:
    server, running = supervise(frontends=2)
    await eventually(lambda: all(ready.is_set() for ready in server._ready), 30)
    os.kill(server._engine.pid, signal.SIGKILL)
    with pytest.raises(ServeError, match=r"the engine \(pid \d+\) was killed by signal 9 \(Killed\)$"):
        await asyncio.wait_for(running, 30)


async def test_a_frontend_that_hangs_when_it_is_started_again_is_replaced(
    supervise: Any, eventually: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FRONTEND_START_TIMEOUT_S", 0.5)
    starts = tmp_path / "starts"
    frontend = (
        f"import os, time\nwith open({str(starts)!r}, 'a') as file: file.write('x')\n"
        f"if os.path.getsize({str(starts)!r}) != 2: {GET_READY}\ntime.sleep(600)"  # the second one hangs
    )
    server, running = supervise(frontend=frontend)
    await eventually(lambda: server._ready[0].is_set(), 30)
    os.kill(server._frontends[0].pid, signal.SIGKILL)
    await eventually(lambda: starts.stat().st_size == 3, 30)
    assert not running.done()


async def test_it_says_that_it_is_ready_and_ends_when_told(
    supervise: Any, eventually: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server, running = supervise(frontends=2)
    output = ""

    def announced() -> bool:
        nonlocal output
        output += capsys.readouterr().out
        return output.endswith("\n")

    await eventually(announced, 30)
    address = server._listening.getsockname()
    engine, *frontends = server.pids()
    pids = f"(engine pid {engine}, frontends pids {frontends[0]} {frontends[1]})"
    assert output == f"shmring: serving on http://127.0.0.1:{address[1]} {pids}\n"
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 30)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


async def test_the_port_is_closed_before_requests_have_ended(
    supervise: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_SAME_SIGNAL_S", -1.0)
    closing = "import os, signal; signal.signal(signal.SIGTERM, lambda *_: os.close({listen_fd}))\n"  # as frontends do
    server, running = supervise(frontend=closing + GET_READY + "\ntime.sleep(600)", shutdown_timeout_s=600.0)
    await eventually(lambda: server._ready[0].is_set(), 30)
    address = server._listening.getsockname()
    os.kill(os.getpid(), signal.SIGTERM)

    def is_refused() -> bool:
        with socket.socket() as connecting:
            return connecting.connect_ex(address) == errno.ECONNREFUSED

    await eventually(is_refused)
    assert server._frontends[0].process.returncode is None
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(ServeError):
        await asyncio.wait_for(running, 30)


async def test_a_second_signal_kills(supervise: Any, eventually: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_SAME_SIGNAL_S", 600.0)
    deaf = tmp_path / "deaf"
    engine = IGNORE_SIGTERM + f"open({str(deaf)!r}, 'x'); " + SLEEP
    server, running = supervise(engine=engine, frontend=IGNORE_SIGTERM + GET_READY, shutdown_timeout_s=600.0)
    await eventually(lambda: server._ready[0].is_set() and deaf.exists(), 30)
    os.kill(os.getpid(), signal.SIGTERM)
    await eventually(server._stop.is_set)
    os.kill(os.getpid(), signal.SIGTERM)  # as `timeout` and `tini -g` do: to a process, and then to its group
    await asyncio.sleep(0.05)
    assert not server._hurry.is_set()
    monkeypatch.setattr(supervisor, "_SAME_SIGNAL_S", -1.0)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(ServeError, match="told twice to stop"):
        await asyncio.wait_for(running, 30)
    assert [child.process.returncode for child in (server._frontends[0], server._engine)] == [-9, -9]


async def test_who_does_not_end_is_killed_when_the_time_is_up(
    supervise: Any, eventually: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert supervisor._FRONTENDS_GRACE_S < supervisor._GRACE_S < 3
    monkeypatch.setattr(supervisor, "_FRONTENDS_GRACE_S", 0.2)
    monkeypatch.setattr(supervisor, "_GRACE_S", 0.4)
    deaf = tmp_path / "deaf"
    engine = IGNORE_SIGTERM + f"open({str(deaf)!r}, 'x'); " + SLEEP
    server, running = supervise(engine=engine, frontend=IGNORE_SIGTERM + GET_READY, shutdown_timeout_s=0.0)
    await eventually(lambda: server._ready[0].is_set() and deaf.exists(), 30)
    started = asyncio.get_running_loop().time()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 30)
    assert 0.4 <= asyncio.get_running_loop().time() - started < 10
    assert [child.process.returncode for child in (server._frontends[0], server._engine)] == [-9, -9]


async def test_a_signal_during_the_start_is_heeded(supervise: Any, eventually: Any) -> None:
    server, running = supervise(frontend=SLEEP)
    await eventually(lambda: len(server.pids()) == 2, 30)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 30)
    assert [child.process.returncode for child in (server._frontends[0], server._engine)] == [-15, -15]


def test_frontends_wait_for_the_engine_and_know_how_long_requests_may_take() -> None:
    with supervisor._listen(options()) as listening:
        server = supervisor._Supervisor(
            options(start_timeout_s=90.5, shutdown_timeout_s=0.25, frontend_arguments=("--x=1",)), listening, "/nowhere"
        )
        command = server._frontend_command(7)
    assert {"--connect-timeout=90.5", "--shutdown-timeout=0.25", "--ready-fd=7", "--name=test", "--x=1"} < set(command)


async def test_what_command_lines_must_not_show_is_in_the_frontends_environment(
    supervise: Any, eventually: Any, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    frontend = f"import os\nwith open({str(seen)!r}, 'w') as file: file.write(os.environ['SECRET'])\n{GET_READY}"
    server, _ = supervise(frontend=frontend, frontend_environment={"SECRET": "a key"})
    await eventually(lambda: server._ready[0].is_set(), 30)
    assert seen.read_text() == "a key"
    assert b"SECRET" not in Path(f"/proc/{server._engine.pid}/environ").read_bytes()
