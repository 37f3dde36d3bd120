"""Replies that wait for a frontend to take them: which, since when, and what is said and done about it.

Theory of operation: a reply waits for space in the reply reserve, or for its frontend to read its message ring. Both depend on
one process, which may be stopped, busy, or full of replies that no caller reads. So a handler gives its place among
``max_concurrency`` up meanwhile (``places.py``), and whoever looks into the log finds which frontend it is.

While replies wait, a timer looks at them. A reply that finds no room comes before smaller ones behind it, or it would wait as
long as there are any. But a silent frontend may have the room, so this holds for 50 ms of each second, and then smaller ones
may pass.

Invariant: the timer runs exactly while replies wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from shmring.core.compiled import BaseClaim
from shmring.core.loggers import logger_of
from shmring.ring.life import RingLife
from shmring.ring.places import own_place

__all__ = ["Waits"]

logger = logger_of("shmring.ring")

_LOOK_S = 0.05  # frontends that are well give space back within a few turns of their loops
_LOOKS_IN_ROUND = 20  # so the others wait for one that finds no room for at most a twentieth of the time
_SILENCE_S = 5.0  # before the log says so: a busy frontend takes less
_SAID_AGAIN_S = 60.0


class Waits:
    """The replies of an engine that wait. Lives in a loop.

    Args:
        life: of the engine.
        describe: says how much of the reserve a client has.
        let_overtake: is told whether a reply that finds no room lets others pass.
    """

    def __init__(self, life: RingLife, describe: Callable[[int], str], let_overtake: Callable[[bool], object]) -> None:
        self._life = life
        self._describe = describe
        self._let_overtake = let_overtake
        self._waiting: dict[object, tuple[BaseClaim, float]] = {}  # and since when, in order
        self._say_at_s: dict[int, float] = {}  # by client: when it is said again
        self._looks = 0
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def of(self, claim: BaseClaim) -> Iterator[None]:
        """A reply to a request waits inside this block. Its handler has no place meanwhile, nor when this is left."""
        key, place = object(), own_place.get(None)
        self._waiting[key] = claim, self._life.loop.time()
        if self._timer is None:
            self._timer = self._life.loop.call_later(_LOOK_S, self._look)
        if place is not None:
            place.give_up()
            claim._gave_place_up = True
        try:
            yield
        finally:
            del self._waiting[key]
            if not self._waiting:
                self._rest()

    async def take_place_again(self, claim: BaseClaim) -> None:
        """Takes a place for this task's handler, if it gave its own up while it replied to this request."""
        if claim._gave_place_up and (place := own_place.get(None)) is not None:
            await place.take_again()
            claim._gave_place_up = False

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._say_at_s.clear()
        if self._looks % _LOOKS_IN_ROUND and not self._life.home.is_closed:
            self._let_overtake(False)
        self._looks = 0

    def _look(self) -> None:
        self._timer = self._life.loop.call_later(_LOOK_S, self._look)
        self._looks += 1
        if not self._life.home.is_closed:
            self._let_overtake(self._looks % _LOOKS_IN_ROUND != 0)
        if not self._looks % _LOOKS_IN_ROUND:
            self._say()

    def _say(self) -> None:
        """Logs which clients have kept replies waiting for long."""
        now_s = self._life.loop.time()
        by_client: dict[int, list[tuple[BaseClaim, float]]] = {}
        for claim, since_s in self._waiting.values():
            by_client.setdefault(claim.client_id, []).append((claim, since_s))
        for client_id in [client_id for client_id in self._say_at_s if client_id not in by_client]:
            del self._say_at_s[client_id]
        for client_id, waiting in by_client.items():
            claim, since_s = waiting[0]
            if now_s < self._say_at_s.get(client_id, since_s + _SILENCE_S):
                continue
            self._say_at_s[client_id] = now_s + _SAID_AGAIN_S
            logger.warning(
                "%s takes no replies, and keeps %d waiting, the first one for %.0f s, to its request %d; it has %s. "
                "Read replies and drop views of them there, or see why it is stopped",
                claim._end.frontend_of(claim),
                len(waiting),
                now_s - since_s,
                claim.request_id,
                self._describe(client_id),
                extra={"request_id": claim.name},
            )
