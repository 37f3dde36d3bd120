"""How much of a store's memory one stage has in use, and what it gets a copy of.

A stage that keeps what it got would fill the store, and wait for the next chunk in vain: what it holds is the room that its
sender waits for. So views are for a part of the store; the rest is copied, and the store's memory is free at once. What is
small was copied when it came.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch

__all__ = ["SMALL_NBYTES", "Views"]

#: A copy of so much takes some microseconds, which is less than two questions to the store.
SMALL_NBYTES = 72 << 10


class Views:
    """What one connector has handed out, and what of it lives.

    Attributes:
        copied: how much was copied instead of viewed.
    """

    def __init__(self) -> None:
        self.copied = 0
        self._nbytes = 0
        self._died: deque[int] = deque()  # a finaliser may run in any thread, at any moment: it takes no lock
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the store's memory that living tensors view."""
        with self._lock:
            return self._settled()

    def hand_out(self, frame: torch.Tensor, most_nbytes: int) -> torch.Tensor:
        """Returns a frame to read, in place or copied.

        Args:
            frame: a view of the store's memory, if it is larger than ``SMALL_NBYTES``.
            most_nbytes: of its memory, that may be viewed at a time.
        """
        nbytes = frame.nbytes
        if nbytes <= SMALL_NBYTES:
            return frame
        with self._lock:
            is_viewed = self._settled() + nbytes <= most_nbytes
            if is_viewed:
                self._nbytes += nbytes
            else:
                self.copied += 1
        if not is_viewed:
            return frame.clone()
        array = frame.numpy()  # all tensors that are made of it hold this one, and not the tensor
        weakref.finalize(array, self._died.append, nbytes).atexit = False
        return torch.from_numpy(array)

    def _settled(self) -> int:
        while self._died:
            self._nbytes -= self._died.popleft()
        return self._nbytes
