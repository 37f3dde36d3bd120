"""What an adapter of a transport implements."""

from __future__ import annotations

import abc
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from typing import Any, ClassVar

from bench.messages import Cell, Sink, Source

__all__ = ["Peer"]


class Peer(abc.ABC):
    """A transport, used the way its users use it. Its two coroutines run in two processes, on uvloop, once for each cell.

    Attributes:
        name: as the command line and the results spell it.
        title: as the table spells it.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    def create_shared(self, context: SpawnContext) -> Any:
        """Makes what both processes must inherit, in their parent, once for the life of both. Nothing, usually."""
        return None

    @abc.abstractmethod
    async def produce(self, cell: Cell, shared: Any, source: Source) -> None:
        """Sends the source's messages until it is finished, and returns when all have been consumed.

        ``source.stamp`` is called when the window has room for the message, right before it is sent: waiting for the
        window is no latency, everything behind it is.
        """

    @abc.abstractmethod
    async def consume(self, cell: Cell, shared: Any, sink: Sink, listening: Callable[[], None]) -> None:
        """Receives messages until the sink has taken the last one.

        Args:
            listening: to be called once, when a producer may start.
        """
