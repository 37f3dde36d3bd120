"""The calls of an engine that are awaited: for its next request, and to reply to one.

:class:`EngineCalls` and :class:`ClaimCalls` are the parts of :class:`~shmring.Ring` and :class:`~shmring.Claim` that work with every
request. If a request has come, it is claimed
at once when the call is awaited. Otherwise its task waits in line for one.

A task that waits has a *place*, a future of the loop, which the :class:`EngineEnd` keeps in order. When a request can be claimed,
the end wakes the first task that it has not woken; that task claims the request, and wakes the next. A task that was woken and
cancelled in the same turn of the loop passes this on.

A reply is sent at once when the call is awaited, if its frontend reads and its space is there. Otherwise a coroutine of the shell
waits for that (``ring/replies.py``).
"""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t

from shmring.door import count_of, seconds_of
from shmring.errors import ClosedError, WouldBlock

cdef object _MOST_CLAIMS = 0xFFFFFFFF  # more than there are ever
cdef object _NOTHING = object()


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
    cdef object place    # in the line of those that wait

    cdef PyObject* happen(self) except NULL:
        cdef EngineEnd end = self.ring._end
        claim = end.claim_now()
        if claim is None:
            claim = self.ring.look()
        if claim is not None:
            return self.taken(claim)
        if not end.may_claim():
            return self.refused()
        self.place = end.enter_line()
        try:
            return self.wait_in(self.place)
        except BaseException:  # there is no memory left
            end.leave_line(self.place)
            raise

    cdef PyObject* came(self, object result) except NULL:
        cdef EngineEnd end = self.ring._end
        end.leave_line(self.place)
        end.allow_more()
        claim = end.claim_next() if end.may_claim() else None
        if claim is None:
            return self.happen()
        end.wake_next()
        return self.taken(claim)

    cdef int gave_up(self, type kind) except -1:
        self.ring._end.leave_line(self.place)
        if not self.place.cancelled() and self.place.done():
            self.ring._end.wake_next()  # this task was woken for a request, and was cancelled just then
        return 0

    cdef int check_loop(self) except -1:
        self.ring._end.home.check_loop()
        return 0

    cdef PyObject* refused(self) except NULL:
        """Nothing is claimed any more: raises the error that says why."""
        try:
            self.ring._end.shell.check_claiming()
        except ClosedError:
            if not self.is_next:
                raise
            self.ring._end.home.check_process()
            return nothing_more()
        raise AssertionError("the shell says why nothing is claimed")

    cdef PyObject* taken(self, object claim) except NULL:
        """Returns what the caller gets: the claim, or a list of it and of those behind it."""
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


@cython.final
cdef class Replying(Awaited):  # type: Awaited[None]
    """What :meth:`ClaimCalls.reply` returns."""

    cdef BaseClaim claim
    cdef object payload
    cdef bint is_last

    cdef PyObject* happen(self) except NULL:
        cdef BaseClaim claim = self.claim
        cdef EngineEnd end = claim._end
        cdef RecordWriter writer = claim._frontend._writer
        payload, self.payload, self.claim = self.payload, None, None  # whoever keeps this keeps no views
        cdef Packed packed = end.pack_reply(claim, payload)
        if writer is not None and writer.has_turn() and not claim._gave_place_up \
                and end.reply_now(claim, packed, self.is_last, False):
            return owned(None)
        return self.wait_in(end.shell.replies.send_in_turn(claim, packed, self.is_last))


@cython.no_gc_clear
@cython.trashcan(True)
cdef class ClaimCalls(BaseClaim):
    """The part of :class:`~shmring.Claim` that answers requests."""

    def reply(self, payload) -> Awaited[None]:
        """Sends an answer; any number of times. Waits for reply space and for a frontend that reads slowly.

        Args:
            payload: like a request's: any msgspec-encodable object with tensors and arrays at any depth.

        Raises:
            AbortedError: the request was aborted.
            TypeError: something in the payload can't be sent; the message names its path.
            CapacityError: it can never fit the reply reserve, or a message.
        """
        return _replying(self, payload, False)

    def reply_nowait(self, payload) -> None:
        """Sends an answer if that needs no waiting; the copy is made in the loop.

        Raises:
            WouldBlock: there is no reply space now, or the frontend reads slowly.
            AbortedError, TypeError, CapacityError: as :meth:`reply`.
        """
        cdef EngineEnd end = self._end
        cdef Packed packed = end.pack_reply(self, payload)
        end.lacks_space = False
        if self._frontend.is_local:
            is_sent = end.shell.replies.send_local_nowait(self, packed)
        else:
            is_sent = end.reply_now(self, packed, False, True)
        if end.lacks_space:
            raise WouldBlock(f"no {packed.slot_nbytes} bytes of reply space are free")
        if not is_sent:
            raise WouldBlock(f"client {self._client_id} reads more slowly than it is written to")

    def done(self, reply=_NOTHING) -> Awaitable[None]:
        """Releases the slots and tells the frontend that the request is finished.

        Args:
            reply: a last answer, in the same message. Then await the result: it waits as :meth:`reply` does, and nothing
                happens before. Without a reply, everything has happened when this returns.

        Raises:
            AbortedError, TypeError, CapacityError: as :meth:`reply`, if there is one.
        """
        if reply is not _NOTHING:
            return _replying(self, reply, True)
        self._end.finish(self)
        return done


cdef Replying _replying(BaseClaim claim, object payload, bint is_last):
    cdef Replying made = Replying.__new__(Replying)
    made.claim, made.payload, made.is_last = claim, payload, is_last
    return made


for _kind in (_Claiming, Replying):
    may_be_awaited(_kind)
