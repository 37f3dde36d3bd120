"""Each ring, client and worker lives in the event loop in which it was made: its timers, its bells and its waiting tasks are
there.

A task of another loop would wait for ever. asyncio notices this when a task waits, but its error speaks of its own tasks and
futures; the error here says what to do. This check runs when a call is about to wait, or has failed to.

All links of a loop share a poller: it keeps the time of the loop's turns.
"""

from __future__ import annotations

import asyncio
from functools import partial
from weakref import WeakValueDictionary

from shmring.core.compiled import Poller
from shmring.errors import LocalProtocolError

__all__ = ["check_loop", "poller_of"]

_pollers: WeakValueDictionary[int, Poller] = WeakValueDictionary()  # by the id of their loop, which each of them keeps


def check_loop(home: asyncio.AbstractEventLoop, what: str) -> None:
    """Raises unless this is the loop of an end.

    Args:
        home: the end's loop.
        what: the end, for the error: ``this client of 'vision'``.

    Raises:
        LocalProtocolError: it is another one.
    """
    if home != asyncio.get_running_loop():
        raise LocalProtocolError(
            f"{what} was made in another event loop, and works only there (asyncio.run makes a new loop each time); "
            "make one in each loop, or use shmring.threads, which any thread may call"
        ) from None


def poller_of(loop: asyncio.AbstractEventLoop) -> Poller:
    """Returns the poller of all links of a loop. It lives as long as one of them knows it."""
    poller = _pollers.get(id(loop))
    if poller is None:
        poller = _pollers[id(loop)] = Poller(loop, check_loop=partial(check_loop, loop, "this end of a ring"))
    return poller
