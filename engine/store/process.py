"""A store as a process: keeps content and deliveries, until it is told to end or nobody has used it for long.

When a signal tells it to end, it drains for ``shutdown_timeout_s``: it keeps nothing new, and waits until no client uses its
content. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import NoReturn

import msgspec
import uvloop

import shmring
from shmring.core.loggers import logger_of
from shmring.engine.store.metrics import serve_metrics
from shmring.engine.store.settings import StoreSettings
from shmring.processes.child import say_ready
from shmring.service.logs import ending, finish_logging
from shmring.service.supervision import Stop, seldom_look_for_garbage

__all__ = ["Ready", "run"]

logger = logger_of("shmring.store")

_LOOK_S = 0.05  # between two looks whether content is in use, while it drains
_IDLE_LOOK_S = 1.0  # and whether a client is there


class Ready(msgspec.Struct, frozen=True):
    """What a store says to the process that started it.

    Attributes:
        pid: of its process.
        port: that ``/metrics`` has; None: it is not served.
    """

    pid: int
    port: int | None


def run(settings: StoreSettings, ready_fd: int | None = None) -> NoReturn:
    """Runs a store until it is told to end, and ends the process.

    Args:
        settings: of it, checked.
        ready_fd: where it says that clients can connect; None: nowhere.

    Raises:
        SystemExit: it can't start; says why. With ``EX_TEMPFAIL``, another engine has the name.
    """
    try:
        uvloop.run(_serve(settings, ready_fd))
    except shmring.LocalProtocolError as error:
        print(f"shmring store: {error}", file=sys.stderr)
        raise SystemExit(os.EX_TEMPFAIL) from None
    except (shmring.ShmringError, ImportError, OSError, ValueError) as error:
        raise ending(f"shmring store: {error}") from None
    _leave()


def _leave() -> NoReturn:
    """Ends the process without unloading torch, which takes most of a second. Everything of ours is closed by now."""
    try:
        finish_logging()
    finally:  # also where the log has failed
        os._exit(0)


async def _serve(settings: StoreSettings, ready_fd: int | None) -> None:
    stop = Stop()
    stop.heed_signals()
    async with shmring.serve(settings.name, settings.ring) as ring, contextlib.AsyncExitStack() as closing:
        facts = {"name": settings.name, "engines": 1, "pid": os.getpid()}  # as ServerFacts, for `shmring drain`
        ring.add_to_snapshots(lambda: {"store": facts})
        port = None
        if settings.port is not None:
            port = await closing.enter_async_context(serve_metrics(ring, settings.host, settings.port))
        answering = asyncio.ensure_future(_answer_requests(ring))
        counts = ring.statistics()
        logger.info(
            "%s is ready: slab %d bytes, for content %d", settings.name, counts.slab_nbytes, counts.kept_capacity_nbytes
        )
        seldom_look_for_garbage()
        if ready_fd is not None:
            with contextlib.suppress(BrokenPipeError):  # whoever waited is gone, and others may want a store
                say_ready(ready_fd, Ready(os.getpid(), port))
        await _until_told(ring, stop, settings)
        await _drain(ring, stop, settings.shutdown_timeout_s)
        await answering
    logger.info("%s has ended", settings.name)


async def _answer_requests(ring: shmring.Ring) -> None:
    """A client may not know what it talks to. Its requests end at once, and take no memory."""
    async for claim in ring:
        claim.fail(NotImplementedError("a store keeps content, and answers no requests"))


async def _until_told(ring: shmring.Ring, stop: Stop, settings: StoreSettings) -> None:
    """Returns when the process is told to end, or when no client was there for as long as it may be idle."""
    loop = asyncio.get_running_loop()
    used_s = loop.time()
    look_s = min(_IDLE_LOOK_S, settings.idle_timeout_s) if settings.idle_timeout_s else None
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(look_s):
                await stop.told.wait()
                return
        counts = ring.statistics()
        if counts.clients or counts.departed_clients:
            used_s = loop.time()
        elif loop.time() - used_s >= settings.idle_timeout_s:
            logger.info("%s ends: no client was there for %g s", settings.name, settings.idle_timeout_s)
            return


async def _drain(ring: shmring.Ring, stop: Stop, timeout_s: float) -> None:
    """Keeps nothing more, and waits until no client uses content; for so long at most."""
    await ring.drain(0)
    end_s = asyncio.get_running_loop().time() + timeout_s
    while (in_use := ring.statistics().kept_pinned) and not stop.hurry.is_set():
        if asyncio.get_running_loop().time() >= end_s:
            untaken = ring.statistics().deliveries_untaken
            logger.warning(
                "contents that are still in use after %g s go: %d, and %d that nobody has taken",
                timeout_s,
                in_use - untaken,
                untaken,
            )
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await stop.hurry.wait()
