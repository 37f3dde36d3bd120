"""When large bodies are parsed: one in a turn of the loop, and others have their time between two of them.

A body of some thousand values, and what is made of it until it is sent to the engine, takes some milliseconds in which nobody
else is served. A caller who always has another one ready would have a part of every turn, and a request of somebody else takes
several turns. So, while there are requests of other callers, the loop is theirs after a large body for as long as it took.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["LargeBodies"]

_MOST_PAUSE_S = 0.05  # a turn that takes longer has something else in it


class LargeBodies:
    """The turns of large bodies. See the head of this file."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._free_at = 0.0  # when others have had as much time as the last body took

    async def take_turn(self, has_others: Callable[[], bool]) -> None:
        """Waits for a turn of the loop, which is this body's from then on until something else is awaited.

        Args:
            has_others: whether there are requests of other callers.
        """
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(max(0.0, self._free_at - loop.time()) if has_others() else 0)
            loop.call_soon(self._note_end, loop.time())

    def _note_end(self, began_at: float) -> None:
        ended_at = asyncio.get_running_loop().time()
        self._free_at = ended_at + min(_MOST_PAUSE_S, ended_at - began_at)
