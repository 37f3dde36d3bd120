"""Tests of the integration with Ray.

A cluster is several raylets on this machine, each with an address of its own (127.0.0.2 and on) and a small object store. One
cluster serves all tests of a file that kill nothing of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until

DIRECTORY = Path("/tmp", f"r-{os.getpid()}")  # short: sockets are made below it

if importlib.util.find_spec("ray") is not None:
    (DIRECTORY / "ray").mkdir(parents=True, mode=0o700)
    os.environ.update(  # Ray reads them when it is imported
        RAY_TMPDIR=str(DIRECTORY),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_DEDUP_LOGS="0",
        RAY_memory_monitor_refresh_ms="0",  # it would kill workers when other programs have filled the machine
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),  # without it, any user of the machine may run code in the cluster
        PYTHONPATH=str(Path(__file__).resolve().parents[2]),
    )

STORE_NBYTES = 150 << 20


class Nodes:
    """A cluster of two nodes or more; this process is a driver on node 0.

    Args:
        count: of its nodes.
        first_address: the last number of node 0's; that of node 1 is the next one.
    """

    def __init__(self, count: int, first_address: int = 2) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._ray = ray
        self._first_address = first_address
        self.cluster = Cluster(initialize_head=True, head_node_args=self._arguments(0))
        self.nodes = [self.cluster.head_node]
        try:
            for _ in range(1, count):
                self.add()
            self.cluster.wait_for_nodes()
            ray.init(address=self.cluster.address, namespace="test", log_to_driver=False, logging_level="ERROR")
        except BaseException:
            self.close()
            raise

    def _arguments(self, number: int, **resources: float) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "num_cpus": 4,
            "object_store_memory": STORE_NBYTES,
            "resources": {f"node{number}": 1000, **resources},
            # Not 127.0.0.1, which a driver rewrites to the machine's own address.
            "node_ip_address": f"127.0.0.{self._first_address + number}",
        }
        return arguments if number else arguments | {"include_dashboard": False}

    def add(self, **resources: float) -> int:
        """Adds a node, which has these resources and ``node<number>``; returns its number."""
        number = len(self.nodes)
        self.nodes.append(self.cluster.add_node(**self._arguments(number, **resources)))
        return number

    def raylet(self, number: int) -> int:
        """The process of a node's raylet."""
        pid: int = self.nodes[number].all_processes["raylet"][0].process.pid
        return pid

    def processes(self, number: int) -> set[int]:
        """All processes of a node: what was started for it, and their children."""
        import psutil

        started = [psutil.Process(each.process.pid) for of in self.nodes[number].all_processes.values() for each in of]
        return {process.pid for root in started for process in (root, *root.children(recursive=True))}

    def on(self, number: int) -> dict[str, Any]:
        """Options for an actor that is to run on a node."""
        return {"resources": {f"node{number}": 1}, "num_cpus": 0}

    def close(self) -> None:
        self._ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Two nodes, for the tests of a file."""
    made = Nodes(2)
    yield made
    made.close()


def is_running(pid: int) -> bool:
    """Whether a process is there, and not only waited for. Its first thread can be gone while others still hold its sockets."""
    return any(_state(thread) not in "ZX" for thread in Path("/proc", str(pid), "task").glob("*/stat"))


def _state(thread: Path) -> str:
    try:
        return thread.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


@pytest.fixture(autouse=True, scope="session")
def nothing_of_engines_is_left() -> Iterator[None]:
    """No engine leaves a segment, a socket or a process."""
    sockets = Path(f"/tmp/shmring-{os.getuid()}")
    yield
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    until(lambda: not [path for path in Path("/dev/shm").iterdir() if path.name.startswith("shmring-")])
    left = [path for path in sockets.glob("ray-*.sock") if not _is_dead(path)] if sockets.exists() else []
    assert left == []


def _is_dead(path: Path) -> bool:
    """Whether nobody listens at a socket: what SIGKILL leaves, the next engine sweeps."""
    import socket

    with socket.socket(socket.AF_UNIX) as trying:
        try:
            trying.connect(str(path))
        except OSError:
            return True
    return False


def kill(*pids: int) -> float:
    """Kills processes; returns when."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended with another one
            os.kill(pid, signal.SIGKILL)
    return time.monotonic()
