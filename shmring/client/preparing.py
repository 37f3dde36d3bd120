"""Named requests that are not sent yet: they wait for an engine or for space, or are being copied. Aborts name them, too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from typing import TypeVar

from shmring.errors import AbortedError

__all__ = ["Preparations"]

_Result = TypeVar("_Result")


class _Preparing:
    def __init__(self, name: str, task: asyncio.Task[object] | None) -> None:
        self.name = name
        self.task = task
        self.aborted = False

    def abort(self) -> None:
        """Wakes its task, which then tells an abort from a cancellation by ``aborted``."""
        self.aborted = True
        if self.task is not None:
            self.task.cancel()


class Preparations:
    """Those of one client."""

    def __init__(self) -> None:
        self._requests: set[_Preparing] = set()

    async def prepare(self, name: str, work: Awaitable[_Result]) -> _Result:
        """Awaits something for a named request.

        Raises:
            AbortedError: :meth:`abort` was called meanwhile; the work was cancelled.
        """
        request = _Preparing(name, asyncio.current_task())
        self._requests.add(request)
        try:
            return await work
        except asyncio.CancelledError:
            if not request.aborted or request.task is None or request.task.uncancel():
                raise
            raise AbortedError(f"request {name} was aborted before it was sent", request_id=name) from None
        finally:
            self._requests.discard(request)

    def abort(self, names: Collection[str]) -> int:
        """Aborts the requests of these names; returns how many there were."""
        requests = [request for request in self._requests if request.name in names and not request.aborted]
        for request in requests:
            request.abort()
        return len(requests)
