"""An answer that is costly to make and the same for all: it is made once for all who ask meanwhile.

``/metrics`` needs no key, takes a frontend some milliseconds, and asks each engine. So it is made once for all who ask within a
second, however many these are. One of them who hangs up takes it from nobody.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

__all__ = ["SharedAnswer"]

_Content = TypeVar("_Content")


class SharedAnswer(Generic[_Content]):
    """See the head of this file.

    Args:
        make: makes it.
        max_age_s: for how long it is the answer, from the moment when it was begun; once it is made, that is.
    """

    def __init__(self, make: Callable[[], Awaitable[_Content]], max_age_s: float) -> None:
        self._make = make
        self._max_age_s = max_age_s
        self._making: asyncio.Task[_Content] | None = None
        self._begun_at = 0.0

    async def get(self) -> _Content:
        """Returns it. Holds nothing while it is made.

        Raises:
            Exception: what making it has raised; who asks next has it made anew.
        """
        if self._making is None or (self._making.done() and self._is_over(self._making)):
            self._begun_at = time.monotonic()
            self._making = asyncio.create_task(self._made(), context=contextvars.Context())  # for no one request
            self._making.add_done_callback(_see)
        return await asyncio.shield(self._making)

    def forget(self) -> None:
        """Has it made anew for who asks from now on."""
        self._making = None

    async def _made(self) -> _Content:
        return await self._make()

    def _is_over(self, made: asyncio.Task[_Content]) -> bool:
        failed = made.cancelled() or made.exception() is not None
        return failed or time.monotonic() - self._begun_at >= self._max_age_s


def _see(made: asyncio.Task[_Content]) -> None:
    """Looks at an error which nobody may wait for any more."""
    if not made.cancelled():
        made.exception()
