"""The engine's side without an event loop: claims for any thread, in order of arrival, by their numbers or by their names.

Theory of operation: the loop claims each request when it arrives, and keeps the claims in order until a thread takes them. So a
thread that takes an arrived request waits neither for the loop nor for a thread that keeps the interpreter busy. If a thread
has to wait, the loop hands it the claim later. ``served_by`` decides which thread runs the loop: one of its own, or the calling
threads.

Untaken requests are bounded like all others (``RingConfig.max_inflight`` for each frontend). They go when their frontend aborts
them or is gone, and fail after ``untaken_s`` if that is set.

Invariant: a claim is handed to one thread, or is ended here: it was aborted, has expired, or the ring was closed.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Generic, Literal, Self, Unpack, cast, get_args, overload

from typing_extensions import TypeVar

import shmring.ring.claim as in_loop
import shmring.ring.ring as ring_in_loop
from shmring.config import RingConfig, RingOptions, busy_poll_of, configured
from shmring.core.compiled import BaseClaim, ForEngine, Gathering
from shmring.door import check_callable, check_calls, check_error, check_name, check_text, count_of, shown, timeout_of
from shmring.errors import AbortedError, ClosedError, LocalProtocolError, RemoteProtocolError, ShmringError, WouldBlock
from shmring.ring.frontend import CallHandler
from shmring.ring.serving import create_shell
from shmring.ring.shell import Shell
from shmring.ring.workers import Workers
from shmring.threads.blocking import Blocking, blocking, done_in_loop, read_through, tried_at_once
from shmring.threads.callers_loop import CallersLoop
from shmring.threads.loop_calls import LoopCall, LoopRunner, keep, within
from shmring.threads.loop_thread import LoopThread

__all__ = ["Claim", "Ring", "serve"]

_Payload = TypeVar("_Payload", default=Any)

#: Which thread runs the loop of a ring.
ServedBy = Literal["thread", "callers", "both"]

_NOTHING: Any = object()

#: How many requests that ended untaken are remembered, for a later ``take``. A message that names a request follows it within a
#: second or so; of an older one, ``take`` says only that it was taken or has ended.
_REMEMBERED = 4096

_LARGEST_NUMBER = 2**64 - 1  # of a client or a request

_NO_THREAD_NBYTES = 1 << 62  # nothing is as large

_Key = tuple[int, int]  # client id, request id


class _Arrivals:
    """Claims that have arrived and were not taken. Other threads may take from ``claims``; only the loop uses the rest."""

    def __init__(self, thread: LoopRunner, is_connected: Callable[[int], bool], untaken_s: float | None) -> None:
        self.claims: OrderedDict[_Key, Claim] = OrderedDict()
        self._thread = thread
        self._is_connected = is_connected
        self._loop = asyncio.get_running_loop()
        self._claimers: dict[LoopCall, None] = {}  # in line
        self._takers: dict[_Key, LoopCall] = {}
        self._named: dict[str, dict[LoopCall, None]] = {}  # in line for a name
        self._last_ids: dict[int, int] = {}  # the highest number that has arrived, by client
        self._ended: OrderedDict[_Key, ShmringError | TimeoutError] = OrderedDict()
        if untaken_s is not None:
            self._expire(untaken_s)

    def arrived(self, received: in_loop.Claim) -> None:
        """A request was claimed."""
        claim = Claim(self._thread, received, self._loop.time())
        key = claim.client_id, claim.request_id
        self._last_ids[claim.client_id] = claim.request_id
        received.on_abort(functools.partial(self._aborted, key))
        self._hand_out(key, claim)

    def put_back(self, claim: Claim) -> None:
        """A claim was handed to a thread that no longer takes it."""
        key = claim.client_id, claim.request_id
        if claim.aborted:
            claim.release()
            self.lost(key, _aborted(key))
        else:
            self._hand_out(key, claim)
            if key in self.claims:
                self.claims.move_to_end(key, last=False)

    def _hand_out(self, key: _Key, claim: Claim) -> None:
        """Gives a claim to a thread that waits for it, or keeps it."""
        call = self._takers.get(key) or next(iter(self._named.get(claim.name, self._claimers)), None)
        if call is not None:
            call.answer(claim)
        else:
            self.claims[key] = claim

    # -- in any thread -------------------------------------------------------------------------------------------------

    def pop_first(self) -> Claim | None:
        """Takes the first claim that is not aborted; None: there is none."""
        while True:
            try:
                claim = self.claims.popitem(last=False)[1]
            except KeyError:
                return None
            if not claim.aborted:
                return claim
            claim.release()  # that it was aborted is not known here yet

    def pop(self, key: _Key) -> Claim | None:
        """Takes one claim by its numbers; None: it is not here.

        Raises:
            AbortedError: it was aborted.
        """
        claim = self.claims.pop(key, None)
        if claim is not None and claim.aborted:
            claim.release()
            raise _aborted(key)
        return claim

    def pop_named(self, name: str) -> Claim | None:
        """Takes the first claim of a name that is not aborted; None: it is not here. It looks through all that have arrived."""
        for key, claim in tuple(self.claims.items()):
            if claim.name == name and self.claims.pop(key, None) is not None:  # else another thread was faster
                if not claim.aborted:
                    return claim
                claim.release()
        return None

    # -- whoever waits -------------------------------------------------------------------------------------------------

    def next(self, call: LoopCall) -> None:
        """A thread wants any claim."""
        if (claim := self.pop_first()) is not None:
            call.answer(claim)
        else:
            self._claimers[call] = None
            call.on_end.append(functools.partial(self._claimers.pop, call))

    def take_named(self, call: LoopCall, name: str) -> None:
        """A thread wants the next claim of a name."""
        if (claim := self.pop_named(name)) is not None:
            call.answer(claim)
        else:
            self._named.setdefault(name, {})[call] = None
            call.on_end.append(functools.partial(self._leave_name, name, call))

    def _leave_name(self, name: str, call: LoopCall) -> None:
        del self._named[name][call]
        if not self._named[name]:
            del self._named[name]

    def take(self, call: LoopCall, key: _Key) -> None:
        """A thread wants one certain claim."""
        client_id, request_id = key
        if (claim := self.pop(key)) is not None:
            call.answer(claim)
        elif (error := self._ended.pop(key, None)) is not None:
            raise error
        elif not self._is_connected(client_id):
            raise _gone(key)
        elif request_id <= self._last_ids.get(client_id, 0):
            raise LocalProtocolError(f"request {request_id} of client {client_id} was taken before, or has ended")
        elif key in self._takers:
            raise LocalProtocolError(f"two threads wait for request {request_id} of client {client_id}; only one can have it")
        else:
            self._takers[key] = call
            call.on_end.append(functools.partial(self._takers.pop, key))

    # -- what nobody will take -------------------------------------------------------------------------------------------

    def lost(self, key: _Key, error: ShmringError | TimeoutError) -> None:
        """A request will never be claimed: fails the thread that waits for it, or that will ask for it."""
        taker = self._takers.get(key)
        if taker is not None:
            taker.answer(error=error)
            return
        self._ended[key] = error
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _aborted(self, key: _Key) -> None:
        claim = self.claims.pop(key, None)
        if claim is not None:  # otherwise a thread has it
            claim.release()
            self.lost(key, _aborted(key))

    def client_gone(self, client_id: int) -> None:
        """No more requests will come from a client."""
        self._last_ids.pop(client_id, None)
        for key in [key for key in self._ended if key[0] == client_id]:
            del self._ended[key]
        for key in [key for key in self._takers if key[0] == client_id]:
            self._takers[key].answer(error=_gone(key))

    def _expire(self, untaken_s: float) -> None:
        """Fails requests that were not taken for so long; looks again when the next may be due."""
        again_s = untaken_s
        now = self._loop.time()
        for key in tuple(self.claims):
            claim = self.claims.get(key)
            if claim is None:
                continue  # it was taken just now
            again_s = claim._arrived_s + untaken_s - now
            if again_s > 0:
                break
            again_s = untaken_s
            if self.claims.pop(key, None) is not None:
                message = f"nobody took request {key[1]} of client {key[0]} within {untaken_s:g} s"
                claim.time_out(message)
                self.lost(key, TimeoutError(message))
        self._loop.call_later(again_s, self._expire, untaken_s)


def _aborted(key: _Key) -> AbortedError:
    return AbortedError(f"request {key[1]} of client {key[0]} was aborted by its frontend", request_id=key[1])


def _gone(key: _Key) -> AbortedError:
    return AbortedError(f"client {key[0]} is not connected: request {key[1]} will not come", request_id=key[1])


class _Shell(Shell):
    """The inside of a ring. It claims each request that arrives, and reports requests that will never be claimed."""

    _arrivals: _Arrivals

    def start(self, arrivals: _Arrivals) -> None:
        """Begins to claim requests, in the turn of the loop in which this was made."""
        self._arrivals = arrivals
        self.end.on_arrival = self._claim_all

    def _claim_all(self) -> None:
        while (claim := self.end.claim_next()) is not None:
            self._arrivals.arrived(claim)

    def is_connected(self, client_id: int) -> bool:
        """Whether requests of a client may still come."""
        frontend = self._frontends.get(client_id)
        return frontend is not None and frontend.connected

    def client_lost(self, client_id: int) -> None:
        self._arrivals.client_gone(client_id)

    def claim_failed(self, claim: BaseClaim, error: Exception, *, breaks_rules: bool) -> None:
        super().claim_failed(claim, error, breaks_rules=breaks_rules)
        client_id, request_id = claim.client_id, claim.request_id
        text = f"request {request_id} of client {client_id} can't be taken up: {type(error).__name__}: {error}"
        self._arrivals.lost((client_id, request_id), RemoteProtocolError(text))


class Claim(Blocking[in_loop.Claim], Generic[_Payload]):
    """A request that this engine is working on. Use it as ``with claim:``, or :meth:`done` or :meth:`fail` it, in any thread.

    It is what :class:`shmring.Claim` is; see there. The calls that end it or give its slots back (:meth:`done`, :meth:`fail`,
    :meth:`time_out`, :meth:`release`, leaving its block) never wait and take no lock: the loop's thread carries them out a
    moment later, those of one thread in order. So finalisers may make them too.

    Attributes:
        client_id: the frontend, as this engine numbers its connections.
        request_id: the request, as that frontend numbers its submissions.
        for_engine: what its caller has told the engine besides the payload.
        name: the caller's own name for the request; may be empty.
        nbytes: bytes of tensors in its slots.
    """

    __slots__ = ("_arrived_s", "_is_left", "client_id", "for_engine", "name", "nbytes", "request_id")

    def __init__(self, thread: LoopRunner, claim: in_loop.Claim, arrived_s: float) -> None:
        self._thread = thread
        self._in_loop = claim
        self._is_left = False
        self._arrived_s = arrived_s  # in the time of the loop
        self.client_id: int = claim.client_id
        self.request_id: int = claim.request_id
        self.for_engine: ForEngine = claim.for_engine
        self.name: str = claim.name
        self.nbytes: int = claim.nbytes

    def __repr__(self) -> str:
        return repr(self._in_loop)

    __reduce_ex__ = in_loop.Claim.__reduce_ex__

    @property
    def payload(self) -> _Payload:
        """The payload, its tensors viewed in place. Views taken from it keep their slot after the claim is left.

        Raises:
            LocalProtocolError: the claim has released it.
            ClosedError: it belongs to the process that forked this one.
        """
        self._thread.home.check_process()
        if self._is_left:
            raise LocalProtocolError(f"request {self.request_id} was released; keep what you need of its payload before")
        payload: _Payload = self._in_loop.payload
        return payload

    @property
    def on_gpu(self) -> bool:
        """Whether some of its tensors lie in the device slab."""
        return bool(self._in_loop._submit.content.fence)

    def use_on_gpu(self) -> None:
        """Lets this thread's current stream wait for the frontend's queued work: then the stream may use tensors in the device
        slab.

        Before this call, only the stream of the loop's thread waits for it. The slots are used again after their last view has
        died, and after all work that is queued by then on each of these streams. If the tensors lie elsewhere, this does
        nothing.

        Raises:
            CudaError: CUDA failed.
            LocalProtocolError: the claim has released its slots; or this is the middle of the loop.
            ClosedError: the ring is closed.
        """
        if self.on_gpu:
            self._thread.at_once(_use_on, self._in_loop, self._in_loop._shell.current_stream())

    @property
    def aborted(self) -> bool:
        """Whether the frontend gave the request up, or has gone."""
        return self._in_loop.aborted

    @property
    def ended(self) -> bool:
        """Whether nothing more may be sent in answer to it."""
        return self._in_loop.ended

    @property
    def released(self) -> bool:
        """Whether its slots were released, or are about to be."""
        return self._is_left or self._in_loop.released

    def reply(self, payload: object, *, timeout: float | None = None) -> None:
        """Sends an answer; any number of times. Waits for reply space and for a frontend that reads slowly.

        Args:
            payload: like a request's: any msgspec-encodable object with tensors and arrays at any depth.
            timeout: seconds to wait.

        Raises:
            TimeoutError: it took longer; nothing was sent.
            AbortedError: the request was aborted.
            TypeError: something in the payload can't be sent; the message names its path.
            CapacityError: it can never fit the reply reserve, or a message.
            ClosedError: the ring is closed.
            LocalProtocolError: the request has ended, or this is the loop's own thread.
        """
        self._thread.call(self._reply, self._in_loop.reply, payload, timeout_of(timeout))

    share = tried_at_once(in_loop.Claim.share, in_loop.Claim.share_nowait)
    share_nowait = done_in_loop(in_loop.Claim.share_nowait)

    def done(self, reply: object = _NOTHING, *, timeout: float | None = None) -> None:
        """Releases the slots and tells the frontend that the request is finished.

        Without a reply, this may be called anywhere, also by a finaliser.

        Args:
            reply: a last answer, in the same message; then this waits, and raises, as :meth:`reply` does.
            timeout: seconds to wait, with a reply.
        """
        if reply is not _NOTHING:
            self._thread.call(self._reply, self._in_loop.done, reply, timeout_of(timeout))
            self._is_left = True
            return
        self._is_left = True
        self._thread.post(self._in_loop.done)

    async def _reply(self, send: Callable[[object], Any], payload: object, timeout: float | None) -> None:
        await within(timeout, lambda: f"client {self.client_id} to take a reply to request {self.request_id}", send(payload))

    def fail(self, error: BaseException) -> None:
        """Releases the slots and tells the frontend that the request failed, with the error's type and text."""
        check_error(error)
        self._is_left = True
        self._thread.post(self._in_loop.fail, error)

    def time_out(self, message: str) -> None:
        """Releases the slots and tells the frontend that the request's time is over: it gets a ``TimeoutError``."""
        check_text(message, "message")
        self._is_left = True
        self._thread.post(self._in_loop.time_out, message)

    def release(self) -> None:
        """Releases the slots before the request ends; twice is once."""
        self._is_left = True
        self._thread.post(self._in_loop.release)

    def on_abort(self, callback: Callable[[], object]) -> None:
        """Calls back in the loop's thread when the request is aborted; soon if it was. The callback must not make calls that
        wait. It sees the context variables of this thread, as they are now."""
        check_callable(callback, "callback")
        self._thread.post(functools.partial(self._in_loop.on_abort, callback, context=contextvars.copy_context()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if error is None:
            self.done()
            return False
        self.fail(error)
        return isinstance(error, AbortedError) and self.aborted and error.request_id == self.request_id


def _use_on(claim: in_loop.Claim, stream: int) -> None:
    _ = claim.payload  # raises if its slots were released
    claim._shell.use_on_device(claim.client_id, claim._submit, stream)


def _ask(workers: Workers, payload: object, to: Iterable[int] | None, busy_s: float) -> Gathering | None:
    """Sends the message of a gather, and looks for the replies for a moment; None: it has to wait."""
    gathering = workers.ask_now(payload, to)
    if gathering is not None:
        gathering.look(busy_s)
    return gathering


class _Replies(LoopCall):
    """Waits for the replies to a message. The gathering uses it like a future."""

    __slots__ = ("_gathering", "_timeout")

    def __init__(self, gathering: Gathering, timeout: float | None) -> None:
        super().__init__(keep, (None,), keep)
        self._gathering = gathering
        self._timeout = timeout

    def begin(self) -> None:
        timeout, gathering = self._timeout, self._gathering
        timer = None
        if timeout is not None:
            timer = asyncio.get_running_loop().call_later(timeout, gathering.time_out)
        gathering.expect(self, timeout, timer)
        if gathering.is_over:
            self.answer()

    def done(self) -> bool:
        return self.is_ended

    def set_result(self, result: None) -> None:
        self.answer()

    def set_exception(self, error: BaseException) -> None:
        self.answer()  # Gathering.result raises it


class Ring(Blocking[ring_in_loop.Ring], Generic[_Payload]):
    """The engine's side, for any thread. Made by :func:`serve`; use it as ``with serve(...) as ring:``, or :meth:`close` it.

    Iterate over it for claims, in order of arrival; several threads may do so at once.

    Attributes:
        name: the engine's name.
        config: as configured.
    """

    def __init__(
        self,
        name: str,
        config: RingConfig,
        payload_type: Any,
        calls: Mapping[str, CallHandler] | None,
        untaken_s: float | None,
        served_by: ServedBy,
    ) -> None:
        """Opens it; see :func:`serve`."""
        self.name = name
        self.config = config

        async def create() -> ring_in_loop.Ring:
            shell = await create_shell(
                _Shell, name, config, payload_type=payload_type, calls=calls, offload_nbytes=offload_nbytes
            )
            self._arrivals = _Arrivals(self._thread, shell.is_connected, untaken_s)
            shell.start(self._arrivals)
            self._in_loop = ring_in_loop.Ring(shell)
            return self._in_loop

        offload_nbytes = None if served_by == "thread" else _NO_THREAD_NBYTES  # a caller waits anyway, so it copies itself
        what = f"ring {name!r}"
        thread = LoopThread(what, create) if served_by == "thread" else CallersLoop(what, create, stands_by=served_by == "both")
        self._thread = thread
        thread.open()

    def claim(self, timeout: float | None = None) -> Claim[_Payload]:
        """Waits for the next untaken request.

        Threads that wait are served in the order in which they wait.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: none came.
            ClosedError: the ring is closed.
        """
        timeout = timeout_of(timeout)
        self._thread.check_open()
        claim = self._arrivals.pop_first()
        if claim is None:
            claim = self._thread.ask(timeout, "a request to come", self._arrivals.next, undo=self._arrivals.put_back)
        return claim

    def claim_nowait(self) -> Claim[_Payload]:
        """Claims the next untaken request if one has arrived.

        For a program with a loop of its own, which looks in each turn of it. With ``served_by="callers"`` or ``"both"``, this
        also serves frontends and workers.

        Raises:
            WouldBlock: none has.
            ClosedError: the ring is closed.
        """
        self._thread.check_open()
        claim = self._arrivals.pop_first()
        if claim is None:
            self._thread.turn()
            claim = self._arrivals.pop_first()
        if claim is None:
            raise WouldBlock("no request is waiting")
        return claim

    def take(self, client_id: int, request_id: int, timeout: float | None = None) -> Claim[_Payload]:
        """Claims one request, whether it arrived already or not. One that has arrived is there at once.

        A thread that waits here for a request gets it, even if others wait in :meth:`claim`. If you take requests by their
        numbers, do not call :meth:`claim`, which would take them first.

        Args:
            client_id: of its frontend: ``client_id`` of the client there.
            request_id: its number: ``request_id`` of the submission there.
            timeout: seconds.

        Raises:
            TimeoutError: it did not come; or no thread took it within ``untaken_s``, and it failed.
            AbortedError: it was aborted before it was taken, or its frontend is not connected (any more).
            LocalProtocolError: it was taken before, or ended long ago; or another thread waits for it; or this is the loop's
                own thread.
            RemoteProtocolError: it came, and can't be taken up: its payload is not of ``payload_type``, or its slot is stale.
            ClosedError: the ring is closed.
        """
        if type(client_id) is not int or type(request_id) is not int or client_id | request_id > _LARGEST_NUMBER:
            client_id = count_of(client_id, "client_id", least=0, most=_LARGEST_NUMBER)
            request_id = count_of(request_id, "request_id", least=0, most=_LARGEST_NUMBER)
        key = client_id, request_id
        timeout = timeout_of(timeout)
        self._thread.check_open()
        claim = self._arrivals.pop(key)
        if claim is None:
            what = f"request {request_id} of client {client_id} to come"
            claim = self._thread.ask(timeout, what, self._arrivals.take, key, undo=self._arrivals.put_back)
        return claim

    def take_named(self, name: str, timeout: float | None = None) -> Claim[_Payload]:
        """Claims the first request of a name, whether it arrived already or not. One that has arrived is there at once.

        Its caller has named it: ``request_id=`` of the submission. Several may have the same name; each is taken once, in order
        of arrival. A thread that waits here for a name gets its request, even if others wait in :meth:`claim`. If you take
        requests by their names, do not call :meth:`claim`, which would take them first. Nobody can say that a name will not
        come, since its frontend is not known: use a timeout.

        Args:
            name: of the request; not empty.
            timeout: seconds.

        Raises:
            TimeoutError: it did not come.
            TypeError, ValueError: no request has such a name.
            LocalProtocolError: this is the loop's own thread.
            ClosedError: the ring is closed.
        """
        check_name(name, "name")
        if not name:
            raise ValueError("name is the text that a caller has named its request with, and not empty")
        timeout = timeout_of(timeout)
        self._thread.check_open()
        claim = self._arrivals.pop_named(name)
        if claim is None:
            what = f"a request {name!r} to come"
            claim = self._thread.ask(timeout, what, self._arrivals.take_named, name, undo=self._arrivals.put_back)
        return claim

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Claim[_Payload]:
        try:
            return self.claim()
        except ClosedError:
            if self._thread.home.forked:
                raise
            raise StopIteration from None

    ranks = read_through(ring_in_loop.Ring.ranks)
    wait_workers = blocking(ring_in_loop.Ring.wait_workers)
    broadcast = tried_at_once(ring_in_loop.Ring.broadcast, ring_in_loop.Ring.broadcast_nowait)
    broadcast_nowait = done_in_loop(ring_in_loop.Ring.broadcast_nowait)
    _gather = blocking(ring_in_loop.Ring.gather)

    def gather(
        self,
        payload: object,
        *,
        to: Iterable[int] | None = None,
        timeout: float | None = None,
        busy_poll_s: float | None = None,
    ) -> list[Any]:
        """Sends a payload to workers as :meth:`broadcast` does, and waits for the reply of each.

        Args:
            payload, to: as of :meth:`broadcast`.
            timeout: seconds to wait, for both.
            busy_poll_s: for how long to look for the replies before this sleeps, instead of the ring's ``busy_poll_s``; other
                threads' calls wait meanwhile. Not with ``served_by="thread"``, where the ring's own thread looks.

        Returns:
            Their replies in order of rank.

        Raises:
            ValueError: ``busy_poll_s`` is not what that option may be.
            WorkersBehindError, WorkerLostError, WorkerFailedError, TypeError, CapacityError, ClosedError: as of
                :class:`shmring.Ring`.
            LocalProtocolError: this thread is in the middle of the ring: in a callback, for example.
        """
        thread = self._thread
        if not thread.is_direct:
            if busy_poll_s is not None:
                raise ValueError("busy_poll_s of one gather is for rings that are served_by their callers; set the ring's")
            return self._gather(payload, to=to, timeout=timeout)
        busy_s = self.config.busy_poll_s if busy_poll_s is None else busy_poll_s
        busy_s = busy_poll_of(busy_s)
        timeout = timeout_of(timeout)
        gathering = thread.at_once(_ask, self._in_loop._shell.workers, payload, to, busy_s)
        if gathering is None:
            return self._gather(payload, to=to, timeout=timeout)
        try:
            if not gathering.is_over:
                thread.result_of(_Replies(gathering, timeout))
            return cast(list[Any], gathering.result())
        finally:
            gathering.forget()

    drop_worker = done_in_loop(ring_in_loop.Ring.drop_worker)
    statistics = done_in_loop(ring_in_loop.Ring.statistics)
    inspect = done_in_loop(ring_in_loop.Ring.inspect)
    add_to_snapshots = done_in_loop(ring_in_loop.Ring.add_to_snapshots)

    @property
    def untaken(self) -> int:
        """How many requests have arrived and were not taken. ``running`` of :meth:`statistics` counts them as well."""
        return len(self._arrivals.claims)

    @property
    def epoch(self) -> int:
        """Identity of this life of the engine."""
        return self._in_loop.epoch

    def close(self, reason: str = "the engine is closing") -> None:
        """Ends all connections, aborts running requests, gives the slab and the name up, and ends the thread.

        Threads that wait for something get ``ClosedError`` at once. A second call does nothing.

        Args:
            reason: what frontends are told.
        """
        check_text(reason, "reason")
        self._thread.close(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


@overload
def serve(
    name: str,
    config: RingConfig | None = ...,
    *,
    payload_type: type[_Payload],
    calls: Mapping[str, CallHandler] | None = ...,
    untaken_s: float | None = ...,
    served_by: ServedBy = ...,
    **overrides: Unpack[RingOptions],
) -> Ring[_Payload]: ...


@overload
def serve(
    name: str,
    config: RingConfig | None = ...,
    *,
    payload_type: Any = ...,
    calls: Mapping[str, CallHandler] | None = ...,
    untaken_s: float | None = ...,
    served_by: ServedBy = ...,
    **overrides: Unpack[RingOptions],
) -> Ring[Any]: ...


def serve(
    name: str,
    config: RingConfig | None = None,
    *,
    payload_type: Any = Any,
    calls: Mapping[str, CallHandler] | None = None,
    untaken_s: float | None = None,
    served_by: ServedBy = "thread",
    **overrides: Unpack[RingOptions],
) -> Ring[Any]:
    """Opens a ring, the engine's side: ``with shmring.threads.serve("vision", slab_nbytes="1GiB") as ring``.

    Returns when frontends can connect.

    Args:
        name: what frontends connect to; one living engine of a user may have it.
        config: limits and sizes; ``overrides`` are fields of it.
        payload_type: a msgspec type that payloads are decoded into; plain objects if not given.
        calls: control calls that frontends may make, by name: coroutine functions, which run in the loop's thread.
        untaken_s: a request that no thread has taken for so many seconds fails: its frontend gets a ``TimeoutError``.
            ``None``: it stays until it is taken, or its frontend aborts it or is gone.
        served_by: which thread carries out calls, and serves frontends and workers. ``"thread"``: a thread of the ring.
            ``"callers"``: the thread that calls; between two calls, no thread does. ``"both"``: the thread that calls, and a
            thread of the ring when there was no call for 20 ms.

    Raises:
        SlabError, LocalProtocolError, PermissionError, ValueError, TypeError: as :func:`shmring.serve`.
    """
    check_calls(calls)
    untaken_s = timeout_of(untaken_s, "untaken_s")
    if untaken_s == 0:
        raise ValueError("untaken_s is a number of seconds above 0, or None")
    if served_by not in get_args(ServedBy):
        raise ValueError(f"served_by is 'thread', 'callers' or 'both', not {shown(served_by)}")
    return Ring(name, configured(RingConfig, config, overrides), payload_type, calls, untaken_s, served_by)
