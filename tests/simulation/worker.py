"""A worker's process: the real :class:`~shmring.core.compiled.WorkerEnd` and its messages, as the asyncio worker uses them.

Records wait in the connection until one is received; then its message is in hands, until it is left, and after that views of it
may be alive. A process that has died acknowledges nothing any more, so whatever it had is kept here untouched until the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shmring.core.compiled import BaseMessage, Home, RecordReader, RecordWriter, WorkerEnd, ring_nbytes
from shmring.core.messages import Refused
from shmring.errors import LocalProtocolError
from shmring.memory.tensors import make_decoder
from shmring.worker.answers import failure_record, records_of
from tests.simulation.midst import Midst
from tests.simulation.payloads import DECODER, MAX_PAYLOAD_NBYTES, MAX_TENSORS, MAX_VALUES, PACKER, arrays_of, require_intact
from tests.simulation.scenario import Action, Inside, Kind, Moment, require

if TYPE_CHECKING:
    from tests.simulation.fan_out import EngineWorker, FanOut

_SHARED_DECODER = make_decoder(tuple[Any, Any])
_NO_RING = ring_nbytes(64)  # records are taken from the connection, and replies given to it


class Message(BaseMessage):
    """A message in a worker's hands."""

    def __del__(self) -> None:
        """Whole states are dropped here: nothing is to come back."""


class View:
    """What is left of a message that was left: arrays of it."""

    def __init__(self, sequence: int, payload: list[Any]) -> None:
        self.sequence = sequence
        self.payload = payload


class WorkerProcess:
    """See the head of this file.

    Attributes:
        pid: whose it is.
        rank: its.
        epoch: of its engine.
        number: how the model of the engine's book calls it.
        alive: whether it lives.
        receives: whether it has not closed, and was not told that nothing more comes.
        is_closed: whether it has closed.
        has_stopped: whether it takes no turns.
        expected: the messages that were sent to it and that it has not received, in order.
        in_hands: received and not left.
        views: of messages that were left.
    """

    def __init__(self, pid: int, rank: int, epoch: int, fan_out: FanOut, midst: Midst) -> None:
        self.pid, self.rank, self.epoch = pid, rank, epoch
        self.midst = midst
        self.in_code = fan_out.engine.scenario.in_code
        self.may_stop = fan_out.engine.scenario.stops
        self.number = 0
        self.alive = self.receives = True
        self.is_closed = self.has_stopped = False
        self.expected: deque[int] = deque()
        self.in_hands: list[Message] = []
        self.views: list[View] = []
        self.connection: EngineWorker = fan_out.join(self, rank)
        self.wire = self.connection.wire
        self._bell = self.connection.theirs.dup()
        self.home = Home("a simulated worker", "join anew")
        self._link = self.wire.towards_frontend
        self._end = WorkerEnd(
            self,
            RecordReader(bytearray(_NO_RING), -1),
            RecordWriter(bytearray(_NO_RING), -1),
            self._bell.fileno(),
            fan_out.readable,
            self.connection.page,
            DECODER,
            _SHARED_DECODER,
            PACKER,
            Message,
            max_tensors=MAX_TENSORS,
            max_values=MAX_VALUES,
            max_payload_nbytes=MAX_PAYLOAD_NBYTES,
        )
        self._calls = fan_out.truth.by_number

    def reachable(self) -> list[int]:
        """Messages that it may still read."""
        unread = self.expected if self.receives else ()
        return [*unread, *(message.sequence for message in self.in_hands), *(view.sequence for view in self.views)]

    # -- messages ------------------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Receives what has come first."""
        record = self._link.take()
        self._rings_for_room()
        message: Any = self._end.open(record)
        if message is None:
            require(record[1] == Refused.__struct_config__.tag, "a worker is sent what nobody knows")
            self._stop()
            return
        require(bool(self.expected) and message.sequence == self.expected[0], "a worker gets its messages in another order")
        self.expected.popleft()
        self.in_hands.append(message)
        self.check_intact()

    def _rings_for_room(self) -> None:
        if self.connection.towards.is_awaited and self._link.can_write:
            self.connection.towards.is_awaited = False
            if self.wire.engine_open:
                self._bell.send(b"\0")

    def leave(self, index: int, is_viewed: int) -> None:
        """Leaves a message; with living views it stays unacknowledged."""
        message = self.in_hands.pop(index)
        if is_viewed:
            self.views.append(View(message.sequence, message.payload))
        message.leave()

    def view_dies(self, index: int) -> None:
        """The last view of a message that was left dies."""
        del self.views[index]

    def reply(self, index: int) -> None:
        """Replies to a message that wants it."""
        message = self.in_hands[index]
        payload = message.payload
        answer = [payload[0], self.rank, self.midst.code]
        record = self._end.pack_answer(answer, message.sequence)
        try:
            require(self._end.mark_answered(message), "a message that wants a reply wants none")
        except LocalProtocolError:
            require(message.left, "a message can't be answered")
            return
        for part in records_of(record, self._link.largest_nbytes):
            self.wire.towards_engine.queue(part)

    def fail_answer(self, sequence: int, error: BaseException) -> None:
        """For messages: no reply to one will come."""
        self.wire.towards_engine.queue(failure_record(sequence, error))

    fail_answer_later = fail_answer

    # -- the end ---------------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Its process is stopped."""
        self.has_stopped = True

    def go_on(self) -> None:
        """And goes on."""
        self.has_stopped = False

    def close(self) -> None:
        """Closes, or sees that its engine has: what was not received is left, what is in hands stays."""
        for record in self.wire.to_frontend:
            self._end.leave_unread(record)
        self._stop()
        self.is_closed = True
        self._end.close()
        self.wire.close_frontend()

    def _stop(self) -> None:
        self.receives = False
        self.expected.clear()

    def die(self) -> None:
        """Dies: whatever it had, it says nothing any more."""
        self.alive = False
        self.wire.close_frontend()

    def drop(self) -> None:
        """The world ends."""
        self.in_hands.clear()
        self.views.clear()
        self._bell.close()

    # -- what holds ------------------------------------------------------------------------------------------------------------

    def check_intact(self) -> None:
        """Nobody has written to what it may read."""
        for message in self.in_hands:
            payload = message.payload
            require_intact(payload, payload[0])
            number = (message.beside if message._is_shared else payload)[0]
            require(self._calls[number].sequence == message.sequence, "a worker gets another message than was sent")
        for view in self.views:
            require_intact(view.payload, view.payload[0])

    def enabled(self, position: int) -> Iterator[Action]:
        """Yields what it can do, and what it can do in the midst of that."""
        actions = [*self._enabled(position)]
        yield from actions
        if not self.midst.offers:
            return
        does = [Inside(Moment.IN_CODE, *action[:4]) for action in actions if action.kind in self.in_code]
        yield from (Action(*action[:4], inside) for action in actions if action.kind is Kind.ANSWER for inside in does)

    def _enabled(self, position: int) -> Iterator[Action]:
        yield Action(Kind.WORKER_DIES, position)
        if self.has_stopped:
            yield Action(Kind.WORKER_GOES_ON, position)
            return
        if self.may_stop:
            yield Action(Kind.WORKER_STOPS, position)
        if self.receives:
            yield Action(Kind.WORKER_CLOSES, position)
            if self.wire.to_frontend:
                yield Action(Kind.RECEIVE, position)
        if not self.wire.engine_open and not self.wire.to_frontend and not self.is_closed:
            yield Action(Kind.WORKER_SEES_END, position)
        for index, message in enumerate(self.in_hands):
            yield Action(Kind.LEAVE_MESSAGE, position, index)
            if arrays_of(message.payload):
                yield Action(Kind.LEAVE_MESSAGE, position, index, 1)
            if message.wants_reply and not message.answered and self.wire.towards_engine.can_write:
                yield Action(Kind.ANSWER, position, index)
        for index in range(len(self.views)):
            yield Action(Kind.MESSAGES_VIEW_DIES, position, index)
