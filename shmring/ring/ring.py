"""The engine's side of the transport, for users.

Theory of operation: the :class:`~shmring.core.compiled.EngineEnd` does the work on every message, and the
:class:`~shmring.ring.shell.Shell` around it does the rarer work. :class:`Ring` has only the calls for users.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self

from typing_extensions import TypeVar

from shmring.core.compiled import Awaited, EngineCalls
from shmring.door import check_callable, check_text, count_of, rank_of, seconds_of, timeout_of
from shmring.errors import ClosedError, WouldBlock
from shmring.ring.claim import Claim
from shmring.ring.handling import handle_batches, handle_claims
from shmring.ring.injecting import Injector
from shmring.ring.shell import Shell
from shmring.snapshot import RingSnapshot
from shmring.statistics import RingStatistics
from shmring.uncopied import uncopied

__all__ = ["Ring"]

_Payload = TypeVar("_Payload", default=Any)

_LOOK_S = 0.00005  # how long it looks for a request before the loop goes on, if this engine polls busily: about a round trip


class Ring(EngineCalls, Generic[_Payload]):
    """The engine's side. Made by :func:`serve`; iterate over it for claims, in order of arrival.

    Attributes:
        name: the engine's name.
        config: as configured.
        epoch: identity of this life of the engine.
        address: where clients on other hosts connect to, as :func:`shmring.connect` takes it; empty: nowhere.
    """

    def __init__(self, shell: Shell) -> None:
        life = shell.life
        super().__init__(shell.end, min(life.config.busy_poll_s, _LOOK_S))
        self._shell = shell
        self.name = life.name
        self.config = life.config
        self.epoch = life.epoch
        self.address = ""
        self._close_gateway: Callable[[], Awaitable[None]] | None = None

    def _listen(self, address: str, close: Callable[[], Awaitable[None]], on_drain: Callable[[], object]) -> None:
        """For :func:`shmring.serve`: a gateway is listening, is closed before this is, and is told when this drains."""
        self.address, self._close_gateway, self._shell.on_drain = address, close, on_drain

    __reduce_ex__ = uncopied("it belongs to one process and one event loop; serve a ring of another name in the new one")

    # -- claims ----------------------------------------------------------------------------------------------------

    if TYPE_CHECKING:

        def claim(self) -> Awaited[Claim[_Payload]]: ...

        def claim_many(self, most: int, *, linger_s: float = 0) -> Awaitable[list[Claim[_Payload]]]: ...

        def __anext__(self) -> Awaited[Claim[_Payload]]: ...

    async def _claim_lingering(self, most: int, linger_s: float) -> list[Claim[_Payload]]:
        """For :meth:`claim_many`: more is waited for once the first has come."""
        claims = await self.claim_many(most)
        end_s = self._shell.loop.time() + linger_s
        try:
            with contextlib.suppress(TimeoutError, ClosedError):  # the requests that have come are returned
                async with asyncio.timeout_at(end_s):
                    while len(claims) < most:
                        claims += await self.claim_many(most - len(claims))
        except BaseException:
            for claim in claims:
                claim.fail(asyncio.CancelledError("who claimed the request was cancelled"))
            raise
        return claims

    def claim_nowait(self) -> Claim[_Payload]:
        """Claims the next request if there is one.

        Raises:
            WouldBlock: no request waits, others wait for it, or so much was claimed that the loop must have a turn first.
            ClosedError: the ring is closed.
        """
        self._shell.check_claiming()
        claim: Claim[_Payload] | None = self._shell.end.claim_now()
        if claim is None:
            raise WouldBlock("no request is waiting")
        return claim

    async def run(self, handler: Callable[[Claim[_Payload]], Awaitable[object]], max_concurrency: int = 64) -> None:
        """Handles claims until the ring is closed, one task a claim.

        A handler that raises fails its own request and is logged; the loop goes on. A handler whose request is aborted
        is cancelled. Cancelling ``run`` cancels the handlers, and their requests fail.

        Args:
            handler: called inside ``with claim:``.
            max_concurrency: handlers at a time; further requests wait unclaimed, and can be aborted without cost. A handler
                that waits for its frontend, in ``claim.reply`` or ``claim.done``, does not count, and counts again before it
                goes on: so a frontend that reads nothing holds no other one up. There are at most ``max_inflight`` such
                handlers for each frontend.

        Raises:
            ClosedError: the ring belongs to the process that forked this one.
        """
        self._shell.life.home.check_process()
        await handle_claims(self.claim, handler, count_of(max_concurrency, "max_concurrency"))

    async def run_batches(
        self, handler: Callable[[list[Claim[_Payload]]], Awaitable[Sequence[object]]], most: int, *, linger_s: float = 0.0
    ) -> None:
        """Handles claims in batches until the ring is closed, one batch at a time.

        The replies to a batch are sent while the next one is handled, each of them as the last of its request. A handler that
        raises fails the requests of its batch and is logged; the loop goes on. A request that is aborted meanwhile stays in its
        batch (``claim.aborted`` says so), and its reply is dropped.

        Args:
            handler: called with 1 to ``most`` claims in order of arrival; returns as many replies. An exception in the place of
                a reply fails that one request: its caller gets a :class:`RemoteError`. A request that the handler has ended
                itself (``claim.fail``, ``claim.done``) gets no reply; what stands in its place is dropped.
            most, linger_s: as of :meth:`claim_many`.

        Raises:
            ClosedError: the ring belongs to the process that forked this one.
        """
        self._shell.life.home.check_process()
        count_of(most, "most")
        seconds_of(linger_s, "linger_s")
        await handle_batches(lambda: self.claim_many(most, linger_s=linger_s), handler)

    def injector(self, name: str = "") -> Injector:
        """Returns a frontend that is a part of this process, for requests that another transport has brought here.

        Its requests have no slots. They stand in order of arrival among those of all frontends, and are claimed and handled
        like them; ``max_inflight`` bounds them, and :meth:`statistics` counts them.

        Args:
            name: what the log calls it.

        Raises:
            ClosedError: the ring is closed.
        """
        check_text(name, "name")
        return self._shell.injector(name)

    # -- workers ---------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the workers that get messages, in order."""
        return self._shell.workers.book.ranks

    async def wait_workers(self, count: int, timeout: float | None = None) -> tuple[int, ...]:
        """Waits until so many workers have joined.

        Args:
            count: workers.
            timeout: seconds.

        Returns:
            Their ranks, in order.

        Raises:
            TimeoutError: there were not as many in time.
            ClosedError: the ring is closed.
            ValueError: an engine never has so many (64 at most).
        """
        return await self._shell.workers.wait(count, timeout)

    def broadcast(
        self, payload: object, *, to: Iterable[int] | None = None, timeout: float | None = None
    ) -> Awaitable[tuple[int, ...]]:
        """Sends a payload to workers, in the same order to all. Waits while a worker is too far behind.

        Tensors in a slot of a claim that was not left are sent from there; they keep the slot until the last worker has
        left the message. The others are copied, once for all workers.

        Args:
            payload: any msgspec-encodable object with tensors and arrays at any depth.
            to: ranks of the workers that get it; None: all that have joined.
            timeout: seconds to wait.

        Returns:
            The ranks that it went to, when awaited.

        Raises:
            WorkersBehindError: the time was over; a TimeoutError that names the workers. Nothing was sent.
            WorkerLostError: there is no worker of a rank in ``to``. Nothing was sent.
            TypeError: something in the payload can't be sent; the message names its path. Or ``to`` is no list of ranks, or
                ``timeout`` no number.
            ValueError: a rank in ``to`` can be none, or ``timeout`` is NaN.
            CapacityError: what has to be copied can never fit ``broadcast_nbytes``, or a message.
            ClosedError: the ring is closed.
        """
        return self._shell.workers.broadcast(payload, to, timeout)

    def broadcast_nowait(self, payload: object, *, to: Iterable[int] | None = None) -> tuple[int, ...]:
        """Sends a payload to workers if nothing has to be waited for.

        Raises:
            WouldBlock: a worker is too far behind, others wait to send, or the message takes long to copy.
            WorkerLostError, TypeError, CapacityError, ClosedError: as :meth:`broadcast`.
        """
        return self._shell.workers.broadcast_nowait(payload, to)

    def gather(self, payload: object, *, to: Iterable[int] | None = None, timeout: float | None = None) -> Awaitable[list[Any]]:
        """Sends a payload to workers as :meth:`broadcast` does, and waits for the reply of each.

        Args:
            payload, to: as of :meth:`broadcast`.
            timeout: seconds to wait, for both.

        Returns:
            Their replies in order of rank, when awaited.

        Raises:
            WorkersBehindError: the time was over; a TimeoutError that names the workers. ``sent`` says whether they have the
                message and had not replied, or nothing was sent.
            WorkerLostError: one of them has died, left or was dropped before it replied; or there is none of a rank in ``to``.
            WorkerFailedError: one of them failed with it: with its rank, and its error's type and text.
            TypeError, CapacityError, ClosedError: as :meth:`broadcast`.
        """
        return self._shell.workers.gather(payload, to, timeout)

    def drop_worker(self, rank: int, reason: str = "the engine has dropped this worker") -> None:
        """Ends a worker's connection. The worker gets no more messages, and its rank is free; its ``receive`` raises
        ``ClosedError``.

        The memory of a message that it still reads comes back when it leaves the message, or when its process is dead.

        Args:
            rank: which one.
            reason: the text that the worker gets.

        Raises:
            WorkerLostError: there is none of this rank.
            ClosedError: the ring is closed.
        """
        check_text(reason, "reason")
        self._shell.workers.drop(rank_of(rank), reason)

    # -- the ring itself ---------------------------------------------------------------------------------------------------

    async def drain(self, timeout: float | None = None, *, claiming: bool = False) -> bool:
        """Claims no more requests, and waits until all claimed ones have ended. Call it before :meth:`close`.

        Claiming raises :class:`ClosedError`, and loops over claims end, as with a closed ring. Unclaimed requests wait until
        :meth:`close`; then a client of several engines sends them to another one (``retry``). Such clients send this engine
        nothing more from now on, unless they have a slot here, or all of their engines drain.

        Args:
            timeout: seconds.
            claiming: go on claiming what comes until there is nothing more. Slots that clients are filling are not waited
                for: a client of several engines sends those requests to another one (``retry``).

        Returns:
            Whether all of them have ended. If not, and with ``claiming``, claiming goes on.

        Raises:
            ClosedError: the ring is closed.
        """
        return await self._shell.drain(timeout_of(timeout), claiming=claiming)

    async def close(self, reason: str = "the engine is closing") -> None:
        """Ends all connections, aborts running requests, and gives the slab and the name up. A second call does nothing.

        Args:
            reason: the text that frontends get.
        """
        check_text(reason, "reason")
        close_gateway, self._close_gateway = self._close_gateway, None
        try:
            if close_gateway is not None:
                await close_gateway()
        finally:  # also when this is cancelled
            await self._shell.close(reason)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def inspect(self) -> RingSnapshot:
        """Returns what the ring is doing now: who has which blocks, the oldest requests, what went wrong.

        :func:`shmring.inspect` and ``shmring inspect NAME`` ask for it from another process.

        Raises:
            ClosedError: the ring is closed, or belongs to the process that forked this one.
        """
        self._shell.life.home.check_open()
        return self._shell.inspection.inspect()

    def add_to_snapshots(self, describe_program: Callable[[], dict[str, Any]]) -> None:
        """Has snapshots say more (``RingSnapshot.program``).

        Args:
            describe_program: returns it, as JSON can have it.

        Raises:
            ClosedError: as :meth:`inspect`.
        """
        self._shell.life.home.check_open()
        check_callable(describe_program, "describe_program")
        context = contextvars.copy_context()
        self._shell.inspection.describe_program = lambda: context.copy().run(describe_program)

    def statistics(self) -> RingStatistics:
        """Returns gauges of the present state, and counters since the start.

        Raises:
            ClosedError: the ring belongs to the process that forked this one.
        """
        return self._shell.statistics()
