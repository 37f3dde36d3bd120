"""One task for each claim: what ``ring.run(handler)`` does.

Invariant: when it returns or raises, no handler runs any more, and each of their requests has ended.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from shmring.core.printable import printable_lines
from shmring.errors import ClosedError
from shmring.ring.claim import Claim

if TYPE_CHECKING:
    from shmring.ring.ring import Ring

__all__ = ["handle_claims"]

logger = logging.getLogger("shmring.ring")


async def handle_claims(ring: Ring, handler: Callable[[Claim], Awaitable[object]], max_concurrency: int) -> None:
    """See :meth:`Ring.run`."""
    if max_concurrency < 1:
        raise ValueError(f"max_concurrency must be at least 1, not {max_concurrency}")
    free = asyncio.Semaphore(max_concurrency)
    tasks: set[asyncio.Task[None]] = set()

    def finished(task: asyncio.Task[None], claim: Claim) -> None:
        tasks.discard(task)
        free.release()
        if not claim.released:  # cancelled before its first step, so it never entered its claim
            claim.fail(asyncio.CancelledError("the engine stopped"))

    try:
        while True:
            await free.acquire()
            try:
                claim = await ring.claim()
            except ClosedError:
                break
            task = asyncio.create_task(_handle(claim, handler))
            tasks.add(task)
            task.add_done_callback(functools.partial(finished, claim=claim))
        # The ring is closed, so every claim is aborted and its handler cancelled: see them out.
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _handle(claim: Claim, handler: Callable[[Claim], Awaitable[object]]) -> None:
    task = asyncio.current_task()
    assert task is not None
    try:
        with claim:
            claim.on_abort(task.cancel)
            await handler(claim)
    except asyncio.CancelledError:
        if not claim.aborted:
            raise
    except Exception:  # noqa: BLE001 - a handler that raises ends its own request, and nothing else
        # The request has failed and its frontend knows; what is left is to tell whoever reads the log. As text: a
        # log handler that keeps the exception would keep its frames, and they the views of the request's slots.
        logger.error(
            "the handler of request %d of client %d failed\n%s",
            claim.request_id,
            claim.client_id,
            printable_lines(traceback.format_exc()),
        )
