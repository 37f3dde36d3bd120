"""The error of a request for which there is too much to do: in the scheduler's line, or in an executor."""

from __future__ import annotations

__all__ = ["OverloadedError"]


class OverloadedError(Exception):
    """There is too much to do for this request; the same request may succeed a moment later."""
