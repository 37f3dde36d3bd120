"""Names for what has only an identity."""

from __future__ import annotations

from typing import Any


class Names(dict[Any, int]):
    """Names in the order in which things are met."""

    def __missing__(self, key: Any) -> int:
        name = self[key] = len(self)
        return name
