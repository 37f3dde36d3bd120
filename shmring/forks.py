"""Whether an object is still in the process that made it.

A forked child inherits every object of its parent, sockets and mappings included, and must not use them. Asking the kernel for
the process's id takes as long as encoding a small message, and it would be asked several times for each. So Python's own hook
tells: it runs in each child that ``os.fork`` (or ``multiprocessing``) has made, before anything else does.
"""

from __future__ import annotations

import functools
import os
import weakref

from shmring.errors import ClosedError

__all__ = ["Origin"]


class Origin:
    """The process in which this was made.

    Attributes:
        pid: its id.
        forked: whether this is a copy of it in a child.
    """

    __slots__ = ("__weakref__", "forked", "pid")

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.forked = False
        _living().add(self)

    def stray(self, what: str, instead: str) -> ClosedError:
        """Returns what to raise in a child that was asked to use what its parent made: what that is, and what to do instead."""
        return ClosedError(f"{what} belongs to process {self.pid}, which forked this one; {instead}")


@functools.cache
def _living() -> weakref.WeakSet[Origin]:
    """All there are. The hook is there from the first on; it can't be taken back, and need not be."""
    living: weakref.WeakSet[Origin] = weakref.WeakSet()

    def forked() -> None:
        for origin in living:
            origin.forked = True

    os.register_at_fork(after_in_child=forked)
    return living
