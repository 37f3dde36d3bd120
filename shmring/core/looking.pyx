"""Busy polling: looking for something in shared memory before an event loop goes on, or a thread sleeps.

A turn of a loop takes a few microseconds, and a record that comes meanwhile waits for the next turn. So a call that has nothing
else to do looks itself. It looks for a moment that is short for the other work of the loop, and lets other processes run
whenever there is nothing yet. If other processes want the core, this takes long: a sleeper gets its core back when it is rung,
and a looking thread does not. Then there is no looking for a while.

A thread that is about to sleep looks for a *moment* in any case: for about as long as sleeping and being woken takes both
sides. So a thread that gets one message after the other is not rung for each. After several moments in vain it sleeps at once,
and tries again now and then, as links do (``polling.pyx`` says why).
"""

from libc.stdint cimport uint32_t

cdef enum:
    _LEFT_OUT = 64  # times, after one in which others wanted the core
    _VAIN = 4  # moments in a row, after which there is none
    _RETRY = 32  # times without one, before the next

cdef double _MOMENT_S = 0.0001
cdef double _LONG_YIELD_S = 0.0001  # another polling process gives the core back sooner


cdef class Looking:
    """See the head of this file. There is one object for each purpose; it remembers whether other processes wanted the core."""

    cdef readonly uint32_t begun   # how often it has looked
    cdef double _until
    cdef uint32_t _left_out   # of the next times
    cdef uint32_t _vain       # times in a row, of those that count

    cdef bint begins(self, double seconds) noexcept nogil:
        """Whether to look now, for so many seconds; if so, call :meth:`goes_on` before each further look. 0: not at all."""
        if seconds <= 0:
            return False
        if self._left_out:
            self._left_out -= 1
            return False
        self.begun += 1
        self._until = now_s() + seconds
        return True

    cdef bint goes_on(self) noexcept nogil:
        """Lets other processes run; returns whether to look again. To be called without the interpreter's lock."""
        cdef double before = now_s(), after
        sched_yield()
        after = now_s()
        if after - before > _LONG_YIELD_S:
            self._left_out = _LEFT_OUT
            return False
        return after < self._until

    cdef double moment(self) noexcept nogil:
        """For how long to look without ``busy_poll_s``; call :meth:`has_looked` afterwards."""
        return _MOMENT_S if self._vain < _VAIN or self._vain % _RETRY == 0 else 0

    cdef void has_looked(self, bint found) noexcept nogil:
        """Notes whether looking, or not looking, was the right choice."""
        self._vain = 0 if found else self._vain + 1


cdef double now_s() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + now.tv_nsec * 1e-9
