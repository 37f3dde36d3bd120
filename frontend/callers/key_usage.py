"""What the owners of keys use, and their limits: requests at once, requests a minute, bytes of the slab.

Limits hold for the server, and not for each frontend. The frontends count in one piece of memory: each has a row, which only it
writes, and all add the rows up. There is no lock. A frontend counts first, then looks at the sum, and takes back what was too
much: so two at the same moment may both be refused, but never both be let in. The supervisor clears the row of a frontend that
has died. A frontend without a supervisor counts for itself. (Libraries such as ``limits`` count in one
process, or ask a server such as Redis for each request.)

Requests a minute are a sliding window, of counts in two fixed ones: what came in the minute before this one counts for the
share of it that lies within the last 60 s. A request that is refused does not count. All processes of a host have one
``time.monotonic()``.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated

from starlette.types import ASGIApp, Receive, Scope, Send

from shmring.frontend.callers.keys import KeyOwner
from shmring.frontend.errors import ApiError, ErrorCode
from shmring.service.numbers import CountsByLabel, Number

__all__ = ["KeyLimits", "KeyStatistics", "OwnerUsage", "UsageTable", "hold_slab", "running_usage", "usages_of"]

# The cells of an owner in a frontend's row: requests now, bytes now, and requests in the even and the odd minutes. Such a cell
# also says which minute it is, so that a frontend without requests need not clear it.
_RUNNING, _NBYTES, _MINUTES = 0, 1, 2
_CELLS = 4
_CELL_NBYTES = 8
_MINUTE_S = 60.0
_MINUTE_SHIFT = 32
_COUNT = (1 << _MINUTE_SHIFT) - 1
_BUSY_S = 1  # to wait for one of the own requests to end

_current: ContextVar[OwnerUsage | None] = ContextVar("key usage", default=None)


class UsageTable:
    """The memory: for each owner, a row of each frontend.

    Args:
        owners: how many there are.
        rows: frontends; None: as many as the descriptor has room for.
        fd: of the memory, which this object keeps; -1: it is this process's own.

    Attributes:
        rows: frontends.
        fd: as given.
    """

    def __init__(self, owners: int, rows: int | None = 1, fd: int = -1) -> None:
        row_nbytes = owners * _CELLS * _CELL_NBYTES
        self.rows = os.fstat(fd).st_size // row_nbytes if rows is None else rows
        self.fd = fd
        self._owners = owners
        if fd >= 0:
            os.ftruncate(fd, self.rows * row_nbytes)
        self._cells = memoryview(mmap.mmap(fd, self.rows * row_nbytes)).cast("q")

    def of(self, owner: int) -> memoryview:
        """Returns the cells of an owner, row by row."""
        length = self.rows * _CELLS
        return self._cells[owner * length : (owner + 1) * length]

    def forget(self, row: int) -> None:
        """Clears what a frontend that has ended had running. Its requests of this minute were made."""
        for owner in range(self._owners):
            self.of(owner)[row * _CELLS + _RUNNING] = self.of(owner)[row * _CELLS + _NBYTES] = 0


@dataclass(slots=True)
class KeyStatistics:
    """What a frontend has counted of owners, by name.

    Attributes:
        refused: requests that a limit of their key refused, by ``key`` and ``limit``.
        running: requests now, by ``key``.
        slab_nbytes: bytes of media that requests have in the slab or wait for, by ``key``; kept media are not counted again.
        prompt_tokens: tokens of requests that were answered, by ``key``.
        generated_tokens: tokens of answers, by ``key``; of an answer that is not streamed and whose caller hangs up, all but
            those of the last second.
    """

    refused: Annotated[CountsByLabel, Number("shmring_key_refusals", ("key", "limit"))] = field(default_factory=Counter)
    running: Annotated[dict[tuple[str, ...], int], Number("shmring_key_requests_running", ("key",))] = field(
        default_factory=dict
    )
    slab_nbytes: Annotated[dict[tuple[str, ...], int], Number("shmring_key_slab_bytes", ("key",))] = field(default_factory=dict)
    prompt_tokens: Annotated[CountsByLabel, Number("shmring_key_prompt_tokens", ("key",))] = field(default_factory=Counter)
    generated_tokens: Annotated[CountsByLabel, Number("shmring_key_generation_tokens", ("key",))] = field(
        default_factory=Counter
    )


class OwnerUsage:
    """What an owner uses.

    Args:
        owner: who, and the limits.
        cells: of the owner.
        row: this frontend's.
        statistics: where it is counted for people.
        clock: which all frontends have.
    """

    def __init__(
        self,
        owner: KeyOwner,
        cells: memoryview,
        row: int,
        statistics: KeyStatistics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.owner = owner
        self._cells = cells
        self._own = cells[row * _CELLS : (row + 1) * _CELLS]
        self._statistics = statistics
        self._clock = clock

    def enter(self) -> dict[str, str]:
        """Counts a request, which must :meth:`leave`.

        Returns:
            Headers that tell its caller how many more there may be, as OpenAI has them.

        Raises:
            ApiError: 429, a limit is reached; nothing was counted.
        """
        self._add(_RUNNING, 1)
        try:
            most = self.owner.max_concurrent_requests
            if most is not None and self._sum(_RUNNING) > most:
                raise self._refusal("max-concurrent-requests", f"{most} requests at once", _BUSY_S)
            return self._count_in_minute()
        except ApiError:
            self._add(_RUNNING, -1)
            raise

    def leave(self) -> None:
        """A request has ended."""
        self._add(_RUNNING, -1)

    def _count_in_minute(self) -> dict[str, str]:
        most = self.owner.max_requests_per_minute
        if most is None:
            return {}
        minute, elapsed_s = divmod(self._clock(), _MINUTE_S)
        minute = int(minute)
        cell = _MINUTES + minute % 2
        before_cell = self._own[cell]
        mine = before_cell & _COUNT if before_cell >> _MINUTE_SHIFT == minute else 0
        self._own[cell] = minute << _MINUTE_SHIFT | mine + 1  # one store: nobody sees half of it
        now, before = self._count_of(minute), self._count_of(minute - 1)
        used = now + before * (1 - elapsed_s / _MINUTE_S)
        headers = {
            "x-ratelimit-limit-requests": str(most),
            "x-ratelimit-remaining-requests": str(max(0, int(most - used))),
            "x-ratelimit-reset-requests": f"{math.ceil((2 if now else 1) * _MINUTE_S - elapsed_s)}s",
        }
        if used > most:
            self._own[cell] = minute << _MINUTE_SHIFT | mine
            wait_s = math.ceil(_seconds_until_room(now - 1, before, most, elapsed_s))
            raise self._refusal("max-requests-per-minute", f"{most} requests a minute", wait_s, headers)
        return headers

    def hold(self, nbytes: int) -> None:
        """Counts bytes of media, which must be let go of.

        Raises:
            ApiError: 429, it is too much now; 413, it always is.
        """
        most = self.owner.max_slab_nbytes
        if most is not None and nbytes > most:
            message = f"the request's media take {nbytes} bytes of the slab; {most} are accepted with this key"
            raise ApiError(ErrorCode.MEDIA_TOO_LARGE, message)
        self._add(_NBYTES, nbytes)
        if most is not None and self._sum(_NBYTES) > most:
            self._add(_NBYTES, -nbytes)
            raise self._refusal("max-slab-nbytes", f"{most} bytes of media at once", _BUSY_S)

    def let_go(self, nbytes: int) -> None:
        """Bytes of media are no longer needed."""
        self._add(_NBYTES, -nbytes)

    def count_tokens(self, prompt: int, generated: int) -> None:
        """Counts the tokens of an answer."""
        self._statistics.prompt_tokens[self.owner.name,] += prompt
        self._statistics.generated_tokens[self.owner.name,] += generated

    def _refusal(self, limit: str, text: str, wait_s: int, headers: dict[str, str] | None = None) -> ApiError:
        self._statistics.refused[self.owner.name, limit] += 1
        message = f"this key may have {text}; try again in {wait_s} s"
        return ApiError(ErrorCode.RATE_LIMIT_EXCEEDED, message, retry_after_s=wait_s, headers=headers)

    def _add(self, cell: int, number: int) -> None:
        self._own[cell] += number
        gauge = self._statistics.running if cell == _RUNNING else self._statistics.slab_nbytes
        gauge[self.owner.name,] = self._own[cell]

    def _sum(self, cell: int) -> int:
        return sum(self._cells[cell::_CELLS])

    def _count_of(self, minute: int) -> int:
        cells = self._cells[_MINUTES + minute % 2 :: _CELLS]
        return sum(cell & _COUNT for cell in cells if cell >> _MINUTE_SHIFT == minute)


def _seconds_until_room(now: int, before: int, most: int, elapsed_s: float) -> float:
    """Returns after how many seconds a further request is within the limit.

    Args:
        now: requests in this minute.
        before: requests in the one before.
        most: in any 60 s.
        elapsed_s: of this minute.
    """
    if now < most:  # those of the minute before have to go
        return _MINUTE_S * (1 - (most - 1 - now) / before) - elapsed_s
    return _MINUTE_S - elapsed_s + _MINUTE_S * (1 - (most - 1) / now)


def hold_slab(nbytes: int, stack: contextlib.ExitStack) -> None:
    """Counts bytes of the running request's media until the stack's end, if its key has an owner.

    Raises:
        ApiError: as :meth:`OwnerUsage.hold`.
    """
    if (usage := _current.get()) is not None:
        usage.hold(nbytes)
        stack.callback(usage.let_go, nbytes)


def running_usage() -> OwnerUsage | None:
    """Returns what the owner of the running request's key uses; None: it has no owner."""
    return _current.get()


class KeyLimits:
    """Middleware of routes whose requests are counted and limited by key. It stands behind the one that checks keys.

    Args:
        app: answers requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through.

        Raises:
            ApiError: 429, its owner is at a limit.
        """
        usage: OwnerUsage | None = scope["state"].get("usage")
        _current.set(usage)
        if usage is None:
            await self._app(scope, receive, send)
            return
        scope["state"]["headers"] = usage.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            usage.leave()


def usages_of(
    owners: Sequence[KeyOwner], statistics: KeyStatistics, table: UsageTable | None, row: int
) -> dict[str, OwnerUsage]:
    """Returns what owners use, by key."""
    if not owners:
        return {}
    table = table or UsageTable(len(owners))
    usages = [OwnerUsage(owner, table.of(index), row, statistics) for index, owner in enumerate(owners)]
    return {key: usage for usage in usages for key in usage.owner.keys}
