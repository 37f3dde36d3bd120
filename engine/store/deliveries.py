"""A store's half of deliveries: content that one process has delivered under a name, until another one takes it.

Theory of operation. Three requests, of which :mod:`shmring.client.deliveries` has the other half. ``deliver`` has the content
as its payload, so its claim keeps it pinned. It is answered at once, and the claim is left when the delivery is over. Whoever
delivered it is told a moment later, together with others: being told wakes a process. ``take`` is answered with the key of a
delivery, or with one that is small, at once or when one comes. A taker says that it has the content of a key by ending its
request; one that is small ends it.
``withdraw`` has a process take its own deliveries back.

Whoever dies takes nothing from others. What a dead process has delivered can be taken for a while; what was handed out to a
process that died is over. What nobody takes goes in the end, so nothing stays for ever in a store that goes on.

Invariants: a name has a delivery, or processes that wait for one, or neither. Each delivery's claim is left once. No callback
of a claim raises.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from shmring import AbortedError, Claim, ShmringError, WouldBlock
from shmring.client.deliveries import ABSENT, ACCEPTED, DELIVER, TAKE, WITHDRAW
from shmring.door import KEY_NBYTES

__all__ = ["Deliveries"]

#: What nobody has taken for so long is dropped: an inference server has failed the request that it belongs to long before.
_UNTAKEN_S = 900.0

#: The same, if its sender has gone, or has given it up: who still wants it is asking for it already.
_ALONE_S = 60.0

_LOOK_S = 5.0  # between two looks for what has become too old
_TOLD_S = 0.02  # until senders are told what is over, if they deliver nothing before


@dataclasses.dataclass(slots=True, eq=False)
class _Delivery:
    """Content on its way.

    Attributes:
        name: of it.
        key: under which it is kept; empty: it is small, and lies in the request.
        claim: which keeps it pinned.
        goes_s: when it is dropped, if nobody has taken it.
    """

    name: bytes
    key: bytes
    claim: Claim[Any]
    goes_s: float


class Deliveries:
    """What was delivered to a store and not taken, and who waits for what.

    Args:
        clock: tells the time, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._untaken: dict[bytes, _Delivery] = {}
        self._waiting: dict[bytes, dict[Claim[Any], None]] = {}  # in line
        self._handed_out: dict[Claim[Any], _Delivery] = {}  # by the claim of who takes it, who has not said that it has it
        self._answering: set[asyncio.Task[None]] = set()  # takers of what is small, when there is room for the answer
        self._over: list[Claim[Any]] = []  # of what was taken, of which the senders do not know yet
        self._taken = self._withdrawn = self._dropped = 0

    def describe(self) -> dict[str, int]:
        """Returns what is here, and what became of what was here, for a snapshot of the ring."""
        return {
            "untaken": len(self._untaken),
            "untaken_nbytes": sum(delivery.claim.nbytes for delivery in self._untaken.values()),
            "waiting": sum(map(len, self._waiting.values())),
            "taken": self._taken,
            "withdrawn": self._withdrawn,
            "dropped": self._dropped,
        }

    def answer(self, claim: Claim[Any]) -> None:
        """Answers a request to the store, now or later."""
        if claim.aborted:
            claim.release()
            return
        match claim.payload:
            case [word, bytes() as name, bytes() as key, _] if (
                word == DELIVER and len(name) == KEY_NBYTES and len(key) in (0, KEY_NBYTES)
            ):
                self._deliver(claim, name, key)
            case [word, bytes() as name, bool() as tells] if word == TAKE and len(name) == KEY_NBYTES:
                self._take(claim, name, tells)
            case [word, [*names]] if word == WITHDRAW:
                self._withdraw(claim, names)
            case _:
                claim.fail(NotImplementedError("a store keeps content, and answers no requests"))

    # -- what comes, and who takes it --------------------------------------------------------------------------------------

    def _deliver(self, claim: Claim[Any], name: bytes, key: bytes) -> None:
        if not self._say(claim, ACCEPTED):
            return
        self._tell()
        delivery = _Delivery(name, key, claim, self._clock() + _UNTAKEN_S)
        claim.on_abort(functools.partial(self._left_alone, delivery))
        replaced = self._untaken.pop(name, None)
        if replaced is not None:
            replaced.claim.done()
        self._offer(delivery)

    def _offer(self, delivery: _Delivery) -> None:
        """Gives a delivery to the first process that waits for it, or keeps it for one that comes."""
        while (taker := self._next_in_line(delivery.name)) is not None:
            if self._hand_out(delivery, taker):
                return
        if delivery.name in self._untaken:  # a later one has come while this one was with a taker that went
            delivery.claim.done()
        else:
            self._untaken[delivery.name] = delivery

    def _take(self, taker: Claim[Any], name: bytes, tells: bool) -> None:
        taker.on_abort(functools.partial(self._taker_left, taker, name))
        delivery = self._untaken.get(name)
        if delivery is not None:
            if self._hand_out(delivery, taker):
                del self._untaken[name]
        elif not tells or self._say(taker, ABSENT):
            self._waiting.setdefault(name, {})[taker] = None

    def _hand_out(self, delivery: _Delivery, taker: Claim[Any]) -> bool:
        """Tells a taker the key, or the content if that is small; returns whether the taker can hear it."""
        if delivery.key:
            if not self._say(taker, delivery.key):
                return False
            self._handed_out[taker] = delivery
        else:
            answering = asyncio.get_running_loop().create_task(self._answer(taker, delivery))
            self._answering.add(answering)
            answering.add_done_callback(self._answering.discard)
        return True

    async def _answer(self, taker: Claim[Any], delivery: _Delivery) -> None:
        """Sends what is small, in the one message that ends the taker's request, as soon as there is room for it."""
        try:
            await taker.done([delivery.claim.payload[3]])
        except AbortedError:  # it waits no more
            taker.release()
            self._offer(delivery)
        except (ShmringError, TypeError) as error:  # larger than an answer can be, say
            taker.fail(error)
            delivery.claim.fail(error)
        else:
            self._is_over(delivery)

    def _is_over(self, delivery: _Delivery) -> None:
        """A delivery was taken."""
        self._taken += 1
        if delivery.key:
            delivery.claim.release()  # tells nobody: its sender has left it
        if not self._over:
            asyncio.get_running_loop().call_later(_TOLD_S, self._tell)
        self._over.append(delivery.claim)

    def _tell(self) -> None:
        """Tells senders what is over."""
        over, self._over = self._over, []
        for claim in over:
            claim.done()

    def _say(self, claim: Claim[Any], answer: object) -> bool:
        """Answers a process. One that does not read what it is told is passed over: it may ask again."""
        try:
            claim.reply_nowait(answer)
        except AbortedError:
            claim.release()
            return False
        except WouldBlock as error:
            claim.fail(error)
            return False
        return True

    def _next_in_line(self, name: bytes) -> Claim[Any] | None:
        """Takes the first process out of line that waits for a name."""
        line = self._waiting.get(name)
        if line is None:
            return None
        taker = next(iter(line))
        self._leave_line(taker, name)
        return taker

    def _leave_line(self, taker: Claim[Any], name: bytes) -> None:
        line = self._waiting.get(name, {})
        line.pop(taker, None)
        if not line:
            self._waiting.pop(name, None)

    def _taker_left(self, taker: Claim[Any], name: bytes) -> None:
        """A taker has ended its request: it has the content, or waits no more, or is dead."""
        self._leave_line(taker, name)
        delivery = self._handed_out.pop(taker, None)
        taker.release()
        if delivery is not None:
            self._is_over(delivery)

    # -- what nobody takes -------------------------------------------------------------------------------------------------

    def _withdraw(self, claim: Claim[Any], names: list[Any]) -> None:
        for name in names:
            delivery = self._untaken.get(name) if isinstance(name, bytes) else None
            if delivery is not None and delivery.claim.client_id == claim.client_id:
                del self._untaken[delivery.name]
                self._withdrawn += 1
                delivery.claim.done()
        claim.done()

    def _left_alone(self, delivery: _Delivery) -> None:
        """The sender has given a delivery up, or has gone."""
        delivery.goes_s = min(delivery.goes_s, self._clock() + _ALONE_S)

    def drop_old(self) -> None:
        """Drops what nobody has taken for long."""
        now_s = self._clock()
        for delivery in [each for each in self._untaken.values() if each.goes_s <= now_s]:
            del self._untaken[delivery.name]
            self._dropped += 1
            nbytes = delivery.claim.nbytes
            delivery.claim.time_out(f"nobody has taken these {nbytes} bytes in time")

    async def drop_old_in_time(self) -> None:
        """Does so until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.drop_old()
