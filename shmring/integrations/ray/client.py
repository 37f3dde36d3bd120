"""The one client of an engine in a Ray cluster, wherever the engine is.

Theory of operation: a client has a *way* to its engine: a client of the ring, if the engine is on this node, or a
:class:`~shmring.integrations.ray.far_client.FarClient`. When the engine has died, its way is given up, and the next call looks
the name up again: Ray may have started the engine on another node. Requests that were sent fail, since they may have been
carried out in part; only their caller says whether they are sent again (``retry``).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

import shmring
from shmring.config import check_timeout, parse_nbytes
from shmring.errors import CapacityError, ClosedError, EngineDeadError, LocalProtocolError
from shmring.integrations.ray.directory import look_up, node_id, store_nbytes
from shmring.integrations.ray.engine import UnknownClientError
from shmring.integrations.ray.far_client import FarClient

__all__ = ["Client", "Connecting", "FarSlot", "connect"]

_STORE_SHARE = 4  # each client keeps a fourth of the smaller of the two stores in flight: several clients share a store
_LEAST_FLIGHT_NBYTES = 1 << 20


class FarSlot:
    """Memory of this process to write tensors into, as :class:`shmring.Slot` is memory of the engine's slab. Ray copies
    what was written there once, to its object store.

    Attributes:
        nbytes: how many bytes of tensors it holds.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._used_nbytes = 0
        self._closed = False

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns an uninitialised tensor in the slot."""
        self._take(math.prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype)

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Returns an uninitialised numpy array in the slot."""
        self._take(math.prod(shape) * np.dtype(dtype).itemsize)
        return np.empty(shape, dtype)

    def _take(self, nbytes: int) -> None:
        if self._closed:
            raise ClosedError("this slot was left")
        if self._used_nbytes + nbytes > self.nbytes:
            raise CapacityError(
                f"{nbytes} bytes at {self._used_nbytes} are more than the slot has, {self.nbytes}",
                needed=self._used_nbytes + nbytes,
                capacity=self.nbytes,
            )
        self._used_nbytes += nbytes

    def close(self) -> None:
        """Leaves the slot."""
        self._closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """A client of an engine in a Ray cluster. Made by :func:`connect`.

    Attributes:
        name: the engine's.
        resent: requests that were sent again because their engine had died (``retry``).
    """

    def __init__(self, name: str, connect_timeout_s: float, in_flight_nbytes: int | None, description: str, **options: Any):
        self.name = name
        self.resent = 0
        self._connect_timeout_s = connect_timeout_s
        self._in_flight_nbytes = in_flight_nbytes
        self._description = description
        self._options = options
        self._way: shmring.Client | FarClient | None = None
        self._looking_up = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def is_near(self) -> bool:
        """Whether the engine is on this node, so that requests go through shared memory.

        Raises:
            EngineDeadError: the engine has died, and no call has looked it up again.
        """
        if self._way is None:
            raise EngineDeadError(f"engine {self.name!r} has died; the next call looks it up again", engine=self.name)
        return isinstance(self._way, shmring.Client)

    @property
    def near(self) -> shmring.Client:
        """The client of the ring on this node, for its other calls (:meth:`shmring.Client.submit`, ``submit_nowait``).

        Raises:
            LocalProtocolError: the engine is on another node.
            EngineDeadError: as :attr:`is_near`.
        """
        if not self.is_near:
            raise LocalProtocolError(f"engine {self.name!r} is on another node")
        assert isinstance(self._way, shmring.Client)
        return self._way

    # -- the way to the engine -------------------------------------------------------------------------------------------

    async def _ready(self) -> shmring.Client | FarClient:
        """Returns the way to the engine; looks it up if there is none."""
        if self._way is not None:
            return self._way
        async with self._looking_up:
            if self._is_closed:
                raise ClosedError(f"this client of {self.name!r} is closed")
            if self._way is None:
                self._way = await self._look_up()
            return self._way

    async def _look_up(self) -> shmring.Client | FarClient:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._connect_timeout_s
        while True:
            actor, where = await look_up(self.name, max(0.0, until_s - loop.time()))
            try:
                if where.node == node_id():
                    remaining_s = max(0.0, min(5.0, until_s - loop.time()))
                    return await shmring.connect(
                        where.ring,
                        socket_dir=where.socket_dir,
                        description=self._description,
                        connect_timeout_s=remaining_s,
                        **self._options,
                    )
                max_nbytes = self._in_flight_nbytes
                if max_nbytes is None:
                    here_nbytes = await asyncio.to_thread(store_nbytes, node_id())
                    max_nbytes = max(_LEAST_FLIGHT_NBYTES, min(here_nbytes, where.store_nbytes) // _STORE_SHARE)
                return await FarClient.enter(self.name, actor, where, max_nbytes, self._description)
            except EngineDeadError:  # it has died since it was looked up
                if loop.time() >= until_s:
                    raise

    def _lose(self, way: shmring.Client | FarClient, error: EngineDeadError) -> None:
        """The engine at the end of a way has died, as this error says: so do all requests that are on it."""
        if self._way is not way:
            return  # another request has seen it first
        self._way = None
        task = asyncio.get_running_loop().create_task(way.close(error) if isinstance(way, FarClient) else way.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # -- requests ----------------------------------------------------------------------------------------------------------

    async def request(
        self,
        payload: object,
        *,
        timeout: float | None = None,
        reply_type: Any = Any,
        request_id: str = "",
        retry: int = 0,
    ) -> Any:
        """Sends a payload and waits for its one reply. Cancelling aborts the request.

        Arguments, replies and errors are those of :meth:`shmring.Client.request`. Tensors of a reply that can only be read are
        there as well when the engine is on another node: they lie in Ray's object store.

        Args:
            retry: how often it may be sent again because its engine died before a reply had come, or because Ray can't say
                whether the engine has got it. It may then have been carried out twice, or in part.
        """
        until_s = _deadline(timeout)
        left_s = timeout
        while True:
            way = self._way
            if way is None:
                way = await self._in_time(self._ready(), until_s, timeout)
                left_s = _left_s(until_s)
            try:
                if isinstance(way, FarClient):
                    return await way.request(
                        payload, until_s=until_s, timeout=timeout, reply_type=reply_type, request_id=request_id
                    )
                return await way.request(payload, timeout=left_s, reply_type=reply_type, request_id=request_id)
            except EngineDeadError as error:
                retry = self._again(way, error, retry)

    async def stream(
        self,
        payload: object,
        *,
        timeout: float | None = None,
        reply_type: Any = Any,
        request_id: str = "",
        retry: int = 0,
    ) -> AsyncGenerator[Any, None]:
        """Sends a payload and yields its replies as they come. Leaving the loop early aborts the request.

        Arguments and errors are those of :meth:`request`; ``timeout`` bounds the waiting.
        """
        until_s = _deadline(timeout)
        left_s = timeout
        while True:
            way = self._way
            if way is None:
                way = await self._in_time(self._ready(), until_s, timeout)
                left_s = _left_s(until_s)
            has_replied = False
            if isinstance(way, FarClient):
                replies = way.stream(payload, until_s=until_s, timeout=timeout, reply_type=reply_type, request_id=request_id)
            else:
                replies = way.stream(payload, timeout=left_s, reply_type=reply_type, request_id=request_id)
            try:
                async for reply in replies:
                    has_replied = True
                    yield reply
                    del reply  # or this frame would keep it until the next one has come
                return
            except EngineDeadError as error:
                retry = self._again(way, error, 0 if has_replied else retry)
            finally:
                await replies.aclose()

    def _again(self, way: shmring.Client | FarClient, error: EngineDeadError, retry: int) -> int:
        """Raises the error unless a request may be sent again; returns how often it may be after that."""
        self._lose(way, error)
        if self._is_closed:
            raise error
        if isinstance(error, UnknownClientError):  # nothing was done
            return retry
        if not retry:
            raise error
        self.resent += 1
        return retry - 1

    async def _in_time(self, step: Awaitable[Any], until_s: float | None, timeout: float | None) -> Any:
        scope = asyncio.timeout_at(until_s)
        try:
            async with scope:
                return await step
        except TimeoutError:
            if not scope.expired():
                raise
            raise TimeoutError(
                f"it took longer than the {timeout:g} s it was given: engine {self.name!r} is looked up"
            ) from None

    def abort(self, request_id: str | Iterable[str]) -> int:
        """Aborts the requests of these names; tasks that wait for them get :class:`~shmring.AbortedError`.

        Returns:
            How many were in flight.
        """
        if self._way is None:
            return 0
        names = {request_id} if isinstance(request_id, str) else set(request_id)
        return self._way.abort(names)

    async def call(self, method: str, *arguments: object, timeout: float | None = None) -> Any:
        """Calls a control method of the engine and returns its result; see :meth:`shmring.Client.call`."""
        until_s = _deadline(timeout)
        way = await self._in_time(self._ready(), until_s, timeout)
        try:
            if isinstance(way, FarClient):
                return await self._in_time(way.call(method, arguments), until_s, timeout)
            return await way.call(method, *arguments, timeout=_left_s(until_s))
        except EngineDeadError as error:
            self._lose(way, error)
            raise

    # -- memory --------------------------------------------------------------------------------------------------------------

    async def slot(self, nbytes: int | str, *, timeout: float | None = None) -> shmring.Slot | FarSlot:
        """Waits for memory to write tensors into: a slot of the slab, or, if the engine is on another node, of this process.

        Use it as ``async with await client.slot(nbytes) as slot:``; see :meth:`shmring.Client.slot`.
        """
        until_s = _deadline(timeout)
        way = await self._in_time(self._ready(), until_s, timeout)
        if isinstance(way, FarClient):
            return FarSlot(parse_nbytes(nbytes))
        slot: shmring.Slot = await way.slot(nbytes, timeout=_left_s(until_s))
        return slot

    async def find(self, key: bytes, *, payload_type: Any = Any, timeout: float | None = None) -> shmring.Kept[Any] | None:
        """Looks for content that the engine keeps; see :meth:`shmring.Client.find`. On another node, nothing is ever found."""
        way = await self._ready()
        return None if isinstance(way, FarClient) else await way.find(key, payload_type=payload_type, timeout=timeout)

    async def keep(self, key: bytes, payload: object, *, timeout: float | None = None) -> shmring.Kept[Any]:
        """Gives content to the engine; see :meth:`shmring.Client.keep`.

        Raises:
            LocalProtocolError: the engine is on another node.
        """
        way = await self._ready()
        if isinstance(way, FarClient):
            raise LocalProtocolError(
                f"engine {self.name!r} is on another node: only clients on its own node give it content to keep"
            )
        return await way.keep(key, payload, timeout=timeout)

    # -- the end -------------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Aborts pending requests, and says goodbye. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        way, self._way = self._way, None
        if way is not None:
            await way.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def _deadline(timeout: float | None) -> float | None:
    check_timeout(timeout)
    return None if timeout is None else asyncio.get_running_loop().time() + timeout


def _left_s(until_s: float | None) -> float | None:
    return None if until_s is None else max(0.0, until_s - asyncio.get_running_loop().time())


class Connecting:
    """What :func:`connect` returns: await it, or use it with ``async with``."""

    def __init__(self, create: Callable[[], Awaitable[Client]]) -> None:
        self._create = create
        self._client: Client | None = None

    def __await__(self) -> Generator[Any, None, Client]:
        return self._create().__await__()

    async def __aenter__(self) -> Client:
        self._client = await self._create()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._client is not None
        await self._client.close()


def connect(
    name: str,
    *,
    connect_timeout_s: float = 60.0,
    in_flight_nbytes: int | str | None = None,
    description: str = "",
    **options: Any,
) -> Connecting:
    """Connects an actor, a task or a driver to an engine of its cluster: ``async with connect("vision") as client``.

    Args:
        name: the engine's, as given to ``EngineActor.remote``.
        connect_timeout_s: how long the engine is waited for: Ray may be starting it, or starting it again on another node.
        in_flight_nbytes: if the engine is on another node, the bytes of tensors that this client may have in flight; further
            requests wait. None: a fourth of the smaller of both nodes' object stores.
        description: what the engine's log calls this client.
        options: of :func:`shmring.connect`, if the engine is on this node.

    Raises:
        EngineDeadError: no engine of that name answers in time.
        LocalProtocolError: this process is not connected to a Ray cluster.
        ValueError, TypeError: a size or option is not valid.
    """
    max_nbytes = None if in_flight_nbytes is None else parse_nbytes(in_flight_nbytes)

    async def create() -> Client:
        client = Client(name, connect_timeout_s, max_nbytes, description, **options)
        await client._ready()
        return client

    return Connecting(create)
