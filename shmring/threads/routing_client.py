"""A frontend's end of several engines without an event loop: what :class:`shmring.RoutingClient` is to asyncio programs."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from typing import Any

from shmring.client.routing import EngineLoad, Route
from shmring.client.routing_client import RoutingClient as RoutingClientInLoop
from shmring.client.routing_client import check_retry
from shmring.config import ClientConfig
from shmring.errors import EngineDeadError
from shmring.statistics import ClientStatistics
from shmring.threads.client import BlockingClient, Kept, Slot, Submission
from shmring.threads.loop_thread import within

__all__ = ["RoutingClient"]


class RoutingClient(BlockingClient[RoutingClientInLoop]):
    """A frontend's end of several engines, for any thread. Made by :func:`shmring.threads.connect` from a list of names.

    Attributes:
        names: of the engines.
        config: as configured, for each of them.
    """

    def __init__(self, names: Sequence[str], config: ClientConfig, route: Route, reconnect: bool, description: str) -> None:
        """Opens it; see :func:`shmring.threads.connect`."""
        self.names = tuple(names)
        self._resent_streams = 0
        self._counting = threading.Lock()
        super().__init__(
            " or ".join(map(repr, names)),
            config,
            lambda: RoutingClientInLoop.create(names, config, route=route, reconnect=reconnect, description=description),
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    def request(
        self,
        payload: object,
        *,
        timeout: float | None = None,
        reply_type: Any = Any,
        request_id: str = "",
        key: str | bytes | None = None,
        engine: str | None = None,
        retry: int = 0,
    ) -> Any:
        """Sends a payload to one of the engines and waits for its one reply. A thread that is interrupted meanwhile aborts it.

        Args:
            payload, timeout, reply_type, request_id: as of :meth:`Client.request`.
            key, engine, retry: as of :meth:`shmring.RoutingClient.request`.

        Raises:
            ShmringError, TimeoutError, TypeError, ValueError: as of both.
        """
        where = {"key": key, "engine": engine, "retry": retry}
        return self._thread.call(self._request, payload, timeout, reply_type, request_id, where)

    def stream(
        self,
        payload: object,
        *,
        timeout: float | None = None,
        reply_type: Any = Any,
        request_id: str = "",
        key: str | bytes | None = None,
        engine: str | None = None,
        retry: int = 0,
    ) -> Generator[Any, None, None]:
        """Sends a payload and yields its replies as they come. Leaving the loop early aborts the request.

        Arguments and errors are those of :meth:`request`; ``timeout`` ends with the last reply, and does not interrupt what the
        caller does between two replies.
        """
        check_retry(retry, engine)
        deadline = None if timeout is None else time.monotonic() + timeout

        def left_s() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        while True:
            submission = self.submit(payload, timeout=left_s(), request_id=request_id, key=key, engine=engine)
            try:
                while True:
                    try:
                        reply = [submission.next(reply_type, timeout=left_s())]
                    except StopIteration:
                        return
                    except EngineDeadError:
                        if not retry or submission.has_replied:
                            raise
                        retry -= 1
                        with self._counting:
                            self._resent_streams += 1
                        break
                    yield reply.pop()  # or this frame would keep the reply's slot for as long as the caller takes
            finally:
                submission.abort()

    def submit(
        self,
        payload: object,
        *,
        timeout: float | None = None,
        request_id: str = "",
        key: str | bytes | None = None,
        engine: str | None = None,
    ) -> Submission:
        """Sends a payload, and returns when it is an engine's: the first half of :meth:`request`. Its ``engine`` says whose.

        Arguments and errors are those of :meth:`request`; ``timeout`` is for space and for an engine.
        """
        return self._submit_blocking(payload, timeout, request_id, {"key": key, "engine": engine})

    def submit_nowait(
        self,
        payload: object,
        *,
        request_id: str = "",
        ask: bool = True,
        key: str | bytes | None = None,
        engine: str | None = None,
    ) -> Submission:
        """The same if an engine has space now and takes it; this waits for the copy only.

        Args:
            payload, request_id, ask: as of :meth:`Client.submit_nowait`.
            key, engine: as of :meth:`request`.

        Raises:
            ShmringError, TypeError, ValueError: as there.
        """
        where = {"key": key, "engine": engine}
        submission: Submission = self._thread.call(self._submit_nowait, payload, request_id, ask, where, undo=Submission.abort)
        return submission

    def call(self, method: str, *arguments: object, engine: str, timeout: float | None = None) -> Any:
        """Calls a control method of one engine and returns its result.

        Raises:
            ValueError: there is no such engine.
            RemoteError, TimeoutError, EngineDeadError, ClosedError, LocalProtocolError: as :meth:`Client.call`.
        """
        return self._thread.call(self._call, method, arguments, timeout, {"engine": engine})

    # -- slots ---------------------------------------------------------------------------------------------------------

    def slot(
        self,
        nbytes: int,
        *,
        timeout: float | None = None,
        drain: bool = False,
        key: str | bytes | None = None,
        engine: str | None = None,
    ) -> Slot:
        """Waits in line for memory of an engine's slab: ``with client.slot(nbytes) as slot``. Its ``engine`` says whose.

        Args:
            nbytes, timeout, drain: as of :meth:`Client.slot`.
            key, engine: as of :meth:`request`.

        Raises:
            ShmringError, TimeoutError, ValueError: as there.
        """
        slot: Slot = self._thread.call(self._slot, nbytes, timeout, drain, {"key": key, "engine": engine}, undo=Slot.close)
        return slot

    def slot_nowait(
        self,
        nbytes: int,
        *,
        drain: bool = False,
        ask: bool = True,
        key: str | bytes | None = None,
        engine: str | None = None,
    ) -> Slot:
        """Returns a slot if one is free in this client's leases.

        Args:
            nbytes, drain, ask: as of :meth:`Client.slot_nowait`.
            key, engine: as of :meth:`request`.

        Raises:
            ShmringError, ValueError: as there.
        """
        where = {"key": key, "engine": engine}
        slot: Slot = self._thread.call(self._slot_nowait, nbytes, drain, ask, where, undo=Slot.close)
        return slot

    # -- kept content --------------------------------------------------------------------------------------------------

    def find(
        self, key: bytes, *, payload_type: Any = Any, timeout: float | None = None, engine: str | None = None
    ) -> Kept | None:
        """Looks for content that an engine keeps: the one that is named, or any.

        Args:
            key, payload_type, timeout: as of :meth:`Client.find`.
            engine: as of :meth:`shmring.RoutingClient.find`.

        Raises:
            ShmringError, TimeoutError, TypeError, ValueError: as of both.
        """
        return self._find_blocking(key, payload_type, timeout, {"engine": engine})

    def keep(self, key: bytes, payload: object, *, timeout: float | None = None, engine: str | None = None) -> Kept:
        """Gives content to an engine, to be found under a key.

        Args:
            key, payload, timeout: as of :meth:`Client.keep`.
            engine: as of :meth:`shmring.RoutingClient.keep`.

        Raises:
            ShmringError, TimeoutError, TypeError, ValueError: as of both.
        """
        return self._keep_blocking(key, payload, timeout, {"engine": engine})

    # -- the connections -----------------------------------------------------------------------------------------------

    def wait_connected(self, timeout: float | None = None, *, engine: str | None = None) -> None:
        """Waits until an engine is attached: the one that is named, or any."""
        self._thread.call(self._wait_connected_to, timeout, engine)

    async def _wait_connected_to(self, timeout: float | None, engine: str | None) -> None:
        waiting = self._client.wait_connected(engine=engine)
        await within(timeout, lambda: f"engine {self._whose({'engine': engine})}", waiting)

    def _whose(self, where: dict[str, Any]) -> str:
        engine = where.get("engine")
        if engine is None:
            return self._title
        return repr(engine) if self._client.engines[engine].connected else f"{engine!r}, which is not attached"

    def loads(self) -> dict[str, EngineLoad]:
        """Returns the loads of the engines that are attached, as requests are routed by them now."""
        loads: dict[str, EngineLoad] = self._thread.call(self._client.loads)
        return loads

    @property
    def resent(self) -> int:
        """Requests that were sent again because their engine had died (``retry``)."""
        return self._client.resent + self._resent_streams

    def statistics(self) -> dict[str, ClientStatistics]:
        """Returns gauges of the present state, and counters since the start, of each engine.

        Raises:
            ClosedError: this client is closed.
        """
        statistics: dict[str, ClientStatistics] = self._thread.call(self._client.statistics)
        return statistics
