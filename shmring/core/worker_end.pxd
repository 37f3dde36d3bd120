"""The C interface of :mod:`shmring.core.worker_end`."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from shmring.core.looking cimport Looking
from shmring.core.mapping cimport Mapped, Mapping
from shmring.core.message_ring cimport RecordReader, RecordWriter
from shmring.core.payload cimport Packed, Packer
from shmring.core.received cimport ContentRegions, PayloadDecoder
from shmring.core.views cimport Owner
from shmring.core.wire cimport Bounds, Content


cdef struct Page:
    # A worker's page, and how its engine is rung. Kept by the worker's end and by each message that was not acknowledged.
    int32_t references
    int forks
    int bell          # a socket, closed with the last reference
    Mapped* mapped


cdef struct Acknowledgement:
    # What acknowledges a message: when nobody keeps it any more, neither its owner nor a view.
    Owner owner         # first: what is told that it goes is where this is
    Page* page
    uint64_t sequence
    uint32_t stamp


cdef class MessageEnd:
    cdef readonly WorkerEnd end
    cdef readonly uint64_t sequence
    cdef readonly bint wants_reply
    cdef readonly bint is_shared
    cdef readonly bint left
    cdef readonly bint answered
    cdef bint _is_in_hands                   # it was received
    cdef Acknowledgement* _acknowledgement   # NULL: it was left
    cdef ContentRegions _regions
    cdef object _payload
    cdef object _beside
    cdef object __weakref__

    cdef object _shown(self, object what)
    cdef int _leave(self, object error) except -1
    cdef bint _leave_end(self) except -1


cdef class WorkerEnd:
    cdef readonly RecordReader reader
    cdef readonly RecordWriter writer
    cdef readonly uint64_t received
    cdef public object shell
    cdef Page* _page
    cdef Mapping _mapping
    cdef PayloadDecoder _decoder
    cdef PayloadDecoder _shared_decoder
    cdef Packer _packer
    cdef type _message_type
    cdef Bounds _bounds
    cdef uint64_t _max_payload_nbytes
    cdef uint64_t _last_sequence    # of the last message that was taken from the ring
    cdef readonly Looking looking    # for messages, before it sleeps
    cdef bint _is_receiving  # a thread sleeps until a message comes

    cdef MessageEnd _begin(self, bytes record, Content content, Mapping mapping)
    cdef MessageEnd _open(self, bytes record)
    cdef object _take(self)
    cdef bint _look(self, double seconds, double wait) except -1
    cdef int _sleep(self, int pidfd, double wait, bint is_for_room) except -1
