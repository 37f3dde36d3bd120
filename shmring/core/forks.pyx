"""Whether something is still in the process that made it.

Theory of operation: a forked child inherits every object of its parent, sockets and mappings included, and must not use them.
Asking the kernel for the process's id takes as long as encoding a small message, and it would be asked several times for each. So
forks are counted: libc calls a hook in each child, before ``fork`` returns there, whoever called it. What belongs to a process
remembers the count, and compares it: compiled code by ``forks()``, a load and a compare, and Python by an :class:`Origin`.

This is the only way in which the package finds out. Two other hooks ask nothing, but act in a new child: Python's, by which
:mod:`shmring.transport.endpoint` closes the sockets and locks of its parent there, and one in ``memory/copy_helpers.c``, which forgets
the threads that help with large copies: that C code is an extension of its own, and imports nothing.

Invariants: the count only grows, and only in a child, which has one thread then. A child that is to become another program
(``subprocess``) may not be counted; it runs nothing of ours.
"""

cimport cython
from posix.unistd cimport getpid

from shmring.errors import ClosedError

cdef int fork_count


cdef inline int forks() noexcept nogil:
    """Returns the number of forks from the first process that loaded this to this one: who remembers it knows whether it is a child."""
    return fork_count


cdef void _count_fork() noexcept nogil:
    global fork_count
    fork_count += 1


if pthread_atfork(NULL, NULL, _count_fork):
    raise MemoryError


@cython.final
cdef class Origin:
    """The process in which this was made.

    Attributes:
        pid: its id.
        forked: whether this is a copy of it in a child.
    """

    cdef readonly int pid
    cdef int _forks

    def __cinit__(self) -> None:
        self.pid = getpid()
        self._forks = forks()

    @property
    def forked(self) -> bool:
        return self._forks != forks()

    def stray(self, what: str, instead: str) -> ClosedError:
        """Returns what to raise in a child that was asked to use what its parent made: what that is, and what to do instead."""
        return ClosedError(f"{what} belongs to process {self.pid}, which forked this one; {instead}")
