"""Shared memory that stays mapped until its last use.

Theory of operation: references to mapped memory are counted in C, because views may die where no Python code runs
(``views.pyx``). The :class:`Mapping` has one reference, and so has each region with a view. The thread that drops the last one
unmaps the memory. A :class:`Mapping` has no ``close``: some users of a buffer (``numpy.ndarray``, ``torch.frombuffer``) give it
back at once and keep the object.

The end of a mapping can be reported over a socket, without waiting: this happens in C, when the memory is unmapped.

A forked child drops references like its parent, but unmaps nothing: such memory is kept out of children, and other memory may
be at its address.

It starts where a huge page may, if it is as long as one. So the kernel can map huge pages of the first file (:mod:`shmring.memory.huge_pages`)
as what they are, in every process; those of a file that is mapped behind it only if it starts at a multiple of their size.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from posix.unistd cimport _SC_PAGESIZE, close, sysconf

from shmring.errors import ClosedError


cdef struct Mapped:
    # Memory that stays mapped as long as there is a reference to it.
    int32_t references
    int forks         # of the process that mapped it: in a forked child it is not ours to unmap
    char* address
    uint64_t nbytes
    int socket        # is shut down and closed when this is unmapped; -1: none


cdef enum:
    _HUGE_NBYTES = 2 << 20  # a huge page, where a page has 4 KiB

cdef uint64_t _MOST_NBYTES = <uint64_t>1 << 62  # more than any processor has addresses


cdef void* _map_file(uint64_t nbytes, int protection, int fd) noexcept nogil:
    """Maps the start of a file; at the start of a huge page, if it is as long as one."""
    cdef uint64_t reserved, start, page = <uint64_t>sysconf(_SC_PAGESIZE)
    cdef void* mapped
    nbytes = min(nbytes, _MOST_NBYTES)  # which the kernel refuses
    nbytes = (nbytes + page - 1) & ~(page - 1)
    if nbytes < _HUGE_NBYTES:
        return mmap(NULL, nbytes, protection, MAP_SHARED, fd, 0)
    mapped = mmap(NULL, nbytes + _HUGE_NBYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if mapped == MAP_FAILED:
        return mapped
    reserved = <uint64_t>mapped
    start = (reserved + _HUGE_NBYTES - 1) & ~<uint64_t>(_HUGE_NBYTES - 1)
    mapped = mmap(<void*>start, nbytes, protection, MAP_SHARED | MAP_FIXED, fd, 0)
    if mapped == MAP_FAILED:
        munmap(<void*>reserved, nbytes + _HUGE_NBYTES)
        return mapped
    if start != reserved:
        munmap(<void*>reserved, start - reserved)
    if start != reserved + _HUGE_NBYTES:
        munmap(<void*>(start + nbytes), reserved + _HUGE_NBYTES - start)
    return mapped


cdef void keep_mapped(Mapped* mapped) noexcept nogil:
    take_reference(&mapped.references)


cdef void drop_mapped(Mapped* mapped) noexcept nogil:
    if drop_reference(&mapped.references):
        return
    if mapped.nbytes and mapped.forks == forks():
        munmap(mapped.address, mapped.nbytes)
        if mapped.socket >= 0:
            shutdown(mapped.socket, SHUT_RDWR)  # a forked child may have it, too, and it has no mapping
            close(mapped.socket)
    free(mapped)


cdef char* place_in(const Mapped* mapped, uint64_t offset, uint64_t nbytes) except NULL:
    """The address of bytes of mapped memory. Code that reads or writes them must call this each time: the session may have
    ended since the last call.

    Raises:
        ClosedError: the memory is not mapped any more.
        ValueError: they exceed what is mapped.
    """
    if not mapped.nbytes:
        raise ClosedError("the shared memory of this connection is not mapped any more: the connection has ended")
    if offset > mapped.nbytes or nbytes > mapped.nbytes - offset:
        raise ValueError(f"{nbytes} bytes at {offset} exceed a mapping of {mapped.nbytes}")
    return mapped.address + offset


@cython.final
@cython.no_gc
cdef class Mapping:
    """The memory behind one descriptor, or behind two or three side by side. It is a buffer.

    Args:
        fd: the descriptor, not needed any more afterwards.
        nbytes: how much of it, a multiple of the page size if there is a tail; 0 maps nothing.
        tail_fd: the memory at the next address.
        tail_nbytes: how much of that; 0: nothing follows.
        tail_writable: whether the tail can be written. The kernel refuses that of memory that is sealed against it.
        writable: whether what comes before the tail can be written; a descriptor that was opened to be read allows no more.
        last_fd, last_nbytes: what follows at the next address behind the tail, and is only read; 0: nothing.

    Raises:
        OSError: the kernel refuses.
    """

    cdef Mapped* mapped  # never NULL

    def __cinit__(
        self,
        fd: int,
        nbytes: int,
        tail_fd: int = -1,
        tail_nbytes: int = 0,
        tail_writable: bool = True,
        writable: bool = True,
        last_fd: int = -1,
        last_nbytes: int = 0,
    ) -> None:
        cdef uint64_t head = nbytes, tail = tail_nbytes, last = last_nbytes, size = head + tail + last
        cdef int descriptor = fd, tail_descriptor = tail_fd, tail_protection = PROT_READ, protection = PROT_READ
        cdef int last_descriptor = last_fd
        cdef void* address = NULL
        if head + tail < head or size < last:
            raise OverflowError(f"{nbytes}, {tail_nbytes} and {last_nbytes} bytes are more than there are addresses")
        if writable:
            protection |= PROT_WRITE
        if tail_writable:
            tail_protection |= PROT_WRITE
        self.mapped = <Mapped*>malloc(sizeof(Mapped))
        if self.mapped == NULL:
            raise MemoryError
        self.mapped.references = 1
        self.mapped.forks = forks()
        self.mapped.nbytes = 0
        self.mapped.socket = -1
        if size:
            with nogil:
                address = _map_file(size, protection, descriptor)
            if address == MAP_FAILED:
                PyErr_SetFromErrno(OSError)
        self.mapped.address = <char*>address
        self.mapped.nbytes = size  # from here on, also if the rest fails, its end unmaps all of it
        if tail:
            # In place of the addresses beyond the end of the first file, which are not used yet.
            with nogil:
                address = mmap(self.mapped.address + head, tail, tail_protection, MAP_SHARED | MAP_FIXED, tail_descriptor, 0)
            if address == MAP_FAILED:
                PyErr_SetFromErrno(OSError)
        if last:
            with nogil:
                address = mmap(self.mapped.address + head + tail, last, PROT_READ, MAP_SHARED | MAP_FIXED, last_descriptor, 0)
            if address == MAP_FAILED:
                PyErr_SetFromErrno(OSError)

    def __dealloc__(self) -> None:
        if self.mapped != NULL:
            drop_mapped(self.mapped)

    @property
    def address(self) -> int:
        """Where it is mapped."""
        return <uintptr_t>self.mapped.address

    @property
    def nbytes(self) -> int:
        """Size."""
        return self.mapped.nbytes

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.mapped.address, <Py_ssize_t>self.mapped.nbytes, 0, flags)

    def advise(self, offset: int, nbytes: int, advice: int) -> None:
        """Tells the kernel about a range (``madvise``), without the interpreter's lock.

        Raises:
            OSError: the range is not in this mapping, or the kernel refuses.
        """
        cdef char* start = self._place(offset, nbytes)
        cdef uint64_t length = nbytes
        cdef int what = advice, failed
        with nogil:
            failed = madvise(start, length, what)
        if failed:
            PyErr_SetFromErrno(OSError)

    def protect(self, offset: int, nbytes: int, protection: int) -> None:
        """Sets what this process may do with a range (``mprotect``).

        Raises:
            OSError: the range is not in this mapping, or the kernel refuses.
        """
        cdef char* start = self._place(offset, nbytes)
        if mprotect(start, nbytes, protection):
            PyErr_SetFromErrno(OSError)

    cdef char* at(self, uint64_t offset, uint64_t nbytes) except NULL:
        """Where a range of the mapping is; raises ClosedError if nothing is mapped."""
        return place_in(self.mapped, offset, nbytes)

    def end_with(self, socket: int) -> None:
        """Takes a socket over. Its end tells the other side that the memory is not mapped here any more, and so not used.

        Args:
            socket: its descriptor. This has none yet, and maps something.
        """
        assert self.mapped.socket < 0 and self.mapped.nbytes
        self.mapped.socket = socket

    cdef char* _place(self, uint64_t offset, uint64_t nbytes) except? NULL:
        if offset > self.mapped.nbytes or nbytes > self.mapped.nbytes - offset:
            raise OSError(ENOMEM, f"{nbytes} bytes at {offset} are not in a mapping of {self.mapped.nbytes}")
        return self.mapped.address + offset
