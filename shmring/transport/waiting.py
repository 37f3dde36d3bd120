"""Reaching an engine that may have to start first.

It may be a person who starts it, in another terminal. So the log says for whom this process waits and where, and the error in
the end says for how long it has waited, and by which option.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from shmring.core.loggers import logger_of
from shmring.errors import EngineDeadError

__all__ = ["reach_in_time", "saying_for_whom", "waited"]

logger = logger_of("shmring.waiting")  # of its own: a server that says itself for whom it waits turns it off

_SAID_AFTER_S = 2.0  # an engine that has loaded torch and fills its slab is there by then
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1  # between two attempts; doubled each time

_Reached = TypeVar("_Reached")


def waited(timeout_s: float) -> str:
    """Returns how an error says for how long an engine was waited for."""
    return f"within {timeout_s:g} s (connect_timeout_s)"


@contextlib.contextmanager
def saying_for_whom(whom: str, timeout_s: float) -> Iterator[None]:
    """Logs for whom this waits, if it takes longer than two seconds. Nothing is held."""

    def say() -> None:
        logger.warning("waiting for %s, for %g s at most (connect_timeout_s); start it if nothing else does", whom, timeout_s)

    timer = asyncio.get_running_loop().call_later(_SAID_AFTER_S, say)
    try:
        yield
    finally:
        timer.cancel()


async def reach_in_time(name: str, path: object, attempt: Callable[[], Awaitable[_Reached]], timeout_s: float) -> _Reached:
    """Tries to reach an engine until it is there. Nothing is held meanwhile.

    Args:
        name: the engine's.
        path: of its socket, or its address.
        attempt: one attempt.
        timeout_s: for all of them, and for the engine's answer.

    Raises:
        EngineDeadError: there was none in time.
        Exception: what an attempt raises besides.
    """
    loop = asyncio.get_running_loop()
    deadline_s, pause_s = loop.time() + timeout_s, _FIRST_PAUSE_S
    with saying_for_whom(f"the engine {name!r} at {path}", timeout_s):
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    return await attempt()
            except EngineDeadError as error:
                if loop.time() + pause_s > deadline_s:
                    raise EngineDeadError(f"{error}; there was none {waited(timeout_s)}", engine=name) from error.__cause__
            except TimeoutError:
                why = f"the engine at {path} listens, and did not answer {waited(timeout_s)}"
                raise EngineDeadError(why, engine=name) from None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
