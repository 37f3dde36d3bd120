"""What an adapter of a transport implements, for streams of messages or for requests and their replies; and what they share.

How much memory there is for what a peer needs in a cell is said beforehand, lest a SIGBUS or the kernel end the run.
"""

from __future__ import annotations

import abc
import math
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib import metadata
from multiprocessing.context import SpawnContext
from typing import Any, ClassVar

import msgspec
import psutil
import torch

from bench.messages import DTYPES, Ask, Cell, Header, Sink, Source
from bench.questions import Desk
from shmring.memory.slab import SHM_DIRECTORY

_COPIES = 3  # of all that is in flight: at its sender, on its way, at its receiver


class Adapter:
    """A transport that may not be installed. The package it needs is imported inside its methods.

    Attributes:
        name: as the command line and the results spell it.
        title: as the table spells it.
        requires: the distribution it needs, as pip spells it; None for what shmring depends on anyway.
    """

    name: str
    title: str
    requires: ClassVar[str | None] = None

    def missing(self) -> str | None:
        """Returns why this peer can't be measured here and what to do about it, or None if it can."""
        return f"not installed: pip install {self.requires}" if self.requires and self.version() is None else None

    def version(self) -> str | None:
        """Returns the version of the distribution it needs; None if it needs none or has none."""
        try:
            return self.requires and metadata.version(self.requires)
        except metadata.PackageNotFoundError:
            return None

    def limits(self, cell: Cell) -> str | None:
        """Returns why this peer can't do a cell, such as a largest message; None if it can.

        There must be memory for what is in flight. That is asked of all peers alike, or some would be compared with nobody.
        """
        nbytes = _COPIES * cell.producers * cell.window * cell.nbytes
        available = min(shutil.disk_usage(SHM_DIRECTORY).free, psutil.virtual_memory().available)
        said = f"{nbytes / 2**30:.1f} GiB would be in flight, and {available / 2**30:.1f} GiB of memory are available"
        return None if nbytes <= available else said

    def create_shared(self, context: SpawnContext, ends: int) -> Any:
        """Makes what all processes, of so many producers or clients, must inherit: in their parent, once. Nothing, usually."""
        return None

    def close_shared(self, shared: Any) -> None:
        """Removes what :meth:`create_shared` made, in the parent, once, when all the processes have ended."""


class Peer(Adapter, abc.ABC):
    """A transport of streams, used the way its users use it.

    ``produce`` runs in each of a cell's producer processes, ``consume`` in its one consumer process, all on uvloop, once for
    each cell.

    Attributes:
        in_place: whether the producer writes into the transport's memory, and copies nothing.
        event_driven: whether its ends sleep while nothing comes, and their event loops are free for other work; else they spin.
    """

    in_place: ClassVar[bool] = False
    event_driven: ClassVar[bool] = True

    @abc.abstractmethod
    async def produce(self, cell: Cell, shared: Any, source: Source) -> None:
        """Sends the source's messages until it is finished, and returns when all of them have been consumed.

        ``source.stamp`` is called when the window has room for the message, right before it is sent: waiting for the
        window is no latency, everything behind it is. ``source.producer`` says which of the cell's producers this is.
        """

    @abc.abstractmethod
    async def consume(self, cell: Cell, shared: Any, sink: Sink, listening: Callable[[], None]) -> None:
        """Receives messages of ``cell.producers`` producers at a time until the sink has taken the last one.

        It says once that it is listening: when producers may start.
        """


class RequestPeer(Adapter, abc.ABC):
    """A transport, used for requests the way its users use it. Both coroutines run on uvloop, afresh for each cell."""

    @abc.abstractmethod
    async def serve(self, cell: Cell, desk: Desk, listening: Callable[[], None]) -> None:
        """The engine: has the desk answer what clients ask, until it is cancelled, after the last client has gone."""

    @abc.abstractmethod
    def connect(self, cell: Cell) -> AbstractAsyncContextManager[Ask]:
        """A client: connects, and disconnects when it is left, with nothing in flight unless something has failed."""


# -- what adapters share -------------------------------------------------------------------------------------------------

#: Packs a description as msgpack.
encode = msgspec.msgpack.Encoder().encode


class Description(msgspec.Struct, array_like=True):
    """A message but for its bytes, which travel before it or around it; a subclass adds them, or where they are."""

    header: Header
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def tensor(self, content: Any) -> torch.Tensor:
        """Returns a view of a buffer, which may be longer."""
        return torch.frombuffer(content, dtype=DTYPES[self.dtype], count=math.prod(self.shape)).view(self.shape)
