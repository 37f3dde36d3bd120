"""Garbage in tests: what must go with its last reference, and not when a collector finds it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected in this block: what goes there goes with its last reference."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
