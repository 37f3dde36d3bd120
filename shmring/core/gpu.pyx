"""A GPU as its driver has it: events, memory that is lent out, and a thread that waits.

Theory of operation. The functions of the driver are called by their addresses, which are handed in. What CUDA calls an event is a
*point* in a stream here, with the regions that are kept until the GPU has come to it: a copy reads them, or work that is queued may
still use them. A point is handed to a :class:`Watch`, whose thread waits for one after the other, without the interpreter's lock, and
drops what each of them keeps. From there on that is the death of a view like any other (``views.pyx``). Then the point is used again:
who has waited for an event in a stream waits for what was recorded then, whatever is recorded later.

Memory on a GPU is lent in regions like memory of the host. Its views count, so somebody knows whether it is used.

Invariants: what a point keeps is dropped only when the driver has said that its event has come; where the driver can't say so, it is
kept until the process ends, and counted. A call leaves the thread's current context as it was; the driver knows no pending errors.
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
    # An event, and what is kept until the GPU has come to it.
    void* event
    Point* next
    uint32_t count
    Lent** kept
    Lent* few[_FEW_KEPT]


cdef struct _Lender:
    # Who has memory on a GPU.
    Owner owner
    DLManagedTensor* tensor   # keeps the memory until nobody uses it any more; NULL: somebody else looks after it


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
        error: ``error(call, code, text)`` returns what to raise when a call has failed.
    """

    cdef DLDevice device
    cdef DriverCalls calls
    cdef void* _context
    cdef object _error
    cdef Point* _idle    # points that nobody uses
    cdef void* _over     # a stack of those that a thread has seen come

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
        """Makes the one before the current one again."""
        cdef void* context
        self.calls.cuCtxPopCurrent_v2(&context)

    cdef object failure(self, str call, int code):
        """Returns what to raise when a call has returned this code."""
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
        """Returns a point that nobody uses, with room for so many regions."""
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
        """Nobody uses a point any more; with the interpreter's lock. What it keeps is dropped."""
        drop_kept(point)
        point.next, self._idle = self._idle, point

    cdef void point_came(self, Point* point) noexcept nogil:
        """The same, on any thread without the lock."""
        cdef void* seen = load_top(&self._over)
        drop_kept(point)
        while True:
            point.next = <Point*>seen
            if push_top(&self._over, &seen, point):
                break

    # -- streams -------------------------------------------------------------------------------------------------------

    def is_idle(self, uint64_t stream) -> bool:
        """Whether a stream has come to the end of all that was queued on it."""
        cdef int code
        self._push_context()
        code = self.calls.cuStreamQuery(<void*><uintptr_t>stream)
        self.pop_context()
        if code != CUDA_ERROR_NOT_READY:
            self._check("cuStreamQuery", code)
        return not code

    def record(self, uint64_t stream) -> Mark:
        """Returns a mark behind all that is queued on a stream."""
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
        """Records an event of :meth:`create_shared` behind all that is queued on a stream."""
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
    """What was queued on a stream by some moment; made by :meth:`Gpu.record`."""

    cdef Gpu _gpu
    cdef Point* _point

    def __dealloc__(self) -> None:
        if self._point != NULL:
            self._gpu.give_point(self._point)

    @property
    def has_come(self) -> bool:
        """Whether the GPU has come to it. Does not wait."""
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
        keeper: a capsule of DLPack that keeps it, for as long as this and regions of it live; None: somebody else looks after it.
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
    cdef PyThread_type_lock _news  # is released when something is on the stack that was empty; the thread alone acquires it
    cdef void* _given      # a stack of points
    cdef Point* _next      # those that were taken from it, in order; the thread's own
    cdef Point _end        # the last one, without an event
    cdef bint _is_closed
    cdef uint64_t _lost    # points whose event the thread could not wait for
    cdef uint64_t _kept    # what the driver did not even take

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
        """How much is kept for good."""
        return self._lost + self._kept

    cdef void guard(self, Point* point) noexcept:
        """What a point keeps is dropped when its event has come, and the point is used again."""
        cdef void* seen = load_top(&self._given)
        while True:
            point.next = <Point*>seen
            if push_top(&self._given, &seen, point):
                break
        if seen == NULL:
            PyThread_release_lock(self._news)

    cdef void keep(self, Point* point) noexcept:
        """What a point keeps is kept for good."""
        self._kept += 1

    def keep_for_good(self) -> None:
        """Counts what somebody else keeps for good."""
        self._kept += 1

    def follow(self, Regions regions not None, key: tuple[int, int], streams: Iterable[int]) -> bool:
        """Has ``regions`` collect a key when the GPU has come to all that was queued on some streams by now.

        Returns:
            Whether it has already; then there is nothing to collect.

        Raises:
            what the GPU was given: nobody can say when that is. It is counted as kept for good.
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
            self.guard(point)
        return region == NULL or not leave_region(region)

    def see_out(self) -> Exception | None:
        """In the thread: waits for points until :meth:`close`; returns None then, when the last of them has come.

        Returns:
            The error, where the driver could not wait for a point: what that keeps is kept for good. To be called again.
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
        """Takes what was given, when nothing is left of before; returns whether that was something."""
        cdef Point* point = <Point*>take_stack(&self._given, NULL)
        cdef Point* older
        while point != NULL:  # turned over: the first that was given comes first
            older = point.next
            point.next, self._next = self._next, point
            point = older
        return self._next != NULL

    def close(self) -> None:
        """Nothing more is given: :meth:`see_out` returns when all has come. Twice is once."""
        if not self._is_closed:
            self._is_closed = True
            self.guard(&self._end)
