"""The poller of an event loop, which all links of the loop share: it keeps the time of the loop's turns."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from shmring.core.compiled import Poller

__all__ = ["poller_of"]

_pollers: WeakValueDictionary[int, Poller] = WeakValueDictionary()  # by the id of their loop, which each of them keeps


def poller_of(loop: asyncio.AbstractEventLoop) -> Poller:
    """Returns the poller of all links of a loop. It lives as long as one of them knows it."""
    poller = _pollers.get(id(loop))
    if poller is None or poller.home.forked:
        poller = _pollers[id(loop)] = Poller(loop)
    return poller
