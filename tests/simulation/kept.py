"""Kept content at a frontend: the real :class:`~shmring.client.kept.KeptContents`, in a loop that the simulation turns.

What is made up is the session around it. A caller that looks for content, or gives a slot to keep, is a task: it asks at once,
and goes on when the loop runs it after the answer came, or after it was cancelled. What it gets is a real
:class:`~shmring.client.kept.Kept`; a view of it may outlive both.
"""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from shmring.client.kept import Kept, KeptContents
from shmring.core.client_book import ClientSlotRecord
from shmring.core.geometry import BLOCK_NBYTES
from shmring.core.messages import KEY_NBYTES, Find, Keep, Unpin
from shmring.errors import CapacityError, ClosedError, WouldBlock
from tests.simulation.loop import SimulatedLoop
from tests.simulation.payloads import MAX_TENSORS, payload_of, require_intact
from tests.simulation.scenario import Action, Kind, require

if TYPE_CHECKING:
    from tests.simulation.frontend import Session

__all__ = ["OF_KEPT", "Asking", "KeptEnd", "KeptView"]

OF_KEPT = 2  # the first number of the keys of regions
_MAX_RECORD_NBYTES = 1 << 12


def key_of(number: int) -> bytes:
    """The key of content, whose payload has this number."""
    return number.to_bytes(KEY_NBYTES, "little")


@dataclasses.dataclass(slots=True, eq=False)
class Asking:
    """A caller that looks for content, or gives some to keep."""

    key: int
    slot: ClientSlotRecord | None
    task: asyncio.Task[Any]
    is_cancelled: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class KeptView:
    """A payload that somebody views."""

    generation: int
    start: int
    blocks: int
    payload: list[Any]


@dataclasses.dataclass(slots=True, eq=False)
class Held:
    """Content that a caller holds."""

    kept: Kept
    view: KeptView


@dataclasses.dataclass(slots=True)
class _Link:
    """The session's connection."""

    link: Any

    def send(self, message: Find | Keep) -> None:
        self.link.send(message)

    def send_listed(self, kind: type[Unpin], generations: list[int]) -> None:
        self.link.send(kind(tuple(generations)))


class _Sending:
    async def writable(self) -> None:
        """There is room: callers do nothing before."""


class _Session:
    """What kept content asks of its session."""

    is_usable = False  # nothing that is dropped comes back: whole states are

    def __init__(self, session: Session, loop: SimulatedLoop) -> None:
        self.loop = loop
        self.end, self.regions, self.mapping = session.end, session.regions, session.slab
        self.link = _Link(session.link)
        self.sending = _Sending()
        self.counters = SimpleNamespace(kept_hits=0, kept_misses=0)
        scenario = session.scenario
        self.welcome = SimpleNamespace(
            max_tensors=MAX_TENSORS, max_record_nbytes=_MAX_RECORD_NBYTES, kept_nbytes=scenario.kept_blocks * BLOCK_NBYTES
        )
        self.host_slots = SimpleNamespace(book=session.book, carry_out=lambda effects: session.carry_out(effects))
        self.has_ended = False
        self._last_id = 0

    @property
    def error(self) -> Exception | None:
        return ClosedError("the session has ended") if self.has_ended else None

    def check_alive(self) -> None:
        require(not self.has_ended, "a session was used after its end")

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def can_keep(self, record: ClientSlotRecord) -> bool:
        return record.lease is not None


class KeptEnd:
    """See the head of this file.

    Attributes:
        contents: the real ones.
        asks: so far.
        asking: callers whose tasks have not returned, in order.
        open: contents that callers hold.
        views: of those that were left.
    """

    def __init__(self, session: Session) -> None:
        self._session: Session = weakref.proxy(session)
        self.loop = SimulatedLoop()
        self._around = _Session(self._session, self.loop)
        self.contents = KeptContents(cast(Any, self._around), OF_KEPT)
        self.asks = 0
        self.asking: list[Asking] = []
        self.open: list[Held] = []
        self.views: list[KeptView] = []

    def find(self, key: int) -> None:
        """A caller looks for what is kept."""
        self._ask(key, None, self.contents.find(key_of(key), Any))

    def keep(self, slot: ClientSlotRecord, key: int) -> None:
        """A caller gives a slot to the engine to keep."""
        payload = payload_of([self._session.array(slot)], key)
        self._ask(key, slot, self.contents.keep(key_of(key), payload))

    def _ask(self, key: int, slot: ClientSlotRecord | None, coroutine: Any) -> None:
        self.asks += 1
        self.asking.append(Asking(key, slot, asyncio.Task(coroutine, loop=cast(Any, self.loop))))
        self.loop.run_last()
        self._returned()

    def cancel(self, index: int) -> None:
        """The task of a caller is cancelled."""
        self.asking[index].is_cancelled = True
        self.asking[index].task.cancel()

    def turn(self) -> None:
        """A caller goes on."""
        self.loop.run_next()
        self._returned()

    def _returned(self) -> None:
        for asking in [asking for asking in self.asking if asking.task.done()]:
            self.asking.remove(asking)
            if asking.task.cancelled():
                require(asking.is_cancelled, "a caller was cancelled by nobody")
            elif isinstance(asking.task.exception(), WouldBlock | CapacityError):
                continue
            elif (kept := asking.task.result()) is not None:
                require_intact(kept.payload, asking.key)
                pin = kept._pin
                view = KeptView(pin.found.generation, pin.record.start, pin.record.blocks, kept.payload)
                self.open.append(Held(kept, view))

    def leave(self, index: int, is_viewed: int) -> None:
        """A caller leaves content; a view of it may stay alive."""
        if is_viewed:
            self.views.append(self.open[index].view)
        kept = self.open.pop(index).kept
        kept.close()

    def view_dies(self, index: int) -> None:
        """A view of content that was left dies."""
        generation = self.views.pop(index).generation
        [key] = self._session.regions.collect()
        require(key == (OF_KEPT, generation), "the death of a view is reported as another's")
        self.contents.views_gone(generation)

    def lose(self) -> None:
        """The session is over; what callers can read of content they can still read."""
        self.views += [held.view for held in self.open]
        self._around.has_ended = True
        self.contents.lose()
        self.asking.clear()
        self.open.clear()
        self.loop.ready.clear()

    def check_intact(self) -> None:
        """Nobody has written to what is pinned."""
        for payload in (*(held.view.payload for held in self.open), *(view.payload for view in self.views)):
            require_intact(payload, payload[0])

    def enabled(self, pid: int, *, can_write: bool) -> Iterator[Action]:
        """Yields what callers can do."""
        if self.loop.ready:
            yield Action(Kind.KEPT_TURN, pid)
        for index, asking in enumerate(self.asking):
            if not asking.is_cancelled:
                yield Action(Kind.CANCEL_ASKING, pid, index)
        if not can_write:
            return
        for index in range(len(self.open)):
            yield Action(Kind.UNPIN, pid, index)
            yield Action(Kind.UNPIN, pid, index, 1)
        for index in range(len(self.views)):
            yield Action(Kind.KEPT_VIEW_DIES, pid, index)
        scenario = self._session.scenario
        if scenario.max_asks is not None and self.asks >= scenario.max_asks:
            return
        if scenario.kept_blocks and len(self.asking) < scenario.max_asking and len(self.open) < scenario.max_held:
            for key in range(scenario.keys):
                yield Action(Kind.FIND, pid, key)
                for index in self._session.submittable():
                    yield Action(Kind.KEEP, pid, index, key)
