"""Knowing that a process is dead: from its pidfd, once, and from nothing else."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shmring.errors import PeerLostError
from shmring.processes.process import Process
from shmring.transport import liveness
from shmring.transport.liveness import ProcessId, ProcessWatch, open_peer_pidfd
from tests.tables import for_each
from tests.waiting import eventually, turns

pytestmark = pytest.mark.both_loops


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    """Each test leaves as many descriptors as there were."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def child(run_python: Callable[..., Process]) -> Process:
    """A process that lives until it is killed."""
    return run_python("-c", "import time; time.sleep(600)")


@pytest.mark.one_loop
async def test_a_watch_that_cannot_be_set_leaks_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(24, "Too many open files")

    loop = asyncio.get_running_loop()

    class Loop:
        add_reader = staticmethod(refuse)
        remove_reader = loop.remove_reader

    with pytest.raises(OSError, match="Too many"):
        ProcessWatch(Loop(), os.pidfd_open(os.getpid()), Deaths())


class Deaths:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


async def test_a_death_is_told_once_and_the_descriptor_closed(child: Process) -> None:
    deaths = Deaths()
    watch = ProcessWatch(asyncio.get_running_loop(), os.pidfd_open(child.pid), deaths)
    await asyncio.sleep(0)
    assert deaths.count == 0
    child.send(signal.SIGKILL)
    await eventually(lambda: deaths.count)
    child.wait()
    await turns()
    assert deaths.count == 1
    watch.close()


async def test_a_stopped_process_is_not_dead(child: Process) -> None:
    deaths = Deaths()
    watch = ProcessWatch(asyncio.get_running_loop(), os.pidfd_open(child.pid), deaths)
    child.send(signal.SIGSTOP)
    await turns()
    assert deaths.count == 0
    assert not watch.has_died()
    child.send(signal.SIGCONT)
    child.send(signal.SIGKILL)
    await eventually(lambda: deaths.count)
    assert watch.has_died()
    watch.close()


async def test_who_asks_is_told_of_a_death_before_the_loop_has_heard_of_it(child: Process) -> None:
    deaths = Deaths()
    watch = ProcessWatch(asyncio.get_running_loop(), os.pidfd_open(child.pid), deaths)
    child.send(signal.SIGKILL)
    child.wait()
    assert (watch.has_died(), deaths.count) == (True, 0)
    watch.close()


async def test_a_closed_watch_is_silent(child: Process) -> None:
    deaths = Deaths()
    watch = ProcessWatch(asyncio.get_running_loop(), os.pidfd_open(child.pid), deaths)
    watch.close()
    watch.close()
    child.send(signal.SIGKILL)
    child.wait()
    await turns()
    assert deaths.count == 0


async def test_a_process_that_was_dead_already_is_told_too(child: Process) -> None:
    pidfd = os.pidfd_open(child.pid)
    child.send(signal.SIGKILL)
    child.wait()
    deaths = Deaths()
    watch = ProcessWatch(asyncio.get_running_loop(), pidfd, deaths)
    await eventually(lambda: deaths.count)
    watch.close()


def pid_of(pidfd: int) -> int:
    with open(f"/proc/self/fdinfo/{pidfd}") as information:
        return int(next(line for line in information if line.startswith("Pid:")).split()[1])


@pytest.fixture(params=["this kernel", "a kernel before 6.5"])
def without_peer_pidfd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "this kernel":
        return False
    monkeypatch.setattr(liveness, "_SO_PEERPIDFD", 9999)
    return True


async def test_the_peers_own_process_is_watched(without_peer_pidfd: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pidfd = open_peer_pidfd(ours, os.getpid())
        assert pid_of(pidfd) == os.getpid()
        assert not os.get_inheritable(pidfd)
        os.close(pidfd)


def test_without_the_kernels_help_a_peer_that_hung_up_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_SO_PEERPIDFD", 9999)
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(PeerLostError, match="is gone"):
        open_peer_pidfd(ours, os.getpid())


def test_without_the_kernels_help_a_dead_pid_is_an_error(child: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_SO_PEERPIDFD", 9999)
    child.send(signal.SIGKILL)
    child.wait()
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(PeerLostError, match="is gone"):
        open_peer_pidfd(ours, child.pid)


def id_of(child: Process) -> ProcessId:
    """What the child says of itself, to whom tells others of it."""
    said = child.line()
    return ProcessId(*json.loads(said))


_SAYS_WHO_IT_IS = """
import json, time
from shmring.transport.liveness import ProcessId
print(json.dumps(ProcessId.own()), flush=True)
time.sleep(600)
"""


@pytest.mark.one_loop
def test_a_process_is_known_by_its_number_and_when_it_started(run_python: Callable[..., Process]) -> None:
    child = run_python("-c", _SAYS_WHO_IT_IS)
    child_id = id_of(child)
    pidfd = child_id.open()
    assert pid_of(pidfd) == child.pid
    os.close(pidfd)
    with pytest.raises(PeerLostError, match="is gone"):  # one that had this number before
        child_id._replace(started=child_id.started - 1).open()
    child.send(signal.SIGKILL)
    child.wait()
    with pytest.raises(PeerLostError, match="is gone"):
        child_id.open()
    child.close()


@pytest.mark.one_loop
def test_who_was_there_before_this_process_is_no_later_process(
    run_python: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ProcessId.elder(os.getpid()) == ProcessId.own()
    child = run_python("-c", _SAYS_WHO_IT_IS)
    child_id = id_of(child)
    own = ProcessId.own()._replace(started=child_id.started - 1)  # or both may have started in one tick
    monkeypatch.setattr(ProcessId, "own", lambda: own)
    with pytest.raises(PeerLostError, match="is gone"):
        ProcessId.elder(child.pid)
    child.send(signal.SIGKILL)
    child.wait()
    with pytest.raises(PeerLostError, match="is gone"):
        ProcessId.elder(child.pid)


@pytest.mark.one_loop
@for_each(
    "number, advice",
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "fs.file-max"),
        (errno.EPERM, "seccomp"),
        (errno.ENOSYS, "seccomp"),
        (errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_only_a_process_that_is_not_there_is_gone(number: int, advice: str) -> None:
    """Everything else says something about this process, or about the machine."""
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.MonkeyPatch.context() as patch:

        def refuse(pid: int) -> int:
            raise OSError(number, os.strerror(number))

        patch.setattr(liveness, "_SO_PEERPIDFD", 9999)
        patch.setattr(os, "pidfd_open", refuse)
        with pytest.raises(OSError, match=rf"process {os.getpid()} can't be watched \(pidfd_open\): .*{advice}") as caught:
            open_peer_pidfd(ours, os.getpid())
    assert caught.value.errno == number
    assert not isinstance(caught.value, PeerLostError)


def test_a_process_without_descriptors_says_so_and_nothing_about_its_peer() -> None:
    """With this kernel's own call: it has a pidfd to give, and finds no number for it."""
    ours, theirs = socket.socketpair()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    os.close(probe)
    with ours, theirs:
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
        try:
            with pytest.raises(OSError, match="raise the limit of this process") as caught:
                open_peer_pidfd(ours, os.getpid())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.errno == errno.EMFILE


def test_a_process_that_cannot_be_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_SO_PEERPIDFD", 9999)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(PeerLostError, match="namespace"):
        open_peer_pidfd(ours, 0)


@pytest.mark.one_loop
@pytest.mark.parametrize(
    "program", ["", "import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0)"], ids=["by a signal", "by a debugger"]
)
async def test_a_process_that_was_stopped_is_told_from_one_that_runs(program: str, run_python: Any) -> None:
    """One that has itself traced (PTRACE_TRACEME) stops for its tracer, which is this process."""
    child: Process = run_python("-c", f"import os, signal; {program}\nos.kill(os.getpid(), signal.SIGSTOP)")
    watch = ProcessWatch(asyncio.get_running_loop(), os.pidfd_open(child.pid), Deaths())
    await eventually(watch.is_stopped)
    child.send(signal.SIGKILL)
    while not os.WIFSIGNALED(os.waitpid(child.pid, 0)[1]):
        pass  # the tracer is told of the stop as well
    assert not watch.is_stopped()
    watch.close()
