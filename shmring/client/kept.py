"""Kept content in a frontend: finding it, waiting for it, handing a slot over to be kept, and the pins meanwhile.

Theory of operation. Found content is pinned at the engine until this side gives the pin back. A
:class:`~shmring.core.compiled.Pin` counts its users here: callers that hold a :class:`Kept`; the caller of the slot, until that
slot is left; and living views. With the last of them the pin goes back. A content is pinned once, for any number of callers,
and found again without asking the engine: by any thread (:meth:`KeptContents.find_nowait`).

Its slot stands among the held ones of the session, so a payload with views of it is sent from there. A request that was sent
has a pin of its own at the engine: messages come in order, and the request comes before the message that gives this pin back.

Callers that wait for a key share one question to the engine (:class:`_Wait`), which answers it when the content comes. If all
of them have left, the engine is told, and answers as well: so each question has one answer, whatever crosses on the way.

A *delivery* is content for the one who takes it (:meth:`KeptContents.deliver`, :meth:`KeptContents.take`). Its sender has no
pin of it: when the engine has it, its slot is neither in a lease nor pinned here. Who takes it has a pin under a key that is no
key of content (:func:`_taken_key`), as the next delivery of the same name is another content. Who has left one mostly asks for
the next one at once, so the engine hears of both together: being told wakes a process.

A slot that is handed over behind a GPU's work (:meth:`KeptContents.keep_nowait`) is this object's from then on. Nothing is sent
before the GPU has done that work, so a process that dies meanwhile has published nothing.

Invariants: the content of each pin is pinned at the engine; a pin has a user or a view, or is forgotten; the engine has one
question for each key for which callers wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeAlias

import msgspec
from typing_extensions import TypeVar

from shmring.client.life import SessionLife
from shmring.client.sending import Sending
from shmring.client.slot import Slot
from shmring.core.compiled import ClientEnd, ClientSlotRecord, KeptContent, LoadPage, Packed, Pin, kept_slot
from shmring.core.dropped import give_back_soon, warn_of
from shmring.core.geometry import BLOCK_NBYTES, Geometry, slot_blocks
from shmring.core.messages import (
    MAX_FINDS,
    MAX_KEPT_PAYLOAD_NBYTES,
    MAX_WAITS,
    MAX_WITHDRAWN,
    SLOT_HEADER_NBYTES,
    Find,
    Found,
    Keep,
    NotKept,
    StopWaiting,
    Unpin,
    Withdraw,
)
from shmring.core.states import ClientSlot
from shmring.errors import CapacityError, ClosedError, RemoteError, RemoteProtocolError, ShmringError, WouldBlock, fresh
from shmring.gpu.behind import Behind
from shmring.line import Place, WaitingLine
from shmring.memory.slab import Slab
from shmring.memory.slots import HostSlots
from shmring.transport.link import Link
from shmring.uncopied import uncopied

__all__ = ["Keeping", "Kept", "KeptContents"]

_Payload = TypeVar("_Payload", default=Any)

_TOLD_S = 0.002  # until the engine hears that a delivery was left, if nothing is asked before
_ROOM_S = 0.02  # where there is no room, between two attempts: nobody tells this process what others have left
_TAKEN_KEY_NBYTES = 8  # of the key that a delivery is pinned under here; other keys have 32
_KEEP_NBYTES = 256  # at most, of the message that gives a slot, around its payload
_NOT_FOUND = ("absent", "pins")  # the reasons that can answer a search
_NOT_KEPT = ("full", "large", "pins", "ends")  # and those that can answer a slot that is handed over
_ENDS = "the engine is about to end, and keeps nothing more"
_WHY_NOT = {
    "full": "the engine has no room to keep more: what it keeps is in use, or somebody waits for this memory; send it without "
    "keeping it",
    "pins": "this client has pinned, or delivered and nobody has taken, as much kept content as the engine lets it have; leave "
    "some of it, or raise client_pinned_nbytes",
    "ends": _ENDS,
}


#: What the engine's answer becomes: a pin, with one more user; why there is none; None: a delivery is there for its taker.
_Answer: TypeAlias = Pin | NotKept | None


def _taken_key(found: Found) -> bytes:
    """Returns the key under which a delivery is pinned here: none of content, and of no other delivery."""
    return found.generation.to_bytes(_TAKEN_KEY_NBYTES, "big")


@dataclasses.dataclass(slots=True, eq=False)
class _Wait:
    """A key for which callers wait.

    Attributes:
        key: which one.
        for_one: whether it is the name of a delivery, which one of the callers takes.
        token: of the question to the engine.
        line: of the callers.
        is_ending: whether all of them had left, and the engine was told.
    """

    key: bytes
    for_one: bool = False
    token: int = 0
    line: WaitingLine[Pin | NotKept] = dataclasses.field(default_factory=WaitingLine)
    is_ending: bool = False


class Keeping:
    """Content that will be kept, from :meth:`Client.keep_nowait`. Nobody has to wait for it; nothing is pinned for its caller.

    Attributes:
        key: that it will be found by.
        error: why it is not kept; None: it is, or that is not known yet.
    """

    __slots__ = ("_life", "_over", "error", "key")

    def __init__(self, key: bytes, life: SessionLife) -> None:
        self.key = key
        self.error: Exception | None = None
        self._life = life
        self._over: asyncio.Future[None] = life.loop.create_future()

    def __repr__(self) -> str:
        state = "under way" if not self.ended else "kept" if self.error is None else f"not kept: {self.error}"
        return f"<Keeping {self.key.hex()[:16]}, {state}>"

    __reduce_ex__ = uncopied("it is one content that its client hands over; hand on its key")

    @property
    def ended(self) -> bool:
        """Whether it is kept, or is not and will not be."""
        return self._over.done()

    async def wait(self) -> None:
        """Waits until it is kept.

        Raises:
            WouldBlock, CapacityError, EngineDeadError, ClosedError: it is not, as :meth:`Client.keep` says.
        """
        self._life.home.check_loop()
        await asyncio.shield(self._over)
        if self.error is not None:
            raise fresh(self.error) if isinstance(self.error, ShmringError) else self.error

    def _end(self, error: Exception | None) -> None:
        if not self._over.done():
            self.error = error
            self._over.set_result(None)


@dataclasses.dataclass(slots=True, eq=False)
class _Question:
    """Content that was looked for or handed over, of which the engine has not answered.

    Attributes:
        place: of its caller, in line.
        key: of the content.
        record: of the slot that was handed over; None: this is a search.
        for_one: whether it is a delivery.
        slot: that the delivery lies in, which is left when the engine has it; None: it was copied.
    """

    place: Place[_Answer]
    key: bytes
    record: ClientSlotRecord | None = None
    for_one: bool = False
    slot: Slot | None = None


@dataclasses.dataclass(slots=True, eq=False)
class _Handed:
    """A slot that is published when a GPU has done what is queued: what its caller has asked for, the slot, and its payload."""

    keeping: Keeping
    slot: Slot
    payload: object


class Kept(Generic[_Payload]):
    """Content that the engine keeps, pinned until this is left. Use it as ``with kept:`` (or call :meth:`close`).

    A payload with views of it is sent from where it lies, any number of times. Views that outlive the block keep the pin.

    Attributes:
        key: that it is found by; of a delivery, its name.
        nbytes: bytes of its slot.
    """

    __slots__ = ("__weakref__", "_content", "_contents", "_payload", "_payload_type", "_pin", "key", "nbytes")

    def __init__(self, contents: KeptContents, pin: Pin, payload_type: Any, name: bytes | None = None) -> None:
        self.key = pin.key if name is None else name
        self.nbytes: int = pin.found.nbytes
        self._contents = contents
        self._pin: Pin | None = pin
        self._payload_type = payload_type
        self._payload: list[Any] = []
        self._content: KeptContent | None = None

    def __repr__(self) -> str:
        return f"<Kept {self.key.hex()[:16]} of {self.nbytes} bytes, {'left' if self._pin is None else 'pinned'}>"

    __reduce_ex__ = uncopied("it is one pin of its client; hand on its key, and find that with the other process's client")

    @property
    def payload(self) -> _Payload:
        """The content, its tensors viewed in place. Write to none of them: every frontend reads the same memory.

        Raises:
            ClosedError: this was left, or the client closed.
            EngineDeadError: the engine has gone, and its content with it.
            RemoteError: it is not of ``payload_type``.
        """
        if self._pin is None:
            raise ClosedError("this content was left; take what you need of its payload inside the block")
        self._contents.life.check_alive()
        if not self._payload:
            if self._content is None:
                self._content = self._contents.open(self._pin)
            try:
                self._payload.append(self._content.decode(self._contents.end.decoder_of(self._payload_type)))
            except msgspec.ValidationError as error:
                raise RemoteError("UnexpectedContent", f"what is kept is not of payload_type: {error}") from error
        payload: _Payload = self._payload[0]
        return payload

    def close(self) -> None:
        """Leaves the content. When its last view has died, its memory may be used for something else. Twice is once.

        Any thread may call this; on another than the loop's, it is left in the loop's next turn.
        """
        loop = self._contents.life.loop
        if asyncio._get_running_loop() is not loop:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the client is of no use any more
                loop.call_soon_threadsafe(self.close)
            return
        pin, self._pin = self._pin, None
        self._payload.clear()
        if pin is not None:
            content, self._content = self._content, None
            self._contents.leave(pin, content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_pin", None) is None or not self._contents.life.is_usable:
            return
        give_back_soon(self._contents.life.loop, self._give_back)

    def _give_back(self) -> None:
        """It was dropped, and was not left since."""
        if self._pin is not None and self._contents.life.is_usable:
            self.close()
            warn_of(f"kept content of {self.nbytes} bytes was dropped before it was left; use `with kept:`", self)


class KeptContents:
    """The pins of a session, and its searches.

    Args:
        life: of the engine.
        end, link: of the session, towards the engine.
        host_slots: of the session.
        sending: of the session.
        slab: that content lies in; it lets go of its mapping when the session ends.
        load: of the engine; None: it is unknown.
        behind: says when a GPU has done what is queued.
        key_of_regions: the first number of the keys of their regions.
    """

    def __init__(
        self,
        life: SessionLife,
        end: ClientEnd,
        link: Link,
        host_slots: HostSlots,
        sending: Sending,
        slab: Slab,
        load: LoadPage | None,
        behind: Behind,
        key_of_regions: int,
    ) -> None:
        self.life = life
        self.end = end
        self._link = link
        self._host_slots = host_slots
        self._sending = sending
        self._slab = slab
        self._load = load
        self._behind = behind
        self._key_of_regions = key_of_regions
        self._payload_nbytes = min(MAX_KEPT_PAYLOAD_NBYTES, life.welcome.max_record_nbytes - _KEEP_NBYTES)
        self._tokens = itertools.count(1)
        self._pins: dict[int, Pin] = {}  # by generation; by key, the end has them
        self._asking = asyncio.Semaphore(MAX_FINDS)
        self._line: WaitingLine[_Answer] = WaitingLine()
        self._answers: dict[int, _Question] = {}  # by token
        self._waits: dict[tuple[bytes, bool], _Wait] = {}  # by key, and whether it is for one
        self._waited: dict[int, _Wait] = {}  # the same, by token
        self._handed: dict[int, _Handed] = {}  # behind a GPU's work, by the number that is reported then
        self._publishing: set[asyncio.Task[None]] = set()
        self._left_generations: list[int] = []  # of deliveries, of which the engine does not know yet that they were left
        self._telling: asyncio.TimerHandle | None = None
        self._ends = False  # whether the engine has said that it keeps nothing more

    def __len__(self) -> int:
        return len(self._pins)

    # -- finding and keeping -----------------------------------------------------------------------------------------------

    async def find(self, key: bytes, payload_type: Any) -> Kept[Any] | None:
        """See :meth:`Client.find`."""
        self.life.check_alive()
        pin = self.end.use_pinned(key)
        if pin is None:
            place = await self._send(key, None)
            try:
                pin = self._found(await self._line.stay(place, self._unused))
            finally:
                del place
        return None if pin is None else self._handed_out(pin, payload_type)

    def find_nowait(self, key: bytes, payload_type: Any) -> Kept[Any] | None:
        """See :meth:`Client.find_nowait`; None: it is not pinned here. On any thread."""
        self.life.check_alive()
        pin = self.end.use_pinned(key)
        return None if pin is None else Kept(self, pin, payload_type)

    async def find_many(self, keys: Sequence[bytes], payload_type: Any) -> dict[bytes, Kept[Any]]:
        """See :meth:`Client.find_many`; returns what was found, each once."""
        self.life.check_alive()
        found: dict[bytes, Kept[Any]] = {}
        asked: dict[bytes, Place[_Answer]] = {}
        try:
            for key in dict.fromkeys(keys):
                if (pin := self.end.use_pinned(key)) is not None:
                    found[key] = self._handed_out(pin, payload_type)
                else:
                    asked[key] = await self._send(key, None)  # without waiting for an answer, so all have one round trip
            while asked:
                key = next(iter(asked))
                if (pin := self._found(await self._line.stay(asked.pop(key), self._unused))) is not None:
                    found[key] = self._handed_out(pin, payload_type)
            return found
        except BaseException:
            for kept in found.values():
                kept.close()
            for place in asked.values():
                self._line.leave(place, self._unused)
            raise
        finally:
            asked.clear()

    def _found(self, answer: _Answer) -> Pin | None:
        """The answer to a search has come: returns the pin; None: there is no such content.

        Raises:
            WouldBlock: it must not be pinned.
        """
        assert answer is not None, "only what was handed over is answered with nothing"
        if not isinstance(answer, NotKept):
            self.life.counters.kept_hits += 1
            return answer
        if answer.reason != "absent":
            raise WouldBlock(_WHY_NOT[answer.reason])
        self.life.counters.kept_misses += 1
        return None

    async def wait(self, key: bytes, payload_type: Any) -> Kept[Any]:
        """See :meth:`Client.wait_kept`."""
        self.life.home.check_loop()
        while True:  # who comes just when the last one leaves hears that there is nothing, and waits anew
            self.life.check_alive()
            pin = self.end.use_pinned(key)
            if pin is None:
                pin = self._found(await self._await_in_line(key))
            if pin is not None:
                return self._handed_out(pin, payload_type)

    async def take(self, name: bytes, payload_type: Any, absent: Callable[[], object] | None) -> Kept[Any]:
        """See :meth:`shmring.client.deliveries.Deliveries.take`."""

        def absent_once() -> None:
            nonlocal absent
            call, absent = absent, None
            if call is not None:
                call()

        while True:  # who comes just when the last one leaves hears that there is nothing, and waits anew
            self.life.check_alive()
            answer = await self._await_in_line(name, for_one=True, absent=None if absent is None else absent_once)
            if isinstance(answer, NotKept) and answer.reason == "pins":
                await asyncio.sleep(_ROOM_S)  # until views of what this client has pinned have died
            elif (pin := self._found(answer)) is not None:
                return self._handed_out(pin, payload_type, name)

    async def _await_in_line(
        self, key: bytes, *, for_one: bool = False, absent: Callable[[], object] | None = None
    ) -> Pin | NotKept:
        """Waits for content, together with others that wait for the same. It has one more user then.

        What is held meanwhile: one of the keys that a client may wait for.

        Args:
            key, for_one: of the content.
            absent: called when the engine has heard of it, if there is nothing yet.
        """
        await self._sending.writable()
        self.life.check_alive()
        wait = self._waits.get((key, for_one))
        if wait is None:
            if len(self._waits) >= MAX_WAITS:
                raise WouldBlock(f"callers of this client wait for {len(self._waits)} keys, and the engine takes no more")
            wait = _Wait(key, for_one)
            self._ask(wait)
        place = wait.line.enter()
        try:
            if absent is not None:
                await self._echo(key, wait, place, absent)
            return await wait.line.stay(place, lambda answer: self._unused_of(wait, answer), lambda _: self._left(wait))
        finally:
            del place

    def _ask(self, wait: _Wait) -> None:
        """Asks the engine for those who wait for a key."""
        key, for_one = wait.key, wait.for_one
        wait.token = next(self._tokens)
        self._waits[key, for_one] = self._waited[wait.token] = wait
        try:
            if self._telling is not None:
                self._tell_left()
            self._link.send(Find(wait.token, key, waits=True, for_one=for_one))
        except BaseException:  # it was not sent
            del self._waits[key, for_one], self._waited[wait.token]
            raise

    async def _echo(self, key: bytes, wait: _Wait, place: Place[Pin | NotKept], absent: Callable[[], object]) -> None:
        """Asks for other content behind a question that waits: its answer comes behind what answers that at once."""

        def echoed(echo: Place[_Answer]) -> None:
            self._line.leave(echo, self._unused)
            if not place.done():
                absent()

        try:
            echo = await self._send(key, None)
        except BaseException:
            wait.line.leave(place, lambda answer: self._unused_of(wait, answer), lambda _: self._left(wait))
            raise
        echo.add_done_callback(echoed)

    def _left(self, wait: _Wait) -> None:
        """A caller waits no more. With the last one, the engine is told; it answers, too."""
        if not wait.line.is_waited_in and not wait.is_ending and self.life.error is None:
            wait.is_ending = True
            self._link.send(StopWaiting((wait.token,)))

    def _unused_of(self, wait: _Wait, answer: Pin | NotKept) -> None:
        """A caller was cancelled just when content came. The next caller of this client that waits for a delivery has it."""
        others = self._waits.get((wait.key, True)) if wait.for_one and isinstance(answer, Pin) else None
        if others is not None and others.line.give_first(answer):
            self._left(others)
        else:
            self._unused(answer)

    def _came(self, wait: _Wait, answer: Found | NotKept) -> None:
        """The engine answers those that wait for a key.

        Raises:
            RemoteProtocolError: the answer can't be true.
        """
        if isinstance(answer, Found):
            result: Pin | NotKept = self._pinned(_taken_key(answer) if wait.for_one else wait.key, answer, None)
        elif answer.reason == "pins" or (answer.reason == "absent" and wait.is_ending):
            result = answer
        else:
            raise RemoteProtocolError(f"who waits for content is answered with {answer.reason!r}")
        del self._waits[wait.key, wait.for_one], self._waited[wait.token]
        waiting = [place for place, _ in wait.line.waiting()]
        if isinstance(result, Pin) and wait.for_one and len(waiting) > 1:  # the others wait for the next one
            del waiting[1:]
            self._ask(wait)
        for place in waiting:
            if isinstance(result, Pin):
                result.enter()
            place.set_result(result)
        if isinstance(result, Pin):
            self.leave(result, None)

    def keep_nowait(self, key: bytes, payload: object, slot: Slot, stream: tuple[int, int] | None) -> Keeping:
        """See :meth:`Client.keep_nowait`; the stream is given as the numbers of its GPU and its own."""
        self.life.check_alive()
        self.life.home.check_loop()
        packed = self.end.pack(payload)
        if not self._can_keep(packed) or packed.slots[0] is not slot._record:
            raise ValueError("what is kept without waiting lies in the slot that is given, with all its tensors")
        if len(packed.payload) > self._payload_nbytes:
            raise self._too_long(packed.payload)
        self._check_keeps()
        handed = _Handed(Keeping(key, self.life), slot._hand_on(), payload)
        if stream is not None:
            number = next(self._tokens)
            self._handed[number] = handed  # first: if CUDA can't say when it has done its work, the slot is kept for good
            if not self._behind.follow(*stream, number):
                return handed.keeping
            del self._handed[number]
        self._publish(handed)
        return handed.keeping

    def handed_over(self) -> list[asyncio.Future[None]]:
        """What is done when the content of a slot that was handed over is kept, or is not; for each of these slots."""
        return [*self._publishing, *(handed.keeping._over for handed in self._handed.values())]

    def gpu_came(self, number: int) -> None:
        """A GPU has done what was queued before a slot was handed over."""
        handed = self._handed.pop(number, None)
        if handed is not None:
            self._publish(handed)

    def _publish(self, handed: _Handed) -> None:
        task = self.life.loop.create_task(self._keep_handed(handed))
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)

    async def _keep_handed(self, handed: _Handed) -> None:
        error: Exception | None = None
        try:
            (await self.keep(handed.keeping.key, handed.payload)).close()
        except Exception as failure:  # noqa: BLE001 - it is for whoever looks at the keeping
            error = failure
        except BaseException:  # the loop ends
            error = ClosedError("the event loop ended before this was kept")
            raise
        finally:
            handed.payload = None
            handed.slot.close()
            handed.keeping._end(error)

    async def keep(self, key: bytes, payload: object) -> Kept[Any]:
        """See :meth:`Client.keep`."""
        self._check_keeps()
        packed = self.end.pack(payload)
        if not self._can_keep(packed):
            packed = self._pack_apart(payload)
        if len(packed.payload) > self._payload_nbytes:
            raise self._too_long(packed.payload)
        copied: ClientSlotRecord | None = None
        if packed.copied:
            copied = await self._host_slots.acquire(packed.slot_nbytes, held=False)
        try:
            if copied is not None:
                await self._sending.copy(packed, copied)
            pin = await self._hand_over(key, packed, payload, copied)
        except BaseException:
            if copied is not None and copied.state is ClientSlot.WRITING:
                self._host_slots.give_up(copied)
            raise
        assert pin is not None
        return self._handed_out(pin, Any)

    async def deliver(self, name: bytes, payload: object, slot: Slot | None) -> None:
        """See :meth:`shmring.client.deliveries.Deliveries.deliver`. The slot is left when the engine has the content.

        What is held meanwhile: the slot, or a copy in another one, which is made once.
        """
        self._check_keeps()
        packed = None if slot is None else self.end.pack(payload)
        if packed is None or slot is None or not self._can_keep(packed) or not self._can_give_away(slot, packed):
            packed = self._pack_apart(payload)
        if len(packed.payload) > self._payload_nbytes:
            raise self._too_long(packed.payload)
        if not packed.copied:
            await self._deliver_from(name, packed, payload, None, slot)
            return
        own = self.end.hold(await self._host_slots.acquire(packed.slot_nbytes, held=True), False)
        try:
            await self._sending.copy(packed, own._record)
            await self._deliver_from(name, packed, payload, own._record, own)
        finally:
            own.close()
        if slot is not None:
            slot.close()

    async def _deliver_from(
        self, name: bytes, packed: Packed, payload: object, copied: ClientSlotRecord | None, slot: Slot | None
    ) -> None:
        """Hands a slot over as a delivery when there is room."""
        while True:
            try:
                await self._hand_over(name, packed, payload, copied, for_one=True, slot=slot)
                return
            except WouldBlock:
                if self._ends:
                    raise
            await asyncio.sleep(_ROOM_S)

    def withdraw(self, names: Sequence[bytes]) -> None:
        """Takes deliveries back that nobody has taken: those of these names, or without names all of this client."""
        self.life.check_alive()
        for start in range(0, max(1, len(names)), MAX_WITHDRAWN):
            self._link.send(Withdraw(tuple(names[start : start + MAX_WITHDRAWN])))

    def _check_keeps(self) -> None:
        """Raises an error if the engine keeps nothing more."""
        self.life.check_alive()
        if self._ends or (self._load is not None and self._load.draining):
            raise WouldBlock(_ENDS)

    def _pack_apart(self, payload: object) -> Packed:
        packed = self.end.pack_apart(payload)
        if not packed.copied_nbytes:
            raise ValueError("content that is kept has a tensor in it; there is none in this payload that has bytes")
        return packed

    async def _hand_over(
        self,
        key: bytes,
        packed: Packed,
        payload: object,
        copied: ClientSlotRecord | None,
        *,
        for_one: bool = False,
        slot: Slot | None = None,
    ) -> Pin | None:
        """Hands content over; returns its pin, with one more user. None: it is a delivery.

        Args:
            key, packed, payload: of the content.
            copied: where it was copied to; None: it stays where it is.
            for_one: whether it is a delivery.
            slot: that the delivery lies in, which is left when the engine has it.
        """
        place = await self._send(key, (packed.payload, payload, copied), for_one=for_one, slot=slot)
        try:
            answer = await self._line.stay(place, self._unused)
        finally:
            del place
        if isinstance(answer, NotKept):
            if answer.reason == "large":
                raise self._too_large(packed.slot_nbytes or packed.in_place_nbytes)
            self._ends = self._ends or answer.reason == "ends"
            raise WouldBlock(_WHY_NOT[answer.reason])
        return answer

    def _too_large(self, nbytes: int) -> CapacityError:
        """The error of content that can never be kept: its slot is larger than one of two limits."""
        kept_nbytes, pinned_nbytes = self.life.welcome.kept_nbytes, self.life.welcome.client_pinned_nbytes
        if slot_blocks(nbytes) * BLOCK_NBYTES > kept_nbytes:
            message = f"{nbytes} bytes are more than the {kept_nbytes} that the engine keeps; raise its kept_nbytes"
            return CapacityError(message, needed=nbytes, capacity=kept_nbytes)
        message = (
            f"{nbytes} bytes are more than the {pinned_nbytes} that one client may use of what the engine keeps; raise its "
            "client_pinned_nbytes"
        )
        return CapacityError(message, needed=nbytes, capacity=pinned_nbytes)

    def _handed_out(self, pin: Pin, payload_type: Any, name: bytes | None = None) -> Kept[Any]:
        try:
            return Kept(self, pin, payload_type, name)
        except BaseException:
            self.leave(pin, None)
            raise

    def _can_keep(self, packed: Packed) -> bool:
        """Whether the engine can keep a payload where it lies: in one slot in host memory that it does not keep already."""
        if packed.copied or len(packed.slots) != 1:
            return False
        record: ClientSlotRecord = packed.slots[0]
        return record.is_submittable() and record.lease is not None and record.offset < self.life.welcome.slab_nbytes

    def _can_give_away(self, slot: Slot, packed: Packed) -> bool:
        """Whether a delivery may be the slot itself: it lies there, and no thread may go on writing when the slot was left."""
        return packed.slots[0] is slot._record and not slot._drain

    def _too_long(self, payload: bytes) -> CapacityError:
        message = f"what is kept beside tensors takes {len(payload)} bytes, and has to fit {self._payload_nbytes}"
        return CapacityError(message, needed=len(payload), capacity=self._payload_nbytes)

    async def _send(
        self,
        key: bytes,
        given: tuple[bytes, object, ClientSlotRecord | None] | None,
        *,
        for_one: bool = False,
        slot: Slot | None = None,
    ) -> Place[_Answer]:
        """Looks for content, or hands some over, when that may be. Found content has one more user then.

        Args:
            key: of the content.
            given: its payload as msgpack, the packed payload, and the slot; None: this is a search.
            for_one, slot: as of :meth:`_hand_over`.

        Returns:
            The place of the answer, in line.
        """
        self.life.home.check_loop()
        await self._asking.acquire()  # until the engine has answered, even if the caller no longer waits
        try:
            await self._sending.writable()
            self.life.check_alive()
            token = next(self._tokens)
            record: ClientSlotRecord | None = None
            place: Place[_Answer] | None = None
            if given is None:
                message: Find | Keep = Find(token, key, for_one=for_one)
            else:
                encoded, payload, record = given
                is_copied = record is not None
                if record is None:  # where its tensors are may have changed while this waited
                    packed = self.end.pack(payload)
                    if not self._can_keep(packed):
                        raise WouldBlock("the slot that this lies in was submitted by somebody else meanwhile")
                    encoded, record = packed.payload, packed.slots[0]
                ref = self.end.hand_over(record)
            try:
                if record is not None:
                    message = Keep(
                        token, key, ref.lease_id, ref.offset, ref.nbytes, ref.generation, is_copied, encoded, for_one
                    )
                place = self._line.enter()
                self._answers[token] = _Question(place, key, record, for_one, slot)
                if self._telling is not None:
                    self._tell_left()
                self._link.send(message)
            except BaseException:  # the message was not sent
                self._answers.pop(token, None)
                if place is not None:
                    self._line.pop(place, None)
                    place = None
                if record is not None:
                    self.end.take_back((record.generation,))
                raise
            return place
        except BaseException:
            self._asking.release()
            raise
        finally:
            place = None

    def _unused(self, answer: _Answer) -> None:
        if isinstance(answer, Pin):
            self.leave(answer, None)

    def answered(self, answer: Found | NotKept) -> None:
        """The engine answers.

        Raises:
            RemoteProtocolError: there is no such question, or the answer can't be true.
        """
        if (wait := self._waited.get(answer.token)) is not None:
            self._came(wait, answer)
            return
        question = self._answers.get(answer.token)
        if question is None:
            raise RemoteProtocolError(f"request {answer.token} for kept content is answered, which is not in flight")
        future = question.place
        result: _Answer = None
        if isinstance(answer, NotKept) and answer.reason in (_NOT_FOUND if question.record is None else _NOT_KEPT):
            result = answer
        elif isinstance(answer, NotKept):
            raise RemoteProtocolError(f"request {answer.token} for kept content is answered with {answer.reason!r}")
        elif question.for_one and question.record is not None:
            self._delivered(question.record, question.slot, answer)
        else:
            result = self._pinned(_taken_key(answer) if question.for_one else question.key, answer, question.record)
        del self._answers[answer.token]  # not before: the waiting task gets the error if the answer breaks the rules
        self._asking.release()
        if not future.done():
            future.set_result(result)
        elif isinstance(result, Pin):  # its caller stopped waiting
            self.leave(result, None)

    def _delivered(self, record: ClientSlotRecord, slot: Slot | None, found: Found) -> None:
        """The engine has a delivery of this client.

        Raises:
            RemoteProtocolError: it has something else.
        """
        if (found.generation, found.offset, found.nbytes) != (record.generation, record.offset, record.nbytes):
            raise RemoteProtocolError(f"the engine has slot {found.generation} delivered, and not slot {record.generation}")
        self._host_slots.carry_out(self._host_slots.book.kept(found.generation, self.life.loop.time()))
        record.state = ClientSlot.FREE  # its taker's
        if slot is not None:
            slot.close()

    def _pinned(self, key: bytes, found: Found, record: ClientSlotRecord | None) -> Pin:
        """Content is pinned once more at the engine; returns its pin, with one more user.

        Raises:
            RemoteProtocolError: it can't be what the engine keeps under this key.
        """
        pin = self._pins.get(found.generation)
        is_given = pin is None and record is not None and record.generation == found.generation
        if not (self._is_same(pin, key, found) if pin is not None else self._can_be(key, found, record if is_given else None)):
            raise RemoteProtocolError(
                f"the engine says that it keeps slot {found.generation} at {found.offset} of {found.nbytes} bytes under a key"
            )
        if is_given:
            assert record is not None
            self._host_slots.carry_out(self._host_slots.book.kept(found.generation, self.life.loop.time()))
            pin = Pin(key, found, record, self.end.content_address(record))
            if record.held or record.viewed:  # its caller has not left it, or still views it
                pin.is_slots = record.held
                pin.enter()
        elif pin is None:
            self._open(found)
            record = kept_slot(found)
            pin = Pin(key, found, record, self.end.content_address(record))
        pin.count += 1
        pin.enter()
        if found.generation not in self._pins:
            self._pins[found.generation] = self.end.pinned[key] = pin
            if not pin.is_slots:
                self.end.held.hold(pin.record, pin.address, found.nbytes)
        return pin

    def _is_same(self, pin: Pin, key: bytes, found: Found) -> bool:
        """Whether found content is the content that is pinned already."""
        is_same: bool = pin.key == key and msgspec.structs.replace(found, token=pin.found.token) == pin.found
        return is_same

    def _can_be(self, key: bytes, found: Found, given: ClientSlotRecord | None) -> bool:
        """Whether an engine that keeps to the rules can have found this: another content under no key that is pinned, where
        no lease of ours and nothing else that is pinned lies; or the slot that was given, where that is."""
        if key in self.end.pinned:
            return False
        if given is not None:
            return (found.offset, found.nbytes) == (given.offset, given.nbytes)
        address = self._slab.mapping.address + found.offset + SLOT_HEADER_NBYTES
        start, blocks = found.offset // BLOCK_NBYTES, slot_blocks(found.nbytes)
        last_block = Geometry.LEASABLE_START + self.life.welcome.leasable_nbytes // BLOCK_NBYTES
        is_leasable = not found.offset % BLOCK_NBYTES and start >= Geometry.LEASABLE_START and start + blocks <= last_block
        is_ours = self._host_slots.book.has(start, blocks) or self.end.held.overlaps(address, found.nbytes)
        return is_leasable and not is_ours

    def open(self, pin: Pin) -> KeptContent:
        """Opens a content for one caller's views."""
        return self._open(pin.found)

    def _open(self, found: Found) -> KeptContent:
        return KeptContent(found, self._key_of_regions, self.end.regions, self._slab.mapping, self.life.welcome.max_tensors)

    # -- leaving -------------------------------------------------------------------------------------------------------------

    def leave(self, pin: Pin, content: KeptContent | None) -> None:
        """A caller has left a content.

        Args:
            pin: of it.
            content: that it had opened.
        """
        if self.life.error is not None:
            return
        pin.leave()
        if content is not None and content.leave():
            pin.views += 1
        self._forget_unused(pin)

    def slot_left(self, record: ClientSlotRecord) -> None:
        """The caller of a slot that is kept has left it; it may still view it."""
        pin = self._pins.get(record.generation)
        if pin is None or not pin.is_slots:
            return
        pin.is_slots = False
        if not record.viewed:
            pin.leave()
        self.end.held.hold(record, pin.address, pin.found.nbytes)  # for who holds the content
        self._forget_unused(pin)

    def slot_views_gone(self, record: ClientSlotRecord) -> None:
        """The last view of a slot that is kept, and was left, has died."""
        pin = self._pins[record.generation]
        pin.leave()
        self._forget_unused(pin)

    def views_gone(self, generation: int) -> None:
        """The last view of one caller of a content has died."""
        pin = self._pins[generation]
        pin.views -= 1
        self._forget_unused(pin)

    def _forget_unused(self, pin: Pin) -> None:
        if not self.end.forget_unused(pin):
            return
        try:
            del self._pins[pin.found.generation]
            self.end.held.leave(pin.address)
            pin.record.state = ClientSlot.FREE  # a payload that is about to be sent from there is packed again
            generations = [pin.found.generation] * pin.count
            if len(pin.key) == _TAKEN_KEY_NBYTES:
                self._left_generations += generations
                if self._telling is None:
                    self._telling = self.life.loop.call_later(_TOLD_S, self._tell_left)
            else:
                self._link.send_listed(Unpin, generations)
        except MemoryError as error:
            self._link.fail_soon(error)
            raise

    def _tell_left(self) -> None:
        """Tells the engine which deliveries were left, as is planned."""
        assert self._telling is not None
        self._telling.cancel()
        self._telling = None
        generations, self._left_generations = self._left_generations, []
        self._link.send_listed(Unpin, generations)

    def in_use(self) -> list[int]:
        """The generations of what is pinned, for a goodbye: those that this process may still view.

        This includes content that was handed over and not answered yet: when the engine reads the goodbye, it is kept or was
        refused, and the caller of its slot may still write to it.
        """
        given = [question.record.generation for question in self._answers.values() if question.record is not None]
        return [*self._pins, *given]

    def lose(self) -> list[asyncio.Future[Any]]:
        """The session has ended; returns the futures that tasks wait for."""
        waiting: list[asyncio.Future[Any]] = [question.place for question in self._answers.values()]
        for _ in self._answers:
            self._asking.release()
        if self._telling is not None:
            self._telling.cancel()
        for wait in self._waits.values():
            waiting += wait.line
        for questions in (self._answers, self._waits, self._waited, self._pins, self.end.pinned):
            questions.clear()
        for handed in self._handed.values():
            handed.keeping._end(self.life.fresh_error())
            self.end.held.leave(self.end.content_address(handed.slot._record))  # which has the last tensor that was made there
        self._behind.close(list(self._handed.values()))
        self._handed.clear()
        return waiting
