"""An engine's load, in a page that the engine writes and its frontends read: the number of requests in flight, to choose an
engine, and the number of bytes received, to choose a way to copy; and whether the engine drains.

The engine stores its numbers whenever one of them changes, and sends nothing. A frontend loads them when it has a request to
send. They are hints: they need not be of the same moment, and only these choices depend on them.

A page has one writer, the thread of the engine's loop: the stores need no order.
"""

cimport cython
from cpython.exc cimport PyErr_SetFromErrno
from libc.stdint cimport uint8_t, uint64_t

cdef enum:
    _AT_IN_FLIGHT = 0
    _AT_WAITING = 8
    _AT_RECEIVED = 16
    _AT_DRAINING = 24
    _NBYTES = 4096

#: Of the page.
LOAD_PAGE_NBYTES: int = _NBYTES


@cython.final
cdef class LoadPage:
    """The page, mapped. It is unmapped when this object goes. Forked children do not have the page: there, all numbers are 0.

    Args:
        fd: of :data:`LOAD_PAGE_NBYTES` bytes; it may be closed afterwards.
        writable: whether this is the engine.

    Raises:
        OSError: it can't be mapped. The kernel refuses to map it for writing once it is sealed against that.
    """

    cdef uint8_t* _at
    cdef bint _is_writable
    cdef int _forks

    def __cinit__(self, fd: int, *, writable: bool) -> None:
        cdef int protection = PROT_READ | PROT_WRITE if writable else PROT_READ
        self._is_writable = writable
        self._forks = forks()
        self._at = <uint8_t*>mmap(NULL, _NBYTES, protection, MAP_SHARED | MAP_POPULATE, fd, 0)
        if self._at == <uint8_t*>MAP_FAILED:
            self._at = NULL
            PyErr_SetFromErrno(OSError)
        if madvise(self._at, _NBYTES, MADV_DONTFORK):
            PyErr_SetFromErrno(OSError)

    def __dealloc__(self) -> None:
        if self._at != NULL and self._forks == forks():  # otherwise other memory may be there
            munmap(self._at, _NBYTES)

    cdef void put(self, uint64_t in_flight, uint64_t waiting, uint64_t received_nbytes) noexcept nogil:
        if self._is_writable and self._forks == forks():
            store_relaxed_u64(self._at + _AT_IN_FLIGHT, in_flight)
            store_relaxed_u64(self._at + _AT_WAITING, waiting)
            store_relaxed_u64(self._at + _AT_RECEIVED, received_nbytes)

    def drain(self) -> None:
        """Says that the engine drains, for good."""
        if self._is_writable and self._forks == forks():
            store_relaxed_u64(self._at + _AT_DRAINING, 1)

    @property
    def draining(self) -> bool:
        """Whether the engine ends what it has, and new requests should go to other engines."""
        return self._forks == forks() and load_relaxed_u64(self._at + _AT_DRAINING) != 0

    @property
    def in_flight(self) -> int:
        """Requests that the engine has and that have not ended."""
        return load_relaxed_u64(self._at + _AT_IN_FLIGHT) if self._forks == forks() else 0

    @property
    def waiting(self) -> int:
        """Of these, those that it has not claimed yet."""
        return load_relaxed_u64(self._at + _AT_WAITING) if self._forks == forks() else 0

    @property
    def received_nbytes(self) -> int:
        """Bytes of slots that have come with requests, of all frontends together."""
        return self.received()

    cdef uint64_t received(self) noexcept:
        return load_relaxed_u64(self._at + _AT_RECEIVED) if self._forks == forks() else 0
