"""Objects that were dropped while they held something: they come back, with a warning that says where they came from.

They come back a moment after they were dropped: what was dropped with them may have a finaliser that leaves them, and the
garbage collector runs finalisers in any order.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["DROPPED_S", "give_back_soon", "warn_of"]

DROPPED_S = 0.1  # that moment


def give_back_soon(loop: Any, give_back: Callable[[], object]) -> None:
    """Something was dropped, on whatever thread: gives it back in its event loop, unless a finaliser does that before."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left who could reuse anything
        loop.call_soon_threadsafe(loop.call_later, DROPPED_S, give_back)


def warn_of(message: str, source: object) -> None:
    """Warns that something was dropped, which comes back now.

    Args:
        message: what it was, and what to do.
        source: the object; with ``tracemalloc``, the warning says where it was made.
    """
    warnings.warn(message, ResourceWarning, stacklevel=2, source=source)
