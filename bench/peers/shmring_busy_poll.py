"""shmring, one copy, busy polling: for a moment after each message both ends look for the next one instead of sleeping.

How its users use it: ``busy_poll_s`` in both configurations, where the latency of a message counts for more than a core; with
the 200 microseconds that the configuration recommends. Everything else is as in :mod:`bench.peers.shmring_copy`.

What it must not cost is a core that has nothing to do. So in one kind of cell, the smallest, one message in flight, both
ends stay connected for a while after the last message, with nothing to send, and say what CPU time that takes.
"""

from __future__ import annotations

from bench.messages import Cell
from bench.peers.shmring_copy import ShmringCopy

__all__ = ["ShmringBusyPoll"]

_IDLE_S = 2.0  # long enough for what happens once a second to be seen; each repetition takes so much longer
_IDLE_NBYTES = 4 << 10  # of the messages before it, on which it does not depend


class ShmringBusyPoll(ShmringCopy):
    """See the head of this file."""

    name = "shmring-busy-poll"
    title = "shmring, busy polling"
    busy_poll_s = 0.0002

    def idle_s(self, cell: Cell) -> float:
        return _IDLE_S if (cell.nbytes, cell.window, cell.producers) == (_IDLE_NBYTES, 1, 1) else 0.0
