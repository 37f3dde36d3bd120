"""What an adapter of a transport implements: one engine that answers, clients that ask."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.context import SpawnContext
from typing import Any, ClassVar

import torch

from bench.request.questions import Answer, Cell, Desk, Header

__all__ = ["Ask", "Peer"]

#: Sends a question and waits for its answer. Called by many tasks at a time; the tensor is not written in between.
Ask = Callable[[Header, torch.Tensor], Awaitable[Answer]]


class Peer(abc.ABC):
    """A transport, used for requests the way its users use it. Both coroutines run on uvloop, afresh for each cell.

    Attributes:
        name: as the command line and the results spell it.
        title: as the table spells it.
        requires: the distribution it needs; None: what shmring itself needs will do.
    """

    name: str
    title: str
    requires: ClassVar[str | None] = None

    def version(self) -> str | None:
        """Returns the version of the distribution it needs; None if it is not installed, or if there is none."""
        try:
            return None if self.requires is None else version(self.requires)
        except PackageNotFoundError:
            return None

    def missing(self) -> str | None:
        """Returns what to do before it can be measured; None if nothing."""
        if self.requires is None or self.version() is not None:
            return None
        return f"not installed: pip install {self.requires}"

    def limits(self, cell: Cell) -> str | None:
        """Returns why a cell can't be measured with it; None if it can."""
        return None

    def create_shared(self, context: SpawnContext, clients: int) -> Any:
        """Makes what all processes must inherit, in their parent, once for the life of all. Nothing, usually."""
        return None

    @abc.abstractmethod
    async def serve(self, cell: Cell, shared: Any, desk: Desk, listening: Callable[[], None]) -> None:
        """The engine: has the desk answer what clients ask, until it is cancelled, after the last client has gone.

        Args:
            listening: to be called once, when clients may connect.
        """

    @abc.abstractmethod
    def connect(self, cell: Cell, shared: Any, client: int) -> AbstractAsyncContextManager[Ask]:
        """A client: connects, and disconnects when it is left, with nothing in flight unless something has failed."""
