"""What a case is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple


class Case(NamedTuple):
    """Something that is done again and again.

    Attributes:
        act: does it so often.
        messages: how often, in each part.
        parts: that are counted each by itself; the one that takes least counts. Of cases of one thread, one is enough. Where
            several threads wait for each other, chance decides how often they look for messages and find none.
    """

    act: Callable[[int], Awaitable[None]]
    messages: int = 160
    parts: int = 1
