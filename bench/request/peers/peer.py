"""What an adapter of a transport implements: one engine that answers, clients that ask."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from multiprocessing.context import SpawnContext
from typing import Any

import torch

from bench.peers.peer import Adapter
from bench.request.questions import Answer, Cell, Desk, Header

__all__ = ["Ask", "Peer"]

#: Sends a question and waits for its answer. Called by many tasks at a time; the tensor is not written in between.
Ask = Callable[[Header, torch.Tensor], Awaitable[Answer]]


class Peer(Adapter, abc.ABC):
    """A transport, used for requests the way its users use it. Both coroutines run on uvloop, afresh for each cell."""

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
