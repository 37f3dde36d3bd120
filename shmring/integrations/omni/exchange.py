"""A connector's client of the store, for the threads of a stage: puts, takes, and waits until something comes.

Theory of operation: the client lives in the loop of a thread of its own. What a stage asks for is asked of the store once
(:class:`_Want`), and the loop takes what comes in the moment in which it comes, so that a thread that looks for it finds it
here. Threads share a condition with the loop; nobody holds its lock while waiting for anything else.

vLLM-Omni's loops ask for each chunk that they wait for, again and again, with a pause of a millisecond. They are let in at
once, but for the time when a whole round has brought nothing: then one call waits until anything comes, for some milliseconds,
and longer while nothing comes and nothing new is asked for. A request that is new to the stage waits for that call. So a chunk
is seen when it comes, and a loop that has nothing to do costs little. The first call for a name waits for the store's answer,
whether it is there.

A store that has ended is started anew if the settings say so. What was in it is gone, and whoever waits for that asks again.

Invariant: a want is in ``_wants`` until its frame or error was taken, or nobody asks for it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Self

import torch

import shmring
from shmring.client.deliveries import Deliveries
from shmring.client.slot import Slot
from shmring.core.loggers import logger_of
from shmring.errors import ClosedError
from shmring.integrations.omni.frames import Frame
from shmring.integrations.omni.settings import Settings
from shmring.integrations.omni.views import SMALL_NBYTES
from shmring.threads.loop_thread import LoopThread

__all__ = ["Exchange"]

logger = logger_of("vllm_omni.shmring")

_CONNECT_S = 10.0  # a store that is there answers in milliseconds; on a machine where models are loaded, later
_ANSWER_S = 0.25  # the same, for what is asked of it: the loop that asks goes on without an answer, and asks again
_LONGER, _LONGEST = 1.1, 50.0  # a wait in vain makes the next one longer: in a second, from 2 ms to 100
_IN_LOOP_NBYTES = 4 << 20  # is copied by the loop's thread: that takes less than a second call would
_CLOSE_S = 2.0  # for taking back what was not taken; a store that does not answer drops it by itself

#: Who wants something asks for it all the time. What nobody has asked for so long is left; what has come stays for longer, as a
#: scheduler may be busy with what came before.
_ASKED_S = 30.0
_CAME_S = 600.0
_LOOK_S = 10.0


class _Want:
    """What was asked of the store. The condition's lock guards it.

    Attributes:
        asked_s: until when a thread asks for it: the time of its last call, or a later one until which it waits.
        is_answered: whether the store has said that it is there, or is not.
        frame, error: what came; one of them.
        task: takes it, in the loop.
        is_left: whether it was taken, or nobody wants it any more: another call asks anew.
    """

    __slots__ = ("asked_s", "error", "frame", "is_answered", "is_left", "task")

    def __init__(self) -> None:
        self.asked_s = time.monotonic()
        self.is_answered = self.is_left = False
        self.frame: torch.Tensor | None = None
        self.error: Exception | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        return self.frame is not None or self.error is not None


class _InLoop:
    """The part that lives in the loop."""

    def __init__(self, settings: Settings, client: shmring.Client, forget: Callable[[], None]) -> None:
        self.client = client
        self._settings = settings
        self._deliveries = Deliveries(client)
        self._has_delivered = False
        self._starting: asyncio.Task[None] | None = None
        self._forgetting = asyncio.get_running_loop().create_task(self._forget_in_time(forget))

    @classmethod
    async def open(cls, settings: Settings, description: str, forget: Callable[[], None]) -> Self:
        if settings.start:
            await _start_store(settings)
        client = await shmring.connect(
            settings.store,
            reconnect=True,
            description=description,
            socket_dir=settings.socket_dir,
            connect_timeout_s=_CONNECT_S,
        )
        return cls(settings, client, forget)

    async def put(self, name: bytes, frame: Frame) -> None:
        """Writes a frame and delivers it, in one call: the loop is busy meanwhile."""
        slot = await self.slot(frame.nbytes)
        try:
            memory = slot.tensor((frame.nbytes,), torch.uint8)
            frame.write_to(memory)
            await self.deliver(name, memory, slot)
        finally:
            slot.close()

    async def slot(self, nbytes: int) -> Slot:
        self._look_for_store()
        return await self.client.slot(nbytes, timeout=self._settings.wait_s)

    async def deliver(self, name: bytes, frame: torch.Tensor, slot: Slot) -> None:
        self._look_for_store()
        self._has_delivered = True
        await self._deliveries.deliver(name, {"frame": frame}, timeout=self._settings.wait_s, slot=slot)

    async def withdraw(self, names: Collection[bytes]) -> None:
        if self._has_delivered and self.client.connected:
            async with asyncio.timeout(_CLOSE_S):
                await self._deliveries.withdraw(*names)

    async def take(self, name: bytes, absent: Callable[[], object] | None) -> torch.Tensor:
        self._look_for_store()
        with await self._deliveries.take(name, absent=absent) as taken:
            frame: torch.Tensor = taken.payload["frame"]
            # A large one keeps its memory. Many small ones would keep as many contents of the store, until whoever knows when.
            # So they are copied, and what is left has no view: it goes back in this turn of the loop.
            if frame.nbytes <= SMALL_NBYTES:
                frame = frame.clone()
            return frame

    def _look_for_store(self) -> None:
        """Has the store started anew, if it is gone. Calls wait for it meanwhile."""
        if self._settings.start and not self.client.connected and (self._starting is None or self._starting.done()):
            self._starting = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> None:
        try:
            await _start_store(self._settings)
        except Exception as error:  # noqa: BLE001 - whoever waits for it gets a TimeoutError; this says why
            logger.warning("shmring: the store %s does not start again: %s", self._settings.store, error)

    async def _forget_in_time(self, forget: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            forget()

    async def close(self) -> None:
        self._forgetting.cancel()
        if self._starting is not None:
            self._starting.cancel()
        with contextlib.suppress(shmring.ShmringError, TimeoutError):
            await self.withdraw([])
        await self.client.close()


async def _start_store(settings: Settings) -> None:
    await shmring.start_store(settings.store, slab_nbytes=settings.slab_nbytes, socket_dir=settings.socket_dir)


class Exchange:
    """What one connector puts and takes, from any thread.

    Args:
        settings: of the connector.
        description: what the store's log calls this process.

    Raises:
        EngineDeadError: there is no such store, or it did not start.
        RemoteProtocolError: what has this name speaks another version of the protocol.
        TimeoutError, PermissionError, SlabError, OSError: it can't be used.
    """

    def __init__(self, settings: Settings, description: str) -> None:
        self._settings = settings
        self._changed = threading.Condition()
        self._wants: dict[bytes, _Want] = {}
        self._polled: set[bytes] = set()  # in this round, in vain
        self._arrivals = 0
        self._pause_s = settings.poll_wait_s
        self._is_closed = False
        self._thread = LoopThread(f"this connector to the store {settings.store!r}", functools.partial(self._open, description))
        self._thread.open()

    async def _open(self, description: str) -> _InLoop:
        self._end = await _InLoop.open(self._settings, description, self._forget_old)
        return self._end

    @property
    def is_connected(self) -> bool:
        """Whether the store is reached."""
        return self._thread.is_open and self._end.client.connected

    @property
    def kept_nbytes(self) -> int:
        """How much content the store may have at a time; 0: it is not reached."""
        return self._end.client.kept_nbytes

    @property
    def waiting(self) -> int:
        """How many names were asked for, and have not come or were not taken."""
        return len(self._wants)

    # -- putting -----------------------------------------------------------------------------------------------------------

    def put(self, name: bytes, frame: Frame) -> None:
        """Delivers a frame: when this returns, it can be taken, also if this process dies. Its tensors are copied once.

        Raises:
            TimeoutError: there was no room in time, or no store.
            CapacityError: it can never fit.
            EngineDeadError: the store has ended meanwhile.
            ClosedError: this is closed.
        """
        if frame.nbytes <= _IN_LOOP_NBYTES and not frame.is_on_gpu:
            self._thread.call(self._end.put, name, frame)
            return
        slot: Slot = self._thread.call(self._end.slot, frame.nbytes, undo=Slot.close)
        try:
            memory = slot.tensor((frame.nbytes,), torch.uint8)
            frame.write_to(memory)  # in this thread: the loop goes on
            self._thread.call(self._end.deliver, name, memory, slot)
        except BaseException:
            self._thread.post(slot.close)
            raise

    def withdraw(self, names: Collection[bytes]) -> None:
        """Takes back what nobody has taken. When this returns, a name may be used anew.

        Raises:
            TimeoutError, EngineDeadError, ClosedError: the store has gone, and what lay in it with it.
        """
        if names:
            self._thread.call(self._end.withdraw, names)

    # -- taking ------------------------------------------------------------------------------------------------------------

    def get(self, name: bytes, until_s: float | None = None) -> torch.Tensor | None:
        """Takes what was delivered under a name.

        Args:
            name: which.
            until_s: until when it is waited for, by ``time.monotonic``. None: for a loop that asks again and again; see the
                head of this file.

        Returns:
            The frame: a view of the store's memory, or if it is small, a copy; None: it has not come.

        Raises:
            ShmringError: the store has ended, say. Another call asks anew.
        """
        with self._changed:
            if self._is_closed:
                return None
            want = self._wants.get(name)
            is_new = want is None
            if want is None:
                want = self._wants[name] = _Want()
                self._pause_s = self._settings.poll_wait_s
                self._thread.post(self._ask, name, want, until_s is None)
            if until_s is not None:
                want.asked_s = max(want.asked_s, until_s)
            self._wait_for(name, want, until_s, is_new)
            if want.is_left:  # meanwhile: another thread has taken it, or nobody asks for it any more
                return None
            want.asked_s = max(want.asked_s, time.monotonic())
            if not want.is_over:
                self._polled.add(name)
                return None
            self._forget(name, want)
        if want.error is not None:
            raise want.error
        return want.frame

    def _wait_for(self, name: bytes, want: _Want, until_s: float | None, is_new: bool) -> None:
        """Waits as long as a caller may, with the lock of the condition given up."""
        if want.is_over:
            return
        if until_s is not None:
            self._changed.wait_for(lambda: want.is_over or want.is_left, max(0.0, until_s - time.monotonic()))
        elif is_new and self._end.client.connected:
            self._changed.wait_for(lambda: want.is_answered or want.is_left, _ANSWER_S)
        elif name in self._polled:
            self._polled.clear()
            arrivals = self._arrivals
            least_s = self._settings.poll_wait_s
            if self._changed.wait_for(lambda: self._arrivals != arrivals or self._is_closed, self._pause_s):
                self._pause_s = least_s
            else:
                self._pause_s = min(self._pause_s * _LONGER, least_s * _LONGEST)

    def abandon(self, names: Collection[bytes]) -> None:
        """Nobody asks for these any more. What has come is dropped."""
        with self._changed:
            for name in names:
                if (want := self._wants.get(name)) is not None:
                    self._leave(name, want)

    def _forget(self, name: bytes, want: _Want) -> None:
        del self._wants[name]
        self._polled.discard(name)
        want.is_left = True

    def _leave(self, name: bytes, want: _Want) -> None:
        self._forget(name, want)
        want.frame = None
        self._changed.notify_all()
        self._thread.post(_cancel, want)

    # -- in the loop -------------------------------------------------------------------------------------------------------

    def _ask(self, name: bytes, want: _Want, tells: bool) -> None:
        if not want.is_left:
            want.task = asyncio.get_running_loop().create_task(self._take(name, want, tells))

    async def _take(self, name: bytes, want: _Want, tells: bool) -> None:
        frame: torch.Tensor | None = None
        error: Exception | None = None
        try:
            frame = await self._end.take(name, functools.partial(self._answered, want) if tells else None)
        except Exception as failure:  # noqa: BLE001 - it is raised where this is asked for
            error = failure
        with self._changed:
            if not want.is_left:
                want.frame, want.error = frame, error
                want.is_answered = True
                self._arrivals += 1
                self._changed.notify_all()

    def _answered(self, want: _Want) -> None:
        """The store says that it is not there yet."""
        with self._changed:
            want.is_answered = True
            self._changed.notify_all()

    def _forget_old(self) -> None:
        """Leaves what nobody asks for."""
        now_s = time.monotonic()
        with self._changed:
            for name, want in list(self._wants.items()):
                if now_s - want.asked_s > (_CAME_S if want.is_over else _ASKED_S):
                    self._leave(name, want)

    def close(self) -> None:
        """Takes back what nobody has taken, and disconnects. Threads that wait go on at once. Twice is once."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            for name, want in list(self._wants.items()):
                self._leave(name, want)
            self._changed.notify_all()
        with contextlib.suppress(ClosedError):
            self._thread.close()


def _cancel(want: Any) -> None:
    if want.task is not None:
        want.task.cancel()
