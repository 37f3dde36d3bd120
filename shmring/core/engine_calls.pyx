"""The call of an engine that is awaited: for its next request.

:class:`EngineCalls` is the part of :class:`~shmring.Ring` that works with every request. If a request has come, it is claimed
at once when the call is awaited. Otherwise a coroutine of the shell waits for one.
"""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t

from shmring.door import count_of, seconds_of

cdef object _MOST_CLAIMS = 0xFFFFFFFF  # more than there are ever


cdef class EngineCalls:
    """See above.

    Args:
        end: of this engine.
        look_s: how long :meth:`claim` looks for a request before the loop goes on.
    """

    cdef EngineEnd _end
    cdef double _look_s
    cdef Looking _looking

    def __init__(self, EngineEnd end not None, look_s: float) -> None:
        self._end = end
        self._look_s = look_s
        self._looking = Looking()

    def claim(self) -> Awaited[Claim]:
        """Waits for the next request and claims it; callers are served in the order in which they wait.

        Returns:
            The :class:`~shmring.Claim`, when awaited.

        Raises:
            ClosedError: the ring is closed.
        """
        return _claiming(self, 0)

    def claim_many(self, most: int, *, linger_s: float = 0) -> Awaitable[list[Claim]]:
        """Waits for the next request, and claims it and those behind it that have come as well.

        For engines that work in steps on all requests that there are. It claims as many as may be claimed in one turn of the
        loop. A claim that is aborted meanwhile says so (``claim.aborted``).

        Args:
            most: requests, at most.
            linger_s: how long this waits for more once the first has come, if fewer than ``most`` have. If this is cancelled,
                the requests that were claimed by then fail.

        Returns:
            A list of 1 to ``most`` claims in order of arrival, when awaited. Each is to be left, as one from :meth:`claim`.

        Raises:
            ClosedError: the ring is closed.
            ValueError: ``most`` is less than 1, or ``linger_s`` negative.
            TypeError: one of them is no number.
        """
        cdef uint32_t count = min(count_of(most, "most"), _MOST_CLAIMS)
        cdef double lingering_s = seconds_of(linger_s, "linger_s")
        return self._claim_lingering(count, lingering_s) if lingering_s > 0 else _claiming(self, count)

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaited[Claim]:
        cdef _Claiming claiming = _claiming(self, 0)
        claiming.is_next = True
        return claiming

    def _claim_lingering(self, most: int, linger_s: float) -> Coroutine[Any, Any, list[Claim]]:
        """A coroutine that claims requests as they come, for ``linger_s``; for the subclass."""
        raise NotImplementedError

    cdef object look(self):
        """Claims the next request if it comes soon. For busy polling, while no request is in hand to work on."""
        cdef EngineEnd end = self._end
        cdef Looking looking = self._looking
        cdef bint goes_on
        if end.is_turn_over or end._known != end.waiting_count or not looking.begins(self._look_s):
            return None
        while True:
            with nogil:
                goes_on = looking.goes_on()
            claim = end.claim_now() if goes_on else None
            if claim is not None or not goes_on:
                return claim


@cython.final
cdef class _Claiming(Awaited):
    """Waits for the next request."""

    cdef EngineCalls ring
    cdef uint32_t most   # 0: one, which is no list
    cdef bint is_next

    cdef PyObject* happen(self) except NULL:
        cdef EngineEnd end = self.ring._end
        claim = end.claim_now()
        if claim is None:
            claim = self.ring.look()
        if claim is None:
            return self.wait_in(end.shell.next_in_turn() if self.is_next else end.shell.claim_in_turn())
        return self.came(claim)

    cdef PyObject* came(self, object claim) except NULL:
        cdef list claims
        if not self.most:
            return owned(claim)
        claims = [claim]
        while len(claims) < self.most:
            claim = self.ring._end.claim_now()
            if claim is None:
                break
            claims.append(claim)
        return owned(claims)


cdef _Claiming _claiming(EngineCalls ring, uint32_t most):
    cdef _Claiming claiming = _Claiming.__new__(_Claiming)
    claiming.ring = ring
    claiming.most = most
    return claiming


may_be_awaited(_Claiming)
