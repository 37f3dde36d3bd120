"""The compiled books, reporting each call that a compiled end makes in C, which Python code could not see.

The methods here are all that the ends call in C and that changes something. Each does what it does in the book, and then tells
the subclass, unless the subclass has called the book itself, and knows.
"""

from libc.stdint cimport uint8_t, uint64_t

from shmring.core.compiled cimport ClientBook, ClientRecord, ClientSlotRecord, EngineBook, EngineSlotRecord, RequestRecord, SlotNumbers

from shmring.core.effects import Released
from shmring.core.messages import SlotRef
from shmring.core.states import RequestEvent

cdef list _EVENTS = list(RequestEvent)


cdef class ObservedEngineBook(EngineBook):
    """The engine's book.

    Attributes:
        is_called: whether the subclass is calling it.
    """

    cdef public bint is_called

    def follow(self, name, *arguments, result=None, error=None):
        """An end has done this; for the subclass."""
        raise NotImplementedError

    cdef RequestRecord submit_slots(self, ClientRecord client, uint64_t request_id, const SlotNumbers* slots, Py_ssize_t count):
        if self.is_called:
            return EngineBook.submit_slots(self, client, request_id, slots, count)
        named = [SlotRef(slots[i].lease_id, slots[i].offset, slots[i].nbytes, slots[i].generation) for i in range(count)]
        try:
            request = EngineBook.submit_slots(self, client, request_id, slots, count)
        except Exception as error:
            self.follow("submit", client.client_id, request_id, named, error=error)
            raise
        self.follow("submit", client.client_id, request_id, named)
        return request

    cdef int claim_request(self, RequestRecord request) except -1:
        EngineBook.claim_request(self, request)
        if not self.is_called:
            [client_id] = [
                client_id for client_id, client in self.clients.items() if client.requests.get(request.request_id) is request
            ]
            self.follow("claim", client_id, request.request_id)
        return 0

    cdef int end_request(self, ClientRecord client, RequestRecord request, int event) except -1:
        cdef int result = EngineBook.end_request(self, client, request, event)
        if not self.is_called:
            self.follow("end", client.client_id, request.request_id, _EVENTS[event], result=True)
        return result

    cdef list release_request(
        self, ClientRecord client, RequestRecord request, const uint8_t* viewed, uint64_t* released, Py_ssize_t* count
    ):
        cdef EngineSlotRecord slot
        if self.is_called:
            return EngineBook.release_request(self, client, request, viewed, released, count)
        slots = [slot for slot in request.slots or ()]
        generations = [slot.generation for slot in slots]
        drains = {slot.generation for i, slot in enumerate(slots) if viewed != NULL and viewed[i]}
        effects = EngineBook.release_request(self, client, request, viewed, released, count)
        told = tuple([released[i] for i in range(count[0])])
        result = ([Released(client.client_id, told)] if told else []) + (effects or [])
        self.follow("release_slots", client.client_id, generations, drains, result=result)
        return effects


cdef class ObservedClientBook(ClientBook):
    """A frontend's book.

    Attributes:
        is_called: whether the subclass is calling it.
    """

    cdef public bint is_called
    cdef list _released  # generations that came back and were not told of yet, each with its time

    def follow(self, name, *arguments, result=None, error=None, **named):
        """An end has done this; for the subclass."""
        raise NotImplementedError

    cdef ClientSlotRecord acquire_slot(self, uint64_t nbytes, bint held):
        if self.is_called:
            return ClientBook.acquire_slot(self, nbytes, held)
        try:
            slot = ClientBook.acquire_slot(self, nbytes, held)
        except Exception as error:
            self.follow("acquire", nbytes, held=held, error=error)
            raise
        self.follow("acquire", nbytes, held=held, result=slot)
        return slot

    cdef uint64_t submit_slot(self, ClientSlotRecord slot, ClientBook numbers) except 0:
        if self.is_called:
            return ClientBook.submit_slot(self, slot, numbers)
        try:
            generation = ClientBook.submit_slot(self, slot, numbers)
        except Exception as error:
            self.follow("submit", slot, numbers, error=error)
            raise
        self.follow("submit", slot, numbers, result=generation)
        return generation

    cdef list give_slot_up(self, ClientSlotRecord slot, double now):
        effects = ClientBook.give_slot_up(self, slot, now)
        if not self.is_called:
            self.follow("give_up", slot, now, result=effects or [])
        return effects

    cdef bint release_generation(self, uint64_t generation, double now) except -1:
        is_ours = ClientBook.release_generation(self, generation, now)
        if not self.is_called:
            self._released = [*(self._released or ()), (generation, now)]
        return is_ours

    cdef list serve(self):
        effects = ClientBook.serve(self)
        if not self.is_called and self._released:  # else it is a part of something else
            released, self._released = self._released, None
            self.follow("released_at", released, result=(effects or [], 0))
        return effects
