"""Where the tensors of a payload are made on a GPU: in device memory in which they lie already, or in memory to which they are
copied.

Theory of operation. The bytes that a content's tensors cover in each region are copied in the same layout, but without large
gaps. Each copy costs some microseconds, even a small one, so tensors that are near each other are copied together. Most
requests are one *run* of bytes for each slot. Source and target agree modulo a cache line, so what was aligned stays so.
"""

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc, qsort

cdef enum:
    #: Bytes between two tensors that are copied along: queueing one more copy takes as long as PCIe 4 takes to carry about so many.
    GAP_NBYTES = 64 << 10
    _FEW_RUNS = 4


cdef struct Run:
    # Bytes [start, end) of a region that go to ``target`` in one piece.
    uint32_t region
    uint64_t start
    uint64_t end
    uint64_t target
    const char* source   # where they are, while they are copied


cdef int _by_place(const void* one, const void* other) noexcept nogil:
    cdef const Run* a = <const Run*>one
    cdef const Run* b = <const Run*>other
    if a.region != b.region:
        return -1 if a.region < b.region else 1
    return (a.start > b.start) - (a.start < b.start)


@cython.final
cdef class Placement:
    """Where the tensors of one content are made.

    Args:
        given: regions in device memory, by number (1 being the first slot): tensors in them are made there.

    Attributes:
        is_copied: whether all others are to be on the GPU as well; else they are views of where they lie.
        nbytes: how many bytes are copied.
        target: where the bytes go; the caller sets it.
    """

    cdef readonly dict given  # type: dict[int, Region]
    cdef readonly bint is_copied
    cdef readonly uint64_t nbytes
    cdef public Region target  # type: Region | None
    cdef Run* runs
    cdef uint32_t run_count
    cdef Run _few[_FEW_RUNS]
    cdef void* stream      # that the copies are queued on
    cdef Point* point      # behind the copies, while they are queued
    cdef uint32_t queued   # of them
    cdef int code          # of the first call that failed

    def __init__(self, given: dict[int, Region]) -> None:
        self.given = given

    def __dealloc__(self) -> None:
        if self.runs != self._few:
            free(self.runs)

    cdef int reserve(self, uint32_t count) except -1:
        """Makes room for so many spans."""
        self.runs = self._few
        if count > _FEW_RUNS:
            self.runs = <Run*>malloc(count * sizeof(Run))
            if self.runs == NULL:
                raise MemoryError
        return 0

    cdef void add(self, uint32_t region, uint64_t start, uint64_t nbytes) noexcept:
        """These bytes are to be copied; there is room for them."""
        cdef Run* run = &self.runs[self.run_count]
        self.run_count += 1
        run.region, run.start, run.end = region, start, start + nbytes

    cdef void lay_out(self) noexcept:
        """Joins spans that are near each other, and decides where they go."""
        cdef uint32_t count = self.run_count, i
        cdef Run* run
        cdef Run* following
        self.is_copied = True
        self.nbytes = 0
        if not count:
            return
        if count > 1:
            qsort(self.runs, count, sizeof(Run), _by_place)
        run = self.runs
        for i in range(1, count):
            following = &self.runs[i]
            if following.region == run.region and following.start <= run.end + GAP_NBYTES:
                run.end = max(run.end, following.end)
                continue
            self._place(run)
            run += 1
            run[0] = following[0]
        self._place(run)
        self.run_count = <uint32_t>(run - self.runs) + 1

    cdef void _place(self, Run* run) noexcept:
        run.start -= run.start % CACHE_LINE
        run.target = self.nbytes
        self.nbytes = align(run.target + run.end - run.start)

    cdef uint64_t find(self, uint32_t region, uint64_t offset) noexcept:
        """Returns where a tensor lies in ``target`` that lies there in a region."""
        cdef uint32_t low = 0, high = self.run_count, middle
        while high - low > 1:  # the last run that does not begin behind it
            middle = (low + high) // 2
            if self.runs[middle].region < region or (self.runs[middle].region == region and self.runs[middle].start <= offset):
                low = middle
            else:
                high = middle
        return self.runs[low].target + offset - self.runs[low].start
