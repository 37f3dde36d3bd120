"""The errors of shmring, by cause.

Theory of operation: the name of an error says *which side* ended or broke something, because that decides what the caller does
next. Every error carries the values it is about (asked, available, slot, path, errno) as attributes as well as in its text.
Timeouts are the built-in ``TimeoutError``, or a subclass of it with the ranks of workers; cancellation is
``asyncio.CancelledError``; neither is wrapped.

::

    ShmringError
      ClosedError               this end closed it
      PeerLostError             the other end vanished
        EngineDeadError         ... seen from a frontend or a worker
        WorkerLostError         ... seen from an engine: a worker is dead, was dropped, or never joined
      WouldBlock                a _nowait call would have had to wait
      CapacityError             can never fit; retrying is useless
      StaleDescriptorError      generation or epoch does not match
      AbortedError              the request was aborted
      RemoteError               the engine's executor failed
        WorkerFailedError       a worker failed with a message
      RankTakenError            a living worker has this rank
      ProtocolError
        LocalProtocolError      we broke the rules
        RemoteProtocolError     they broke the rules
      SlabError                 create, map or pin failed

    TimeoutError                the built-in one
      WorkersBehindError        ... that says which workers were waited for
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Iterable
from typing import Any, TypeVar

__all__ = [
    "ShmringError",
    "ClosedError",
    "PeerLostError",
    "EngineDeadError",
    "WorkerLostError",
    "WouldBlock",
    "CapacityError",
    "StaleDescriptorError",
    "AbortedError",
    "RemoteError",
    "WorkerFailedError",
    "WorkersBehindError",
    "RankTakenError",
    "ProtocolError",
    "LocalProtocolError",
    "RemoteProtocolError",
    "SlabError",
    "fresh",
]

_Error = TypeVar("_Error", bound=Exception)


class ShmringError(Exception):
    """Base of every error that shmring raises on purpose. It can be pickled and copied, with its attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own method calls the class with the text alone, but the subclasses take other arguments.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ClosedError(ShmringError):
    """This end was closed (or never opened, or belongs to the process that forked this one)."""


class PeerLostError(ShmringError):
    """The other end vanished: its process died, or its connection ended."""


class EngineDeadError(PeerLostError):
    """The engine vanished, or there is no engine of that name. Attach to the next one with ``reconnect=True``.

    Attributes:
        engine: its name, if the error is about one engine.
    """

    def __init__(self, message: str, *, engine: str | None = None) -> None:
        super().__init__(message)
        self.engine = engine


class WorkerLostError(PeerLostError):
    """A worker is dead, was dropped, or never joined: it gets no messages, and will not reply.

    Attributes:
        ranks: of those workers.
    """

    def __init__(self, message: str, *, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class WouldBlock(ShmringError):
    """A ``_nowait`` call would have had to wait; call its twin without ``_nowait``, which waits, or try again later."""


class CapacityError(ShmringError):
    """The requested size can never fit; retrying is useless.

    Attributes:
        needed: what was asked for, in bytes (or items, where the text says so).
        capacity: the limit it exceeds, in the same unit.
    """

    def __init__(self, message: str, *, needed: int, capacity: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.capacity = capacity


class StaleDescriptorError(ShmringError):
    """A slot's generation or epoch is not the announced one: its memory has been lent out again since."""


class AbortedError(ShmringError):
    """The request was aborted: by its caller, or because its frontend has gone.

    Attributes:
        request_id: the request, where known.
    """

    def __init__(self, message: str, *, request_id: int | str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class RemoteError(ShmringError):
    """The engine's handler or executor failed with this request; the engine itself goes on.

    Attributes:
        type_name: the name of the exception's type on the engine.
        message: its text.
    """

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(f"{type_name}: {message}")
        self.type_name = type_name
        self.message = message


class WorkerFailedError(RemoteError):
    """A worker failed with a message of a ``gather``; worker and engine go on.

    Attributes:
        rank: of the worker.
        type_name: the name of the exception's type there.
        message: its text.
    """

    def __init__(self, type_name: str, message: str, *, rank: int = -1) -> None:
        super().__init__(type_name, message)
        self.rank = rank

    def __str__(self) -> str:
        return f"worker {self.rank}: {super().__str__()}"


class WorkersBehindError(TimeoutError):
    """The time was over before these workers had made room for one more message, or had replied.

    Attributes:
        ranks: of those workers.
        sent: whether the message was sent. Then it went to all of its workers, and those that have not carried it out will do
            so; their replies are dropped. Otherwise no worker got it, and it may be sent again.
    """

    def __init__(self, message: str, *, ranks: Iterable[int] = (), sent: bool = False) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.sent = sent


class RankTakenError(ShmringError):
    """A worker can't join: a living one has its rank.

    Attributes:
        rank: that rank.
    """

    def __init__(self, message: str, *, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class ProtocolError(ShmringError):
    """The rules of the protocol were broken."""


class LocalProtocolError(ProtocolError):
    """We broke the rules: this call is not allowed in this state. Nothing was changed."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules. Its connection is closed with this reason; nothing else was changed."""


class SlabError(ShmringError):
    """Creating, mapping or pinning the slab failed.

    Attributes:
        path: the file system path concerned, if any.
        errno: the operating system's error number, if any.
        nbytes: how many bytes were asked for, if any.
    """

    def __init__(self, message: str, *, path: str | None = None, errno: int | None = None, nbytes: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.errno = errno
        self.nbytes = nbytes


def fresh(error: _Error) -> _Error:
    """Returns a new instance of an error: a raised one holds its traceback, which holds frames, which hold views."""
    return copy.copy(error)
