"""What the engine's own process asks: the real :class:`~shmring.ring.injecting.Injector`, and callers of its requests.

A caller reads what is there, or waits for it in a task. It may give its request up at any time; then its task is cancelled, and
aborts the request, as the integration with Ray does. What is not read makes handlers wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import numpy as np

from shmring.errors import AbortedError, RemoteError, WouldBlock
from shmring.memory.bundles import Bundle, bundle
from shmring.ring.injecting import Injected, Injector
from shmring.ring.ring import Ring
from tests.simulation.loop import SimulatedLoop, require_obeyed
from tests.simulation.payloads import (
    MAX_PAYLOAD_NBYTES,
    MAX_TENSORS,
    MAX_VALUES,
    content_nbytes,
    payload_of,
    require_intact,
)
from tests.simulation.scenario import Action, Kind, Scenario, require


@dataclasses.dataclass(slots=True, eq=False)
class Asked:
    """A request, until its caller has read its end or given it up.

    Attributes:
        request: the product's.
        injector: that it went through.
        reading: the task that waits for what comes.
    """

    request: Injected
    injector: Injector
    reading: asyncio.Task[list[Bundle]] | None = None


class Injecting:
    """The injectors of one life of an engine, and their callers.

    Attributes:
        injectors: that are open.
        asked: requests, in the order in which they were injected.
    """

    def __init__(self, scenario: Scenario, ring: Ring, loop: SimulatedLoop) -> None:
        self.injectors: list[Injector] = []
        self.asked: list[Asked] = []
        self._scenario = scenario
        self._ring = ring
        self._loop = loop

    @property
    def known(self) -> list[Injector]:
        """Those that the ring has, closed ones included."""
        return [each for each in self._ring._shell._frontends.values() if isinstance(each, Injector)]

    # -- what happens --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        with self._loop.running():
            self.injectors.append(self._ring.injector())

    def close(self, index: int) -> None:
        with self._loop.running():
            self.injectors.pop(index).close()

    def inject(self, index: int, blocks: int) -> None:
        injector = self.injectors[index]
        arrays = [np.zeros(content_nbytes(blocks), np.uint8)] if blocks else []
        payload = payload_of(arrays, injector._last_request_id + 1)
        packed = bundle(payload, max_tensors=MAX_TENSORS, max_payload_nbytes=MAX_PAYLOAD_NBYTES, max_values=MAX_VALUES)
        going = sum(asked.injector is injector and not asked.request.ended for asked in self.asked)
        try:
            with self._loop.running():
                request = injector.inject(packed)
        except WouldBlock:
            require(going >= self._scenario.max_inflight, "a request was refused for which there is room")
            return
        require(going < self._scenario.max_inflight, "more requests were injected than may be in flight")
        self.asked.append(Asked(request, injector))

    def read(self, index: int) -> None:
        asked = self.asked[index]
        asked.reading = self._loop.begin(self._read(asked.request))

    @staticmethod
    async def _read(request: Injected) -> list[Bundle]:
        try:
            return await request.read()
        except BaseException:
            request.abort()
            raise

    def give_up(self, index: int) -> None:
        asked = self.asked[index]
        with self._loop.running():
            if asked.reading is not None:
                asked.reading.cancel()
            else:
                self.asked.remove(asked)
                asked.request.abort()

    def follow(self) -> None:
        """Tasks that read may have returned."""
        for asked in [asked for asked in self.asked if asked.reading is not None and asked.reading.done()]:
            assert asked.reading is not None
            task, asked.reading = asked.reading, None
            require_obeyed(task, "caller")
            error = None if task.cancelled() else task.exception()
            if task.cancelled() or error is not None or not task.result():
                self.asked.remove(asked)
                require(task.cancelled() or asked.request.ended, "a request that goes on has an end")
            if isinstance(error, AbortedError):
                require(not asked.injector.connected, "a request was aborted that nobody has aborted")
            elif error is not None and not isinstance(error, RemoteError | TimeoutError):
                raise error
            for reply in [] if task.cancelled() or error is not None else task.result():
                require_intact(reply.open(), asked.request.request_id)

    def check(self) -> None:
        """Unread bytes are those of the replies that lie in requests."""
        for asked in self.asked:
            unread = sum(len(reply.payload) + reply.nbytes for reply in asked.request._replies)
            require(asked.request.unread._nbytes == unread, "unread replies are counted that are not there, or the reverse")

    # -- what can happen -----------------------------------------------------------------------------------------------------

    def enabled(self) -> Iterator[Action]:
        if len(self.known) < self._scenario.injectors:
            yield Action(Kind.INJECTOR)
        for index in range(len(self.injectors)):
            yield Action(Kind.CLOSE_INJECTOR, index)
            if len(self.asked) <= self._scenario.max_inflight:
                yield from (Action(Kind.INJECT, index, blocks) for blocks in (0, 1))
        for index, asked in enumerate(self.asked):
            if asked.reading is None:
                yield Action(Kind.READ_INJECTED, index)
            if asked.reading is None or not asked.reading.cancelling():
                yield Action(Kind.GIVE_UP_INJECTED, index)
