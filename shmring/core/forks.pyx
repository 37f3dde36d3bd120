"""The check that an object is still in the process that made it.

Theory of operation: a forked child inherits every object of its parent, sockets and mappings included, and must not use them.
Asking the kernel for the process's id takes as long as encoding a small message, and it would be asked several times for each.
So forks are counted: libc calls a hook in each child, before ``fork`` returns there. An object that belongs to a process
remembers the count, and compares it: compiled code calls ``forks()``, a load and a compare; Python has an :class:`Origin`.

No other code of the package detects forks. Two other hooks act in a new child without a check. With Python's hook,
:mod:`shmring.transport.listener` closes the sockets and locks of its parent there. A hook in ``memory/copy_helpers.c`` forgets
the threads that help with large copies; that C code is an extension of its own.

Invariants: the count only grows, and only in a child, which has one thread then. A child that is to become another program
(``subprocess``) may not be counted; it runs no code of ours.
"""

cimport cython
from posix.unistd cimport getpid

from shmring.errors import ClosedError

cdef int fork_count


cdef inline int forks() noexcept nogil:
    """Returns the number of forks between the first process that loaded this module and this process."""
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
        """Returns the error for a child that uses an object of its parent: it names the object, and says what to do instead."""
        return ClosedError(f"{what} belongs to process {self.pid}, which forked this one; {instead}")
