"""Each end lives in the event loop in which it was made: its timers, its bells and whoever waits for it are there.

Whoever uses it in another loop waits in vain. asyncio notices that where something has to be waited for, and speaks of its
own tasks and futures; this says what to do. It is asked where an end is about to wait, or has failed to.
"""

from __future__ import annotations

import asyncio

from shmring.errors import LocalProtocolError

__all__ = ["check_loop"]


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
