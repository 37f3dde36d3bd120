"""Who was stopped, and who has died. Time is an argument."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shmring.integrations.vllm.peers import PeerError, Peers, state_of


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def peers(child: subprocess.Popen[bytes]) -> Peers:
    peers = Peers()
    peers.add("worker 0", os.getpid())
    peers.add("worker 1", child.pid)
    return peers


def stop(child: subprocess.Popen[bytes], until: Callable[..., Any]) -> None:
    child.send_signal(signal.SIGSTOP)
    until(lambda: state_of(child.pid) == "T")


def test_whoever_runs_is_waited_for(peers: Peers) -> None:
    for now_s in range(10):
        peers.look(now_s)


def test_whoever_stays_stopped_is_not(peers: Peers, child: subprocess.Popen[bytes], until: Callable[..., Any]) -> None:
    stop(child, until)
    peers.look(0)
    with pytest.raises(PeerError, match=rf"worker 1 \(pid {child.pid}\) was stopped"):
        peers.look(1)


def test_a_server_that_was_stopped_as_a_whole_goes_on(
    peers: Peers, child: subprocess.Popen[bytes], until: Callable[..., Any]
) -> None:
    """Its engine core wakes a moment before its workers: after a long time, in which it did not look."""
    stop(child, until)
    peers.look(0)
    peers.look(1000)
    child.send_signal(signal.SIGCONT)
    until(lambda: state_of(child.pid) != "T")
    peers.look(1001)


def test_whoever_has_died_is_found_before_it_is_reaped(
    peers: Peers, child: subprocess.Popen[bytes], until: Callable[..., Any]
) -> None:
    child.kill()
    until(lambda: state_of(child.pid) == "Z")
    with pytest.raises(PeerError, match=r"worker 1 .* has died"):
        peers.look(0)
    child.wait()
    with pytest.raises(PeerError, match="has died"):
        peers.look(1)
