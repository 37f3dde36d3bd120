"""Steps that a cancellation must not cut in half: a thread that is writing, a socket that is changing hands."""

from __future__ import annotations

import asyncio
from typing import TypeVar

__all__ = ["uninterrupted"]

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
        if not future.cancelled():
            future.exception()  # retrieved, so that it is not reported as lost
        raise
    finally:
        del future  # it holds its error, whose traceback holds this frame
