"""What ``serve``, ``connect`` and ``join`` return, and ``slot`` in a Ray cluster: what opens when it is awaited, or entered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar

from shmring.uncopied import uncopied

__all__ = ["Opening"]


_End = TypeVar("_End", bound=AbstractAsyncContextManager[Any])


class Opening(Generic[_End]):
    """Await it, or use it with ``async with``, which closes the end."""

    def __init__(self, create: Callable[[], Awaitable[_End]]) -> None:
        self._create = create
        self._end: _End | None = None

    __reduce_ex__ = uncopied("it opens one end; call serve, connect or join again")

    def __await__(self) -> Generator[Any, None, _End]:
        return self._create().__await__()

    async def __aenter__(self) -> _End:
        self._end = await self._create()
        return self._end

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._end is not None
        await self._end.__aexit__(kind, error, traceback)
