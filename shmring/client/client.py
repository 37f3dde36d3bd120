"""A frontend's side of the transport: one client of one or more engines.

Theory of operation: :class:`Client` is what callers hold. It has an :class:`~shmring.client.attachment.Attachment` to each of
its engines, which attaches to it, learns of its death, and attaches to the next one of that name. A request goes to one of
them, whole: its engine is chosen when it is sent (:mod:`shmring.client.engines`). So an engine that dies takes its own requests
with it and no others. With one engine there is nothing to choose, and the compiled :class:`~shmring.core.compiled.ClientCalls`
does all that need not wait.

When an engine dies, its unsent requests go to another engine, if there are others. Its sent requests fail, unless their caller
allows another try, since the engine may have carried them out in part. Tensors in slots of the dead engine are still there as
long as their caller holds the slots: a slab in host memory is mapped here until the last view of it has died, and a dead engine
lends no memory. They are copied to the next engine. For memory on a GPU this is not known, so tensors there are not sent a
second time.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar, Unpack, overload

import torch

from shmring.client.connection import EngineConnection
from shmring.client.deadlines import Deadlines
from shmring.client.engines import Engines
from shmring.client.far_session import Access, keeps_nothing
from shmring.client.kept import Keeping, Kept
from shmring.client.preparing import Preparations
from shmring.client.routing import EngineLoad, Route
from shmring.client.session import Session
from shmring.client.slot import Slot
from shmring.client.submission import Submission
from shmring.config import ClientConfig
from shmring.core.compiled import ClientCalls, ForEngine
from shmring.core.geometry import nbytes_for_slots
from shmring.door import (
    check_key,
    check_name,
    check_retry,
    check_route_key,
    keys_of,
    names_of,
    parse_nbytes,
    shown,
    stream_of,
    timeout_of,
)
from shmring.errors import ClosedError, EngineDeadError, ShmringError, WouldBlock
from shmring.gpu.cuda import Cuda, Stream, TorchCuda
from shmring.gpu.device import DeviceMemory
from shmring.gpu.driver import Driver
from shmring.memory.copier import Copier
from shmring.request_options import RequestOptions
from shmring.statistics import ClientStatistics
from shmring.uncopied import uncopied

__all__ = ["Client"]

_Result = TypeVar("_Result")
_Reply = TypeVar("_Reply")
_Payload = TypeVar("_Payload")

_COPY_THREADS = 2  # for large copies: two saturate the memory bandwidth of most servers


class Client(ClientCalls):
    """A frontend's connection to one engine, or to several. Made by :func:`shmring.connect`.

    Several engines should be alike: each may get any request. A client has as much memory and as many requests in flight
    at each of them as it would have at that one alone.

    Attributes:
        names: the names of its engines, in the order in which they were given.
        config: as configured, for each engine.
        engines: the connection to each engine, by its name.
        resent: requests that were sent again because their engine had died (``retry``).
    """

    def __init__(
        self,
        names: Sequence[str],
        config: ClientConfig,
        *,
        route: Route = "least_loaded",
        reconnect: bool = False,
        description: str = "",
        access: Access | None = None,
        cuda: Cuda | None = None,
        device_memory: DeviceMemory | None = None,
    ) -> None:
        """Makes a client that is not attached yet; see :func:`shmring.client.connecting.open_client`."""
        self.names = tuple(names)
        self.config = config
        self.resent = 0
        self._copier = Copier(_COPY_THREADS, int(config.copy_offload_nbytes))
        super().__init__(self._copier)
        self._deadlines = Deadlines()
        self._preparations = Preparations()
        self._engines = Engines(
            self.names,
            config,
            route=route,
            reconnect=reconnect,
            description=description,
            copier=self._copier,
            cuda=cuda or TorchCuda(),
            device_memory=device_memory or Driver(),
            access=access,
            use=self._use,
        )
        connections = {name: EngineConnection(attachment) for name, attachment in self._engines.attachments.items()}
        self.engines: Mapping[str, EngineConnection] = MappingProxyType(connections)

    __reduce_ex__ = uncopied("it belongs to one process and one event loop; connect in the new one")

    # -- requests ----------------------------------------------------------------------------------------------------

    @overload
    async def request(self, payload: object, *, reply_type: type[_Reply], **options: Unpack[RequestOptions]) -> _Reply: ...

    @overload
    async def request(self, payload: object, *, reply_type: Any = ..., **options: Unpack[RequestOptions]) -> Any: ...

    async def request(
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
        """Sends a payload and waits for its one reply. Cancelling aborts the request.

        Tensors of a reply are views into the engine's slab; they go back when the last view of them dies. They are in memory
        that can only be read: writing to one in place ends this process, so write to a copy (``clone``).

        Args:
            payload: any msgspec-encodable object with torch tensors and numpy arrays at any depth. Tensors that lie in a
                slot of this client are sent from there; others are copied, once, into one slot in host memory. This includes
                tensors on a GPU; the call waits for the GPU.
            timeout: seconds for all of it, waiting for space included.
            reply_type: a msgspec type to decode the reply into.
            request_id: the caller's own name for it, for :meth:`abort` and the engine's log.
            key: of several engines, sends all requests of this key to the same one, as long as that is attached.
            engine: sends it to this one.
            retry: how often it may be sent again, to whichever engine is attached, because its engine died before a reply was
                read. It may then have been carried out twice, or in part.

        Raises:
            TimeoutError: it took longer; the request was aborted.
            TypeError: something in the payload can't be sent; the message names its path. Nothing was sent.
            CapacityError: it can never fit the slab, or a message.
            RemoteError: the engine failed with this request.
            AbortedError: it was aborted by :meth:`abort`.
            EngineDeadError: its engine went away; ``engine`` of the error names it. Or no engine is attached, and the client
                does not reconnect.
            ClosedError: this client is closed.
            LocalProtocolError: tensors of the payload lie in slots of two engines, or in a slot of another engine than
                ``engine``.
            ValueError: there is no such engine, or ``engine`` and ``retry`` contradict each other.
        """
        retry = check_retry(retry, engine)
        why_not_sent = self._engines.why_not_sent if engine is None else functools.partial(self._engines.why_not_sent, engine)
        with self._deadlines.within(timeout, why_not_sent) as deadline:
            while True:
                submission = await self.submit(payload, request_id=request_id, key=key, engine=engine)
                deadline.waits_for = submission._why_no_reply
                try:
                    return await submission.result(reply_type)
                except EngineDeadError:
                    if not self._sends_again(submission, retry):
                        raise
                    retry -= 1
                    deadline.waits_for = why_not_sent
                except BaseException:
                    submission.abort()
                    raise

    @overload
    def stream(
        self, payload: object, *, reply_type: type[_Reply], **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[_Reply, None]: ...

    @overload
    def stream(
        self, payload: object, *, reply_type: Any = ..., **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[Any, None]: ...

    async def stream(
        self,
        payload: object,
        *,
        timeout: float | None = None,
        reply_type: Any = Any,
        request_id: str = "",
        key: str | bytes | None = None,
        engine: str | None = None,
        retry: int = 0,
    ) -> AsyncGenerator[Any, None]:
        """Sends a payload and yields its replies as they come. Leaving the loop early aborts the request.

        Arguments and errors are those of :meth:`request`; ``timeout`` bounds the waiting, not what the caller does
        between two replies.
        """
        retry = check_retry(retry, engine)
        timeout = timeout_of(timeout)
        until_s = None if timeout is None else asyncio.get_running_loop().time() + timeout

        while True:
            submitting = self.submit(payload, request_id=request_id, key=key, engine=engine)
            submission = submitting.at_once()
            if submission is None:
                with self._deadlines.within(timeout, lambda: self._engines.why_not_sent(engine), until_s=until_s):
                    submission = await submitting
            try:
                while True:
                    try:
                        if submission._need_not_wait():
                            reply = [await submission.next(reply_type)]
                        else:
                            with self._deadlines.within(timeout, submission._why_no_reply, until_s=until_s):
                                reply = [await submission.next(reply_type)]
                    except StopAsyncIteration:
                        return
                    except EngineDeadError:
                        if not self._sends_again(submission, retry):
                            raise
                        retry -= 1
                        break
                    yield reply.pop()  # or this frame would keep the reply's slot until the caller asks for the next reply
            finally:
                submission.abort()

    def _sends_again(self, submission: Submission, retry: int) -> bool:
        """Whether a request whose engine has died is sent once more."""
        if not retry or submission.has_replied or submission._on_gpu:
            return False
        if not self._engines.has_another:
            return False  # its caller learns why it has died
        self.resent += 1
        return True

    async def _submit_in_turn(
        self, payload: object, for_engine: ForEngine, key: str | bytes | None, engine: str | None
    ) -> Submission:
        """For :meth:`submit`: waits, or chooses an engine."""
        check_route_key(key)
        sending = self._submit_when_attached(payload, for_engine, key, engine)
        return await (self._preparations.prepare(for_engine.request_id, sending) if for_engine.request_id else sending)

    async def _submit_when_attached(
        self, payload: object, for_engine: ForEngine, key: str | bytes | None, engine: str | None
    ) -> Submission:
        while True:
            holder, packed, on_gpu = self._engines.holder(payload, engine)
            attachment = holder or await self._engines.pick_in_time(key, engine)
            session = attachment.session
            if self._engines.only is None and session is not None and not session.is_far:
                self._engines.home.check_loop()
                submission = self._submit_now(session.end, payload, packed, for_engine)
                if submission is not None:
                    return submission
            del packed
            try:
                session = await self._engines.session_with(attachment, engine)
                is_given = holder is not None or key is not None or engine is not None
                sending = session.sending.submit_in_turn(payload, for_engine)
                return await self._engines.while_it_responds(session, sending, is_given=is_given)
            except EngineDeadError:  # before it was sent
                if on_gpu or self._engines.leaves_no_other(engine):
                    raise

    def submit_nowait(
        self,
        payload: object,
        *,
        request_id: str = "",
        ask: bool = True,
        key: str | bytes | None = None,
        engine: str | None = None,
    ) -> Submission:
        """Sends a payload if nothing has to be waited for; the copy is made in the loop.

        Unless a slot, a key or ``engine`` decides, the payload may go to any engine with room for it. In
        :mod:`shmring.threads`, a long copy is made beside the loop, and waited for.

        Args:
            payload, request_id, key, engine: as of :meth:`request`.
            ask: whether to ask the engine for a lease where there is no space, so that a later call finds some.

        Raises:
            WouldBlock: there is no space in this client's leases, too much is in flight, or no engine is attached.
        """
        for_engine = ForEngine(request_id=request_id)
        return _first_that_can(
            self._engines.takers(payload, key, engine),
            lambda session: session.sending.submit_nowait(payload, for_engine, ask=ask),
        )

    def abort(self, request_id: str | Iterable[str]) -> int:
        """Aborts the requests of these names, wherever they are; tasks that wait for them get :class:`AbortedError`.

        Returns:
            How many requests were in flight. An unknown name is no error: its request may just have ended.

        Raises:
            TypeError: it is neither a name nor several.
            ClosedError: this client belongs to the process that forked this one.
        """
        self._engines.home.check_process()
        names = names_of(request_id)
        preparing = self._preparations.abort(names)
        pending = [submission for session in self._engines.sessions() for submission in session.end.pending.values()]
        in_flight = [submission for submission in pending if submission.name in names and not submission.ended]
        for submission in in_flight:
            submission.abort()
        return preparing + len(in_flight)

    async def call(self, method: str, *arguments: object, engine: str | None = None, timeout: float | None = None) -> Any:
        """Calls a control method of an engine (see ``calls`` of :func:`shmring.serve`) and returns its result.

        Args:
            method: its name.
            arguments: values that msgpack can hold.
            engine: which one; None: the only one. To call several engines, call this for each name in :attr:`names`.
            timeout: seconds.

        Raises:
            RemoteError: it failed, or the engine has no method of that name.
            ValueError: there is no such engine; or there are several, and none is named.
            TimeoutError, EngineDeadError, ClosedError: as :meth:`request`.
        """
        check_name(method, "method")
        attachment = self._engines.given(engine) if engine is not None else self._engines.the_only("methods to call")
        with self._deadlines.within(timeout, lambda: f"{self._engines.why_no_answer(engine)}, for the call {method!r}"):
            session = await attachment.ready()
            return await session.calls.call(method, arguments)

    # -- kept content --------------------------------------------------------------------------------------------------

    @overload
    async def find(
        self, key: bytes, *, payload_type: type[_Payload], timeout: float | None = ..., engine: str | None = ...
    ) -> Kept[_Payload] | None: ...

    @overload
    async def find(
        self, key: bytes, *, payload_type: Any = ..., timeout: float | None = ..., engine: str | None = ...
    ) -> Kept[Any] | None: ...

    async def find(
        self, key: bytes, *, payload_type: Any = Any, timeout: float | None = None, engine: str | None = None
    ) -> Kept[Any] | None:
        """Looks for content that the engine keeps under a key, from any client. It is pinned until the result is left.

        One round trip to each engine that is asked; none if this client has it pinned already. A request with tensors of it
        goes to the engine that keeps it. While you hold it, wait for a slot only with a timeout: otherwise two clients could
        wait for each other.

        Args:
            key: 32 bytes.
            payload_type: a msgspec type to decode the payload into.
            timeout: seconds to wait for the engine.
            engine: where it is looked for; None: at all engines that are attached, the least loaded first. An engine that reads
                nothing is passed over while another one reads.

        Returns:
            The content; None if it is not there.

        Raises:
            WouldBlock: it is there, and this client has as much pinned as the engine allows (4,096 contents, and
                ``client_pinned_nbytes``).
            TimeoutError, EngineDeadError, ClosedError: as :meth:`request`.
            TypeError, ValueError: this is no key, or there is no such engine.
        """
        check_key(key)
        with self._deadlines.within(timeout, lambda: self._engines.why_no_answer(engine)):
            for attachment in self._engines.searched(engine) or await self._engines.searched_soon(engine):
                try:
                    session = attachment.session or await self._engines.session_with(attachment, engine)
                    finding = session.kept.find(key, payload_type)
                    kept = await self._engines.while_it_responds(session, finding, is_given=engine is not None)
                except EngineDeadError:
                    if self._engines.leaves_no_other(engine):
                        raise
                else:
                    if kept is not None:
                        return kept
        return None

    async def find_many(
        self,
        keys: Iterable[bytes],
        *,
        payload_type: Any = Any,
        timeout: float | None = None,
        engine: str | None = None,
    ) -> list[Kept[Any] | None]:
        """Looks for many contents at once: with one round trip to each engine that is asked, for up to 64 of them.

        Args:
            keys: as of :meth:`find`; any number.
            payload_type, timeout, engine: as of :meth:`find`.

        Returns:
            For each key, in their order, the content to be left, or None if it is not there.

        Raises:
            WouldBlock: one of them is there, and this client has as much pinned as the engine allows. Nothing new is pinned.
            TimeoutError, EngineDeadError, ClosedError, TypeError, ValueError: as :meth:`find`; nothing new is pinned.
        """
        wanted = keys_of(keys)
        found: dict[bytes, Kept[Any]] = {}
        try:
            with self._deadlines.within(timeout, lambda: self._engines.why_no_answer(engine)):
                for attachment in self._engines.searched(engine) or await self._engines.searched_soon(engine):
                    missing = [key for key in wanted if key not in found]
                    if not missing:
                        break
                    try:
                        session = attachment.session or await self._engines.session_with(attachment, engine)
                        finding = session.kept.find_many(missing, payload_type)
                        found |= await self._engines.while_it_responds(session, finding, is_given=engine is not None)
                    except EngineDeadError:
                        if self._engines.leaves_no_other(engine):
                            raise
            first = {key: place for place, key in reversed(list(enumerate(wanted)))}
            return [  # what is named twice is left twice
                kept if kept is None or first[key] == place else kept._contents.find_nowait(key, payload_type)
                for place, (key, kept) in enumerate((key, found.get(key)) for key in wanted)
            ]
        except BaseException:
            for kept in found.values():
                kept.close()
            raise

    def find_nowait(self, key: bytes, *, payload_type: Any = Any, engine: str | None = None) -> Kept[Any]:
        """Returns kept content that this client has pinned already, without asking anybody. Any thread may call this.

        Args:
            key, payload_type, engine: as of :meth:`find`.

        Raises:
            WouldBlock: this client has not pinned it: :meth:`find` asks the engine. Or no engine is attached now.
            EngineDeadError, ClosedError, TypeError, ValueError: as :meth:`find`.
        """
        check_key(key)
        for session in self._engines.asked(engine):
            kept = session.kept.find_nowait(key, payload_type)
            if kept is not None:
                return kept
        raise WouldBlock("this client has pinned no such content; find() asks the engine for it")

    async def wait_kept(
        self, key: bytes, *, payload_type: Any = Any, timeout: float | None = None, engine: str | None = None
    ) -> Kept[Any]:
        """Waits until there is content under a key, and returns it: at once if it is there. Nobody polls for it.

        It is pinned for this client in the moment in which it comes, so it is there when the caller goes on. Callers that wait
        for the same key share one question to the engine.

        Args:
            key, payload_type: as of :meth:`find`.
            timeout: seconds.
            engine: where; of several engines, one has to be named.

        Returns:
            The content, which is pinned until it is left.

        Raises:
            TimeoutError: none has come.
            WouldBlock: it is there, and this client has as much pinned as the engine allows; or callers of this client wait for
                1024 other keys.
            EngineDeadError: the engine has gone. The next engine of that name begins without content: wait again.
            ClosedError, TypeError, ValueError: as :meth:`find`; or there are several engines, and none is named.
        """
        check_key(key)
        attachment = self._engines.given(engine) if engine is not None else self._engines.the_only("content to wait for")
        with self._deadlines.within(timeout, lambda: f"content to come to {attachment.name!r} under the key {key.hex()[:16]}"):
            session = await attachment.ready()
            return await session.kept.wait(key, payload_type)

    def keep_nowait(self, key: bytes, payload: object, slot: Slot, *, stream: Stream | None = None) -> Keeping:
        """Gives a slot to the engine, to be found under a key as soon as a GPU has written it. Waits for nothing.

        The slot is not the caller's any more: leaving its block does nothing. If this process dies before the GPU has done its
        work, nothing was published. If there is content under this key already, that stays, and the slot is free again.

        Args:
            key: as of :meth:`keep`.
            payload: any msgspec-encodable object with tensors in ``slot``, and in no other memory. Don't change it.
            slot: of this client, in host memory.
            stream: what is queued on it by now writes to the slot: a stream of torch's, of any GPU. No number: that would be of
                another stream on each GPU.
                None: nothing is queued, the slot is written.

        Returns:
            An object that says later whether it is kept (``ended``, ``error``), and that can be waited for.

        Raises:
            WouldBlock: the engine is about to end.
            CapacityError, TypeError: as :meth:`keep`.
            CudaError, RuntimeError: CUDA can't say when its work is done, or no thread waits for it; the slot is kept for good.
            ValueError: the tensors lie elsewhere, or the slot is not of this client.
            ClosedError: the slot was left, or the client closed.
            EngineDeadError: the engine has gone.
        """
        check_key(key)
        if not isinstance(slot, Slot):
            raise TypeError(f"slot is a slot of this client, not {shown(slot)}")
        gpu_stream = None if stream is None else stream_of(stream)
        session = self._engines.given(slot.engine).ready_nowait()
        if session.is_far:
            raise keeps_nothing()
        if slot._end is not session.end:
            assert slot._end is not None, "it has an engine"
            slot._end.shell.check_alive()  # raises why, if it is of an earlier life of its engine
            raise ClosedError("this slot is of another client")
        return session.kept.keep_nowait(key, payload, slot, gpu_stream)

    async def keep(self, key: bytes, payload: object, *, timeout: float | None = None, engine: str | None = None) -> Kept[Any]:
        """Gives content to an engine, to be found under a key by every client until its space is wanted for something else.

        If all tensors of the payload lie in one slot of this client, nothing is copied: the whole slot is the engine's from now
        on, and you must not write to it any more. Otherwise they are copied to a slot of their own, and the call waits
        for that slot. If there is content under this key already, that is returned: the first is kept.

        Args:
            key: 32 bytes that stand for this content and for no other, such as a hash of what it was made of.
            payload: any msgspec-encodable object with a torch tensor or numpy array in it; beside them, 4 KiB at most.
            timeout: seconds for all of it, waiting for space included.
            engine: which one; None: the engine of the slot in which it lies, or the one to which a request would go.

        Returns:
            The content, which is pinned until you leave it.

        Raises:
            WouldBlock: it can't be kept now, since too much of the kept content is pinned, or a frontend waits for that memory;
                or it is larger than all that the engine lets one client pin. A slot that it lies in is the caller's again, and
                can be sent as usual.
            CapacityError: it is larger than all that the engine may keep.
            TypeError, ValueError: it can't be sent, has no tensor, this is no key, or there is no such engine.
            TimeoutError, EngineDeadError, ClosedError, LocalProtocolError: as :meth:`request`.
        """
        check_key(key)
        with self._deadlines.within(timeout, lambda: self._engines.why_not_sent(engine)):
            holder = self._engines.holder(payload, engine)[0]
            if holder is not None:
                engine = holder.name
            return await self._engines.at_some_engine(None, engine, lambda session: session.kept.keep(key, payload))

    @property
    def kept_nbytes(self) -> int:
        """How much an engine that is attached now may keep (``RingConfig.kept_nbytes``); 0: nothing, or none is attached."""
        return max(connection.kept_nbytes for connection in self.engines.values())

    # -- slots ---------------------------------------------------------------------------------------------------------

    async def slots(
        self,
        sizes: Sequence[int | str],
        *,
        timeout: float | None = None,
        drain: bool = False,
        key: str | bytes | None = None,
        engine: str | None = None,
    ) -> list[Slot]:
        """Waits in line for several slots at once, in host memory of one engine's slab.

        Acquiring them one by one could wait for ever, for memory that the caller itself holds.

        Args:
            sizes: bytes of tensors of each; at least one.
            timeout, drain, key, engine: as of :meth:`slot`.

        Returns:
            The slots, which the caller leaves one by one.

        Raises:
            CapacityError: together they are more than the engine can lease out.
            TimeoutError, EngineDeadError, ClosedError, ValueError: as :meth:`slot`.
        """
        parts = _parse_sizes(sizes)

        async def acquire(session: Session) -> list[Slot]:
            slots = session.host_slots
            record = await slots.acquire(nbytes_for_slots(parts), held=True)
            return [slots.hold(part, drain=drain) for part in slots.book.split(record, parts)]

        with self._deadlines.within(timeout, lambda: self._engines.why_not_sent(engine)):
            return await self._engines.at_some_engine(key, engine, acquire)

    async def _acquire_in_turn(
        self,
        nbytes: int,
        timeout: float | None,
        drain: bool,
        device: torch.device | None,
        key: str | bytes | None,
        engine: str | None,
    ) -> Slot:
        """For :meth:`slot`, where it can't be had at once: chooses one of several engines, and waits for memory there."""

        async def acquire(session: Session) -> Slot:
            slots = session.host_slots if device is None else await session.device_slots.open(device.index)
            slot: Slot = slots.hold(await slots.acquire(nbytes, held=True), drain=drain)
            return slot

        with self._deadlines.within(timeout, lambda: self._engines.why_not_sent(engine)):
            return await self._engines.at_some_engine(key, engine, acquire)

    def slot_nowait(
        self,
        nbytes: int | str,
        *,
        drain: bool = False,
        device: torch.device | str = "cpu",
        ask: bool = True,
        key: str | bytes | None = None,
        engine: str | None = None,
    ) -> Slot:
        """Returns a slot if one is free in this client's leases; at any engine, unless a key or ``engine`` decides.

        Args:
            nbytes, drain, device, key, engine: as of :meth:`slot`.
            ask: whether to ask the engine for a lease where there is no space, so that a later call finds some.

        Raises:
            WouldBlock: no slot is free, or others wait for one; or this process has not mapped the device slab yet
                (:meth:`slot` maps it).
            CapacityError, EngineDeadError, ClosedError, SlabError, ValueError: as :meth:`slot`.
        """
        asked_nbytes = parse_nbytes(nbytes, "nbytes")
        wanted = self._resolve_device(device)

        def take(session: Session) -> Slot:
            session.check_alive()
            slots = session.host_slots if wanted is None else session.device_slots.opened(wanted.index)
            slot: Slot = slots.hold(slots.acquire_nowait(asked_nbytes, held=True, ask=ask), drain=drain)
            return slot

        return _first_that_can(self._engines.candidates(key, engine), take)

    def check_capacity(self, *sizes: int | str, engine: str | None = None) -> None:
        """Checks that slots of these sizes could be had at once, before the caller makes their content. Acquires no slot.

        Args:
            sizes: as for :meth:`slots`; at least one.
            engine: at this one; None: at each that is attached.

        Raises:
            CapacityError: more than one of the engines can lease out.
            WouldBlock: no engine is attached now, and the client waits for the next one.
            EngineDeadError, ClosedError: as :meth:`request`.
            ValueError: a size is negative, there is none, or there is no such engine.
        """
        total_nbytes = nbytes_for_slots(_parse_sizes(sizes))
        for session in self._engines.asked(engine):
            session.check_alive()
            session.host_slots.book.check_capacity(total_nbytes)

    def _resolve_device(self, device: torch.device | str) -> torch.device | None:
        if not isinstance(device, str | torch.device):
            raise TypeError(f"device is 'cpu', 'cuda' or a torch.device, not {shown(device)}")
        try:
            return _where(device)
        except RuntimeError as error:  # torch knows no such device
            raise ValueError(f"device is 'cpu', 'cuda' or a torch.device, not {shown(device)}") from error

    # -- choosing ------------------------------------------------------------------------------------------------------

    def choose(self, *, key: str | bytes | None = None) -> str:
        """Returns the engine that a request would go to now, for callers who need several things at one engine.

        Raises:
            WouldBlock: no engine is attached now, and the client waits for one.
            EngineDeadError: no engine is attached, and the client does not wait for one (``reconnect=False``).
        """
        return self._engines.candidates(key, None)[0].engine_name

    def loads(self) -> dict[str, EngineLoad]:
        """Returns the loads of the engines that are attached, without those that drain, unless all do.

        Raises:
            ClosedError: this client belongs to the process that forked this one.
        """
        return self._engines.loads()

    # -- the connections -----------------------------------------------------------------------------------------------

    @property
    def client_id(self) -> int:
        """How the only engine numbers this client now (``Claim.client_id`` there); 0: it is not attached.

        Raises:
            ValueError: there are several; ask each of :attr:`engines`.
        """
        return self.engines[self._engines.the_only("a client_id").name].client_id

    @property
    def epoch(self) -> int:
        """Which life of the only engine is attached now; 0: none is.

        Raises:
            ValueError: there are several; ask each of :attr:`engines`.
        """
        return self.engines[self._engines.the_only("an epoch").name].epoch

    @property
    def connected(self) -> bool:
        """Whether an engine is attached now."""
        return self._engines.connected

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._engines.home.is_closed

    @property
    def lost_error(self) -> ShmringError | None:
        """Why an engine went away, as far as it is known: the only engine, or one that is not attached now."""
        return self._engines.lost_error

    async def wait_connected(self, timeout: float | None = None, *, engine: str | None = None) -> None:
        """Waits until an engine is attached: the one that is named, or any (at once, unless one is being waited for)."""
        if engine is not None:
            self._engines.given(engine)
        with self._deadlines.within(timeout, lambda: self._engines.why_not_sent(engine)):
            await self._engines.ready(engine)

    async def wait_prefaulted(self, timeout: float | None = None) -> None:
        """Waits until the slabs' pages are mapped in this process (at once, without ``prefault``), of each engine attached.

        It takes some 0.2 s per GB, beside other work. If a server must be fast from its first request on, await this before it
        says that it is ready.
        """
        with self._deadlines.within(timeout, lambda: "the slabs' pages to be mapped in this process"):
            while True:
                await self._engines.ready(None)
                sessions = self._engines.sessions()
                for session in sessions:
                    await session.prefaulted()
                if all(session.life.is_usable for session in sessions):  # else they have ended meanwhile
                    return

    def statistics(self) -> ClientStatistics:
        """Returns gauges of the present state, and counters since the start: the sums, of several engines.

        Each of :attr:`engines` has its own.

        Raises:
            ClosedError: this client belongs to the process that forked this one.
        """
        self._engines.home.check_process()
        return ClientStatistics.total([connection.statistics() for connection in self.engines.values()])

    async def close(self) -> None:
        """Aborts pending requests, says goodbye, and detaches. A second call does nothing.

        What was handed over with :meth:`keep_nowait` is kept before, if the GPU and the engine need no more than a second.
        """
        if self._engines.home.is_closed or self._engines.home.forked:
            return  # a forked child must not say goodbye for its parent
        self._engines.home.check_loop()
        try:
            await self._engines.close()
        finally:  # also when this is cancelled
            self._copier.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def _parse_sizes(sizes: Sequence[int | str]) -> list[int]:
    """Returns sizes of slots, of which there is at least one, in bytes."""
    if isinstance(sizes, str | bytes) or not isinstance(sizes, Iterable):
        raise TypeError(f"sizes is a list of sizes of slots, not {shown(sizes)}")
    parts = [parse_nbytes(nbytes, "a size of a slot") for nbytes in sizes]
    if not parts:
        raise ValueError("sizes has at least one size of a slot")
    return parts


def _first_that_can(sessions: Sequence[Session], attempt: Callable[[Session], _Result]) -> _Result:
    """Returns what the first engine can do without waiting; the error is that of the best one."""
    full: WouldBlock | None = None
    for session in sessions:
        try:
            return attempt(session)
        except WouldBlock as error:
            full = full or error
    assert full is not None, "there is an engine"
    raise full


@functools.lru_cache(maxsize=64)  # torch takes longer to read a name than it takes to acquire the slot
def _where(device: torch.device | str) -> torch.device | None:
    """The GPU that a caller wants a slot on; None: on the host."""
    wanted = torch.device(device)
    if wanted.type == "cpu":
        return None
    if wanted.type != "cuda":
        raise ValueError(f"a slot is on device 'cpu' or 'cuda', not on {str(wanted)!r}")
    return wanted
