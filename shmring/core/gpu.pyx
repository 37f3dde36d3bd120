"""A GPU by its driver's functions: events, memory that is lent out, and a thread that waits.

Theory of operation. The functions of the driver are called by their addresses, which are handed in. A CUDA event is called a
*point* in a stream here. It keeps regions until the GPU has reached it: a copy reads them, or queued work may still use them. A
point is handed to a :class:`Watch`, whose thread waits for one after the other, without the interpreter's lock, and drops the
regions of each. This works like the death of a view (``views.pyx``). Then the point is used again. That is safe: a stream that
waits for an event waits for the work that was recorded when the wait was queued, even if the event is recorded again later.

To wake the thread, and to be woken by it, costs tens of microseconds, which is more than many a piece of work takes. So a point
may be looked at in the loop's next turn first (:meth:`Watch.look`), and the thread only gets it if it has not come by then.

Memory on a GPU is lent in regions like memory of the host. Its views are counted, so its users know whether it is in use.

Invariants: the regions of a point are dropped only when the driver has said that its event has come; if the driver can't say
so, they are kept until the process ends, and counted. A call leaves the thread's current context as it was; the driver has no
pending errors.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_SetName
from cpython.pythread cimport (
    WAIT_LOCK,
    PyThread_acquire_lock,
    PyThread_allocate_lock,
    PyThread_free_lock,
    PyThread_release_lock,
    PyThread_type_lock,
)
from libc.stdint cimport int32_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

cdef enum:
    _FEW_KEPT = 2


cdef struct Point:
    # An event, and the regions that are kept until the GPU has reached it.
    void* event
    Point* next
    uint32_t count
    Lent** kept
    Lent* few[_FEW_KEPT]


cdef struct _Lender:
    # The owner of memory on a GPU.
    Owner owner
    DLManagedTensor* tensor   # keeps the memory until its last use; NULL: its owner does that


cdef void _lender_gone(Owner* owner) noexcept nogil:
    cdef DLManagedTensor* tensor = (<_Lender*>owner).tensor
    if tensor != NULL:
        tensor.deleter(tensor)
    free(owner)


cdef void drop_kept(Point* point) noexcept nogil:
    """Drops what a point keeps."""
    cdef uint32_t i
    for i in range(point.count):
        drop_region(point.kept[i])
    if point.kept != point.few:
        free(point.kept)
    point.kept = point.few
    point.count = 0


@cython.final
cdef class Gpu:
    """A GPU of this process. Streams and events are the driver's, as numbers; stream 0 is its default stream.

    Args:
        device: its type and number, as DLPack has them.
        context: the driver's, in which all of this is.
        functions: the addresses of the driver's functions, by name.
        error: ``error(call, code, text)`` returns the error to raise when a call has failed.
    """

    cdef DLDevice device
    cdef DriverCalls calls
    cdef void* _context
    cdef object _error
    cdef Point* _idle    # points that are not in use
    cdef void* _over     # a stack of points that the thread has finished with

    def __init__(
        self, device: tuple[int, int], context: int, functions: dict[str, int], error: Callable[[str, int, str], Exception]
    ) -> None:
        cdef uint64_t addresses[12]
        names = (
            "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuMemcpyHtoDAsync_v2", "cuEventCreate", "cuEventRecord", "cuEventSynchronize",
            "cuStreamWaitEvent", "cuStreamQuery", "cuEventQuery", "cuIpcGetEventHandle", "cuIpcOpenEventHandle", "cuGetErrorString",
        )
        assert sizeof(addresses) == sizeof(self.calls)
        for i, name in enumerate(names):
            addresses[i] = functions[name]
        memcpy(&self.calls, addresses, sizeof(addresses))
        self.device.device_type, self.device.device_id = device
        self._context = <void*><uintptr_t>context
        self._error = error

    def __dealloc__(self) -> None:
        cdef Point* point = self._idle
        cdef Point* following
        while point != NULL:
            following = point.next
            free(point)
            point = following
        point = <Point*>take_stack(&self._over, NULL)
        while point != NULL:
            following = point.next
            free(point)
            point = following

    cdef int push_context(self) noexcept nogil:
        """Makes this GPU's context the thread's current one; returns the driver's code."""
        return self.calls.cuCtxPushCurrent_v2(self._context)

    cdef void pop_context(self) noexcept nogil:
        """Makes the thread's previous context the current one again."""
        cdef void* context
        self.calls.cuCtxPopCurrent_v2(&context)

    cdef object failure(self, str call, int code):
        """Returns the error to raise when a call has returned this code."""
        cdef const char* text = NULL
        self.calls.cuGetErrorString(code, &text)
        return self._error(call, code, "unknown error" if text == NULL else (<bytes>text).decode("ascii", "replace"))

    cdef int _check(self, str call, int code) except -1:
        if code:
            raise self.failure(call, code)
        return 0

    cdef int _push_context(self) except -1:
        return self._check("cuCtxPushCurrent_v2", self.push_context())

    # -- points ------------------------------------------------------------------------------------------------------

    cdef Point* new_point(self, uint32_t kept) except NULL:
        """Returns an unused point, with room for so many regions."""
        cdef Point* point
        if self._idle == NULL:
            self._idle = <Point*>take_stack(&self._over, NULL)
        if self._idle == NULL:
            self._idle = self._new_point()
        point = self._idle
        if kept > _FEW_KEPT:
            point.kept = <Lent**>malloc(kept * sizeof(Lent*))
            if point.kept == NULL:
                point.kept = point.few
                raise MemoryError
        self._idle = point.next
        return point

    cdef Point* _new_point(self) except NULL:
        cdef Point* point = <Point*>malloc(sizeof(Point))
        cdef int code
        if point == NULL:
            raise MemoryError
        point.next, point.kept, point.count = NULL, point.few, 0
        code = self.push_context()
        if not code:
            code = self.calls.cuEventCreate(&point.event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING)
            self.pop_context()
        if code:
            free(point)
            raise self.failure("cuEventCreate", code)
        return point

    cdef void give_point(self, Point* point) noexcept:
        """Ends the use of a point, and drops its regions; with the interpreter's lock."""
        drop_kept(point)
        point.next, self._idle = self._idle, point

    cdef void point_came(self, Point* point) noexcept nogil:
        """Ends the use of a point whose event has come, and drops its regions; on any thread, without the interpreter's lock."""
        cdef void* seen = load_top(&self._over)
        drop_kept(point)
        while True:
            point.next = <Point*>seen
            if push_top(&self._over, &seen, point):
                break

    # -- streams -------------------------------------------------------------------------------------------------------

    def is_idle(self, uint64_t stream) -> bool:
        """Whether a stream has finished all work that was queued on it."""
        cdef int code
        self._push_context()
        code = self.calls.cuStreamQuery(<void*><uintptr_t>stream)
        self.pop_context()
        if code != CUDA_ERROR_NOT_READY:
            self._check("cuStreamQuery", code)
        return not code

    def record(self, uint64_t stream) -> Mark:
        """Returns a mark behind all work that is queued on a stream."""
        cdef Mark mark = Mark.__new__(Mark)
        cdef int code
        mark._gpu = self
        mark._point = self.new_point(0)
        self._push_context()
        code = self.calls.cuEventRecord(mark._point.event, <void*><uintptr_t>stream)
        self.pop_context()
        self._check("cuEventRecord", code)
        return mark

    def follow(self, uint64_t stream, Mark mark not None) -> None:
        """Has all later work of a stream come behind a mark. Returns at once."""
        self.wait(stream, <uintptr_t>mark._point.event)

    # -- events that other processes wait for ----------------------------------------------------------------------------

    def create_shared(self) -> int:
        """Returns a new event that other processes can wait for."""
        cdef void* event = NULL
        cdef int code
        self._push_context()
        code = self.calls.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS)
        self.pop_context()
        self._check("cuEventCreate", code)
        return <uintptr_t>event

    def export(self, uint64_t event) -> bytes:
        """Returns the handle by which other processes open an event of :meth:`create_shared`."""
        cdef CUipcEventHandle handle
        cdef int code
        self._push_context()
        code = self.calls.cuIpcGetEventHandle(&handle, <void*><uintptr_t>event)
        self.pop_context()
        self._check("cuIpcGetEventHandle", code)
        return (<char*>&handle)[:sizeof(handle)]

    def open(self, handle: bytes) -> int:
        """Returns another process's event. Not to be called twice for one handle, nor in the process that made it."""
        cdef CUipcEventHandle taken
        cdef void* event = NULL
        cdef int code
        if len(handle) != sizeof(taken):
            raise self.failure("cuIpcOpenEventHandle", 1)
        memcpy(&taken, <const char*><bytes>handle, sizeof(taken))
        self._push_context()
        code = self.calls.cuIpcOpenEventHandle(&event, taken)
        self.pop_context()
        self._check("cuIpcOpenEventHandle", code)
        return <uintptr_t>event

    def record_shared(self, uint64_t event, uint64_t stream) -> None:
        """Records an event of :meth:`create_shared` behind all work that is queued on a stream."""
        cdef int code
        self._push_context()
        code = self.calls.cuEventRecord(<void*><uintptr_t>event, <void*><uintptr_t>stream)
        self.pop_context()
        self._check("cuEventRecord", code)

    def wait(self, uint64_t stream, uint64_t event) -> None:
        """Has all later work of a stream wait for an event as it was recorded last. Returns at once."""
        cdef int code
        self._push_context()
        code = self.calls.cuStreamWaitEvent(<void*><uintptr_t>stream, <void*><uintptr_t>event, 0)
        self.pop_context()
        self._check("cuStreamWaitEvent", code)


@cython.final
cdef class Mark:
    """Stands for the work that was queued on a stream by some moment; made by :meth:`Gpu.record`."""

    cdef Gpu _gpu
    cdef Point* _point

    def __dealloc__(self) -> None:
        if self._point != NULL:
            self._gpu.give_point(self._point)

    @property
    def has_come(self) -> bool:
        """Whether the GPU has finished that work. Does not wait."""
        cdef int code
        self._gpu._push_context()
        code = self._gpu.calls.cuEventQuery(self._point.event)
        self._gpu.pop_context()
        if code != CUDA_ERROR_NOT_READY:
            self._gpu._check("cuEventQuery", code)
        return not code


@cython.final
cdef class GpuMemory:
    """Memory on a GPU that is lent out in regions.

    Args:
        gpu: that it is on.
        address, nbytes: of it.
        keeper: a capsule of DLPack that keeps it, for as long as this and regions of it live; None: the caller keeps it.
    """

    cdef Gpu _gpu
    cdef _Lender* _lender
    cdef readonly uint64_t address
    cdef readonly uint64_t nbytes

    def __init__(self, Gpu gpu not None, uint64_t address, uint64_t nbytes, keeper=None) -> None:
        assert self._lender == NULL
        self._gpu = gpu
        self.address, self.nbytes = address, nbytes
        self._lender = <_Lender*>malloc(sizeof(_Lender))
        if self._lender == NULL:
            raise MemoryError
        self._lender.owner.references, self._lender.owner.gone, self._lender.tensor = 1, _lender_gone, NULL
        if keeper is not None:
            self._lender.tensor = <DLManagedTensor*>PyCapsule_GetPointer(keeper, "dltensor")
            PyCapsule_SetName(keeper, "used_dltensor")

    def __dealloc__(self) -> None:
        if self._lender != NULL:
            drop_owner(&self._lender.owner)

    @property
    def lent(self) -> int:
        """How many regions of it there are."""
        return count_references(&self._lender.owner.references) - 1

    def lend(self, Regions regions not None, uint64_t offset, uint64_t nbytes, key: tuple[int, int]) -> Region:
        """Lends bytes of it; ``key``: for ``regions.collect()``.

        Raises:
            ValueError: it exceeds the memory, or the regions are closed.
        """
        cdef Region region = Region.__new__(Region)
        if offset > self.nbytes or nbytes > self.nbytes - offset:
            raise ValueError(f"[{offset}, {offset + nbytes}) is not inside memory of {self.nbytes} bytes")
        key_high, key_low = key
        region._lent = regions.lend_for(key_high, key_low, <char*><uintptr_t>(self.address + offset), nbytes, &self._lender.owner)
        region._lent.device = self._gpu.device
        return region


@cython.final
cdef class Watch:
    """Points that a thread waits for, in the order in which it was given them; the thread calls :meth:`see_out`.

    Args:
        gpu: theirs.
    """

    cdef Gpu gpu
    cdef Point* _first     # the points that are to be looked at, in order
    cdef Point* _last
    cdef PyThread_type_lock _news  # is released when a point is pushed on the empty stack; only the thread acquires it
    cdef void* _given      # a stack of points
    cdef Point* _next      # the points that the thread has taken from it, in order
    cdef Point _end        # the last one, without an event
    cdef bint _is_closed
    cdef uint64_t _lost    # points whose event the thread could not wait for
    cdef uint64_t _kept    # points that the driver refused

    def __init__(self, Gpu gpu not None) -> None:
        assert self.gpu is None
        self.gpu = gpu
        self._news = PyThread_allocate_lock()
        if self._news == NULL:
            raise MemoryError
        PyThread_acquire_lock(self._news, WAIT_LOCK)

    def __dealloc__(self) -> None:
        if self._news != NULL:
            PyThread_free_lock(self._news)

    @property
    def kept(self) -> int:
        """How many points are kept for good."""
        return self._lost + self._kept

    cdef void guard(self, Point* point) noexcept:
        """When the point's event has come, its regions are dropped, and the point is used again."""
        cdef void* seen = load_top(&self._given)
        while True:
            point.next = <Point*>seen
            if push_top(&self._given, &seen, point):
                break
        if seen == NULL:
            PyThread_release_lock(self._news)

    cdef void remember(self, Point* point) noexcept:
        """The point's event is looked at by :meth:`look`, and waited for by the thread only after that."""
        point.next = NULL
        if self._first == NULL:
            self._first = point
        else:
            self._last.next = point
        self._last = point

    def look(self) -> bool:
        """In the loop: drops the regions of remembered points that have come. The thread waits for all others.

        Returns:
            Whether any has come.
        """
        cdef Point* point
        cdef int code = self.gpu.push_context()
        cdef bint has_context = not code
        cdef bint have_come = False
        while self._first != NULL:
            point = self._first
            self._first = point.next
            if code == 0 or code == CUDA_ERROR_NOT_READY:
                code = self.gpu.calls.cuEventQuery(point.event)
            if code:  # also after an error, which the thread will see, too
                self.guard(point)
            else:
                have_come = True
                self.gpu.give_point(point)
        if has_context:
            self.gpu.pop_context()
        return have_come

    cdef void keep(self, Point* point) noexcept:
        """The regions of a point are kept for good."""
        self._kept += 1

    def keep_for_good(self) -> None:
        """Counts something that the caller keeps for good."""
        self._kept += 1

    def follow(self, Regions regions not None, key: tuple[int, int], streams: Iterable[int]) -> bool:
        """Has ``regions`` collect a key when the GPU has finished all work that is queued on some streams now.

        Returns:
            Whether it has finished already; then there is nothing to collect. Otherwise :meth:`look` must be called in the
            loop's next turn.

        Raises:
            the error that the :class:`Gpu` makes: CUDA can't say when that is. It is counted as kept for good.
        """
        cdef Lent* region = NULL
        cdef Point* point
        cdef uint64_t stream
        cdef int code
        key_high, key_low = key
        for stream in streams:
            try:
                if self.gpu.is_idle(stream):
                    continue
                if region == NULL:
                    region = regions.lend_for(key_high, key_low, NULL, 0, NULL)
                point = self.gpu.new_point(1)
            except BaseException:
                self._kept += 1
                raise
            code = self.gpu.push_context()
            if not code:
                code = self.gpu.calls.cuEventRecord(point.event, <void*><uintptr_t>stream)
                self.gpu.pop_context()
            if code:
                self._kept += 1
                raise self.gpu.failure("cuEventRecord", code)
            hold_region(region)
            point.kept[0], point.count = region, 1
            self.remember(point)
        return region == NULL or not leave_region(region)

    def see_out(self) -> Exception | None:
        """In the thread: waits for points until :meth:`close`; returns None then, when the last of them has come.

        Returns:
            The error, if the driver could not wait for a point: its regions are kept for good. Call this again then.
        """
        cdef int code
        with nogil:
            code = self._see_out()
        return None if code == 0 else self.gpu.failure("cuEventSynchronize", code)

    cdef int _see_out(self) noexcept nogil:
        cdef Point* point
        cdef int code = self.gpu.push_context()
        while True:
            while self._next == NULL and not self._take():
                PyThread_acquire_lock(self._news, WAIT_LOCK)
            point = self._next
            self._next = point.next
            if point.event == NULL:
                self.gpu.pop_context()
                return 0
            if not code:
                code = self.gpu.calls.cuEventSynchronize(point.event)
            if code:
                self._lost += 1
                self.gpu.pop_context()
                return code
            self.gpu.point_came(point)

    cdef bint _take(self) noexcept nogil:
        """Takes the points from the stack when the last batch is done; returns whether there were any."""
        cdef Point* point = <Point*>take_stack(&self._given, NULL)
        cdef Point* older
        while point != NULL:  # reversed: the first that was pushed comes first
            older = point.next
            point.next, self._next = self._next, point
            point = older
        return self._next != NULL

    def close(self) -> None:
        """No more points are added: :meth:`see_out` returns when all have come. A second call does nothing."""
        cdef Point* point
        if not self._is_closed:
            self._is_closed = True
            while self._first != NULL:
                point = self._first
                self._first = point.next
                self.guard(point)
            self.guard(&self._end)
