"""The processes of peers: of each one that receives, and those that send to it; see :mod:`bench.children` for their life.

Of a transport of streams they are a consumer and its producers, of one of requests an engine and its clients. Their parent
has the receiver listen, and then the senders send in all phases. A consumer ends by itself after the last message, an engine
when it is told that all clients have gone.

Those of all peers that are compared live at the same time (:class:`Groups`), and are measured in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing import get_context
from typing import Any, Self

import numpy as np
import psutil
from numpy.typing import NDArray

from bench.children import BenchError, Child, Children, Parent
from bench.messages import Case, Cell, Measurement, Sink, Source
from bench.meter import Cost, Meter
from bench.peers import Peer, RequestPeer
from bench.plan import Runs, Timing
from bench.questions import Client, Desk
from bench.results import Status

_PROCESS_NBYTES = 160 << 20  # what a process that has imported torch keeps for itself
_LIMIT_S = 120.0  # after which a repetition has failed. A peer that moves 1 GB/s takes some 20 s for the largest case


@dataclasses.dataclass(frozen=True)
class Part:
    """What a child must know to play its part in every cell: what its peer made for all of them, and its number if it sends."""

    peer: Any
    shared: Any = None
    number: int = 0
    moments: Any = None


class PeerGroup(Children):
    """Processes that use a peer, and end with what it made for them; so many of them send. Tests fork them: that is quick."""

    def __init__(self, peer: Peer | RequestPeer, ends: int = 1, context: Any = None) -> None:
        context = context or get_context("spawn")
        super().__init__(peer.title)
        self._peer = peer
        self._moments = context.RawArray("q", 2)
        roles: list[tuple[str, Any]] = [("consumer", consume)] + [("producer", produce)] * ends
        if isinstance(peer, RequestPeer):
            roles = [("engine", answer)] + [("client", ask)] * ends
        try:
            self._shared = peer.create_shared(context, ends)  # kept: what children inherit is ours to remove
        except Exception as error:  # any of a library's own; it has its place among the results
            raise BenchError(f"{peer.title}: {type(error).__name__}: {error}") from error
        try:
            for number, (role, play) in enumerate(roles, start=-1):
                name = f"{role} {number}" if number >= 0 and ends > 1 else role
                part = Part(peer, self._shared, number, self._moments)
                self.children.append(Child(context, name, peer.name, functools.partial(play, part)))
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Ends all processes at once, and removes what they shared. Twice is once."""
        if not self._ended:
            super().kill()
            self._peer.close_shared(self._shared)

    def run(self, cell: Cell) -> Measurement:
        """Runs one cell, of at most as many ``producers`` as this group has senders.

        Raises:
            BenchError: a message was not what was sent, a process died, or it took too long. All processes are dead.
        """
        receiver, *senders = self.children[: 1 + cell.producers]
        assert len(senders) == cell.producers, "a group has the producers of its cells"
        with self._playing(cell.limit_s) as deadline:
            self._moments[:] = 0, 0
            self._tell([receiver], cell, cell.title)
            self._hear([receiver], deadline, cell.title)  # it listens
            self._tell(senders, cell, cell.title)
            measurement, *costs = self._hear([receiver, *senders], deadline, cell.title)
            if isinstance(self._peer, RequestPeer):  # the engine has only said that it has answered the last question
                latencies_ns = [latencies for _, latencies in costs]
                costs = [cost for cost, _ in costs]
                self._tell([receiver], "end", cell.title)
                (measurement,) = self._hear([receiver], deadline, cell.title)
                measurement = dataclasses.replace(measurement, latencies_ns=np.concatenate(latencies_ns))
            result: Measurement = dataclasses.replace(measurement, producers=tuple(costs))
            return result


class Groups:
    """The processes of peers that are compared. Use it with ``with``, which leaves no process and no file."""

    def __init__(self, peers: Mapping[str, Peer | RequestPeer], timing: Timing) -> None:
        self._peers, self._timing = peers, timing
        self._groups: dict[tuple[str, int], PeerGroup] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="shmring-bench-")

    def prepare(self, runs: Runs, cases: Sequence[Case]) -> None:
        """Has the processes that cases need, and no others. What can't be measured is said to the runs, with the reason."""
        needed: dict[tuple[str, int], list[Case]] = {}
        for case in cases:
            for name in (name for name in runs.cases[case] if name in self._peers):
                peer = self._peers[name]
                if (reason := peer.missing() or peer.limits(self._cell(case))) is not None:
                    runs.fail([case], [name], reason, Status.EXCLUDED)
                else:
                    needed.setdefault((name, case.producers), []).append(case)
        for key in self._groups.keys() - needed.keys():
            self._groups.pop(key).kill()
        room = psutil.virtual_memory().available // _PROCESS_NBYTES
        new = [key for key in needed if key not in self._groups]
        for name, ends in new:
            room -= ends + 1
            if room < 0:
                runs.fail(needed[name, ends], [name], "there is too little memory for its processes", Status.EXCLUDED)
                continue
            try:
                self._groups[name, ends] = PeerGroup(self._peers[name], ends)
            except BenchError as error:
                runs.fail(needed[name, ends], [name], str(error))
        for key in self._groups.keys() & new:  # all of them have begun to start
            try:
                self._groups[key].start()
            except BenchError as error:
                runs.fail(needed[key], [key[0]], str(error))
                self._groups.pop(key).kill()

    def run(self, case: Case, name: str) -> Measurement:
        """Measures a case with a peer, once; with new processes, if those that it had have failed in another case."""
        key = name, case.producers
        try:
            if key not in self._groups:
                self._groups[key] = PeerGroup(self._peers[name], case.producers)
                self._groups[key].start()
            return self._groups[key].run(self._cell(case))
        except BenchError:
            if (group := self._groups.pop(key, None)) is not None:
                group.kill()
            raise

    def _cell(self, case: Case) -> Cell:
        timing = self._timing
        return case.cell(warm_up_s=timing.warm_up_s, timed_s=timing.timed_s, limit_s=_LIMIT_S, directory=self._directory.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._directory:
            for group in self._groups.values():
                group.kill()


# -- in the child ------------------------------------------------------------------------------------------------------


async def produce(part: Part, parent: Parent, cell: Cell) -> Cost | None:
    """A producer's part of a cell; returns what it cost."""
    source = Source(cell, part.number, part.moments)
    with _watching(part, source.meter):
        await part.peer.produce(cell, part.shared, source)
    return source.meter.cost


async def consume(part: Part, parent: Parent, cell: Cell) -> Measurement:
    """The consumer's part of a cell."""
    sink = Sink(cell, part.moments)
    with _watching(part, sink.meter):
        await part.peer.consume(cell, part.shared, sink, lambda: parent.tell("listening"))
    return sink.measurement()


async def ask(part: Part, parent: Parent, cell: Cell) -> tuple[Cost | None, NDArray[np.int64]]:
    """A client's; returns what it cost, and its round trips."""
    client = Client(cell, part.number, part.moments)
    async with part.peer.connect(cell) as ask_one:
        await client.ask_all(ask_one)
    return client.source.meter.cost, np.array(client.latencies_ns, np.int64)


async def answer(part: Part, parent: Parent, cell: Cell) -> Measurement:
    """The engine's, which answers until its clients have gone."""
    finished, loop = asyncio.Event(), asyncio.get_running_loop()
    desk = Desk(cell, part.moments, lambda: loop.call_soon_threadsafe(finished.set))

    async def serve() -> None:
        await part.peer.serve(cell, desk, lambda: parent.tell("listening"))
        raise RuntimeError("the engine has stopped answering by itself")

    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve())
        await finished.wait()
        parent.tell("finished")
        await parent.hear()
        serving.cancel()
    return desk.measurement()


def _watching(part: Part, meter: Meter) -> AbstractContextManager[None]:
    """Has the meter look after the running loop, where the loop is meant to be free for other work."""
    return meter.watched() if part.peer.event_driven else contextlib.nullcontext()
