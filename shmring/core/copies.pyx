"""Copies of requests to a GPU: planned, queued, and kept until they are over.

Theory of operation. A content's tensors go to the GPU in as few copies as their gaps allow (``placement.pyx``), on a stream of their
own. The consumer's stream waits for a point behind them, so work that is queued there afterwards may use the tensors at once.
Until the GPU has reached that point, the slots must not be reused: the point keeps their regions, like views.

A small copy is over before two streams have agreed on it: on an H100, 64 KB take 5 microseconds, and the consumer's wait takes 25.
So the caller may have small copies queued on the consumer's stream itself, if that has nothing to do. Waking the thread that waits
for a point costs as much again. So the point of a small copy is looked at in the loop first (:meth:`Watch.look`).

Copies from memory that is not pinned block the calling thread until the bytes have been read. To run on another thread, a copy
has three parts: :meth:`CopyLane.begin` and :meth:`CopyLane.finish` in the loop, :meth:`CopyLane.queue` on any thread.

Invariants: regions that are copied from are dropped after the point behind their copies, or kept for good; no copy crosses the
boundary of what was registered with CUDA in one call.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc


cdef struct _Span:
    const char* start
    const char* end


def plan_copies(PayloadDecoder decoder not None, Content content not None, given: dict[int, Region]) -> Placement:
    """Plans how a content's tensors get to a GPU, except for those that are there already. Tensors that the GPU can't hold stay
    on the host.

    Args:
        decoder: knows which dtypes it can hold.
        content: as it was checked.
        given: as of :class:`Placement`.
    """
    cdef Placement placement = Placement(given)
    cdef Cursor cursor
    cdef Value value
    cdef TensorNumbers tensor
    cdef uint32_t seen = 0
    placement.reserve(content.tensor_count)
    cursor.at = <const uint8_t*>PyBytes_AS_STRING(content.payload)
    cursor.end = cursor.at + PyBytes_GET_SIZE(content.payload)
    while seen < content.tensor_count and read_value(&cursor, &value) != TRUNCATED:
        if value.kind != EXTENSION or value.type != TENSOR_EXTENSION:
            continue
        seen += 1
        read_tensor(value.data, value.nbytes, &tensor)
        if tensor.nbytes and content.slot_of(tensor.region) not in given and decoder.is_for_gpu(&tensor, content):
            placement.add(content.slot_of(tensor.region), tensor.offset, tensor.nbytes)
    placement.lay_out()
    return placement


@cython.final
cdef class CopyLane:
    """The stream and the thread for copies to one GPU.

    Args:
        gpu: where to.
        watch: its thread waits for the copies.
        stream: that they are queued on, unless the consumer's is chosen.
        pinned: address and bytes of what was registered with CUDA in one call each.
    """

    cdef Gpu _gpu
    cdef Watch _watch
    cdef readonly uint64_t stream
    cdef _Span* _pinned
    cdef uint32_t _pinned_count

    def __init__(self, Gpu gpu not None, Watch watch not None, uint64_t stream, pinned: Sequence[tuple[int, int]]) -> None:
        assert self._pinned == NULL
        self._gpu, self._watch = gpu, watch
        self.stream = stream
        self._pinned_count = len(pinned)
        self._pinned = <_Span*>malloc((self._pinned_count + 1) * sizeof(_Span))
        if self._pinned == NULL:
            raise MemoryError
        for i, (address, nbytes) in enumerate(pinned):
            self._pinned[i].start = <const char*><uintptr_t>address
            self._pinned[i].end = self._pinned[i].start + <uint64_t>nbytes

    def __dealloc__(self) -> None:
        free(self._pinned)

    def copy(self, Placement placement not None, ContentRegions regions not None, uint64_t stream, uint64_t consumer, bint soon) -> None:
        """Queues the copies, and has a stream wait for them. Returns at once if the slots are pinned.

        Args:
            placement: of :func:`plan_copies`, its target set.
            regions: of the content.
            stream: to queue them on: the lane's, or the consumer's.
            consumer: the stream that will use the tensors.
            soon: they will be over soon: :meth:`Watch.look` is called in the loop's next turn.

        Raises:
            the error that the :class:`Gpu` makes: a call failed. Copies that were queued are still waited for.
        """
        self._begin(placement, regions, stream)
        self._queue(placement)
        self._finish(placement, consumer, soon)

    def begin(self, Placement placement not None, ContentRegions regions not None) -> None:
        """Prepares the copies for :meth:`queue`; the caller must call :meth:`finish` in any case."""
        self._begin(placement, regions, self.stream)

    cdef int _begin(self, Placement placement, ContentRegions regions, uint64_t stream) except -1:
        cdef Point* point
        cdef Run* run
        cdef uint32_t i
        assert placement.point == NULL and placement.target is not None
        point = self._gpu.new_point(placement.run_count)
        placement.point, placement.queued, placement.code = point, 0, 0
        placement.stream = <void*><uintptr_t>stream
        try:
            for i in range(placement.run_count):
                run = &placement.runs[i]
                point.kept[i] = regions.region(run.region)
                hold_region(point.kept[i])
                point.count += 1
                run.source = point.kept[i].address + run.start
        except BaseException:
            placement.point = NULL
            self._gpu.give_point(point)
            raise
        return 0

    def queue(self, Placement placement not None) -> None:
        """Queues the copies, without the interpreter's lock: on a thread, where this may block."""
        with nogil:
            self._queue(placement)

    cdef void _queue(self, Placement placement) noexcept nogil:
        cdef char* target = placement.target._lent.address
        cdef const char* at
        cdef const char* end
        cdef const char* part_end
        cdef Run* run
        cdef uint32_t i
        placement.code = self._gpu.push_context()
        if placement.code:
            return
        for i in range(placement.run_count):
            run = &placement.runs[i]
            at, end = run.source, run.source + (run.end - run.start)
            while at < end and not placement.code:
                part_end = self._end_of_part(at, end)
                placement.code = self._gpu.calls.cuMemcpyHtoDAsync_v2(
                    <uintptr_t>(target + run.target + (at - run.source)), at, part_end - at, placement.stream
                )
                placement.queued += not placement.code
                at = part_end
        self._gpu.pop_context()

    cdef const char* _end_of_part(self, const char* at, const char* end) noexcept nogil:
        """Returns how far one copy may go from ``at`` on."""
        cdef _Span* span
        cdef uint32_t i
        for i in range(self._pinned_count):
            span = &self._pinned[i]
            if at < span.end and span.end < end:
                end = span.end
            if at < span.start and span.start < end:
                end = span.start
        return end

    def finish(self, Placement placement not None, uint64_t consumer) -> None:
        """Has a stream wait for the queued copies, which are watched from now on.

        Raises:
            the error that the :class:`Gpu` makes: a call failed, here or before.
        """
        self._finish(placement, consumer, False)

    cdef int _finish(self, Placement placement, uint64_t consumer, bint soon) except -1:
        cdef Point* point = placement.point
        cdef void* consuming = <void*><uintptr_t>consumer
        cdef int record_code, wait_code = 0
        placement.point = NULL
        if not placement.queued:
            self._gpu.give_point(point)
        else:
            record_code = self._gpu.push_context()
            if not record_code:
                record_code = self._gpu.calls.cuEventRecord(point.event, placement.stream)
                if not record_code and not placement.code and placement.stream != consuming:
                    wait_code = self._gpu.calls.cuStreamWaitEvent(consuming, point.event, 0)
                self._gpu.pop_context()
            if record_code:
                self._watch.keep(point)
                raise self._gpu.failure("cuEventRecord", record_code)
            if soon and not placement.code and not wait_code:
                self._watch.remember(point)
            else:
                self._watch.guard(point)
        if placement.code:
            raise self._gpu.failure("cuMemcpyHtoDAsync_v2", placement.code)
        if wait_code:
            raise self._gpu.failure("cuStreamWaitEvent", wait_code)
        return 0
