"""The check that threads are not greenlets: gevent and eventlet can put greenlets in their place.

All greenlets run in one thread of the system. A call of ours sleeps in that thread until another one answers. But that other
one never runs, so the call would never return, even with a ``timeout``. So opening raises an error.
"""

from __future__ import annotations

import _thread
import queue

from shmring.errors import LocalProtocolError

__all__ = ["check_threads"]

_STANDARD = ("_thread", "queue", "_queue")


def check_threads() -> None:
    """Raises if threads, or the queues that hand work to them, are not Python's own.

    Raises:
        LocalProtocolError: they were replaced.
    """
    for kind in (_thread.start_new_thread, queue.SimpleQueue):
        if kind.__module__ not in _STANDARD:
            library = kind.__module__.split(".")[0]
            raise LocalProtocolError(
                f"{library} has replaced Python's threads, and a call of shmring.threads would never return; leave them as "
                "they are (gevent: monkey.patch_all(thread=False, queue=False); all greenlets then wait while a call does), "
                f"or use shmring with asyncio, or a process without {library}"
            )
