"""The door of an end: whether it may be used here, in this process and in this event loop.

Theory of operation: a forked child inherits every object of its parent, sockets and mappings included, and must not use them.
Asking the kernel for the process's id takes as long as encoding a small message, and it would be asked several times for each.
So forks are counted: libc calls a hook in each child, before ``fork`` returns there. An object that belongs to a process
remembers the count, and compares it: compiled code calls ``forks()``, a load and a compare; Python has a :class:`Home`.

Each ring, client and worker of asyncio lives in the event loop in which it was made: its timers, its bells and its waiting tasks
are there. A task of another loop would wait for ever. asyncio notices this when a task waits, but its error speaks of its own
tasks and futures; the error here says what to do.

No other code of the package detects forks. Two other hooks act in a new child without a check. With Python's hook,
:mod:`shmring.transport.listener` closes the sockets and locks of its parent there. A hook in ``memory/copy_helpers.c`` forgets
the threads that help with large copies; that C code is an extension of its own.

Invariants: the count only grows, and only in a child, which has one thread then. A child that is to become another program
(``subprocess``) may not be counted; it runs no code of ours.
"""

from posix.unistd cimport getpid

from asyncio import get_running_loop

from shmring.errors import ClosedError, LocalProtocolError

cdef object running_loop = get_running_loop
cdef int fork_count


cdef inline int forks() noexcept nogil:
    """Returns the number of forks between the first process that loaded this module and this process."""
    return fork_count


cdef void _count_fork() noexcept nogil:
    global fork_count
    fork_count += 1


if pthread_atfork(NULL, NULL, _count_fork):
    raise MemoryError


cdef class Home:
    """Where something lives: the process that made it, and the event loop in which it works, until it is closed.

    Args:
        what: it is, for errors: ``ring 'vision'``.
        instead: what a forked child does instead of using it.
        loop: in which it works; None: any thread may use it.

    Attributes:
        what, loop: as above.
        pid: the id of the process.
        is_closed: whether it was closed; whoever closes it sets this.
    """

    cdef readonly str what
    cdef readonly object loop  # type: Any
    cdef readonly int pid
    cdef public bint is_closed
    cdef str _instead
    cdef int _forks

    def __init__(self, what: str, instead: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.what, self._instead, self.loop = what, instead, loop
        self.pid, self._forks = getpid(), forks()

    cdef inline bint is_forked(self) noexcept:
        return self._forks != forks()

    @property
    def forked(self) -> bool:
        """Whether this is a copy in a forked child."""
        return self.is_forked()

    def check_process(self) -> None:
        """Raises :class:`ClosedError` in a forked child."""
        if self.is_forked():
            raise self.closed_error()

    def check_loop(self) -> None:
        """Raises :class:`LocalProtocolError` in another loop, and :class:`ClosedError` in a forked child."""
        self.pass_loop()

    def check_open(self) -> None:
        """Raises :class:`ClosedError` unless it is open, and may be used in this process."""
        self.pass_open()

    def enter(self) -> None:
        """Raises unless it is open, and may be used in this process and in this loop: the door."""
        self.pass_open()
        self.pass_loop()

    cdef int pass_open(self) except -1:
        if self.is_closed or self.is_forked():
            raise self.closed_error()
        return 0

    cdef int pass_loop(self) except -1:
        if self.is_forked():  # a forked child has another loop, too
            raise self.closed_error()
        if self.loop is not running_loop():
            raise LocalProtocolError(
                f"{self.what} was made in another event loop, and works only there (asyncio.run makes a new loop each time); "
                "make one in each loop, or use shmring.threads, which any thread may call"
            ) from None
        return 0

    def closed_error(self) -> ClosedError:
        """Returns why it can't be used."""
        if self.is_forked():
            return ClosedError(f"{self.what} belongs to process {self.pid}, which forked this one; {self._instead}")
        return ClosedError(f"{self.what} is closed")
