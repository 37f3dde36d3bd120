"""Looking for something in shared memory before an event loop goes on, or a thread sleeps, for who polls busily.

A turn of a loop takes a few microseconds, and what comes in the meantime waits for the next one. So who has nothing else to do looks
itself, for a moment that is short for whatever else is in the loop, and lets other processes run whenever there is nothing yet. When
others want the core, that takes long: a sleeper gets its core back when it is rung, and who looks does not. Then looking is left out
for a while.

A thread that would sleep looks for a *moment* in any case: for about as long as sleeping and being woken takes both ends. So who gets
one message after the other is not rung for each. Where several moments in a row were in vain it sleeps at once, and tries again now
and then, as links do (:mod:`shmring.transport.polling`, which says why).
"""

from libc.stdint cimport uint32_t

cdef enum:
    _LEFT_OUT = 64  # times, after one in which others wanted the core
    _VAIN = 4  # moments in a row, after which there is none
    _RETRY = 32  # times without one, before the next

cdef double _MOMENT_S = 0.0001
cdef double _LONG_YIELD_S = 0.0001  # whoever else polls gives a core back sooner


cdef class Looking:
    """See the head of this file. One for each purpose: what others wanted is remembered here."""

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
        """For how long to look where nobody has asked for it; say :meth:`has_looked` afterwards."""
        return _MOMENT_S if self._vain < _VAIN or self._vain % _RETRY == 0 else 0

    cdef void has_looked(self, bint found) noexcept nogil:
        """What came of it, or of leaving it out."""
        self._vain = 0 if found else self._vain + 1


cdef double now_s() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + now.tv_nsec * 1e-9
