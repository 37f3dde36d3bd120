"""The name of an engine, in a directory and in the kernel: whose it is, and what somebody removes."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shmring.core.messages import PROTOCOL_VERSION, Hello
from shmring.errors import EngineDeadError, LocalProtocolError
from shmring.processes.process import Process
from shmring.transport.endpoint import attach_engine
from shmring.transport.listener import Listener, _kernel_name, hold_start, make_directory, socket_path, sweep_names
from tests.forked import in_child
from tests.tables import for_each

pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning")]

ME = frozenset({os.getuid()})
HELLO = Hello(PROTOCOL_VERSION, 65536, "tester")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def path(socket_dir: Path) -> Path:
    return socket_path("unit", str(socket_dir))


@pytest.fixture
def listener(path: Path) -> Iterator[Listener]:
    listener = Listener.create(path, others_may_connect=False)
    yield listener
    listener.close()


# -- the path -----------------------------------------------------------------------------------------------------------


def test_the_socket_is_where_the_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert socket_path("vision", None) == Path("/run/user/7/shmring/vision.sock")
    assert socket_path("vision", "/srv/rings") == Path("/srv/rings/vision.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert socket_path("vision", None) == Path(f"/tmp/shmring-{os.getuid()}/vision.sock")


@for_each("name", ["", "../up", "a/b", ".hidden", "a b", "x" * 65, "a\n"])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="can't name an engine"):
        socket_path(name, "/srv")


def test_a_path_that_no_socket_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter socket_dir"):
        socket_path("unit", "/tmp/" + "x" * 100)


# -- the directory and the socket ---------------------------------------------------------------------------------------


def test_a_listener_makes_its_directory_and_socket_private(path: Path) -> None:
    nested = path.parent / "made" / path.name
    listener = Listener.create(nested, others_may_connect=False)
    assert stat.S_IMODE(nested.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(nested.stat().st_mode) == 0o600
    listener.close()
    assert os.listdir(nested.parent) == []


def test_others_can_reach_it_only_if_they_may(path: Path) -> None:
    nested = path.parent / "made" / path.name
    listener = Listener.create(nested, others_may_connect=True)
    assert stat.S_IMODE(nested.parent.stat().st_mode) == 0o711
    assert stat.S_IMODE(nested.stat().st_mode) == 0o666
    listener.close()


@pytest.mark.one_loop
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
async def test_a_directory_that_others_can_write_to_is_refused_by_both_ends(path: Path, mode: int) -> None:
    path.parent.chmod(mode)
    before = descriptors()
    with pytest.raises(PermissionError, match="chmod go-w"):
        Listener.create(path, others_may_connect=False)
    with pytest.raises(PermissionError, match="chmod go-w"):
        await attach_engine(path, HELLO, ME)
    assert os.listdir(path.parent) == []
    assert descriptors() == before


@pytest.mark.one_loop
async def test_a_directory_that_is_a_link_is_refused_by_both_ends(path: Path) -> None:
    (path.parent / "real").mkdir(mode=0o700)
    link = path.parent / "link"
    link.symlink_to("real")
    with pytest.raises(PermissionError, match="not a directory"):
        Listener.create(link / path.name, others_may_connect=False)
    with pytest.raises(PermissionError, match="not a directory"):
        await attach_engine(link / path.name, HELLO, ME)


@pytest.mark.one_loop
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
async def test_a_directory_of_another_user_is_refused_by_both_ends(path: Path) -> None:
    os.chown(path.parent, 12345, -1)
    with pytest.raises(PermissionError, match="belongs to uid 12345"):
        Listener.create(path, others_may_connect=False)
    with pytest.raises(PermissionError, match="belongs to uid 12345"):
        await attach_engine(path, HELLO, ME)


@pytest.mark.one_loop
@pytest.mark.parametrize("kind", ["symlink", "file", "directory"])
async def test_what_is_in_the_place_of_the_socket_is_refused_and_not_touched(path: Path, kind: str) -> None:
    if kind == "symlink":
        path.symlink_to("/etc/passwd")
    elif kind == "file":
        path.write_text("precious")
    else:
        path.mkdir()
    before = descriptors()
    with pytest.raises(PermissionError, match="in the place of the socket"):
        Listener.create(path, others_may_connect=False)
    with pytest.raises(PermissionError, match="in the place of the socket"):
        await attach_engine(path, HELLO, ME)
    assert os.path.lexists(path)
    assert descriptors() == before
    (path.rmdir if kind == "directory" else path.unlink)()
    Listener.create(path, others_may_connect=False).close()


def test_a_link_in_the_place_of_the_lock_is_refused(path: Path) -> None:
    victim = path.parent / "victim"
    victim.write_text("precious")
    path.with_suffix(".lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        Listener.create(path, others_may_connect=False)
    assert victim.read_text() == "precious"


# -- one engine a name --------------------------------------------------------------------------------------------------


def test_a_second_engine_of_a_name_is_refused_and_harms_nothing(listener: Listener) -> None:
    before = descriptors()
    with pytest.raises(LocalProtocolError, match=rf"'unit' is running already \(pid {os.getpid()}, "):
        Listener.create(listener.path, others_may_connect=False)
    assert descriptors() == before
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.fspath(listener.path))


def test_a_name_is_free_again_when_its_listener_is_closed(listener: Listener) -> None:
    listener.close()
    listener.close()
    assert os.listdir(listener.path.parent) == []
    again = Listener.create(listener.path, others_may_connect=False)
    again.close()


def test_closing_late_does_not_take_the_next_engines_files(path: Path) -> None:
    first = Listener.create(path, others_may_connect=False)
    first.close()
    second = Listener.create(path, others_may_connect=False)
    first.close()
    assert path.exists()
    second.close()


def test_engines_of_different_names_share_a_directory(listener: Listener) -> None:
    other = Listener.create(listener.path.with_name("other.sock"), others_may_connect=False)
    other.close()
    assert listener.path.exists()
    assert listener.path.with_suffix(".lock").exists()


def test_a_lock_that_vanishes_while_it_is_taken_is_taken_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner removes the file between our open and our lock: a lock on a removed file is worth nothing."""
    lock = path.with_suffix(".lock")
    real = fcntl.flock
    removed: list[int] = []

    def flock(fd: int, operation: int) -> None:
        if not removed:
            removed.append(fd)
            lock.unlink()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    before = descriptors()
    listener = Listener.create(path, others_may_connect=False)
    assert lock.exists()
    with pytest.raises(LocalProtocolError):
        Listener.create(path, others_may_connect=False)
    listener.close()
    assert descriptors() == before


PROGRAM = """
    import os, sys, time
    from pathlib import Path
    from shmring.transport.listener import Listener
    listener = Listener.create(Path(sys.argv[1]), others_may_connect=False)
"""


@pytest.fixture
def run_program(path: Path, run_python: Callable[..., Process]) -> Callable[[str], tuple[Process, str]]:
    """Starts a process that has the name, and then does as told; returns it, and what it has said first."""

    def start(rest: str) -> tuple[Process, str]:
        process = run_python("-c", textwrap.dedent(PROGRAM) + textwrap.dedent(rest), path)
        return process, process.line()

    return start


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_killed_engine_leaves_its_files_and_the_next_takes_them_over(path: Path, run_program: Any) -> None:
    process, _ = run_program("print('ready', flush=True); time.sleep(600)")
    with pytest.raises(LocalProtocolError, match=f"pid {process.pid}"):
        Listener.create(path, others_may_connect=False)
    process.kill()
    assert path.exists()
    assert path.with_suffix(".lock").exists()
    with pytest.raises(EngineDeadError):
        await attach_engine(path, HELLO, ME)
    listener = Listener.create(path, others_may_connect=False)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.fspath(path))
    listener.close()


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_forked_child_does_not_keep_the_name(path: Path, run_program: Any) -> None:
    """The child outlives its parent, which is killed; the next engine must get the name, and the child not its calls."""
    process, said = run_program(
        """
        if os.fork() == 0:
            print(os.getpid(), flush=True)  # it is the child that says so: by then it has closed what is not its own
            time.sleep(600)
            os._exit(0)
        time.sleep(600)
        """
    )
    child = int(said)
    try:
        process.kill()
        os.kill(child, 0)
        with pytest.raises(EngineDeadError):
            await attach_engine(path, HELLO, ME)
        Listener.create(path, others_may_connect=False).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_what_a_forked_child_closes_stays_open_here(socket_dir: Path, listener: Listener) -> None:
    closed = [Listener.create(socket_dir / f"closed{number}.sock", others_may_connect=False) for number in range(5)]
    for other in closed:  # still referenced, but closed: the child must not stumble over them
        other.close()

    def as_child() -> None:
        listener.close()
        assert listener.socket.fileno() == -1

    in_child(as_child)
    assert listener.path.exists()
    with pytest.raises(LocalProtocolError):
        Listener.create(listener.path, others_may_connect=False)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.fspath(listener.path))


def test_a_forked_child_does_not_keep_a_start(path: Path) -> None:
    held = hold_start(path)
    assert held is not None
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.write(writes, b"h")  # by now it has closed what is not its own
        signal.pause()
    try:
        os.read(reads, 1)
        assert hold_start(path) is None
        held.close()
        again = hold_start(path)
        assert again is not None
        again.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reads)
        os.close(writes)


def test_an_address_at_which_nobody_listens_keeps_no_engine_from_starting(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(_kernel_name(path))
        Listener.create(path, others_may_connect=False).close()
    assert "a process that does not listen there has taken the address" in caplog.text
    assert "another user" not in caplog.text


# -- a socket that somebody removes --------------------------------------------------------------------------------------


def can_connect(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(os.fspath(path)) == 0


def remove_socket(path: Path) -> None:
    path.unlink()


def remove_lock(path: Path) -> None:
    path.with_suffix(".lock").unlink()


def remove_directory(path: Path) -> None:
    shutil.rmtree(path.parent)


def move_directory(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


def replace_socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(os.fspath(path))


def replace_directory(path: Path) -> None:
    move_directory(path)
    path.parent.mkdir(mode=0o700)


@for_each(
    "remove, is_bound_again",
    [
        (remove_socket, True),
        (remove_lock, False),
        (remove_directory, True),
        (move_directory, True),
        (replace_socket, True),
        (replace_directory, True),
    ],
)
def test_what_somebody_removes_is_there_again_and_the_name_is_nobody_elses(
    remove: Callable[[Path], None], is_bound_again: bool
) -> None:
    with tempfile.TemporaryDirectory(prefix="shmr-") as place:
        path = Path(place, "run", "unit.sock")
        listener = Listener.create(path, others_may_connect=False)
        before = descriptors()
        assert listener.keep() is None
        remove(path)
        with pytest.raises(LocalProtocolError, match=rf"'unit' is running already \(pid {os.getpid()}, "):
            Listener.create(path, others_may_connect=False)
        missing = listener.keep()
        assert missing is not None
        assert missing.path == (path if is_bound_again else path.with_suffix(".lock"))
        assert (missing.before is not None) == is_bound_again
        if missing.before is not None:
            missing.before.close()
        assert listener.keep() is None
        assert can_connect(path)
        assert path.with_suffix(".lock").read_bytes().startswith(b"%d\n" % os.getpid())
        with pytest.raises(LocalProtocolError):
            Listener.create(path, others_may_connect=False)
        assert descriptors() == before
        listener.close()
        assert os.listdir(path.parent) == []
        Listener.create(path, others_may_connect=False).close()


def test_a_name_that_another_engine_has_taken_meanwhile_stays_its_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another container, say, that shares the directory: another mount namespace is another address in the kernel."""
    listener = Listener.create(path, others_may_connect=False)
    remove_socket(path)
    remove_lock(path)
    with monkeypatch.context() as patch:
        patch.setattr("shmring.transport.listener._kernel_name", lambda path: f"\0shmring-test-{os.getpid()}")
        other = Listener.create(path, others_may_connect=False)
    with pytest.raises(LocalProtocolError, match="running already"):
        listener.keep()
    listener.close()
    assert other.keep() is None
    assert can_connect(path)
    other.close()


def test_engines_in_two_directories_have_one_name_each(path: Path) -> None:
    first = Listener.create(path.parent / "a" / path.name, others_may_connect=False)
    second = Listener.create(path.parent / "b" / path.name, others_may_connect=False)
    assert can_connect(first.path)
    assert can_connect(second.path)
    first.close()
    second.close()


def test_whoever_asks_often_who_has_a_name_is_told_each_time(listener: Listener) -> None:
    """Each leaves a connection at the kernel's address, which the engine clears away when it looks."""
    for _ in range(3):
        for _ in range(50):
            with pytest.raises(LocalProtocolError, match=f"pid {os.getpid()}"):
                Listener.create(listener.path, others_may_connect=False)
        assert listener.keep() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_who_takes_the_address_keeps_no_engine_from_starting(
    path: Path, run_python: Callable[..., Process], caplog: pytest.LogCaptureFixture
) -> None:
    from shmring.transport import listener as listening

    squatting = run_python(
        "-c",
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.bind('\\0' + sys.argv[1])\n"
        "s.listen(); print('listens', flush=True); sys.stdin.read()",
        listening._kernel_name(path)[1:],
        stdin=subprocess.PIPE,
    )
    assert squatting.line() == "listens"
    listener = Listener.create(path, others_may_connect=False)
    assert "another user has taken the address" in caplog.text
    assert listener.keep() is None
    with pytest.raises(LocalProtocolError, match="running already"):
        Listener.create(path, others_may_connect=False)
    listener.close()


# -- what killed engines leave ------------------------------------------------------------------------------------------


def test_the_files_of_engines_that_were_killed_go_when_another_starts(path: Path, run_program: Any) -> None:
    process, _ = run_program("print('ready', flush=True); time.sleep(600)")
    with_it = Listener.create(path.with_name("other.sock"), others_may_connect=False)
    assert path.exists(), "a living engine's files are not touched"
    process.kill()
    assert sweep_names(path.parent, remove=False) == ["unit"]
    assert path.exists()
    again = Listener.create(path.with_name("third.sock"), others_may_connect=False)
    assert sorted(os.listdir(path.parent)) == ["other.lock", "other.sock", "third.lock", "third.sock"]
    assert sweep_names(path.parent) == []
    with_it.close()
    again.close()


def test_a_sweep_leaves_what_is_not_ours(path: Path) -> None:
    directory = path.parent
    (directory / "foreign.lock").write_text("4711\n")  # as other programs write them, and lock them in other ways
    (directory / "marked.lock").write_text("4711\nanother program\n")
    (directory / "empty.lock").touch()
    (directory / "directory.lock").mkdir()
    (directory / "link.lock").symlink_to("foreign.lock")
    (directory / "file.lock").write_text("4711\nshmring\n")
    (directory / "file.sock").write_text("no socket")
    assert sweep_names(directory) == ["file"]
    left = ["directory.lock", "empty.lock", "file.sock", "foreign.lock", "link.lock", "marked.lock"]
    assert sorted(os.listdir(directory)) == left


async def test_a_name_that_a_sweep_is_looking_at_is_free(path: Path) -> None:
    """It has the lock for a moment, which is no living engine's."""
    lock = path.with_suffix(".lock")
    lock.write_text("4711\nshmring\n")
    with lock.open() as swept:
        fcntl.flock(swept, fcntl.LOCK_EX)
        taking = asyncio.get_running_loop().run_in_executor(None, lambda: Listener.create(path, others_may_connect=False))
        await asyncio.sleep(0)
        lock.unlink()
        fcntl.flock(swept, fcntl.LOCK_UN)
    (await taking).close()


@for_each("name", ["a file", "a file/below", "link"])
def test_what_is_no_directory_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "a file").touch(exist_ok=True)
    if not (tmp_path / "link").is_symlink():
        (tmp_path / "link").symlink_to(tmp_path)
    directory = tmp_path / name
    with pytest.raises(PermissionError) as caught:
        make_directory(directory)
    assert str(directory) in str(caught.value)
    assert "is not a directory" in str(caught.value) or "can't be made: Not a directory" in str(caught.value)
