"""One task for each claim, or one call for a batch of them: what ``ring.run`` and ``ring.run_batches`` do.

Invariant: when it returns or raises, no handler runs any more, and each of their requests has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

from shmring.core.loggers import logger_of
from shmring.core.printable import printable_lines
from shmring.errors import AbortedError, ClosedError
from shmring.ring.claim import Claim
from shmring.ring.places import Place, Places, own_place

__all__ = ["handle_batches", "handle_claims"]

logger = logger_of("shmring.ring")


async def handle_claims(
    claim_next: Callable[[], Awaitable[Claim]], handler: Callable[[Claim], Awaitable[object]], max_concurrency: int
) -> None:
    """See :meth:`Ring.run`."""
    places = Places(max_concurrency)
    async with _seen_out() as start:
        while True:
            await places.take()
            try:
                claim = await claim_next()
            except ClosedError:
                break
            place = Place(places)
            start(claim, _handle(claim, handler, place)).add_done_callback(functools.partial(_leave, place))
        # The ring is closed, so every claim is aborted and its handler cancelled; or it drains, and they go on.


@contextlib.asynccontextmanager
async def _seen_out() -> AsyncIterator[Callable[[Claim, Coroutine[Any, Any, None]], asyncio.Task[None]]]:
    """Yields a function that starts a task for a claim. After the block, all tasks and their requests have ended."""
    tasks: set[asyncio.Task[None]] = set()

    def ended(task: asyncio.Task[None], claim: Claim) -> None:
        tasks.discard(task)
        if not claim.released:  # cancelled before its first step, so it never entered its claim
            claim.fail(asyncio.CancelledError("the engine stopped"))

    def start(claim: Claim, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(functools.partial(ended, claim=claim))
        return task

    try:
        yield start
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _leave(place: Place, _: asyncio.Task[None]) -> None:
    place.leave()


async def _handle(claim: Claim, handler: Callable[[Claim], Awaitable[object]], place: Place) -> None:
    own_place.set(place)
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
        _log_failure([claim])


async def handle_batches(
    claim_some: Callable[[], Awaitable[list[Claim]]], handler: Callable[[list[Claim]], Awaitable[Sequence[object]]]
) -> None:
    """See :meth:`Ring.run_batches`."""
    async with _seen_out() as start:
        while True:
            try:
                claims = await claim_some()
            except ClosedError:
                break
            for claim, reply in await _replies_to(claims, handler):
                start(claim, _answer(claim, reply))  # a frontend that does not read delays no other
            claims = claim = reply = None  # type: ignore[assignment]  # or they would live until the next batch has come


async def _replies_to(
    claims: list[Claim], handler: Callable[[list[Claim]], Awaitable[Sequence[object]]]
) -> list[tuple[Claim, object]]:
    """Returns the reply to each claim of a batch; none if its handler failed, and each of them with it."""
    try:
        return list(zip(claims, await handler(claims), strict=True))
    except BaseException as error:
        for claim in claims:
            claim.fail(error)
        if not isinstance(error, Exception):
            raise
        _log_failure(claims)
        return []


async def _answer(claim: Claim, reply: object) -> None:
    try:
        if isinstance(reply, BaseException):
            claim.fail(reply)
        with claim:
            if not claim.ended:  # the handler may have ended it itself
                await claim.done(reply)
    except AbortedError:
        pass
    except Exception:  # noqa: BLE001 - as above: a reply that can't be sent ends its own request
        _log_failure([claim])


def _log_failure(claims: list[Claim]) -> None:
    """Logs why requests have failed; their frontends know already.

    It logs text, not the exception: a log handler that keeps the exception would keep its frames, and the views in them.
    """
    requests = ", ".join(f"{claim.request_id} of client {claim.client_id}" for claim in claims)
    names = ", ".join(claim.name for claim in claims if claim.name)
    text = printable_lines(traceback.format_exc())
    logger.error("the handler of request %s failed\n%s", requests, text, extra={"request_id": names})
