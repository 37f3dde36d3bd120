"""Steps that a cancellation must not interrupt: a thread that is writing, a socket that changes hands. And errors that no task
awaits."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

__all__ = ["retrieve", "uninterrupted"]

_Result = TypeVar("_Result")


async def uninterrupted(future: asyncio.Future[_Result]) -> _Result:
    """Waits until a task or future is done. If the waiting is cancelled meanwhile, the cancellation is delivered then."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue  # the first cancellation is on its way already; this one adds nothing
        retrieve(future)
        raise
    finally:
        del future  # it holds its error, whose traceback holds this frame


def retrieve(future: asyncio.Future[Any]) -> None:
    """Retrieves the error of a future that is done. If no task waits for it any more, asyncio would report it as lost."""
    if not future.cancelled():
        future.exception()
