"""Steps a cancellation must not cut in half: a thread that is writing, a socket that changes hands; and errors left over."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

__all__ = ["retrieve", "uninterrupted"]

_Result = TypeVar("_Result")


async def uninterrupted(future: asyncio.Future[_Result]) -> _Result:
    """Waits for a task or future to its end; a cancellation of the waiting is delivered when that has come."""
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
    """Takes the error of a future that is done. Who waited for it may have gone, and asyncio would report it as lost."""
    if not future.cancelled():
        future.exception()
