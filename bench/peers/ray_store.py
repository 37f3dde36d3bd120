"""Ray's object store: ``ray.put`` of an array in one process, ``ray.get`` in another, which reads it in place.

How its users use it: a cluster of this one machine, to which the consumer and the producers are connected as drivers. A
producer puts the tensor's memory as a numpy array (a torch tensor would be pickled), which copies it into the store once, and
passes the reference on by a call of a named asynchronous actor, a mailbox, since references must not travel outside of Ray,
where it does not count them. The consumer awaits the mailbox and then, on a thread, so that its loop stays free, gets all
arrays that it was told of at once; they are views of the store.

Done well, to be worth comparing with: the mailbox is one hop, hands over all that is there at once, and calls of it are not
awaited by the producers (so they may run in another order, and the consumer sorts them); the store is of the size that Ray
gives it, nothing is spilled or evicted; there is no dashboard and no usage report. Starting a cluster takes seconds, so there
is one for all cells of a group of processes; idle, it took about 2 % of a core when this was written. Its processes (raylet,
GCS, the mailbox's worker) do much of the work, and their CPU time is not in the producers' or the consumer's: this peer is more
expensive than it looks there.

The cluster listens on the loopback interface only, with a token made for the run, and ends with the consumer; what outlives
one that was killed is ended by its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from bench.messages import Cell, Header, Source
from bench.peers.in_flight import Intake, Send, WindowedPeer
from bench.peers.peer import allow_read_only_tensors
from shmring.memory.slab import SHM_DIRECTORY

__all__ = ["RayStore"]

_ADDRESS = "127.0.0.1"
_MAILBOX = "mailbox"
_STORE_SHARE = 0.3  # of the shared memory: as much of a machine as Ray takes without being told
_STORE_WINDOWS = 2  # that must fit: objects live on for a while after their last reader, references are counted by messages
_END_LIMIT_S = 10.0  # for killed processes to be gone, on a machine that does much else
_END_POLL_S = 0.02
_LEAVE_LIMIT_S = 3.0  # for the producers to leave the cluster; then they are on their own
_OPTIONS: dict[str, Any] = {"namespace": "bench", "log_to_driver": False, "logging_level": logging.ERROR}
_MAX_MAILBOX_CALLS = 1000  # at the same time: windows of all producers, and the consumer's wait


class _Cluster(NamedTuple):
    """What its processes share."""

    directory: str  # Ray's; its sockets are in it, so its path is short
    token: str
    store_nbytes: int
    producers: int
    departures: tuple[Connection, Connection]  # a byte from each producer that has left the cluster


class RayStore(WindowedPeer):
    name = "ray"
    title = "Ray object store"
    requires = "ray"

    def limits(self, cell: Cell) -> str | None:
        needed, size = _STORE_WINDOWS * cell.producers * cell.window * cell.nbytes, _store_nbytes()
        return None if needed <= size else f"it needs {needed / 2**30:.1f} GiB in a store of {size / 2**30:.1f} GiB"

    def create_own(self, context: SpawnContext, producers: int) -> _Cluster:
        departures = context.Pipe(duplex=False)
        return _Cluster(tempfile.mkdtemp(prefix="bench-ray-"), secrets.token_hex(32), _store_nbytes(), producers, departures)

    def close_own(self, own: _Cluster) -> None:
        _end_survivors(own.directory)
        shutil.rmtree(own.directory)
        for end in own.departures:
            end.close()

    @contextlib.asynccontextmanager
    async def sending(self, cell: Cell, own: _Cluster, source: Source) -> AsyncIterator[Send]:
        ray = _join(own)
        mailbox = ray.get_actor(_MAILBOX)

        def send() -> None:
            header = source.stamp()
            mailbox.put.remote(tuple(header), [ray.put(source.array)])  # in a list a reference stays one

        yield send

    async def receive(self, cell: Cell, own: _Cluster, intake: Intake, listening: Callable[[], None]) -> None:
        ray = _start(own)
        mailbox = ray.get_actor(_MAILBOX)
        allow_read_only_tensors()
        listening()
        order = _Order(cell.producers)
        last = False
        while not last:
            messages = list(order.sort(await mailbox.take.remote()))
            arrays = list(await asyncio.to_thread(ray.get, [reference for _, (reference,) in messages]))
            while messages:
                header, _ = messages.pop(0)
                last = intake.take(header, torch.from_numpy(arrays.pop(0)).view(cell.torch_dtype))
                intake.acknowledge(header)  # the reference and the array are gone, and the store's memory with them


def _start(cluster: _Cluster) -> Any:
    """Starts the cluster, once in the life of this process, with which it ends; returns Ray."""
    ray = _import_ray(cluster)
    if not ray.is_initialized():
        sizes = {"num_cpus": 1, "object_store_memory": cluster.store_nbytes}
        context = ray.init(include_dashboard=False, _temp_dir=cluster.directory, _node_ip_address=_ADDRESS, **sizes, **_OPTIONS)
        Finalize(None, _stop, args=(ray, cluster), exitpriority=0)
        actor = ray.remote(_mailbox_class())
        mailbox = actor.options(name=_MAILBOX, lifetime="detached", num_cpus=0, max_concurrency=_MAX_MAILBOX_CALLS).remote()
        ray.get(mailbox.ready.remote())
        _address_path(cluster).write_text(context.address_info["gcs_address"])
    return ray


def _join(cluster: _Cluster) -> Any:
    """Connects to the cluster, once in the life of this process; returns Ray."""
    ray = _import_ray(cluster)
    if not ray.is_initialized():
        ray.init(address=_address_path(cluster).read_text(), **_OPTIONS)
        Finalize(None, _leave, args=(ray, cluster), exitpriority=0)
    return ray


def _leave(ray: Any, cluster: _Cluster) -> None:
    ray.shutdown()
    os.write(cluster.departures[1].fileno(), b"\0")


def _stop(ray: Any, cluster: _Cluster) -> None:
    """Ends the cluster after the producers have left it: a driver does not survive its cluster."""
    deadline = time.monotonic() + _LEAVE_LIMIT_S
    for _ in range(cluster.producers):
        if cluster.departures[0].poll(max(0.0, deadline - time.monotonic())):
            os.read(cluster.departures[0].fileno(), 1)
    ray.shutdown()


class _Order:
    """Puts messages back into the order in which each producer has sent them.

    Args:
        producers: how many there are.
    """

    def __init__(self, producers: int) -> None:
        self._due = [0] * producers
        self._early: dict[tuple[int, int], tuple[Header, Any]] = {}  # by producer and sequence number

    def sort(self, messages: list[tuple[Any, Any]]) -> Iterator[tuple[Header, Any]]:
        """Yields those of the messages that have come, now and before, whose turn it is."""
        for fields, content in messages:
            header = Header(*fields)
            self._early[header.producer, header.sequence] = header, content
        for producer in range(len(self._due)):
            while (message := self._early.pop((producer, self._due[producer]), None)) is not None:
                self._due[producer] += 1
                yield message


def _mailbox_class() -> type:
    """The actor's class. A local one travels to the actor's process as code; a module's would have to be importable there."""

    class Mailbox:
        def __init__(self) -> None:
            self._messages: list[tuple[Any, Any]] = []
            self._arrival = asyncio.Event()

        async def ready(self) -> None:
            pass

        async def put(self, header: Any, reference: Any) -> None:
            self._messages.append((header, reference))
            self._arrival.set()

        async def take(self) -> list[tuple[Any, Any]]:
            await self._arrival.wait()
            self._arrival.clear()
            messages, self._messages = self._messages, []
            return messages

    return Mailbox


def _end_survivors(directory: str) -> None:
    """Ends what is left of a cluster whose driver was killed: the raylet's agents take a minute to notice.

    Raises:
        RuntimeError: some can't be ended.
    """
    deadline = time.monotonic() + _END_LIMIT_S
    while survivors := [process for process in psutil.process_iter() if _writes_in(process, directory)]:
        if time.monotonic() > deadline:
            pids = [process.pid for process in survivors]
            raise RuntimeError(f"processes {pids} of the Ray cluster in {directory} can't be ended: end them by hand")
        for process in survivors:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_END_POLL_S)


def _writes_in(process: psutil.Process, directory: str) -> bool:
    """Returns whether a process has a file of a directory open, as every one of a cluster has its log."""
    with contextlib.suppress(psutil.Error):  # it has ended, or is somebody else's
        return any(file.path.startswith(f"{directory}/") for file in process.open_files())
    return False


def _import_ray(cluster: _Cluster) -> Any:
    """Ray is configured by its environment, which it reads when it is imported, and so do the processes that it starts."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = cluster.token  # else it would write one into the user's home
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    return importlib.import_module("ray")


def _store_nbytes() -> int:
    return int(_STORE_SHARE * min(shutil.disk_usage(SHM_DIRECTORY).total, psutil.virtual_memory().total))


def _address_path(cluster: _Cluster) -> Path:
    return Path(cluster.directory, "address")
