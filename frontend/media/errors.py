"""The one error of media."""

from __future__ import annotations

__all__ = ["MediaError"]


class MediaError(ValueError):
    """What a caller sent can't be taken as media; the text says why, and is meant for the caller."""
