"""A wait that vLLM does not know of must not be where its caller is cancelled.

Adding a request takes vLLM no time in which it could be cancelled: when a caller hangs up, the request has been added, and
is aborted. If it were cancelled while a tensor is being copied, vLLM would take it that no request was added, and would
never forget the one that it had entered in its books.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine
from typing import Any

__all__ = ["held_back"]


async def held_back(work: Coroutine[Any, Any, None]) -> None:
    """Awaits work to its end. A cancellation meanwhile comes a little later: at the next thing that the caller awaits.

    Args:
        work: a coroutine that ends soon.
    """
    loop = asyncio.get_running_loop()
    caller = asyncio.current_task()
    assert caller is not None
    task = loop.create_task(work)
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            caller.uncancel()
            # Once the work is over, and with its message: anyio knows by it which cancellations are its own.
            cancel = functools.partial(caller.cancel, *error.args)
            task.add_done_callback(lambda _, cancel=cancel: loop.call_soon(cancel))  # type: ignore[misc]
    task.result()
