"""Content for one taker, at a store: a process delivers it under a name, and the process that asks for that name takes it.

Theory of operation. Kept content is for many: its key stands for its bytes, and of two with one key, the first is kept. A
*delivery* is for one, and its name says only where it goes: of two with one name that nobody has taken, the later one stands.
So its content is kept under a key that nobody has used before, and a request tells the store that it is for whoever asks for
the name (:mod:`shmring.engine.store.deliveries`). The content is that request's payload: the store has it pinned as soon as
it answers ``ACCEPTED``, whatever becomes of this process. A *small* one is not kept: the request carries it, and the store's
answer to the taker does. That is copied once more, by the store, and saves two questions, which take longer.

Who takes asks with a request, too. The store answers with the delivery's key as soon as there is one; before that with
``ABSENT``, if the taker wants to know. The taker pins the content by this key, and ends its request, which tells the store that
it has it. So nobody polls, and nothing that was delivered can be dropped on its way.

Invariant: ``_untaken`` has the deliveries of this process of which the store has not said that they are over, and perhaps some
that are over.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shmring.client.kept import Kept
from shmring.client.submission import Submission
from shmring.core.loggers import logger_of
from shmring.door import KEY_NBYTES, check_key
from shmring.errors import RemoteError, RemoteProtocolError, ShmringError, WouldBlock

if TYPE_CHECKING:
    from shmring.client.client import Client
    from shmring.client.slot import Slot

__all__ = ["ABSENT", "ACCEPTED", "DELIVER", "TAKE", "WITHDRAW", "Deliveries", "Taken"]

logger = logger_of("shmring.deliveries")

# The first word of a request to a store.
DELIVER, TAKE, WITHDRAW = "deliver", "take", "withdraw"

#: What a store answers who asks for a name of which there is no delivery yet.
ABSENT = b""

#: What a store answers who delivers, as soon as it has that.
ACCEPTED = b""

# Where there is no room, an attempt each time: nobody tells this process what others have left.
_ROOM_S = 0.02

_LOOKED_AT = 2  # deliveries that may be over, with each new one: so their number does not grow


class Taken:
    """What was delivered, for its taker. Use it as ``with taken:`` (or call :meth:`close`); views of it may outlive the block.

    Attributes:
        payload: as it was delivered, its tensors viewed in place.
    """

    __slots__ = ("_kept", "payload")

    def __init__(self, payload: Any, kept: Kept[Any] | None) -> None:
        self.payload = payload
        self._kept = kept

    def close(self) -> None:
        """Leaves it. When its last view has died, its memory may be used for something else. Twice is once."""
        self.payload = None
        if self._kept is not None:
            self._kept.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class Deliveries:
    """What one client delivers and takes, in its event loop.

    Args:
        client: of one store.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._untaken: OrderedDict[bytes, Submission] = OrderedDict()

    @property
    def untaken(self) -> list[bytes]:
        """The names of what was delivered, and is not over: nobody has taken it, as far as this process knows."""
        return [name for name in self._untaken if self.is_untaken(name)]

    def is_untaken(self, name: bytes) -> bool:
        """Whether it is one of these. Any thread may ask."""
        submission = self._untaken.get(name)
        return submission is not None and not submission.ended

    async def check(self) -> None:
        """Asks whether this is a store that hands deliveries out.

        Raises:
            RemoteError: it is another engine, or an older store.
            EngineDeadError, ClosedError: it has gone, or the client was closed.
        """
        await self._withdraw([])

    async def deliver(
        self, name: bytes, payload: object, *, timeout: float, small: bool = False, slot: Slot | None = None
    ) -> None:
        """Delivers content. When this returns, it is there for whoever asks for the name, also if this process dies.

        A delivery of this name that nobody has taken is replaced.

        Args:
            name: 32 bytes.
            payload: as of :meth:`shmring.Client.keep`; copied once, or not at all if it lies in a slot of the client.
            timeout: seconds to wait for room. What takers have in use is no room.
            slot: of the client, with the payload in it: it is left as soon as the store has that.
            small: whether it is so small that a further copy takes less time than two questions to the store: some 64 KiB. It
                needs no tensor then.

        Raises:
            TimeoutError: there was no room.
            CapacityError, TypeError, ValueError: it can't be kept by this store.
            RemoteError: the store takes no deliveries, or passes this client over since it does not read.
            EngineDeadError, ClosedError: the store has gone, or the client was closed.
        """
        check_key(name)
        try:
            async with asyncio.timeout(timeout):
                submission = await self._send(name, payload, small, slot)
        except TimeoutError:
            what = "room at the store, and its answer"
            raise TimeoutError(f"it took longer than the {timeout:g} s it was given: {what}") from None
        replaced, self._untaken[name] = self._untaken.get(name), submission
        self._untaken.move_to_end(name)
        if replaced is not None:
            replaced.abort()  # nobody will look at its end
        for _ in range(_LOOKED_AT):
            await self._look_at_the_oldest()

    async def _send(self, name: bytes, payload: object, small: bool, slot: Slot | None) -> Submission:
        """Returns the request that the content is in, when the store has it; before that, it would go with this process."""
        if small:
            submission = await self._client.submit([DELIVER, name, b"", payload])
        else:
            with await self._keep(payload) as kept:
                submission = await self._client.submit([DELIVER, name, kept.key, kept.payload])
        if slot is not None:
            slot.close()  # the request has it. So the store hears of both at once, and is not woken for each
        try:
            await submission.next()
        except BaseException:
            submission.abort()
            raise
        return submission

    async def _keep(self, payload: object) -> Kept[Any]:
        """Has the store keep content, as soon as there is room for it."""
        while True:
            with contextlib.suppress(WouldBlock):
                return await self._client.keep(secrets.token_bytes(KEY_NBYTES), payload)
            await asyncio.sleep(_ROOM_S)

    async def _look_at_the_oldest(self) -> None:
        """Forgets a delivery that is over: taken, replaced, withdrawn, or dropped since nobody came."""
        if not self._untaken:
            return
        name, submission = next(iter(self._untaken.items()))
        if not submission.ended:
            self._untaken.move_to_end(name)
            return
        del self._untaken[name]
        try:
            await submission.wait()
        except (RemoteError, TimeoutError) as error:
            logger.warning("what was delivered was dropped: %s", str(error))
        except ShmringError:
            pass  # it has gone with its store

    async def take(self, name: bytes, *, absent: Callable[[], object] | None = None) -> Taken:
        """Waits for the delivery of a name, and takes it. Among several that ask for one name, the first one gets it.

        A caller that is cancelled leaves the name to others. If the store had answered just then, the delivery is gone.

        Args:
            name: 32 bytes.
            absent: called if there is no such delivery yet, before this waits for one.

        Returns:
            The content, until the caller leaves it.

        Raises:
            RemoteError: the store answers no such requests, or passes this client over since it does not read.
            EngineDeadError, ClosedError: the store has gone, or the client was closed.
        """
        check_key(name)
        submission = await self._client.submit([TAKE, name, absent is not None])
        try:
            answer = await submission.next()
            if answer == ABSENT and absent is not None:
                absent()
                answer = await submission.next()
            match answer:
                case [payload]:
                    return Taken(payload, None)
                case bytes():
                    kept = await self._pin(answer)
                    return Taken(kept.payload, kept)
                case _:
                    raise RemoteProtocolError(f"a store answers a taker with {type(answer).__name__}")
        finally:
            submission.abort()

    async def _pin(self, key: bytes) -> Kept[Any]:
        check_key(key)
        while True:
            with contextlib.suppress(WouldBlock):  # this client has pinned as much as it may, until views of that die
                kept = await self._client.find(key)
                if kept is None:
                    raise RemoteProtocolError(
                        "what was delivered is not there: its sender has named a key that it had not kept"
                    )
                return kept
            await asyncio.sleep(_ROOM_S)

    async def withdraw(self, *names: bytes) -> None:
        """Takes own deliveries back. Those that were taken stay with who has them.

        Raises:
            EngineDeadError, ClosedError: the store has gone, or the client was closed.
        """
        if own := [name for name in names if self.is_untaken(name)]:
            await self._withdraw(own)

    async def _withdraw(self, names: list[bytes]) -> None:
        submission = await self._client.submit([WITHDRAW, names])
        await submission.wait()

    def close(self) -> None:
        """Looks after nothing any more. What was delivered can be taken for a while."""
        while self._untaken:
            self._untaken.popitem()[1].abort()
