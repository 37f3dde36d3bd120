"""Waiting in tests that have no loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["until"]


def until(condition: Callable[[], Any], timeout_s: float = 600.0) -> Any:
    """Polls a condition until it is true; returns what it said. When the time is up, which only a hang reaches, it fails."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while not (result := condition()):
        assert time.monotonic() < deadline, f"still {result!r} after {timeout_s} s"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return result
