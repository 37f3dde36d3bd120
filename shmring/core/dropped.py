"""Objects that were dropped while they held memory: the memory comes back, with a warning that says where the object was made.

It comes back a moment after the object was dropped: another object that was dropped with it may have a finaliser that leaves
it, and the garbage collector runs finalisers in any order.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["DROPPED_S", "give_back_soon", "warn_of"]

DROPPED_S = 0.1  # that moment


def give_back_soon(loop: Any, give_back: Callable[[], object]) -> None:
    """An object was dropped, on whatever thread: has its loop call ``give_back`` in a moment.

    A finaliser may give it back before. So ``give_back`` does nothing a second time.
    """
    with contextlib.suppress(RuntimeError):  # the loop is closed: its memory is not reused any more
        loop.call_soon_threadsafe(loop.call_later, DROPPED_S, give_back)


def warn_of(message: str, source: object) -> None:
    """Warns that an object was dropped. Call it when the object was given back: it raises where warnings are errors.

    Args:
        message: names the object, and says what to do.
        source: the object; with ``tracemalloc``, the warning says where it was made.
    """
    warnings.warn(message, ResourceWarning, stacklevel=2, source=source)
