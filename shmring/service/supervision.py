"""A process's end of the socket to the supervisor that started it (``shmring serve``).

Down the socket come lines of JSON. The first one is :class:`Orders`: all settings of the process, so that no key stands on a
command line or in an environment. After the process has said that it is ready, a frontend is told how all frontends are (a list
of :class:`FrontendState`) whenever that changes.

Up it go single bytes: :data:`READY`, once, and at every heartbeat :data:`ALIVE`, or :data:`STUCK` if a step does not end. They
are sent by the event loop, so a blocked loop sends none. When the socket ends, the supervisor is gone, and the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import Generic, Literal, TypeVar

import msgspec

__all__ = [
    "ALIVE",
    "DRAIN_SIGNAL",
    "READY",
    "STUCK",
    "FrontendState",
    "Orders",
    "Stop",
    "SupervisorLink",
    "seldom_look_for_garbage",
    "stop_signals",
]

#: As SIGTERM, but said twice it is no hurry: two operators may run ``shmring drain``.
DRAIN_SIGNAL = signal.SIGUSR2

READY = b"r"
ALIVE = b"."
STUCK = b"s"

_Settings = TypeVar("_Settings")

_SAME_SIGNAL_S = 0.5  # `timeout` and `tini -g` signal a process and then its group: they want one end, and no hurry
_LINE_LIMIT_NBYTES = 1 << 20  # of a list of frontends: each takes 80 bytes

# New objects after which garbage is looked for. Requests in flight have thousands, and leave next to no garbage: with Python's
# 700, a twentieth of a frontend's time went there.
_NEW_OBJECTS = 10_000


def seldom_look_for_garbage() -> None:
    """Has garbage looked for seldom from now on, and not in what is there: looking through that stops the loop for 0.1 s.

    To be called when everything is imported and made.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that tell a process to end in good order.

    SIGHUP (the terminal was closed) is one of them, unless it is ignored: ``nohup`` does that, and means it.
    """
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if is_ignored else [signal.SIGHUP])]


class Stop:
    """What signals have told a process of a running loop: first to end in good order, and then to end at once.

    Attributes:
        told: set by the first signal.
        hurry: set by the next one that is none of the first's echoes.
    """

    def __init__(self) -> None:
        self.told = asyncio.Event()
        self.hurry = asyncio.Event()
        self._told_at: float | None = None

    def heed_signals(self) -> None:
        """Listens to signals from now on."""
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self.tell)
        loop.add_signal_handler(DRAIN_SIGNAL, self.drain)

    def tell(self) -> bool:
        """A signal has come. That of ``shmring drain`` is none of those that are counted.

        Returns:
            Whether it was the first one.
        """
        now_s = asyncio.get_running_loop().time()
        if is_first := self._told_at is None:
            self._told_at = now_s
            self.told.set()
        elif now_s - self._told_at > _SAME_SIGNAL_S:
            self.hurry.set()
        return is_first

    def drain(self) -> None:
        """The process is to end in good order."""
        self.told.set()

    def tell_at_once(self) -> None:
        """There is nobody for whom to end in good order."""
        self.told.set()
        self.hurry.set()


class Orders(msgspec.Struct, Generic[_Settings], frozen=True):
    """The orders for a process.

    Attributes:
        heartbeat_s: how often it shows that it lives; 0: never.
        settings: of the engine or of the frontend.
    """

    heartbeat_s: float
    settings: _Settings


class FrontendState(msgspec.Struct, frozen=True):
    """The state of a frontend of the server, as the supervisor sees it.

    Attributes:
        index: which one; it stays the same when the process is replaced.
        pid: of its process, or of its last one.
        state: ``"serving"``; ``"unresponsive"``: its event loop has shown no sign of life for a while; ``"starting"``;
            ``"restarting"``: its process has ended, and another one is not ready yet.
        restarts: how often its process was replaced.
    """

    index: int
    pid: int
    state: Literal["starting", "serving", "unresponsive", "restarting"]
    restarts: int


class SupervisorLink:
    """See the head of this file. Made by :meth:`open`; used with ``async with link.held(...)``.

    Attributes:
        frontends: the last states from the supervisor.
        is_stuck: says whether requests are not carried out any more, though this loop runs.
    """

    def __init__(self, sock: socket.socket, heartbeat_s: float) -> None:
        self._sock = sock
        self._heartbeat_s = heartbeat_s
        self._writer: asyncio.StreamWriter | None = None
        self.frontends: list[FrontendState] = []
        self.is_stuck: Callable[[], bool] = lambda: False

    @classmethod
    def open(cls, fd: int, settings: type[_Settings]) -> tuple[SupervisorLink, _Settings]:
        """Takes an inherited descriptor over, and reads the orders; blocks until they are there.

        Raises:
            EOFError: the supervisor has gone.
            OSError: this is no socket.
        """
        sock = socket.socket(fileno=fd)
        sock.set_inheritable(False)
        with sock.makefile("rb") as lines:  # only the orders come before we are ready
            line = lines.readline()
        if not line.endswith(b"\n"):
            sock.close()
            raise EOFError("the supervisor has gone")
        orders = msgspec.json.decode(line, type=Orders[settings])  # type: ignore[valid-type]  # known at run time only
        return cls(sock, orders.heartbeat_s), orders.settings

    @contextlib.asynccontextmanager
    async def held(self, on_lost: Callable[[], object]) -> AsyncIterator[None]:
        """Shows signs of life, and listens, for as long as the block runs.

        Args:
            on_lost: called once, in the loop, when the supervisor has gone.
        """
        self._sock.setblocking(False)
        reader, self._writer = await asyncio.open_unix_connection(sock=self._sock, limit=_LINE_LIMIT_NBYTES)
        tasks = [asyncio.create_task(self._listen(reader, on_lost)), asyncio.create_task(self._beat(self._writer))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._writer.close()

    def say_ready(self) -> None:
        """Tells the supervisor that requests are served."""
        assert self._writer is not None, "the link is held"
        if not self._writer.is_closing():  # otherwise the supervisor has gone, and this process is about to notice
            self._writer.write(READY)

    async def _listen(self, reader: asyncio.StreamReader, on_lost: Callable[[], object]) -> None:
        decoder = msgspec.json.Decoder(list[FrontendState])
        with contextlib.suppress(ConnectionError):
            while (line := await reader.readline()).endswith(b"\n"):
                self.frontends = decoder.decode(line)
        on_lost()

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        while self._heartbeat_s > 0 and not writer.is_closing():
            if not writer.transport.get_write_buffer_size():  # otherwise the supervisor has unread signs of life
                writer.write(STUCK if self.is_stuck() else ALIVE)
            await asyncio.sleep(self._heartbeat_s)
