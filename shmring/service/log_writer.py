"""Standard output and standard error of a server's process: whoever writes there never waits for whoever reads.

A pipe that nobody reads is full after 64 KiB, and then ``write`` waits for ever: a log collector that stalls would stop every
loop that logs. So here a write is an entry in a bounded queue, and one thread for each descriptor writes what is there. What
does not fit, or can't be written (a full disk), is dropped and counted. When lines go out again, the owner is told.

The standard library has a handler with a queue and a thread (``QueueHandler``, ``QueueListener``). It is not used, because not
only loggers write: tracebacks, warnings and what tells the user how the start goes would still wait. Its end waits without a
limit, too.

What a process writes in C (``abort``, stacks on SIGUSR1) does not come through here, so a crash still says what it was.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import select
import threading
import weakref
from collections.abc import Callable, Iterator

__all__ = ["LineWriter"]

_MAX_WAITING_NBYTES = 1 << 20  # some ten thousand lines; a collector that restarts is away for some seconds
_FORKED_FLUSH_S = 1.0  # for a forked child, whose last act is to flush


class LineWriter(io.TextIOBase):
    """A text stream that writes to a descriptor in a thread; see the head of this file.

    Args:
        fd: to write to; the writer does not close it.
        on_dropped: called by the thread when lines go out again after some were dropped, with the reason why the last one was.
        max_waiting_nbytes: of the queue.

    Attributes:
        dropped: lines that were dropped, in all.
    """

    encoding = "utf-8"  # what is written; `click` asks for both
    errors = "backslashreplace"

    def __init__(self, fd: int, on_dropped: Callable[[str], object], max_waiting_nbytes: int = _MAX_WAITING_NBYTES) -> None:
        self.dropped = 0
        self._fd = fd
        self._on_dropped = on_dropped
        self._max_waiting_nbytes = max_waiting_nbytes
        self._told = 0  # of the dropped ones
        self._reason = ""
        self._begin()
        _living.add(self)

    def _begin(self, flush_s: float = 0.0) -> None:
        self._lock = threading.RLock()  # a destructor may log, in the middle of a write
        self._begun = b""  # a line whose end has not come; several processes write to one pipe, and no line is cut
        self._waiting: list[bytes | threading.Event] = []
        self._waiting_nbytes = 0  # what is being written counts until it is written
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_started = False
        self._flush_s = flush_s

    def write(self, text: str) -> int:
        """Puts the lines of a text in the queue, and keeps the beginning of the last one until its end comes. Never waits."""
        with self._lock:
            data = self._begun + text.encode(self.encoding, self.errors)
            end = len(data) if len(data) > select.PIPE_BUF else data.rfind(b"\n") + 1
            self._begun = data[end:]
            self._put_text(data[:end])
        return len(text)

    def flush(self) -> None:
        """Puts the beginning of a line in the queue. Does not wait for anybody. (In a forked child, it does for a moment.)"""
        with self._lock:
            begun, self._begun = self._begun, b""
            self._put_text(begun)
        if self._flush_s:
            self.finish(self._flush_s)

    def finish(self, timeout_s: float) -> bool:
        """Waits until everything that was written so far has gone out, or the time is over. Returns whether it has."""
        reached = threading.Event()
        with self._lock:
            begun, self._begun = self._begun, b""
            self._put_text(begun)
            self._put(reached)
        return reached.wait(timeout_s)

    def writable(self) -> bool:
        """Says that it is."""
        return True

    def fileno(self) -> int:
        """Returns the descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Whether the descriptor is a terminal."""
        return os.isatty(self._fd)

    def _put_text(self, data: bytes) -> None:
        if not data:
            return
        if self._waiting_nbytes + len(data) <= self._max_waiting_nbytes:
            self._waiting_nbytes += len(data)
            self._put(data)
        else:
            self._drop(data, "nobody reads them")

    def _put(self, item: bytes | threading.Event) -> None:
        self._waiting.append(item)
        if len(self._waiting) == 1:
            self._wake.put(None)
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._work, name=f"writer of descriptor {self._fd}", daemon=True).start()

    def _drop(self, data: bytes, reason: str) -> None:
        self.dropped += data.count(b"\n")
        self._reason = reason

    def _work(self) -> None:
        while True:
            self._wake.get()
            with self._lock:
                items, self._waiting = self._waiting, []
            texts = [item for item in items if isinstance(item, bytes)]
            is_out = False
            for piece in _pieces(texts):
                is_out = self._write_out(piece)
            with self._lock:
                self._waiting_nbytes -= sum(map(len, texts))
                is_news = is_out and self.dropped > self._told
                if is_news:
                    self._told = self.dropped
            if is_news:
                self._on_dropped(self._reason)
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()

    def _write_out(self, data: bytes) -> bool:
        """Waits until it is written. Returns whether it was."""
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # somebody who shares the descriptor has made it so
                with contextlib.suppress(OSError):
                    select.select([], [self._fd], [])
            except OSError as error:
                with self._lock:
                    self._drop(data, error.strerror or str(error))
                return False
        return True


_living: weakref.WeakSet[LineWriter] = weakref.WeakSet()


def _begin_anew() -> None:
    """A forked child has no threads, and must not write its parent's lines once more."""
    for writer in list(_living):
        writer._begin(_FORKED_FLUSH_S)


os.register_at_fork(after_in_child=_begin_anew)


def _pieces(texts: list[bytes]) -> Iterator[bytes]:
    """Joins texts to what a pipe takes in one piece: several processes write to it, and lines must not be mixed."""
    piece = b""
    for text in texts:
        if piece and len(piece) + len(text) > select.PIPE_BUF:
            yield piece
            piece = b""
        piece += text
    if piece:
        yield piece
