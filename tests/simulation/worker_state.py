"""The state of workers and of the engine's end towards them, as :mod:`.state` has the rest.

What a task waits for stands in no field: it is told by the future that it waits for. Numbers of messages, calls and joins are
named anew, in order; the wish that stands in a page is compared with the messages that its worker has.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any

from shmring.core.messages import Refused
from tests.simulation.fan_out import EngineWorker, FanOut
from tests.simulation.fan_out_truth import Call, stamp_in
from tests.simulation.loop import callback_of, waited_for
from tests.simulation.names import Names
from tests.simulation.worker import WorkerProcess

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

_AT_WANT, _AT_CLOSED = 0, 1024


class FanOutEncoding:
    """Makes the workers of a simulation plain data.

    Args:
        simulation: whose.
        clients, generations: the names that clients and slots have in the rest of the state.
    """

    def __init__(self, simulation: Simulation, clients: Names, generations: Names) -> None:
        self._world = simulation
        self._clients = clients
        self._generations = generations

    def workers(self) -> list[Any]:
        """Returns all that there is of them."""
        world = self._world
        fan_out = world.engine.fan_out if world.engine is not None else None
        engine = None if fan_out is None else self._engine(fan_out)
        return [engine, [self._process(worker) for worker in world.workers]]

    def _process(self, worker: WorkerProcess) -> list[Any]:
        fan_out = self._world.engine.fan_out if self._world.engine is not None else None
        is_known = fan_out is not None and worker.connection in fan_out.connections
        first = worker.connection.record.sent  # what it is sent is numbered anew: only the order counts
        return [
            worker.rank,
            worker.receives,
            worker.is_closed,
            worker.has_stopped,
            worker.epoch == self._world.epoch,
            fan_out.connections.index(worker.connection) if fan_out is not None and is_known else -1,
            [self._message(worker, sequence) for sequence in worker.expected],
            [[self._message(worker, message.sequence), message.answered] for message in worker.in_hands],
            [self._message(worker, view.sequence) for view in worker.views],
            [] if is_known else [len(worker.wire.to_frontend), worker.wire.engine_open, first > 0],
        ]

    def _message(self, worker: WorkerProcess, sequence: int) -> int:
        """What a message is to a worker: its age among those that are outstanding."""
        fan_out = self._world.engine.fan_out if self._world.engine is not None else None
        if fan_out is None or worker.epoch != self._world.epoch:
            return -1
        return sorted(fan_out.truth.sent).index(sequence)

    def _engine(self, fan_out: FanOut) -> list[Any]:
        sequences = sorted(fan_out.truth.sent)
        loop = fan_out.engine.loop
        tasks: list[Any] = [call.task for call in fan_out.calls]
        tasks += fan_out.engine.tasks
        places = {id(task): place for place, task in enumerate(tasks) if task is not None}
        return [
            [self._connection(fan_out, worker, sequences) for worker in fan_out.connections],
            [self._sent(fan_out, sequence) for sequence in sequences],
            [self._call(fan_out, call) for call in fan_out.calls],
            [[place.done(), parcel in fan_out._sending] for place, parcel in fan_out._line.items()],
            [place.done() for place in fan_out._changes],
            [parcel.to for parcel in fan_out._sending],
            [[places.get(id(task), -1), *taken] for task, taken in fan_out.truth.taken.items()],
            loop.plain_ready(tasks),
            [self._timer(places, timer) for timer in sorted(loop.timers, key=lambda timer: timer.when())],
            0 if self._world.scenario.max_calls is None else fan_out.next_call,
        ]

    def _timer(self, tasks: dict[int, int], timer: asyncio.TimerHandle) -> list[Any]:
        callback = callback_of(timer)
        return [callback.__name__, tasks.get(id(getattr(callback.__self__, "_task", None)), -1)]

    def _connection(self, fan_out: FanOut, worker: EngineWorker, sequences: list[int]) -> list[Any]:
        record = worker.record
        wanted = struct.unpack_from("<Q", worker.page, _AT_WANT)[0]
        closed = struct.unpack_from("<Q", worker.page, _AT_CLOSED)[0]
        left = [
            sequence
            for sequence in sequences
            if fan_out.truth.has(worker.process, sequence)
            and stamp_in(worker.page, fan_out.truth.sent[sequence].stamp) == sequence
        ]
        return [
            worker.rank,
            record.place,
            record.is_member,
            record in fan_out.workers,
            worker.process.alive,
            [sequence for sequence in range(len(sequences)) if fan_out.truth.has(worker.process, sequences[sequence])],
            [sequences.index(sequence) for sequence in left],
            # Of a wish, only whom it has ring counts: a message that it has, or any later one.
            None if not wanted else sum(sequence < wanted for sequence in sequences),
            None if not closed else sum(sequence < closed for sequence in sequences),
            worker.is_rung,
            worker.towards.is_awaited,
            worker.wire.frontend_open,
            worker.wire.engine_open,
            ["refused" if body[1] == Refused.__struct_config__.tag else "message" for body in worker.wire.to_frontend],
            [len(body) for body in worker.wire.to_engine],
            worker.pidfd.is_open,
        ]

    def _sent(self, fan_out: FanOut, sequence: int) -> list[Any]:
        sent = fan_out.truth.sent[sequence]
        slots = [[self._clients[client_id], self._generations[generation]] for client_id, generation in sent.slots]
        gathering: Any = fan_out.end.gathers.get(sequence)
        place = fan_out.calls.index(sent.call) if sent.call in fan_out.calls else -1
        return [
            sent.stamp,
            sent.start,
            sent.blocks,
            slots,
            place,
            sent.call.gathers,
            None if gathering is None else gathering.expected,
        ]

    def _call(self, fan_out: FanOut, call: Call) -> list[Any]:
        waits_for = waited_for(call.task)
        place = next((place for place, future in enumerate(fan_out._line) if future is waits_for), -1)
        change = next((place for place, future in enumerate(fan_out._changes) if future is waits_for), -1)
        return [
            call.to,
            call.gathers,
            call.blocks,
            [[self._clients[client_id], self._generations[generation]] for client_id, generation in call.slots],
            call.is_cancelled,
            call.begun > 0,
            call.sequence > 0,
            [waits_for is None, place, change],
        ]
