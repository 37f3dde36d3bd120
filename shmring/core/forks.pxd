"""The C interface of :mod:`shmring.core.forks`."""

cdef int fork_count


cdef inline int forks() noexcept nogil:
    """Returns the number of forks from the first process that loaded this to this one: who remembers it knows whether it is a child."""
    return fork_count
