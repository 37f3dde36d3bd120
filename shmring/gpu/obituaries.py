"""Knowing when an object has died that stands for memory of a GPU.

Theory of operation: all views of a slot in device memory keep one object alive, so the slot is unviewed when a weak reference
to that object dies. Its callback may run on any thread and in the middle of anything, so it does nothing but append to a deque
and wake the event loop; :class:`Obituaries` hands the deaths out there. Waking a loop takes system calls and a turn of it, and
most objects die before anybody waits for that, so it is done for those only whose death is expected.

Views of host memory are counted in C (``core/views.pyx``).
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Obituaries"]

_Key = TypeVar("_Key", bound=Hashable)
_Watched = TypeVar("_Watched")


class Obituaries(Generic[_Key, _Watched]):
    """Tells when objects die.

    Args:
        wake: called on whatever thread an expected death happened; must only wake the loop, which calls :meth:`collect`.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._references: dict[_Key, weakref.ref[_Watched]] = {}
        self._expected: set[_Key] = set()
        self._dead: deque[tuple[_Key, weakref.ref[_Watched]]] = deque()

    def __len__(self) -> int:
        return len(self._references)

    def watch(self, key: _Key, watched: _Watched) -> None:
        """Watches an object; one living one at a time for a key."""
        assert self.watched(key) is None, f"{key} is watched already"
        self._references[key] = weakref.ref(watched, functools.partial(self._died, key))

    def watched(self, key: _Key) -> _Watched | None:
        """Returns the living object that is watched under a key."""
        reference = self._references.get(key)
        return None if reference is None else reference()

    def expect(self, key: _Key) -> None:
        """Has a watched object's death reported; at once if it has died."""
        self._expected.add(key)
        reference = self._references[key]
        if reference() is None:  # maybe a moment ago on another thread, which did not see yet that it was expected
            self._report(key, reference)

    def living(self) -> list[_Key]:
        """Returns the keys whose objects are alive."""
        return [key for key, reference in self._references.items() if reference() is not None]

    def collect(self) -> list[_Key]:
        """Returns the keys whose expected deaths have happened since the last call, and forgets them."""
        dead = []
        while self._dead:
            key, reference = self._dead.popleft()
            if self._references.get(key) is reference:
                self.forget(key)
                dead.append(key)
        return dead

    def forget(self, key: _Key) -> None:
        """Stops watching; a death that was already noticed is dropped as well."""
        self._references.pop(key, None)
        self._expected.discard(key)

    def _died(self, key: _Key, reference: weakref.ref[_Watched]) -> None:
        if key in self._expected:
            self._report(key, reference)

    def _report(self, key: _Key, reference: weakref.ref[_Watched]) -> None:
        self._dead.append((key, reference))
        self._wake()
