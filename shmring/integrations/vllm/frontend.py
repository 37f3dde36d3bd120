"""The API server's half: what goes through the slab instead of vLLM's messages.

Theory of operation: one :class:`Frontend` for each of vLLM's clients of its engine cores (``MPClient``), with a link to
each engine core's ring. The wrapped ``_send_input`` hands it each request before vLLM encodes it. Only requests (ADD) are
diverted: nothing else is certain to be decoded where tensors can be taken. Their large tensors are placed in the slab
(:class:`~shmring.integrations.vllm.request_tensors.RequestTensors`); then vLLM encodes the request, and its encoder asks the
frontend for each tensor. A request whose tensors are kept already, or small, takes no ``await`` more than without the plug-in.

If anything does not work, the tensor goes inline, as without the plug-in: to vLLM's own consumer, if it has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from shmring.core.loggers import logger_of
from shmring.errors import ShmringError
from shmring.integrations.traffic import Traffic, engine_gauges
from shmring.integrations.vllm.cancellation import held_back
from shmring.integrations.vllm.link import AsyncLink, ThreadLink, Where, client_config
from shmring.integrations.vllm.payloads import large_tensors
from shmring.integrations.vllm.request_tensors import RequestTensors
from shmring.integrations.vllm.settings import Settings

if TYPE_CHECKING:
    import torch

__all__ = ["AsyncFrontend", "SyncFrontend"]

logger = logger_of("vllm.shmring")

_DROP_S = 0.25  # how long a drop waits for a message that takes it along
_REPORTS_EVERY = 20  # of these pauses: every five seconds
_REST_S = 10.0  # the longest pause, when no request came for five seconds: an idle server hardly wakes

_Sent = TypeVar("_Sent")


class _Frontend:
    """What both kinds share. It is what vLLM's encoder calls an out-of-band tensor consumer.

    Args:
        settings: the plug-in's.
        own: vLLM's own consumer, which gets what does not go through shmring; None: it has none.
        public: whether vLLM's ``/metrics`` show what went which way.
    """

    def __init__(self, settings: Settings, own: Any, *, public: bool) -> None:
        self._settings = settings
        self._own = own
        self._traffic = Traffic(public=public)
        self._in_slab: RequestTensors | None = None  # of the request that is being encoded

    def __call__(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """For vLLM's encoder: what to send instead of a tensor."""
        reference: dict[str, Any] | None = None if self._in_slab is None else self._in_slab.reference_to(tensor)
        return self._own(tensor) if reference is None and self._own is not None else reference

    def new_message(self) -> None:
        """For vLLM's encoder: a message begins. Which one, the wrapped method has said."""
        if self._own is not None:
            self._own.new_message()

    def _prepare(self, request: Any, link: AsyncLink | ThreadLink | None) -> _Prepared | None:
        """Places what needs no waiting; None: nothing of this request is for the slab."""
        if link is None:
            return None
        try:
            tensors = large_tensors(request, self._settings.min_nbytes, on_gpus=self._settings.device_slab_nbytes > 0)
            if not tensors:
                return None
            in_slab = RequestTensors(link, self._traffic, checks=self._settings.check)
            return _Prepared(in_slab, tensors, in_slab.place_now(tensors))
        except Exception:  # this vLLM's requests are others than its encoder promised, and must be sent all the same
            logger.exception("shmring: a request goes as without it, and this should not be")
            return None

    def _post(self, prepared: _Prepared, send: Callable[[], _Sent]) -> _Sent:
        """Has vLLM encode and send a request of which tensors were placed."""
        self._in_slab = in_slab = prepared.in_slab
        try:
            sent = send()
        except BaseException:
            in_slab.abandon()
            raise
        finally:
            self._in_slab = None
        if isinstance(sent, asyncio.Future) and not sent.done():
            sent.add_done_callback(prepared.end)  # the socket's queue is full
        else:
            in_slab.settle(prepared.tensors)
        return sent


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A request before vLLM encodes it: its large tensors, and those of them that are not placed yet."""

    in_slab: RequestTensors
    tensors: Sequence[torch.Tensor]
    waiting: Sequence[torch.Tensor]

    def end(self, sent: asyncio.Future[Any]) -> None:
        """It was sent, or not."""
        if sent.cancelled() or sent.exception() is not None:
            self.in_slab.abandon()
        else:
            self.in_slab.settle(self.tensors)


class SyncFrontend(_Frontend):
    """Of vLLM's ``LLM``, which has no event loop.

    Args:
        settings: the plug-in's.
        engines: vLLM's identities of the engine cores.
        own: vLLM's own consumer of tensors.
        ask_ring: asks an engine core, in this thread, what its ring is; returns what will have the answer. None: the ring of
            the name that is set, whoever has it.
    """

    def __init__(
        self,
        settings: Settings,
        engines: Sequence[bytes],
        own: Any = None,
        ask_ring: Callable[[bytes], Future[Any]] | None = None,
    ) -> None:
        super().__init__(settings, own, public=False)
        config = client_config(settings, 1)

        def asking(engine: bytes) -> Callable[[], Future[Any]]:
            return functools.partial(ask_ring or self._by_name, engine)

        self._links = {engine: ThreadLink(number_of(engine), asking(engine), config, settings) for engine in engines}
        for link in self._links.values():
            link.keep_trying()

    def _by_name(self, engine: bytes) -> Future[Any]:
        answered: Future[Any] = Future()
        answered.set_result((self._settings.ring_name(number_of(engine)), 0))
        return answered

    def divert(self, request: Any, engine: bytes, send: Callable[[], _Sent]) -> _Sent:
        """Sends a request.

        Args:
            request: vLLM's ``EngineCoreRequest``.
            engine: the identity of the engine core that gets it.
            send: has vLLM encode and send it.
        """
        link = self._links.get(engine)
        if link is not None and not link.is_connected:
            link.keep_trying()
            link.wait_tried()
        prepared = self._prepare(request, link)
        return send() if prepared is None else self._post(prepared, send)

    def close(self) -> None:
        """Disconnects, and says in the log what went which way."""
        for link in self._links.values():
            link.close()
        logger.info("shmring: large tensors sent: %s", self._traffic.summary())


class AsyncFrontend(_Frontend):
    """Of an API server, in its event loop.

    Args:
        settings: the plug-in's.
        engines: vLLM's identities of the engine cores.
        api_servers: how many share them.
        own: vLLM's own consumer of tensors.
        tell_drops: awaited with the identity of an engine core, the id of its client and numbers of kept tensors, tells it
            in vLLM's own order of messages to drop them; returns false when vLLM's client has gone.
        find_ring: awaited with the identity of an engine core, asks it by vLLM's own way what its ring is. None: the ring of
            the name that is set, whoever has it.
    """

    def __init__(
        self,
        settings: Settings,
        engines: Sequence[bytes],
        api_servers: int,
        tell_drops: Callable[[bytes, int, list[int]], Awaitable[bool]],
        *,
        keeps: bool,
        own: Any = None,
        find_ring: Callable[[bytes], Awaitable[Where]] | None = None,
    ) -> None:
        super().__init__(settings, own, public=True)
        config = client_config(settings, api_servers)
        keep_nbytes = settings.keep_nbytes // api_servers if keeps else 0

        def finding(engine: bytes) -> Callable[[], Awaitable[Where]]:
            return functools.partial(find_ring or self._by_name, engine)

        self._links = {
            engine: AsyncLink(number_of(engine), finding(engine), config, settings, keep_nbytes) for engine in engines
        }
        self._tell_drops = tell_drops
        self._keeping_house: list[asyncio.Task[None]] = []  # one for each link: an engine core may keep silent

    async def _by_name(self, engine: bytes) -> Where:
        return Where(self._settings.ring_name(number_of(engine)))

    def start(self) -> None:
        """Begins to connect, in the running loop. A second call does nothing."""
        if not self._keeping_house:
            loop = asyncio.get_running_loop()
            for engine, link in self._links.items():
                link.keep_trying()
                self._keeping_house.append(loop.create_task(self._keep_house(engine, link), name="shmring"))

    def divert(self, request: Any, engine: bytes, send: Callable[[], Awaitable[Any]]) -> Awaitable[Any]:
        """Sends a request; the same as :meth:`SyncFrontend.divert`, but for the result, which is to be awaited."""
        self.start()
        link = self._links.get(engine)
        if link is not None:
            link.keep_trying()
            link.came.set()
        prepared = self._prepare(request, link)
        if prepared is None:
            return send()
        return self._post_later(prepared, send) if prepared.waiting else self._post(prepared, send)

    async def _post_later(self, prepared: _Prepared, send: Callable[[], Awaitable[Any]]) -> Any:
        await held_back(prepared.in_slab.place(prepared.waiting))
        return await self._post(prepared, send)

    async def _keep_house(self, engine: bytes, link: AsyncLink) -> None:
        """Takes care of what no request takes care of: a lost connection, drops that nothing takes along, and gauges."""
        pauses, last_came, has_reported = 0, 0, False
        while True:
            link.keep_trying()
            if not await self._send_drops(engine, link):
                return
            if link.came.is_set():
                link.came.clear()
                last_came = pauses
            is_idle = pauses - last_came > _REPORTS_EVERY
            if is_idle or pauses % _REPORTS_EVERY == 0 or not has_reported:  # at once, when it is reached
                has_reported = await _update_gauges(engine, link)
            pauses += 1
            if is_idle:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(link.came.wait(), _REST_S)
            else:
                await asyncio.sleep(_DROP_S)

    async def _send_drops(self, engine: bytes, link: AsyncLink) -> bool:
        book = link.book
        if book is None or not link.is_connected:
            return True
        book.reap()
        drops = book.take_drops()
        if not drops:
            return True
        try:
            return await self._tell_drops(engine, link.client_id, drops)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises: it is told again, or it has ended
            book.put_back(drops)
            logger.debug("shmring: an engine core could not be told what to drop: %r", error)
            return True

    def close(self) -> None:
        """Disconnects as soon as the loop can, and says in the log what went which way. From any thread."""
        keeping_house, self._keeping_house = self._keeping_house, []
        if keeping_house:
            loop = keeping_house[0].get_loop()

            def disconnect() -> None:
                for task in keeping_house:
                    task.cancel()
                for link in self._links.values():
                    loop.create_task(link.close())

            with contextlib.suppress(RuntimeError):  # the loop is closed: the engine cores see that this process ends
                loop.call_soon_threadsafe(disconnect)
        logger.info("shmring: large tensors sent: %s", self._traffic.summary())


async def _update_gauges(engine: bytes, link: AsyncLink) -> bool:
    """Shows what an engine core counts; returns False if it is not reached now."""
    if not link.is_connected:
        return False
    try:
        report = await link.report()
    except (ShmringError, TimeoutError):  # it has gone just now
        return False
    for name, gauge in engine_gauges().items():
        gauge.labels(str(number_of(engine))).set(report[name])
    return True


def number_of(engine: bytes) -> int:
    """An engine core's number, from vLLM's identity of it."""
    return int.from_bytes(engine, "little")
