"""A thread that waits for points in the streams of a GPU, and lets go of what each of them keeps when the GPU has come to it.

Why a thread, and no polling from the loop: both event loops count in milliseconds (asyncio rounds a timer up to the next one,
uvloop takes half of one for none at all and spins), while a thread that sleeps in ``cuEventSynchronize`` is back some ten
microseconds after the event, and costs nothing meanwhile. All that it does for each is compiled, and needs no interpreter's
lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from shmring.core.compiled import Gpu, Watch
from shmring.core.loggers import logger_of

__all__ = ["Watcher"]

logger = logger_of("shmring.ring")


class Watcher:
    """Waits in the order in which it is given something.

    Args:
        gpu: what is waited for.
        name: of the thread.

    Attributes:
        watch: what it is given.
    """

    def __init__(self, gpu: Gpu, name: str) -> None:
        self.watch = Watch(gpu)
        self._will_look = False
        # A daemon: where the GPU never answers, the process must still be able to end.
        self._thread = threading.Thread(target=_see_out, args=(self.watch,), name=name, daemon=True)
        self._thread.start()

    def look_soon(self, loop: asyncio.AbstractEventLoop, report: Callable[[], object] | None = None) -> None:
        """Has a loop look in its next turn at what the watch remembers by then, and report if some of that has come."""
        if not self._will_look:
            loop.call_soon(self._look, report)
            self._will_look = True

    def _look(self, report: Callable[[], object] | None) -> None:
        self._will_look = False
        if self.watch.look() and report is not None:
            report()

    def close(self, timeout_s: float) -> bool:
        """Waits until all has come, and nothing was kept for good; returns whether that came to be. Twice is once."""
        self.watch.close()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self.watch.kept


def _see_out(watch: Watch) -> None:
    while (error := watch.see_out()) is not None:
        logger.error("slots that a GPU may still be using are kept until this process ends: %s", error)
