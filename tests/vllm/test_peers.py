"""Who was stopped, and who has died. Time is an argument."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Callable

import pytest

from shmring.integrations.vllm.peers import PeerError, Peers
from shmring.processes.process import Process
from shmring.transport.liveness import ProcessId
from tests.waiting import until


@pytest.fixture
def child(run_python: Callable[..., Process]) -> Process:
    return run_python("-c", "input()", stdin=subprocess.PIPE)


@pytest.fixture
def peers(child: Process) -> Peers:
    peers = Peers()
    peers.add("worker 0", os.getpid())
    peers.add("worker 1", child.pid)
    return peers


def stop(child: Process) -> None:
    child.send(signal.SIGSTOP)
    until(lambda: ProcessId.of(child.pid).state() == "T")


def test_whoever_runs_is_waited_for(peers: Peers) -> None:
    for now_s in range(10):
        peers.look(now_s)


def test_whoever_stays_stopped_is_not(peers: Peers, child: Process) -> None:
    stop(child)
    peers.look(0)
    with pytest.raises(PeerError, match=rf"worker 1 \(pid {child.pid}\) was stopped"):
        peers.look(1)


def test_whoever_goes_on_and_is_stopped_anew_is_stopped_since_then(peers: Peers, child: Process) -> None:
    stop(child)
    peers.look(0)
    child.send(signal.SIGCONT)
    until(lambda: ProcessId.of(child.pid).state() != "T")
    peers.look(1)
    stop(child)
    peers.look(2)
    with pytest.raises(PeerError, match="was stopped"):
        peers.look(3)


def test_a_server_that_was_stopped_as_a_whole_goes_on(peers: Peers, child: Process) -> None:
    """Its engine core wakes a moment before its workers: after a long time, in which it did not look."""
    stop(child)
    peers.look(0)
    peers.look(1000)
    child.send(signal.SIGCONT)
    until(lambda: ProcessId.of(child.pid).state() != "T")
    peers.look(1001)


def test_whoever_has_died_is_found_before_it_is_reaped(peers: Peers, child: Process) -> None:
    child.send(signal.SIGKILL)
    until(lambda: ProcessId.of(child.pid).state() == "Z")
    with pytest.raises(PeerError, match=r"worker 1 .* has died"):
        peers.look(0)
    child.wait()
    with pytest.raises(PeerError, match="has died"):
        peers.look(1)


def test_a_later_process_of_the_number_is_another_one(peers: Peers, child: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ProcessId.of(child.pid)
    monkeypatch.setattr(ProcessId, "of", lambda pid: before._replace(started=before.started - 1))
    peers.add("worker 1", child.pid)  # as the one was that has had its number before
    with pytest.raises(PeerError, match=rf"worker 1 \(pid {child.pid}\) has died"):
        peers.look(0)


def test_whoever_is_gone_before_the_first_look_has_died(child: Process) -> None:
    child.send(signal.SIGKILL)
    child.wait()
    with pytest.raises(PeerError, match=rf"worker 1 \(pid {child.pid}\) has died"):
        Peers().add("worker 1", child.pid)


def test_a_process_without_descriptors_takes_nobody_for_dead(peers: Peers) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        peers.look(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
