"""The requests of a frontend: every way to send one and to lose interest in it, drawn at random.

Each kind of request is a method of :class:`Load`. It returns when its request has ended, as "answered" or "aborted", or
raises what the client raised; which failures a kind may have is decided in one place, and any other is a violation. No
kind but those about time gives up by itself: a request that is never answered must stay visible as one.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import torch

import shmring
from shmring.client import session
from shmring.core.compiled import ClientBook, ClientEnd, ClientSlotRecord, Packed
from shmring.core.states import ClientSlot
from tests.chaos.cores import waited_ns
from tests.chaos.journal import Aborted, Began, Ended, Journal, Reusable
from tests.chaos.plan import Plan
from tests.fleet import cargo
from tests.fleet.cargo import Answer, CorruptedError, Order
from tests.sessions import session_of

_SMALL_NBYTES = (16, 1000)  # travel inside the message
_USUAL_NBYTES = (2_000, 500_000)
_LARGE_NBYTES = (1 << 20, 4 << 20)
_ONE_IN_LARGE = 20
_REPLY_NBYTES = (16, 200_000)
_UNREAD_NBYTES = (100_000, 1 << 20)  # of a reply that others of its client may have to wait for: a few fill the reserve
_UNREAD_AT_ONCE = (3, 9)  # such requests of one caller
_UNREAD_S = 1.0  # for which a caller reads none of them, at most
_PROBE_NBYTES = 2000  # in a slot
_HOARDED_NBYTES = 300_000  # of a reply: a dozen fill the reserve
_KEYS = 40  # of content that is kept, for all frontends; more than fits
_PIECE_NBYTES = 100_000  # written at a time into a slot, so that faults happen in the middle

Outcome = str

_Told = TypeVar("_Told")


class _Wait:
    """Since when the caller of a request has waited for what its client tells it."""

    def __init__(self) -> None:
        self.since_ns = time.monotonic_ns()


_WAIT: ContextVar[_Wait] = ContextVar("_WAIT")


class _ObservedEnd(ClientEnd):
    """Remembers which slots each request in flight has, and says when the engine has released some."""

    observe: Callable[[ClientBook, Collection[int]], None]  # with their generations

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.slots_of: dict[int, list[ClientSlotRecord]] = {}

    def send(self, packed: Packed, slot: ClientSlotRecord | None, stream: object) -> Any:
        submission = super().send(packed, slot, stream)
        if submission is not None:
            self.slots_of[submission.request_id] = [*packed.slots] if slot is None else [*packed.slots, slot]
        return submission

    def forget(self, request_id: int) -> Any:
        """The request has ended, mostly together with its slots."""
        slots = self.slots_of.pop(request_id, [])
        self.observe(self.book, [slot.generation for slot in slots if slot.state is not ClientSlot.SUBMITTED])
        return super().forget(request_id)

    def take_back(self, released: tuple[int, ...]) -> None:
        """Slots come without the end of a request."""
        super().take_back(released)
        self.observe(self.book, released)


class Load:
    """What a frontend sends, and what became of it.

    Args:
        plan: of the run.
        chance: draws everything.
        journal: where it is written down.
        socket_dir: where the locks of the engines' names are.

    Attributes:
        client: the connection; requests wait where it waits.
        unfinished: numbers of requests without an end.
        floods: how many floods are going on; if any, only large requests are sent.
        closing: whether the client is being closed in the middle of its requests.
    """

    def __init__(self, plan: Plan, chance: random.Random, journal: Journal, socket_dir: Path) -> None:
        self._socket_dir = socket_dir
        self._plan = plan
        self._chance = chance
        self._journal = journal
        self._source = cargo.Source(chance)
        self._pid = os.getpid()
        self._number = 0
        self._stormed: set[int] = set()
        self._waiting_for_release: dict[tuple[ClientBook, int], tuple[int, str]] = {}  # to the request and its engine
        self.client: shmring.Client | None = None
        self.unfinished: set[int] = set()
        self.floods = 0
        self.closing = False
        self._kinds: dict[str, tuple[int, Callable[[int], Awaitable[Outcome]]]] = {
            "copied": (20, self._copied),
            "in place": (20, self._in_place),
            "in place, twice": (6, self._in_place_twice),
            "inline": (8, self._inline),
            "kept": (14, self._kept),
            "read in any order": (4, self._in_any_order),
            "not read": (3, self._not_read),
            "stream": (10, self._stream),
            "stream left early": (8, self._stream_left),
            "aborted": (14, self._aborted),
            "cancelled": (8, self._cancelled),
            "deadline of the caller": (5, self._deadline),
            "deadline of the engine": (3, self._timed_out),
            "failing": (3, self._failing),
        }

    async def one(self) -> None:
        """Sends one request, and sees it to its end."""
        self._number = number = self._number + 1
        kind = self._chance.choices(list(self._kinds), [weight for weight, _ in self._kinds.values()])[0]
        if self._corrupts(number):
            kind = "in place"  # the one that can; a slow machine's short run might draw none
        await self._seen_out(kind, number, self._kinds[kind][1])

    async def probe(self, engine: str) -> None:
        """Sends an engine a small request in a slot, and sees it to its end."""
        self._number = number = self._number + 1
        await self._seen_out("probe", number, lambda number: self._probed(number, engine))

    async def hoarded(self, engine: str, sent: asyncio.Event, reads: asyncio.Event) -> None:
        """Sends an engine a request, says so, and reads its large reply when somebody says so."""
        self._number = number = self._number + 1
        try:
            await self._seen_out("hoarded", number, lambda number: self._hoarded(number, engine, sent, reads))
        finally:
            sent.set()

    async def _seen_out(self, kind: str, number: int, send: Callable[[int], Awaitable[Outcome]]) -> None:
        self.unfinished.add(number)
        wait = _Wait()
        _WAIT.set(wait)
        self._journal.write(Began(number, kind, wait.since_ns))
        outcome = await self._outcome(kind, number, send)
        self._journal.write(Ended(number, outcome, time.monotonic_ns(), wait.since_ns))
        self.unfinished.discard(number)
        self._stormed.discard(number)

    async def _outcome(self, kind: str, number: int, send: Callable[[int], Awaitable[Outcome]]) -> Outcome:
        try:
            if self._plan.sabotage == "lose" and number % 20 == 7 and kind in self._kinds:
                await asyncio.Event().wait()
            return await send(number)
        except CorruptedError as error:
            self._journal.wrong("corrupted", str(error))
            return "CorruptedError"
        except (shmring.ShmringError, TimeoutError) as error:
            if isinstance(error, shmring.AbortedError) and (number in self._stormed or kind == "aborted"):
                return "aborted"
            if isinstance(error, shmring.EngineDeadError):
                waiting = self._waiting_for_release  # the memory has gone with its engine
                self._waiting_for_release = {key: of for key, of in waiting.items() if of[1] != error.engine}
            name = type(error).__name__
            if not self._is_expected(kind, error):
                self._journal.wrong("violation", f"request {number} ({kind}) of process {self._pid} failed: {name}: {error}")
            return name

    def _corrupts(self, number: int) -> bool:
        return self._plan.sabotage == "corrupt" and number % 3 == 0

    def _is_expected(self, kind: str, error: Exception) -> bool:
        match error:
            case shmring.EngineDeadError():
                return True  # whether an engine has died is for the driver to know
            case TimeoutError():
                return kind in ("deadline of the caller", "deadline of the engine")
            case shmring.RemoteError():
                return kind == "failing" and error.type_name == "PlannedFailure"
            case shmring.ClosedError():
                return self.closing
        return False

    # -- drawing ---------------------------------------------------------------------------------------------------------

    def _between(self, bounds: tuple[int, int]) -> int:
        """A size between two others, each order of magnitude as likely as the next."""
        low, high = bounds
        return int(low * (high / low) ** self._chance.random())

    def _nbytes(self) -> int:
        large = self.floods > 0 or self._chance.randrange(_ONE_IN_LARGE) == 0
        return self._between(_LARGE_NBYTES if large else _USUAL_NBYTES)

    def _order(self, number: int, tensor: torch.Tensor, checksum: int, **changes: Any) -> Order:
        chance = self._chance
        # In a flood memory is held for long, rather than passed on fast: what is to be full is the slab, not the cores.
        work_s = chance.uniform(0.1, 0.5) if self.floods else chance.uniform(0, 0.15 if chance.randrange(10) == 0 else 0.02)
        order = Order(
            sender=self._pid,
            number=number,
            checksum=checksum,
            tensor=tensor,
            work_s=work_s,
            on_thread=chance.randrange(7) == 0,
            keep_s=chance.uniform(0.001, 0.1) if chance.randrange(10) == 0 else 0.0,
            reply_nbytes=self._between(_REPLY_NBYTES),
        )
        for name, value in changes.items():
            setattr(order, name, value)
        return order

    async def _drawn(self, number: int, **changes: Any) -> Order:
        """An order whose tensor is copied when it is sent."""
        return self._order(number, *await asyncio.to_thread(self._source.content, number, self._nbytes()), **changes)

    async def _checked(self, number: int, index: int, answer: Answer) -> None:
        """Checks a reply, sometimes keeps it for a while, and checks it again."""
        when = f"in reply {index} to request {number} of process {self._pid}"
        if (answer.number, answer.index) != (number, index):
            raise CorruptedError(f"reply {answer.index} to request {answer.number} came {when}")
        # Replies are numbered by the engine; the number at the start of one is of no interest here.
        cargo.check(answer.tensor, number, answer.checksum, when)
        if self._chance.randrange(4) == 0:
            await asyncio.sleep(self._chance.uniform(0, 0.03))
            cargo.check(answer.tensor, number, answer.checksum, f"{when}, later")

    # -- requests that are seen to their end -------------------------------------------------------------------------------

    async def _told(self, awaitable: Awaitable[_Told]) -> _Told:
        """Waits for what a client tells."""
        _WAIT.get().since_ns = time.monotonic_ns()
        return await awaitable

    @property
    def _connected(self) -> shmring.Client:
        assert self.client is not None, "requests are sent while there is a client"
        return self.client

    async def _request(self, order: Order) -> Outcome:
        options: dict[str, Any] = {"retry": self._chance.randrange(3), "key": self._key()}
        order.sends = 1 + options["retry"]
        request = self._connected.request(order, reply_type=Answer, request_id=str(order.number), **options)
        answer = await self._told(request)
        await self._checked(order.number, 0, answer)
        return "answered"

    def _key(self) -> str | None:
        """Every third request is of a session."""
        return f"session-{self._chance.randrange(8)}" if self._chance.randrange(3) == 0 else None

    async def _copied(self, number: int) -> Outcome:
        return await self._request(await self._drawn(number))

    async def _inline(self, number: int) -> Outcome:
        return await self._request(self._order(number, *self._source.content(number, self._between(_SMALL_NBYTES))))

    async def _probed(self, number: int, engine: str) -> Outcome:
        order = self._order(number, *self._source.content(number, _PROBE_NBYTES), work_s=0.0, on_thread=False)
        answer = await self._told(self._connected.request(order, reply_type=Answer, request_id=str(number), engine=engine))
        await self._checked(number, 0, answer)
        return "answered"

    async def _hoarded(self, number: int, engine: str, sent: asyncio.Event, reads: asyncio.Event) -> Outcome:
        changes: dict[str, Any] = {"work_s": 0.0, "on_thread": False, "keep_s": 0.0, "reply_nbytes": _HOARDED_NBYTES}
        order = self._order(number, *self._source.content(number, _SMALL_NBYTES[0]), **changes)
        submission = await self._told(self._connected.submit(order, request_id=str(number), engine=engine))
        sent.set()
        await reads.wait()
        await self._checked(number, 0, await self._told(submission.result(Answer)))
        return "answered"

    async def _failing(self, number: int) -> Outcome:
        return await self._request(await self._drawn(number, fate="fail"))

    async def _timed_out(self, number: int) -> Outcome:
        return await self._request(await self._drawn(number, fate="time out"))

    @asynccontextmanager
    async def _written(self, number: int) -> AsyncIterator[tuple[torch.Tensor, int]]:
        """A slot with a content, written piece by piece."""
        content, checksum = await asyncio.to_thread(self._source.content, number, self._nbytes())
        with await self._told(self._connected.slot(content.numel(), key=self._key())) as slot:
            view = slot.tensor((content.numel(),), torch.uint8)
            for start in range(0, content.numel(), _PIECE_NBYTES):
                view[start : start + _PIECE_NBYTES] = content[start : start + _PIECE_NBYTES]
                await asyncio.sleep(0)
            if self._chance.randrange(8) == 0:
                await asyncio.sleep(self._chance.uniform(0, 0.05))
            yield view, checksum

    async def _in_place(self, number: int) -> Outcome:
        async with self._written(number) as (view, checksum):
            order = self._order(number, view, checksum)
            submission = await self._told(self._connected.submit(order, request_id=str(number)))
            if self._corrupts(number):
                view[-1] ^= 1
            try:
                answer = await self._told(submission.result(Answer))
            except BaseException:
                submission.abort()
                raise
            await self._checked(number, 0, answer)
            if self._plan.sabotage != "corrupt":
                await cargo.check_aside(view, number, checksum, f"in the slot of process {self._pid} that it still has")
        return "answered"

    async def _in_place_twice(self, number: int) -> Outcome:
        async with self._written(number) as (view, checksum):
            await self._request(self._order(number, view, checksum))
            # The same content under another number, which the engine has not seen. Its start is the first's.
            self._number = again = self._number + 1
            return await self._request(self._order(again, view, checksum))

    async def _kept(self, number: int) -> Outcome:
        """Sends content that some frontend has given to keep, or gives some; it must be what it was, whoever gave it."""
        client = self._connected
        key = self._chance.randrange(_KEYS).to_bytes(32, "little")
        try:
            kept = await self._told(client.find(key))
            if kept is None and self._chance.randrange(2):
                async with self._written(number) as (view, checksum):
                    kept = await self._told(client.keep(key, {"checksum": checksum, "tensor": view}))
            elif kept is None:
                content, checksum = await asyncio.to_thread(self._source.content, number, self._nbytes())
                kept = await self._told(client.keep(key, {"checksum": checksum, "tensor": content}))
        except shmring.WouldBlock:  # too much is pinned, or somebody waits for the memory
            return await self._copied(number)
        with kept:
            tensor, checksum = kept.payload["tensor"], kept.payload["checksum"]
            outcome = await self._request(self._order(number, tensor, checksum))
            await cargo.check_aside(tensor, number, checksum, f"in what is kept, as process {self._pid} sees it")
            del tensor
        return outcome

    @asynccontextmanager
    async def _several(self, number: int) -> AsyncIterator[list[tuple[int, shmring.Submission]]]:
        """Several requests with large replies, and the numbers that these carry; what is not read is given up afterwards."""
        submissions: list[tuple[int, shmring.Submission]] = []
        try:
            for _ in range(self._chance.randrange(*_UNREAD_AT_ONCE)):
                order = await self._drawn(number, reply_nbytes=self._between(_UNREAD_NBYTES))
                name = str(submissions[0][0] if submissions else number)
                submission = await self._told(self._connected.submit(order, request_id=name))
                submissions.append((number, submission))
                self._number = number = self._number + 1
            yield submissions
        finally:
            for _, submission in submissions:
                submission.abort()

    async def _in_any_order(self, number: int) -> Outcome:
        """Reads the replies to several requests in any order, and mostly beginning with the last."""
        async with self._several(number) as submissions:
            submissions.reverse()
            if self._chance.randrange(3) == 0:
                self._chance.shuffle(submissions)
            for sent, submission in submissions:
                await self._checked(sent, 0, await self._told(submission.result(Answer)))
        return "answered"

    async def _not_read(self, number: int) -> Outcome:
        """Reads none of the replies to several requests for a while, and then the last one, or none."""
        async with self._several(number) as submissions:
            await asyncio.sleep(self._chance.uniform(0, _UNREAD_S))
            if self._chance.randrange(2):
                return "aborted"
            sent, submission = submissions[-1]
            await self._checked(sent, 0, await self._told(submission.result(Answer)))
        return "answered"

    async def _stream(self, number: int) -> Outcome:
        order = await self._drawn(number, replies=self._chance.randrange(0, 12))
        index = 0
        stream = self._connected.stream(order, reply_type=Answer, request_id=str(number), key=self._key())
        while (answer := await self._told(anext(stream, None))) is not None:
            await self._checked(number, index, answer)
            index += 1
        if index != order.replies:
            raise CorruptedError(f"{index} of {order.replies} replies came to request {number} of process {self._pid}")
        return "answered"

    # -- requests that are given up ------------------------------------------------------------------------------------------

    async def _stream_left(self, number: int) -> Outcome:
        order = await self._drawn(number, replies=12)
        stream = self._connected.stream(order, reply_type=Answer, request_id=str(number))
        try:
            for index in range(self._chance.randrange(1, 6)):
                await self._checked(number, index, await self._told(anext(stream)))
        finally:
            await stream.aclose()
        return "aborted"

    async def _cancelled(self, number: int) -> Outcome:
        order = await self._drawn(number)
        task = asyncio.create_task(self._request(order))
        await asyncio.wait([task], timeout=self._chance.uniform(0, 0.03))
        task.cancel()
        await asyncio.wait([task])
        return "aborted" if task.cancelled() else task.result()

    async def _deadline(self, number: int) -> Outcome:
        order = await self._drawn(number, work_s=0.05)
        options: dict[str, Any] = {"timeout": self._chance.uniform(0.001, 0.06)}
        answer = await self._told(self._connected.request(order, reply_type=Answer, request_id=str(number), **options))
        await self._checked(number, 0, answer)
        return "answered"

    async def _aborted(self, number: int) -> Outcome:
        """Aborts a request that the engine has, and waits for its memory: the time that takes is measured."""
        submission = await self._told(self._connected.submit(await self._drawn(number), request_id=str(number)))
        await asyncio.sleep(self._chance.uniform(0, 0.03))
        if submission.ended:
            answer = await self._told(submission.result(Answer))
            await self._checked(number, 0, answer)
            return "answered"
        end: _ObservedEnd = submission._end  # type: ignore[assignment] # since observe_releases()
        book = end.book
        held = [record.generation for record in end.slots_of[submission.request_id] if record.state is ClientSlot.SUBMITTED]
        self._waiting_for_release.update(((book, generation), (number, submission.engine)) for generation in held)
        if held:
            engine_pid = self._engine_pid(submission.engine)
            self._journal.write(Aborted(number, time.monotonic_ns(), waited_ns(self._pid), waited_ns(engine_pid)))
        submission.abort()
        return "aborted"

    def _engine_pid(self, engine: str) -> int:
        """An engine's pid, which it has written into its lock."""
        pid, *_ = (self._socket_dir / f"{engine}.lock").read_text().split() or ["0"]
        return int(pid)

    def storm(self) -> None:
        """Aborts whatever is in flight."""
        if self.client is not None:
            self._stormed |= self.unfinished
            self.client.abort([str(number) for number in self.unfinished])

    def observe_releases(self) -> None:
        """From now on, writes down when the slots of aborted requests are this process's again."""

        class ObservedEnd(_ObservedEnd):
            observe = staticmethod(self._released)

        assert "ClientEnd" in vars(session), "sessions have no such end: nothing would be observed"
        vars(session)["ClientEnd"] = ObservedEnd  # whose ends are made from now on

    def _released(self, book: ClientBook, generations: Collection[int]) -> None:
        for generation in generations:
            waiting = self._waiting_for_release.pop((book, generation), None)
            if waiting is not None:
                number, engine = waiting
                now_ns = time.monotonic_ns()
                self._journal.write(Reusable(number, now_ns, waited_ns(self._pid), waited_ns(self._engine_pid(engine))))

    def check_book(self) -> None:
        """Checks the client's own books."""
        for engine in () if self.client is None else self.client.engines.values():
            if self.client is None or not engine.connected:
                continue
            try:
                session_of(self.client, engine.name).host_slots.book.check()
            except AssertionError as error:
                self._journal.wrong("violation", f"the book of process {self._pid} for {engine.name}: {error}")
