"""A frontend's end of the transport.

Theory of operation: :class:`RingClient` is what callers hold; the work is done by its current
:class:`~shmring.client.session.Session`, one for each life of the engine. Without ``reconnect``, the client ends with its
session; with it, pending calls fail with :class:`EngineDeadError` and later ones wait for the next engine of that name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shmring.client.counters import ClientCounters
from shmring.client.deadlines import Deadlines
from shmring.client.kept import Kept, check_key
from shmring.client.preparing import Preparations
from shmring.client.session import Session
from shmring.client.slot import Slot
from shmring.client.submission import Submission
from shmring.config import ClientConfig, parse_nbytes
from shmring.core.compiled import ClientCalls, Origin
from shmring.core.geometry import nbytes_for_slots
from shmring.core.states import ClientSlot
from shmring.errors import (
    ClosedError,
    EngineDeadError,
    ShmringError,
    WouldBlock,
    fresh,
)
from shmring.gpu.cuda import Cuda, TorchCuda
from shmring.gpu.device import DeviceMemory
from shmring.gpu.device_slots import DeviceSlots
from shmring.gpu.driver import Driver
from shmring.memory.copier import Copier
from shmring.statistics import ClientStatistics
from shmring.transport.endpoint import socket_path
from shmring.transport.loops import check_loop

__all__ = ["RingClient", "Submission"]

logger = logging.getLogger("shmring.client")

_MAX_NAME_CHARACTERS = 256
_FIRST_ATTEMPT_PAUSE_S = 0.02


class RingClient(ClientCalls):
    """A frontend's end. Made by :func:`shmring.connect`.

    Attributes:
        name: the engine's name.
        config: as configured.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        config: ClientConfig,
        reconnect: bool,
        description: str,
        cuda: Cuda,
        device_memory: DeviceMemory,
    ) -> None:
        self.name = name
        self.config = config
        self._path = path
        self._reconnect = reconnect
        self._description = description
        self._cuda = cuda
        self._device_memory = device_memory
        self._counters = ClientCounters()
        self._copier = Copier(config.copy_threads, int(config.copy_offload_nbytes))
        super().__init__(self._copier)
        self._deadlines = Deadlines()
        self._preparations = Preparations()
        self._session: Session | None = None
        self._attached = asyncio.Event()
        self._reattaching: asyncio.Task[None] | None = None
        self._lost_error: ShmringError | None = None
        self._closed = False
        self._origin = Origin()
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def create(
        cls,
        name: str,
        config: ClientConfig,
        *,
        reconnect: bool = False,
        description: str = "",
        cuda: Cuda | None = None,
        device_memory: DeviceMemory | None = None,
    ) -> RingClient:
        """Attaches to an engine, waiting for it up to ``connect_timeout_s``. See :func:`shmring.connect`."""
        client = cls.detached(
            name, config, reconnect=reconnect, description=description, cuda=cuda, device_memory=device_memory
        )
        try:
            await client._attach_in_time()
        except BaseException:
            client._copier.close()
            raise
        return client

    @classmethod
    def detached(
        cls,
        name: str,
        config: ClientConfig,
        *,
        reconnect: bool,
        description: str,
        cuda: Cuda | None = None,
        device_memory: DeviceMemory | None = None,
    ) -> RingClient:
        """Makes a client that is not attached yet. See :meth:`attach` and :meth:`keep_attaching`."""
        path = socket_path(name, config.socket_dir)
        client = cls(name, path, config, reconnect, description, cuda or TorchCuda(), device_memory or Driver())
        client._check_name(description)
        return client

    # -- requests ----------------------------------------------------------------------------------------------------

    async def request(
        self, payload: object, *, timeout: float | None = None, reply_type: Any = Any, request_id: str = ""
    ) -> Any:
        """Sends a payload and waits for its one reply. Cancelling aborts the request.

        Tensors of a reply are views into the engine's slab; they go back when the last view of them dies. They are in memory
        that can only be read: writing to one in place ends this process, so write to a copy (``clone``).

        Args:
            payload: any msgspec-encodable object with torch tensors and numpy arrays at any depth. Tensors that lie in a
                slot of this client are sent from there; others are copied, once, into one slot in host memory: also those on
                a GPU, for which that waits.
            timeout: seconds for all of it, waiting for space included.
            reply_type: a msgspec type to decode the reply into.
            request_id: the caller's own name for it, for :meth:`abort` and the engine's log.

        Raises:
            TimeoutError: it took longer; the request was aborted.
            TypeError: something in the payload can't be sent; the message names its path. Nothing was sent.
            CapacityError: it can never fit the slab, or a message.
            RemoteError: the engine failed with this request.
            AbortedError: it was aborted by :meth:`abort`.
            EngineDeadError: the engine went away.
            ClosedError: this client is closed.
        """
        with self._deadlines.within(timeout, self.why_not_sent) as deadline:
            submission = await self.submit(payload, request_id=request_id)
            deadline.waits_for = self._why_no_reply
            try:
                return await submission.result(reply_type)
            except BaseException:
                submission.abort()
                raise

    async def stream(
        self, payload: object, *, timeout: float | None = None, reply_type: Any = Any, request_id: str = ""
    ) -> AsyncGenerator[Any, None]:
        """Sends a payload and yields its replies as they come. Leaving the loop early aborts the request.

        Arguments and errors are those of :meth:`request`; ``timeout`` bounds the waiting, not what the caller does
        between two replies.
        """
        until_s = None if timeout is None else asyncio.get_running_loop().time() + timeout
        with self._deadlines.within(timeout, self.why_not_sent):
            submission = await self.submit(payload, request_id=request_id)

        async def next_reply() -> list[Any]:
            with self._deadlines.within(timeout, self._why_no_reply, until_s=until_s):
                return [await submission.next(reply_type)]

        try:
            while True:
                try:
                    reply = await next_reply()
                except StopAsyncIteration:
                    return
                yield reply.pop()  # or this frame would keep the reply's slot for as long as the caller takes
        finally:
            submission.abort()

    async def submit_in_turn(self, payload: object, request_id: str) -> Submission:
        """For :meth:`submit`: something has to be waited for."""
        if not request_id:
            return await self._submit_when_attached(payload, request_id)
        self._check_name(request_id)
        return await self._preparations.prepare(request_id, self._submit_when_attached(payload, request_id))

    async def _submit_when_attached(self, payload: object, request_id: str) -> Submission:
        session = self._attached_here() or await self._ready()
        return await session.sending.submit(payload, request_id)

    def submit_nowait(self, payload: object, *, request_id: str = "", ask: bool = True) -> Submission:
        """The same if nothing has to be waited for; the copy is made in the loop.

        In :mod:`shmring.threads`, a long copy is made beside the loop, and waited for.

        Args:
            payload, request_id: as of :meth:`request`.
            ask: whether to ask the engine for a lease where there is no space, so that a later call finds some.

        Raises:
            WouldBlock: there is no space in this client's leases, too much is in flight, or no engine is attached.
        """
        self._check_name(request_id)
        return self._ready_nowait().sending.submit_nowait(payload, request_id, ask=ask)

    async def submit_in_time(self, payload: object, *, timeout: float | None = None, request_id: str = "") -> Submission:
        """For :mod:`shmring.threads`: as :meth:`submit`, within so many seconds."""
        with self._deadlines.within(timeout, self.why_not_sent):
            return await self.submit(payload, request_id=request_id)

    async def submit_unless_full(self, payload: object, *, request_id: str = "", ask: bool = True) -> Submission:
        """For :mod:`shmring.threads`: as :meth:`submit_nowait`, with a long copy made beside the loop."""
        self._check_name(request_id)
        return await self._ready_nowait().sending.submit_unless_full(payload, request_id, ask=ask)

    def abort(self, request_id: str | Iterable[str]) -> int:
        """Aborts the requests of these names; tasks that wait for them get :class:`AbortedError`.

        Returns:
            How many were in flight; an unknown one is none, it may just have ended.

        Raises:
            ClosedError: this client belongs to the process that forked this one.
        """
        self.check_process()
        names = {request_id} if isinstance(request_id, str) else set(request_id)
        preparing = self._preparations.abort(names)
        if self._session is None:
            return preparing
        pending = self._session.end.pending.values()
        in_flight = [submission for submission in pending if submission.name in names and not submission.ended]
        for submission in in_flight:
            submission.abort()
        return preparing + len(in_flight)

    async def call(self, method: str, *arguments: object, timeout: float | None = None) -> Any:
        """Calls a control method of the engine (see ``calls`` of :func:`shmring.serve`) and returns its result.

        Raises:
            RemoteError: it failed, or there is none of that name.
            TimeoutError, EngineDeadError, ClosedError: as :meth:`request`.
        """
        self._check_name(method)
        with self._deadlines.within(timeout, lambda: f"{self.why_no_answer()}, for the call {method!r}"):
            session = await self._ready()
            return await session.calls.call(method, arguments)

    # -- kept content --------------------------------------------------------------------------------------------------

    async def find(self, key: bytes, *, payload_type: Any = Any, timeout: float | None = None) -> Kept | None:
        """Looks for content that the engine keeps under a key, whoever gave it. It is pinned until what is returned is left.

        One round trip; none if this client has it pinned already. Don't wait for a slot while holding it, without a timeout:
        two clients that do could wait for each other.

        Args:
            key: 32 bytes.
            payload_type: a msgspec type to decode the payload into.
            timeout: seconds to wait for the engine.

        Returns:
            The content; None if it is not there.

        Raises:
            WouldBlock: it is there, and this client has too much pinned (``RingConfig.max_pins``).
            TimeoutError, EngineDeadError, ClosedError: as :meth:`request`.
            TypeError, ValueError: this is no key.
        """
        check_key(key)
        with self._deadlines.within(timeout, self.why_no_answer):
            session = self._attached_here() or await self._ready()
            return await session.kept.find(key, payload_type)

    async def keep(self, key: bytes, payload: object, *, timeout: float | None = None) -> Kept:
        """Gives content to the engine, to be found under a key by every client until its space is wanted for something else.

        If all tensors of the payload lie in one slot of this client, nothing is copied: that slot is the engine's from now on,
        as a whole, and nobody may write to it any more. Otherwise they are copied to a slot of their own, which is waited for.
        If something is kept under this key already, that is returned: the first is kept.

        Args:
            key: 32 bytes that stand for this content and for no other, such as a hash of what it was made of.
            payload: any msgspec-encodable object with a torch tensor or numpy array in it; beside them, 4 KiB at most.
            timeout: seconds for all of it, waiting for space included.

        Returns:
            The content, which is pinned until that is left.

        Raises:
            WouldBlock: it can't be kept now, since too much of what is kept is pinned, or somebody waits for that memory. A
                slot that it lies in is the caller's again, to be sent as usual. Nothing is waited for.
            CapacityError: it is larger than all that the engine may keep.
            TypeError, ValueError: it can't be sent, has no tensor, or this is no key.
            TimeoutError, EngineDeadError, ClosedError: as :meth:`request`.
        """
        check_key(key)
        with self._deadlines.within(timeout, self.why_not_sent):
            session = self._attached_here() or await self._ready()
            return await session.kept.keep(key, payload)

    def why_no_answer(self) -> str:
        """For whoever has a deadline: says what somebody waits for who looks for kept content."""
        if self._session is None:
            return f"an engine {self.name!r} to be attached"
        return f"the answer of engine {self.name!r}"

    # -- slots ---------------------------------------------------------------------------------------------------------

    async def slots(self, sizes: Sequence[int | str], *, timeout: float | None = None, drain: bool = False) -> list[Slot]:
        """Waits in line for several slots at once, in host memory: who acquires them one by one may wait for itself.

        Args:
            sizes: bytes of tensors of each; at least one.
            timeout, drain: as of :meth:`slot`.

        Returns:
            The slots, which the caller leaves one by one.

        Raises:
            CapacityError: together they are more than the engine can lease out.
            TimeoutError, EngineDeadError, ClosedError, ValueError: as :meth:`slot`.
        """
        parts = parse_sizes(sizes)
        with self._deadlines.within(timeout, self.why_not_sent):
            session = await self._ready()
            slots = session.host_slots
            record = await slots.acquire(nbytes_for_slots(parts), held=True)
            return [slots.hold(part, drain=drain) for part in slots.book.split(record, parts)]

    @property
    def kept_nbytes(self) -> int:
        """How much the engine that is attached now may keep (``RingConfig.kept_nbytes``); 0: nothing, or none is attached."""
        session = self._session
        return 0 if session is None else session.welcome.kept_nbytes

    def check_capacity(self, *sizes: int | str) -> None:
        """Checks that slots of these sizes could be had at once, before the caller makes what they would hold. Takes nothing.

        Args:
            sizes: as for :meth:`slots`; at least one.

        Raises:
            CapacityError: more than the engine can lease out.
            WouldBlock: no engine is attached now, and the next one is waited for.
            EngineDeadError, ClosedError: as :meth:`request`.
            ValueError: a size is negative, or there is none.
        """
        total_nbytes = nbytes_for_slots(parse_sizes(sizes))
        session = self._ready_nowait()
        session.check_alive()
        session.host_slots.book.check_capacity(total_nbytes)

    def resolve_device(self, device: torch.device | str) -> torch.device | None:
        """For :meth:`slot`: the GPU that is meant, or None for the host."""
        wanted = torch.device(device)
        if wanted.type == "cpu":
            return None
        if wanted.type != "cuda":
            raise ValueError(f"a slot is on 'cpu' or on 'cuda', not on {str(wanted)!r}")
        return wanted

    async def acquire_in_turn(self, nbytes: int, timeout: float | None, drain: bool, device: torch.device | None) -> Slot:
        """For :meth:`slot`: something has to be waited for."""
        with self._deadlines.within(timeout, self.why_not_sent):
            session = await self._ready()
            slots = session.host_slots if device is None else await session.device_slots.open(device.index)
            slot: Slot = slots.hold(await slots.acquire(nbytes, held=True), drain=drain)
            return slot

    def slot_nowait(
        self, nbytes: int | str, *, drain: bool = False, device: torch.device | str = "cpu", ask: bool = True
    ) -> Slot:
        """Returns a slot if one is free in this client's leases.

        Args:
            nbytes, drain, device: as of :meth:`slot`.
            ask: whether to ask the engine for a lease where there is no space, so that a later call finds some.

        Raises:
            WouldBlock: none is, or others wait for one; or this process has not mapped the device slab yet, as the waiting twin
                does.
            CapacityError, EngineDeadError, ClosedError, SlabError, ValueError: as :meth:`slot`.
        """
        nbytes = parse_nbytes(nbytes)
        wanted = self.resolve_device(device)
        session = self._ready_nowait()
        session.check_alive()
        slots = session.host_slots if wanted is None else session.device_slots.opened(wanted.index)
        slot: Slot = slots.hold(slots.acquire_nowait(nbytes, held=True, ask=ask), drain=drain)
        return slot

    # -- the connection --------------------------------------------------------------------------------------------------

    @property
    def client_id(self) -> int:
        """How the engine that is attached now numbers this client (``Claim.client_id`` there); 0: none is."""
        session = self._session  # once: another thread may ask (shmring.threads)
        return 0 if session is None else session.welcome.client_id

    @property
    def epoch(self) -> int:
        """Which life of the engine is attached now; 0: none is."""
        session = self._session
        return 0 if session is None else session.welcome.epoch

    @property
    def connected(self) -> bool:
        """Whether an engine is attached now."""
        return self._session is not None

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def lost_error(self) -> ShmringError | None:
        """Why the last engine that went away did, as far as it is known; None if none has."""
        return self._lost_error

    async def wait_connected(self, timeout: float | None = None) -> None:
        """Waits until an engine is attached (at once, unless ``reconnect`` is waiting for one)."""
        with self._deadlines.within(timeout, self.why_not_sent):
            await self._ready()

    async def wait_prefaulted(self, timeout: float | None = None) -> None:
        """Waits until the slab's pages are mapped in this process (at once, without ``prefault``).

        It takes some 0.2 s per GB, beside whatever else goes on. A server that is to be fast from its first request on awaits
        this before it says that it is ready.
        """
        with self._deadlines.within(timeout, lambda: "the slab's pages to be mapped in this process"):
            while True:
                session = await self._ready()
                await session.prefaulted()
                if session.error is None:
                    return

    async def _ready(self) -> Session:
        self._check_loop()
        while (session := self._attached_now()) is None:
            await self._attached.wait()
        return session

    def _attached_here(self) -> Session | None:
        """As :meth:`_attached_now`, for whoever is about to wait."""
        self._check_loop()
        return self._attached_now()

    def _check_loop(self) -> None:
        self.check_process()  # a forked child has another loop, too
        check_loop(self._loop, f"this client of {self.name!r}")

    def _ready_nowait(self) -> Session:
        session = self._attached_now()
        if session is None:
            raise WouldBlock(f"no engine {self.name!r} is attached now")
        return session

    def _attached_now(self) -> Session | None:
        """The session with an engine; None while the next engine is waited for."""
        self.check_process()
        if self._closed:
            raise ClosedError(f"this client of {self.name!r} is closed")
        if self._session is not None:
            return self._session
        is_attaching = self._reattaching is not None and not self._reattaching.done()
        if not self._reconnect and not is_attaching:
            why = f"the engine {self.name!r} has gone; connect again, or use connect(..., reconnect=True)"
            raise EngineDeadError(why, engine=self.name)
        return None

    def check_process(self) -> None:
        """Raises :class:`ClosedError` in a forked child."""
        if self._origin.forked:
            raise self._origin.stray("this client", "connect again here")

    @property
    def session(self) -> Session | None:
        """The connection to the engine that is attached now; for whoever chooses among several clients."""
        return self._session

    @property
    def used_device_slots(self) -> Sequence[DeviceSlots]:
        """For :mod:`shmring.threads`, in any thread: the slots in device memory, if callers hold some."""
        session = self._session
        return (session.device_slots,) if session is not None and session.device_slots.held else ()

    async def attach(self) -> None:
        """Attaches to the engine, if there is one.

        Raises:
            EngineDeadError: nobody listens there.
            RemoteProtocolError, PermissionError, SlabError: as :func:`shmring.connect`.
        """
        session = await Session.open(
            self._path,
            self.config,
            self._description,
            self._counters,
            self._copier,
            self._cuda,
            self._device_memory,
            self._session_lost,
        )
        session.check_alive()  # it may have been lost while it opened
        self._session = session
        self.use(session.end)
        self._attached.set()

    async def _attach_in_time(self) -> None:
        """Attaches within ``connect_timeout_s``: the engine may be starting."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.connect_timeout_s
        while True:
            try:
                async with asyncio.timeout_at(deadline + self.config.connect_timeout_s):
                    return await self.attach()
            except EngineDeadError:
                if loop.time() >= deadline:
                    raise
            except TimeoutError:
                why = f"the engine at {self._path} listens, and does not answer"
                raise EngineDeadError(why, engine=self.name) from None
            await asyncio.sleep(_FIRST_ATTEMPT_PAUSE_S)

    def _session_lost(self, session: Session) -> None:
        if session is not self._session:
            return
        self._session = None
        self.use(None)
        self._counters = self._counters.with_those_of(session.end)
        self._lost_error = None if session.error is None else fresh(session.error)
        self._attached.clear()
        if self._reconnect and not self._closed:
            logger.warning("%s: waiting for the next engine %r", session.error, self.name)
            self.keep_attaching()

    def keep_attaching(self) -> None:
        """Attaches as soon as there is an engine of this name, and does not wait for it."""
        self._reattaching = asyncio.get_running_loop().create_task(self._reattach())

    async def _reattach(self) -> None:
        """Attaches to the next engine of this name, whenever it comes; pauses grow so that waiting costs nothing."""
        pause = self.config.reconnect_initial_s
        while not self._closed:
            try:
                await self.attach()
            except Exception as error:
                if not isinstance(error, ShmringError | OSError):
                    logger.error("attaching to the engine %r failed, and is tried again", self.name, exc_info=error)
                elif not isinstance(error, EngineDeadError):
                    logger.warning("can't attach to the engine %r yet: %s", self.name, error)
                await asyncio.sleep(pause)
                pause = min(max(pause, 0.001) * 2, self.config.reconnect_max_s)
            else:
                self._counters.reconnections += self._lost_error is not None
                logger.info("attached to the engine %r", self.name)
                return

    async def close(self) -> None:
        """Aborts pending requests, says goodbye, and detaches. A second call does nothing."""
        if self._closed or self._origin.forked:
            return  # a forked child must not say goodbye for its parent
        self._check_loop()
        self._closed = True
        self._attached.set()  # whoever waits for an engine learns that there will be none
        try:
            if self._reattaching is not None and not self._reattaching.done():
                self._reattaching.cancel()
                await asyncio.wait([self._reattaching])
                self._reattaching = None  # it holds the error that it was cancelled with, whose traceback holds frames
        finally:  # also when this is cancelled
            try:
                if self._session is not None:
                    await self._session.close()
            finally:
                self._copier.close()

    async def __aenter__(self) -> RingClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def why_not_sent(self) -> str:
        """For whoever has a deadline: says what a request that was not sent yet, or a slot, is waiting for."""
        if self._session is None:
            return f"an engine {self.name!r} to be attached"
        return self._session.sending.why_not_sent()

    def _why_no_reply(self) -> str:
        """Says what a request that was sent is waiting for."""
        if self._session is None:
            return "the engine's reply; the engine has gone meanwhile"
        return self._session.why_no_reply()

    def statistics(self) -> ClientStatistics:
        """Returns gauges of the present state, and counters since the start.

        Raises:
            ClosedError: this client belongs to the process that forked this one.
        """
        self.check_process()
        session = self._session
        counters = self._counters if session is None else self._counters.with_those_of(session.end)
        memories = session.slots if session is not None else ()
        books = [slots.book for slots in memories]
        return ClientStatistics(
            connected=session is not None,
            epoch=session.welcome.epoch if session is not None else 0,
            client_id=session.welcome.client_id if session is not None else 0,
            slots_writing=sum(book.count(ClientSlot.WRITING) for book in books),
            slots_submitted=sum(book.count(ClientSlot.SUBMITTED) for book in books),
            slots_cached=sum(book.count(ClientSlot.CACHED) for book in books),
            slots_draining=sum(book.count(ClientSlot.DRAINING) for book in books),
            waiting=sum(book.waiting for book in books),
            in_flight=len(session.end.pending) if session is not None else 0,
            reply_slots_held=session.reply_slots_held if session is not None else 0,
            submitted=counters.submitted,
            finished=counters.finished,
            failed=counters.failed,
            aborted=counters.aborted,
            copies=counters.copies,
            copied_nbytes=counters.copied_nbytes,
            in_place=counters.in_place,
            in_place_nbytes=counters.in_place_nbytes,
            inline_payloads=counters.inline_payloads,
            slot_nbytes_submitted=counters.slot_nbytes_submitted,
            replies=counters.replies,
            reply_copies=counters.reply_copies,
            reply_copied_nbytes=counters.reply_copied_nbytes,
            stale_releases=counters.stale_releases,
            reconnections=counters.reconnections,
            kept_pins=len(session.kept) if session is not None else 0,
            kept_hits=counters.kept_hits,
            kept_misses=counters.kept_misses,
            **{field: count for slots in memories for field, count in slots.statistics().items()},
        )

    def _check_name(self, name: str) -> None:
        if len(name) > _MAX_NAME_CHARACTERS:
            raise ValueError(f"a name has at most {_MAX_NAME_CHARACTERS} characters, not {len(name)}")
        name.encode()  # raises ValueError (UnicodeEncodeError) for what is no text


def parse_sizes(sizes: Sequence[int | str]) -> list[int]:
    """Returns sizes of slots, of which there is at least one, in bytes."""
    if not sizes:
        raise ValueError("there is at least one slot")
    return [parse_nbytes(nbytes) for nbytes in sizes]
