"""The awake links of one event loop: they look at their rings in each turn of the loop, one after the other and within a
budget.

A link is *awake* as long as records keep coming: it looks again in the next turn of the loop, and its peer need not ring. When
nothing has come for as long as being woken would take, it falls asleep. So there are no system calls under load, and none of
ours in an idle process.

Looking costs less than sleeping if the next record comes soon: to wake a sleeper, one side rings and the kernel wakes the
other, which takes both of them tens of microseconds. So a link looks for about as long before it sleeps. Its cost is then never
more than a small multiple of the cost of the best choice. A turn that finds nothing first lets other processes run, one of
which may be about to answer. If no process wanted the core the last time, only a second such turn in a row does so. A link that
has looked in vain several times in a row sleeps at once, since its peer takes longer, and tries again now and then.

Two ends that both sleep answer each other slowly *because* they sleep. Each of them would find out if it looked for longer than
its peer takes to be woken and to answer; if it looked for less, it would look in vain for ever, and both would stay in that
state. So the time to look is that of a peer that has to be woken, with room for its answer.

If other processes want the cores, a yield takes as long as they run: milliseconds, if they compute. A process that is rung gets
its core back at once, but a process that has yielded does not. So the time of long yields is added up. If it is more for each
record than being woken would take, all links sleep at once for a while, also those that poll busily.

The budget. A turn ends after a set time, and the links that have not had theirs come first in the next one. In a turn, a link
delivers so many records, or for so long: whichever is over first. Other links wait for the time that a link takes. The cost of
a record depends on its request and on the books, so a count of records alone is not enough. The type of a record bounds the
cost of a single one.

Busy polling (``busy_poll_s``). A program can spend a core to save the time of being woken: for so long after a message in
either direction, no link falls asleep, whether or not that has helped before.

Source: spinning for as long as blocking would cost is from Karlin, Li, Manasse and Owicki, "Empirical Studies of Competitive
Spinning for a Shared-Memory Multiprocessor" (1991). Busy polling is the kernel's idea (``net.core.busy_poll``), and that of
vLLM's ``shm_broadcast``, whose readers spin for a second.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from typing import Protocol

from shmring.transport.loops import check_loop

__all__ = ["LINK_S", "RECORDS_IN_TURN", "Polled", "Poller", "Vigil"]

RECORDS_IN_TURN = 64  # of a link: as many small requests take about a millisecond
LINK_S = 0.001  # of a turn, for one link
_TURN_S = 0.004  # for all of them together: what an event loop is expected to take anyway
_VIGIL_S = 0.0002  # to wake a peer whose core sleeps, too, takes up to 0.05 ms, and to copy a megabyte for an answer as long
_VAIN_VIGILS = 4  # in a row, after which a link sleeps at once
_RETRY = 32  # so many times, before it looks again
_SWITCH_S = 0.000003  # a yield to nobody takes half a microsecond, and one to somebody at least two switches of context
_YIELD_S = 0.001  # a longer yield was used by others: a peer that is about to answer gives the core back sooner
_LOST_S = 0.02  # after so much time of it, or so many records, the links decide whether yielding is worth it
_WAKE_S = 0.00008  # that may be lost for a record: the time of sleeping and being woken, for both sides
_LOST_RECORDS = 1024
_CROWDED_S = 0.25  # for which links sleep at once, if it is not


class Polled(Protocol):
    """Something that is awake or asleep: a link."""

    def take_turn(self, deadline_s: float) -> bool:
        """Looks at its ring, until the deadline at most; returns whether there was anything."""

    def fall_asleep(self, now_s: float, at_once: bool) -> bool:
        """Nothing came in this turn: returns whether it sleeps now, and needs no further turn.

        Args:
            now_s: in the time of ``time.perf_counter``.
            at_once: whether looking any longer is of no use.
        """


class Vigil:
    """How long one link looks for its next record before it sleeps; see the head of this file."""

    __slots__ = ("_until_s", "_vain")

    def __init__(self) -> None:
        self._until_s = 0.0
        self._vain = 0

    def begin(self, now_s: float) -> None:
        """A record came."""
        if now_s < self._until_s:
            self._vain = 0
        if self._vain < _VAIN_VIGILS or not self._vain % _RETRY:
            self._until_s = now_s + _VIGIL_S

    def is_over(self, now_s: float) -> bool:
        """Whether to sleep now."""
        if now_s < self._until_s:
            return False
        self._vain += 1
        return True


class Poller:
    """Gives the links of a loop their turns.

    Args:
        loop: which one.
        busy_poll_s: for how long after a message none of them falls asleep.

    Attributes:
        records: that links have delivered; they say so. It starts again when it has been looked at.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, busy_poll_s: float = 0.0) -> None:
        self._loop = loop
        self._busy_poll_s = busy_poll_s
        self._busy_until_s = 0.0
        self._crowded_until_s = 0.0
        self._lost_s = 0.0
        self.records = 0
        self._awake: deque[Polled] = deque()
        self._armed = False
        self._found_nothing = False  # in its last turn
        self._others_ran = True  # the time of the last yield

    def wake(self, link: Polled) -> None:
        """Gives a link, which is asleep, a turn in the loop's next one."""
        self._awake.append(link)
        self._arm()

    @property
    def polls_busily(self) -> bool:
        """Whether a link that has just sent a message stays awake for the answer."""
        return self._busy_poll_s > 0

    def extend(self) -> None:
        """A message came, or was sent."""
        if self._busy_poll_s:
            self._busy_until_s = time.perf_counter() + self._busy_poll_s

    def _arm(self) -> None:
        if self._armed:
            return
        try:
            self._loop.call_soon(self._turn)
        except RuntimeError:  # the loop is closed: this call runs in another one
            check_loop(self._loop, "this end of a ring")
            raise
        self._armed = True

    def _turn(self) -> None:
        self._armed = False
        awake = self._awake
        now = time.perf_counter()
        turn_end_s = now + _TURN_S
        is_crowded = now < self._crowded_until_s
        had_records = False
        for _ in range(len(awake)):
            link = awake.popleft()
            is_awake = True  # also if it raises: then it has further turns
            try:
                if link.take_turn(now + LINK_S):
                    had_records = True
                else:
                    is_awake = (now < self._busy_until_s and not is_crowded) or not link.fall_asleep(now, is_crowded)
            finally:
                if is_awake:
                    awake.append(link)
                    self._arm()
            now = time.perf_counter()
            if now > turn_end_s:
                break
        if awake:
            self._arm()
        if awake and not had_records and (self._found_nothing or self._others_ran):
            os.sched_yield()
            back = time.perf_counter()
            self._others_ran = back - now > _SWITCH_S
            if back - now > _YIELD_S:
                self._has_lost(back - now, back)
        self._found_nothing = not had_records

    def _has_lost(self, seconds: float, now: float) -> None:
        """Other processes had the core for long."""
        self._lost_s += seconds
        if self._lost_s > _LOST_S or self.records > _LOST_RECORDS:
            if self._lost_s > self.records * _WAKE_S:
                self._crowded_until_s = now + _CROWDED_S
            self._lost_s, self.records = 0.0, 0
