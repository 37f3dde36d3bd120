"""The packages that decode media. A server starts without them, since texts need none; so it says what is missing."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version

__all__ = ["DECODERS", "what_is_missing"]

#: The names of distributions, of the extra ``serve``.
DECODERS = ("av", "pillow", "pillow-heif")


@functools.cache
def what_is_missing() -> str | None:
    """Says which of them are not installed, and how they are; None if all are there."""
    missing = [name for name in DECODERS if not _is_installed(name)]
    if not missing:
        return None
    return f"{' and '.join(missing)} not installed: pip install 'shmring[serve]' (in a checkout: '.[serve]')"


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
