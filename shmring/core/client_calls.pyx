"""The calls of a frontend that callers await: submitting a payload, and acquiring a slot.

:class:`ClientCalls` is the part of :class:`~shmring.Client` that works with every message. Each of its operations is tried at
once when it is awaited. If it has to wait, a coroutine of the subclass does the waiting.
"""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from shmring.door import LARGEST_NBYTES, parse_nbytes

cdef str _HOST = "cpu"

cdef enum:
    _COUNTED_NBYTES = 256 << 10  # a copy that may be worth counting: the copier knows


cdef class CopyBudget:
    """What may be copied now, in this turn of the loop. ``Copier`` is a subclass.

    Attributes:
        at_once_nbytes: how much may be copied now, without waiting for a turn.
        copied_in_turn: whether this turn of the loop has copied enough, or is about to.
    """

    cdef public uint64_t at_once_nbytes
    cdef public bint copied_in_turn


cdef class ClientCalls:
    """See above; the subclass defines how to wait.

    Args:
        copier: gives copies their turns.
    """

    cdef ClientEnd _end      # None: no engine is attached
    cdef CopyBudget _copier

    def __init__(self, CopyBudget copier not None) -> None:
        self._copier = copier

    def _use(self, ClientEnd end: ClientEnd | None) -> None:
        """Requests go to this end from now on.

        Args:
            end: of the session with the only engine; None: it is not attached, or there are several.
        """
        self._end = end

    def submit(
        self, payload, *, str request_id not None = "", key: str | bytes | None = None, str engine: str | None = None
    ) -> Submitting:
        """Sends a payload, and returns when it is an engine's: the first half of :meth:`~shmring.Client.request`.

        Nothing that was sent is sent again.

        Args:
            payload, request_id, key, engine: as of :meth:`~shmring.Client.request`.

        Returns:
            The :class:`~shmring.Submission`, when awaited.

        Raises:
            TypeError, CapacityError, EngineDeadError, ClosedError, ValueError: as :meth:`~shmring.Client.request`.
        """
        cdef ForEngine for_engine = for_engine_of(request_id)  # first: an object that is not awaited warns
        cdef Submitting submitting = Submitting.__new__(Submitting)
        submitting.client = self
        submitting.payload = payload
        submitting.for_engine = for_engine
        submitting.key = key
        submitting.engine = engine
        return submitting

    def _submit_in_turn(
        self, payload, for_engine: ForEngine, key: str | bytes | None, engine: str | None
    ) -> Coroutine[Any, Any, Submission]:
        """A coroutine that waits, and then submits; for the subclass."""
        raise NotImplementedError

    def slot(
        self,
        nbytes: int | str,
        *,
        timeout: float | None = None,
        bint drain=False,
        device: torch.device | str = "cpu",
        key: str | bytes | None = None,
        str engine: str | None = None,
    ) -> AcquiringSlot:
        """Waits in line for memory of the slab to write tensors into: ``async with client.slot(nbytes) as slot``.

        A request with tensors in it goes to the engine in whose slab it is, which its ``engine`` names.

        Args:
            nbytes: bytes of tensors, or text such as ``"63MiB"``; :func:`shmring.nbytes_for` adds several up with their alignment.
            timeout: seconds to wait.
            drain: whether the memory, after the block was left, is kept until the last view of it has died. For slots that
                threads write to: cancelling ``asyncio.to_thread`` does not stop the thread. Each object that holds a view then
                keeps the memory, also the frames of an exception that is kept.
            device: ``"cuda"``: memory of the engine's device slab (``RingConfig.device_slab_nbytes``), for what is made on
                that GPU. The first such slot maps it into this process. The engine, and later uses of the slot here, wait for
                the work that is queued on the current stream. If another stream writes to the slot, let the current stream wait
                for it before you submit the slot and before you leave it.
            key, engine: as of :meth:`~shmring.Client.request`.

        Raises:
            CapacityError: more than the engine can lease out; waiting would be useless.
            TimeoutError, EngineDeadError, ClosedError: as :meth:`~shmring.Client.request`. Of several engines, one that dies
                meanwhile is no error unless ``engine`` names it: another one is chosen.
            SlabError: the engine has no device slab, or (``CudaError``) this process can't use it. Slots in host memory are
                never given in its place.
            ValueError: ``nbytes`` is negative or no size, ``device`` another GPU than that of the device slab, or there is no
                such engine.
            TypeError: ``nbytes`` is neither an integer nor text, ``timeout`` no number, or ``key`` neither text nor bytes.
        """
        cdef AcquiringSlot acquiring
        if type(nbytes) is not int or not 0 <= nbytes <= LARGEST_NBYTES:
            nbytes = parse_nbytes(nbytes, "nbytes")
        timeout = right_timeout(timeout)
        where = None if device is _HOST or device == _HOST else self._resolve_device(device)
        acquiring = AcquiringSlot.__new__(AcquiringSlot)
        acquiring.client = self
        acquiring.nbytes = nbytes
        acquiring.timeout = timeout
        acquiring.drain = drain
        acquiring.device = where
        acquiring.key = key
        acquiring.engine = engine
        return acquiring

    def _acquire_in_turn(
        self,
        nbytes: int,
        timeout: float | None,
        drain: bool,
        device: torch.device | None,
        key: str | bytes | None,
        engine: str | None,
    ) -> Coroutine[Any, Any, Slot]:
        """A coroutine that waits for a slot; for the subclass.

        Args:
            nbytes, timeout, drain, key, engine: as of :meth:`slot`.
            device: from :meth:`_resolve_device`.
        """
        raise NotImplementedError

    def _resolve_device(self, device: torch.device | str) -> torch.device | None:
        """Returns the GPU that a caller means; None for the host. For the subclass.

        Raises:
            ValueError: slots can't be there.
        """
        raise NotImplementedError

    def _submit_now(
        self, ClientEnd end not None, payload, Packed packed: Packed | None, ForEngine for_engine not None
    ) -> Submission | None:
        """Submits a request; None if something has to be waited for.

        Args:
            end: of the engine's session.
            payload: what to send.
            packed: the payload, if that end has packed it just now.
            for_engine: what the engine is told beside it.
        """
        return self.submit_now(end, payload, packed, for_engine)

    cdef object submit_now(self, ClientEnd end, payload, Packed packed, ForEngine for_engine):
        cdef uint64_t copied_nbytes
        if self._copier.copied_in_turn:
            return None
        copied_nbytes = end.copied_into_slots
        if packed is None:
            sent = end.submit_now(payload, for_engine, self._copier.at_once_nbytes)
        else:
            packed.for_engine = for_engine
            sent = end.submit_packed(packed, self._copier.at_once_nbytes)
        if end.copied_into_slots - copied_nbytes >= _COUNTED_NBYTES:
            self._copier.count_in_turn(end.copied_into_slots - copied_nbytes)
        return sent


@cython.final
cdef class Submitting(Awaited):  # type: Awaited[Submission]
    """What :meth:`ClientCalls.submit` returns."""

    cdef ClientCalls client
    cdef object payload
    cdef ForEngine for_engine
    cdef object key
    cdef str engine

    def at_once(self) -> Submission | None:
        """Submits now; None if something has to be waited for or chosen, and this can be awaited."""
        self._begun = True  # it is over, unless it has to be awaited
        sent = self._at_once(self.client, self.payload)
        self._begun = sent is not None
        return sent

    cdef object _at_once(self, ClientCalls client, object payload):
        if client._end is None or self.key is not None or self.engine is not None:
            return None
        return client.submit_now(client._end, payload, None, self.for_engine)

    cdef PyObject* happen(self) except NULL:
        cdef ClientCalls client = self.client
        payload, self.payload, self.client = self.payload, None, None  # whoever keeps this keeps no views
        sent = self._at_once(client, payload)
        if sent is not None:
            return owned(sent)
        return self.wait_in(client._submit_in_turn(payload, self.for_engine, self.key, self.engine))


@cython.final
cdef class AcquiringSlot(Awaited):  # type: Awaited[Slot]
    """What ``client.slot(nbytes)`` returns: await it, or use it with ``async with``. Waits for space in line."""

    cdef ClientCalls client
    cdef object nbytes
    cdef object timeout
    cdef bint drain
    cdef object device
    cdef object key
    cdef str engine
    cdef BaseSlot slot

    cdef PyObject* happen(self) except NULL:
        cdef ClientEnd end = self.client._end
        if end is not None and self.key is None and self.engine is None:
            slot = end.hold_now(self.nbytes, self.drain, self.device)
            if slot is not None:
                self.slot = slot
                return owned(slot)
        return self.wait_in(
            self.client._acquire_in_turn(self.nbytes, self.timeout, self.drain, self.device, self.key, self.engine)
        )

    cdef PyObject* came(self, object result) except NULL:
        self.slot = result
        return owned(result)

    def __aenter__(self) -> Awaitable[Slot]:
        return self

    def __aexit__(self, kind, error, traceback) -> Awaitable[None]:
        self.slot._close()
        return done


for _kind in (Submitting, AcquiringSlot):
    may_be_awaited(_kind)
