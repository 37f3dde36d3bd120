"""Which engine a request goes to: the least loaded one, the next in turn, or the one that a key belongs to.

This file knows no connections and no clock: :class:`LoadEstimate` gets the numbers that a client sees of an engine, and
:class:`Router` chooses among the attached engines. The numbers are hints; a wrong one can only make a choice worse.

An engine *responds* as long as it reads its message ring. An engine that is stopped, or whose loop is blocked, does not
respond; its last published load might say for ever that it has little to do. It gets no new requests while another engine
responds. This needs no heartbeat.

Keys belong to engines by rendezvous hashing: of all engines that are attached, the one with the highest hash of its name and
the key. So an engine that goes moves its own keys and no others, and has the same ones again when it is back; and every process
on every machine chooses the same engine, since the hash is BLAKE2b.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, get_args

import msgspec

__all__ = ["ROUTES", "EngineLoad", "LoadEstimate", "Route", "Router"]

#: How a request's engine is chosen if neither a key, an engine nor a slot says so.
Route = Literal["least_loaded", "round_robin"]
ROUTES: tuple[Route, ...] = get_args(Route)

# Loops look at their rings every few microseconds or sleep until they are rung for. A tenth of a second is longer than most
# steps that block a loop by mistake, and very short compared to the wait at a stopped engine.
_PATIENCE_S = 0.1


class EngineLoad(msgspec.Struct, frozen=True):
    """An engine's load, as a client sees it.

    Attributes:
        in_flight: requests of all clients that it has, those of this client included that it has not heard of yet.
        waiting: of these, those that it has not claimed.
        responds: whether it reads what is sent to it.
    """

    in_flight: int
    waiting: int
    responds: bool


class LoadEstimate:
    """One engine's load, as a client can estimate it.

    The engine publishes the number of its requests, which includes those that it has read from this client. Requests that this
    client has sent since that number last changed are added, so that a burst spreads before any engine has read it.

    Args:
        patience_s: how long the engine may leave unread what it is sent, and still be said to respond.
    """

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._published = 0
        self._own = 0  # when that number was new
        self._taken_nbytes = 0
        self._unread_since: float | None = None

    def look(self, *, published: int, waiting: int, own: int, unread_nbytes: int, taken_nbytes: int, now: float) -> EngineLoad:
        """Returns the load.

        Args:
            published, waiting: what the engine says.
            own: requests of this client that it has or is about to get.
            unread_nbytes, taken_nbytes: of the message ring to it.
            now: in seconds.
        """
        if published != self._published:
            self._published, self._own = published, own
        if not unread_nbytes:
            self._unread_since = None
        elif self._unread_since is None or taken_nbytes != self._taken_nbytes:
            self._unread_since = now
        self._taken_nbytes = taken_nbytes
        responds = self._unread_since is None or now - self._unread_since <= self._patience_s
        unheard = own - self._own
        in_flight = published + unheard if unheard > 0 else published
        return EngineLoad(own if own > in_flight else in_flight, waiting, responds)


class Router:
    """Chooses engines.

    Args:
        names: of all engines.
        route: see :data:`Route`.
        first: the number of the engine that comes first where nothing else decides. Clients that begin with different ones
            don't all send their first request to the same engine.
    """

    def __init__(self, names: Sequence[str], route: Route, first: int = 0) -> None:
        self._names = tuple(names)
        self._route = route
        self._next = first % len(self._names)
        self._hashes = {name: hashlib.blake2b(name.encode() + b"\0", digest_size=8) for name in names}

    def choose(self, loads: Mapping[str, EngineLoad]) -> str:
        """Returns the engine for a request that may go to any; equals take turns.

        Args:
            loads: of the engines that are attached; of one at least.
        """
        is_least = self._route == "least_loaded"
        chosen, lowest = "", None
        for name in self._names[self._next :] + self._names[: self._next]:
            if (load := loads.get(name)) is not None:
                weight = (not load.responds, load.in_flight, load.waiting) if is_least else (not load.responds,)
                if lowest is None or weight < lowest:
                    chosen, lowest = name, weight
        self._next = (self._names.index(chosen) + 1) % len(self._names)
        return chosen

    def choose_for(self, key: str | bytes, names: Collection[str]) -> str:
        """Returns the engine that a key belongs to.

        Args:
            key: of a session, a conversation, a prefix.
            names: of the engines that are attached; of one at least.
        """
        data = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key

        def rank(name: str) -> tuple[bytes, str]:
            hashed = self._hashes[name].copy()
            hashed.update(data)
            return hashed.digest(), name

        return max(names, key=rank)
